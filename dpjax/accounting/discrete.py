"""Renyi curves of integer noise: the discrete Gaussian and Skellam noise.

The curves serve sums of integer vectors under secure aggregation. A sensitivity here is that of
the vector AFTER scaling and rounding. Rounding makes it larger (see
`dpjax.noise.discrete.rounded_norm_bound`, and P21 and P38 in docs/sharp_edges.md). It is the norm
of one record under add_or_remove_one and replace_special, and twice this norm under replace_one. No
amplification by sampling is claimed. Where every client adds a share of the noise, removing a
client also removes its share. So `SkellamDpEvent`, the event of Skellam noise, is proved only under
replace_special and replace_one. In the table D2 and D1 are the L2 and L1 sensitivities.

| noise                            | Renyi divergence at order a                        | from |
| -------------------------------- | -------------------------------------------------- | ---- |
| discrete Gaussian, variance s2   | a D2^2 / (2 s2)                                    | [1]  |
| sum of discrete Gaussians        | row 1 with the sum's variance, plus an error term  | [2]  |
| Skellam, variance s2, integer a  | a D2^2 / (2 s2) + min(((2a - 1) D2^2 + 6 D1) /     | [3]  |
|                                  | (4 s2^2), 3 D1 / (2 s2))                           |      |

[1] Canonne, Kamath and Steinke 2020, arXiv:2004.00010, theorem 4. [2] Kairouz, Liu and
Steinke 2021, arXiv:2102.06387, proposition 14. [3] Agarwal, Kairouz and Liu 2021,
arXiv:2110.04995, corollary 3.6.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib

from dpjax import validate
from dpjax.validate import UserError

# Orders are integers, for which the bound on Skellam noise is proved. The few large ones serve
# runs with tiny losses.
ORDERS = (*range(2, 129), 256, 512, 1024)
NOISES = ("skellam", "discrete_gaussian")


def l1_sensitivity(l2_sensitivity: float, dim: int) -> float:
  """Returns min(sqrt(dim) D2, D2^2), a bound on the L1 norm of an integer vector of L2 norm D2.

  >>> l1_sensitivity(2.0, 100), l1_sensitivity(20.0, 100)
  (4.0, 200.0)
  """
  validate.positive(l2_sensitivity=l2_sensitivity)
  validate.integer_at_least(1, dim=dim)
  # For integers |x| <= x^2, so the L1 norm is at most the squared L2 norm.
  return l2_sensitivity * min(math.sqrt(dim), l2_sensitivity)


def discrete_gaussian_rdp(variance: float, *, l2_sensitivity: float) -> np.ndarray:
  """Returns Renyi divergences [len(ORDERS)] of discrete Gaussian noise of this variance.

  Every coordinate has independent noise.

  >>> float(discrete_gaussian_rdp(4.0, l2_sensitivity=2.0)[0])  # at order 2
  1.0
  """
  validate.positive(variance=variance, l2_sensitivity=l2_sensitivity)
  return np.array(ORDERS) * l2_sensitivity**2 / (2 * variance)


def summed_discrete_gaussian_rdp(
  share_variance: float, num_shares: int, *, l2_sensitivity: float, dim: int
) -> np.ndarray:
  """Returns Renyi divergences [len(ORDERS)] of a sum of `num_shares` discrete Gaussians.

  Args:
    share_variance: variance of one share. Below 1/4 there is no proof, and UserError is raised.
    num_shares: number of independent shares in each coordinate of the sum.
    l2_sensitivity: L2 norm by which one record changes the integer vector.
    dim: number of coordinates.

  >>> rdp = summed_discrete_gaussian_rdp(4.0, 1, l2_sensitivity=2.0, dim=3)
  >>> bool(np.allclose(rdp, discrete_gaussian_rdp(4.0, l2_sensitivity=2.0)))
  True
  """
  validate.positive(share_variance=share_variance, l2_sensitivity=l2_sensitivity)
  validate.integer_at_least(1, num_shares=num_shares, dim=dim)
  if share_variance < 0.25:
    raise UserError(
      "must be >= 0.25; scale up, or skellam", field="share_variance", value=share_variance
    )
  order = np.array(ORDERS, float)
  # tau of proposition 14 is 10 times the sum, over k, of e^(-2 pi^2 s2 k / (k + 1)).
  k = np.arange(1, num_shares)
  tau = 10 * float(np.exp(-2 * math.pi**2 * share_variance * k / (k + 1)).sum())
  std = math.sqrt(num_shares * share_variance)
  l2 = l2_sensitivity / std
  l1 = l1_sensitivity(l2_sensitivity, dim) / std
  each = (
    order / 2 * l2**2 + tau * dim,
    order / 2 * (l2**2 + 2 * l1 * tau + tau**2 * dim),
    order / 2 * (l2 + math.sqrt(dim) * tau) ** 2,
  )
  # Proposition 14 proves all three bounds. Which one is smallest depends on the dimension.
  return np.min(each, axis=0)


def skellam_rdp(
  variance: float,
  *,
  l2_sensitivity: float,
  l1_sensitivity: float,
  orders: Sequence[float] = ORDERS,
) -> np.ndarray:
  """Returns Renyi divergences [len(orders)] of Skellam noise of this variance per coordinate.

  Args:
    variance: variance of the noise on each coordinate.
    l2_sensitivity: L2 norm by which one record changes the integer vector.
    l1_sensitivity: L1 norm by which one record changes the integer vector. The function
      `l1_sensitivity` bounds this norm.
    orders: Renyi orders > 1. An order that is no integer gets the value of the next integer, which
      is an upper bound.

  >>> curve = skellam_rdp(1e6, l2_sensitivity=1.0, l1_sensitivity=1.0)
  >>> round(float(curve[0]) * 1e6, 3)  # that of a Gaussian, here
  1.0
  """
  validate.positive(
    variance=variance, l2_sensitivity=l2_sensitivity, l1_sensitivity=l1_sensitivity
  )
  # The divergence rises with the order, so its value at the next integer is an upper bound.
  order = np.ceil(np.array(orders, float))
  square = l2_sensitivity**2
  few = ((2 * order - 1) * square + 6 * l1_sensitivity) / (4 * variance**2)
  return order * square / (2 * variance) + np.minimum(
    few, 3 * l1_sensitivity / (2 * variance)
  )


def epsilon_from_rdp(rdp: np.ndarray, *, delta: float, num_steps: int = 1) -> float:
  """Returns epsilon at `delta` of `num_steps` adaptive steps. `rdp` is one step's curve at ORDERS.

  >>> round(epsilon_from_rdp(discrete_gaussian_rdp(4.0, l2_sensitivity=1.0), delta=1e-5), 3)
  2.168
  """
  validate.open_unit(delta=delta)
  validate.integer_at_least(0, num_steps=num_steps)
  if num_steps == 0:
    return 0.0
  return float(rdp_lib.compute_epsilon(list(ORDERS), list(num_steps * rdp), delta)[0])


@dataclasses.dataclass(frozen=True)
class DistributedNoise:
  """Noise that clients add in shares, sized for the smallest number of shares in a sum.

  Every client adds a share of variance `share_variance`. A sum of `min_survivors` shares or more
  holds the guaranteed noise: further shares only post-process it. A sum of fewer shares holds less
  noise (pitfall P37): `check_survivors` refuses this sum, and `rdp` gives its true cost.

  Args:
    noise: "skellam" (shares add up to Skellam noise again) or "discrete_gaussian".
    share_variance: variance of one client's share, on the integer grid.
    min_survivors: smallest number of HONEST clients whose shares are in a sum. Colluding
      clients know their own shares, so they do not count.

  >>> noise = DistributedNoise.sized(total_variance=400.0, min_survivors=40)
  >>> noise.share_variance
  10.0
  >>> noise.check_survivors(39)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: survivors=39: must be >= min_survivors=40, else the sum ...
  """

  share_variance: float
  min_survivors: int
  noise: str = "skellam"

  def __post_init__(self):
    validate.positive(share_variance=self.share_variance)
    validate.integer_at_least(1, min_survivors=self.min_survivors)
    validate.one_of(NOISES, noise=self.noise)

  @classmethod
  def sized(
    cls, *, total_variance: float, min_survivors: int, noise: str = "skellam"
  ) -> DistributedNoise:
    """Returns noise whose variance is `total_variance` in a sum of `min_survivors` shares."""
    validate.positive(total_variance=total_variance)
    validate.integer_at_least(1, min_survivors=min_survivors)
    return cls(total_variance / min_survivors, min_survivors, noise)

  def check_survivors(self, survivors: int) -> None:
    """Raises UserError if a sum has too few shares to hold the guaranteed noise."""
    validate.integer_at_least(0, survivors=survivors)
    if survivors < self.min_survivors:
      raise UserError(
        f"must be >= min_survivors={self.min_survivors}, else the sum holds less "
        "noise than promised; abort the round and release nothing",
        field="survivors",
        value=survivors,
      )

  def rdp(
    self, *, l2_sensitivity: float, dim: int, survivors: int | None = None
  ) -> np.ndarray:
    """Returns Renyi divergences [len(ORDERS)] of one sum.

    Args:
      survivors: number of shares in a sum that was released; None means `min_survivors`. A sum of
        fewer shares than `min_survivors` costs more than the guarantee.
    """
    shares = self.min_survivors if survivors is None else survivors
    validate.integer_at_least(1, survivors=shares)
    if self.noise == "discrete_gaussian":
      return summed_discrete_gaussian_rdp(
        self.share_variance, shares, l2_sensitivity=l2_sensitivity, dim=dim
      )
    return skellam_rdp(
      self.share_variance * shares,
      l2_sensitivity=l2_sensitivity,
      l1_sensitivity=l1_sensitivity(l2_sensitivity, dim),
    )
