"""Integer noise in a secure sum: its sensitivity, and shares of it that clients add.

A sensitivity here is that of the vector AFTER scaling and rounding. Rounding makes it larger (see
`dpjax.noise.discrete.rounded_norm_bound`, and P21 and P38 in docs/sharp_edges.md). It is the norm
of one record under add_or_remove_one and replace_special, and twice this norm under replace_one. No
amplification by sampling is claimed. What the noise costs stands with its events
(`event_kinds.skellam`, `event_kinds.discrete_gaussian`).
"""

from __future__ import annotations

import dataclasses
import math

from dpjax import validate
from dpjax.validate import UserError


def l1_sensitivity(l2_sensitivity: float, dim: int) -> float:
  """Returns min(sqrt(dim) D2, D2^2), a bound on the L1 norm of an integer vector of L2 norm D2.

  >>> l1_sensitivity(2.0, 100), l1_sensitivity(20.0, 100)
  (4.0, 200.0)
  """
  validate.positive(l2_sensitivity=l2_sensitivity)
  validate.integer_at_least(1, dim=dim)
  # For integers |x| <= x^2, so the L1 norm is at most the squared L2 norm.
  return l2_sensitivity * min(math.sqrt(dim), l2_sensitivity)


@dataclasses.dataclass(frozen=True)
class DistributedNoise:
  """Skellam noise that clients add in shares, sized for the smallest number of shares in a sum.

  Every client adds a share of variance `share_variance`. Shares of Skellam noise add up to Skellam
  noise; those of discrete Gaussian noise would not. A sum of `min_survivors` shares or more holds
  the guaranteed noise: further shares only post-process it. A sum of fewer shares holds less noise
  (pitfall P37), and `check_survivors` refuses it.

  Args:
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

  def __post_init__(self):
    validate.positive(share_variance=self.share_variance)
    validate.integer_at_least(1, min_survivors=self.min_survivors)

  @classmethod
  def sized(cls, *, total_variance: float, min_survivors: int) -> DistributedNoise:
    """Returns noise whose variance is `total_variance` in a sum of `min_survivors` shares."""
    validate.positive(total_variance=total_variance)
    validate.integer_at_least(1, min_survivors=min_survivors)
    return cls(total_variance / min_survivors, min_survivors)

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
