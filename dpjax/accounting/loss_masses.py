"""A privacy loss distribution of dp_accounting as arrays: delta at many epsilons at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld_lib

# Function from epsilons >= 0, [k], to their deltas, [k]. The deltas are upper bounds that hold at
# once.
Profile = Callable[[Sequence[float] | np.ndarray], np.ndarray]


# Largest exponent of e whose power is finite, with room for the rounding of the smallest floats.
_LARGEST_EXPONENT = 700.0


class LossMasses(NamedTuple):
  """Masses of a privacy loss distribution in one direction, on multiples of `interval`."""

  interval: float
  lowest: int  # the loss of probs[0] is lowest * interval
  probs: np.ndarray  # [n]
  infinity_mass: float

  @property
  def losses(self) -> np.ndarray:
    """Returns the privacy loss of each mass, [n], rising."""
    return (self.lowest + np.arange(len(self.probs))) * self.interval

  def profile(self) -> Profile:
    """Returns a function that gives delta at any epsilons >= 0. Its sums are computed once.

    Guarantee: delta is never below the hockey-stick divergence of these masses (Koskela et al.
    2020). A bound on the rounding of the sums is added.

    >>> half = LossMasses(interval=1.0, lowest=-1, probs=np.array([0.5, 0, 0.5]), infinity_mass=0)
    >>> half.profile()([0.0, 2.0]).round(4)  # .5 (1 - e^-1)
    array([0.3161, 0.    ])
    """
    losses = self.losses
    # delta(epsilon) is the mass at infinity, plus the sum of p minus e^epsilon times the sum of
    # p e^-loss, both over losses above epsilon. So sums from every loss upwards are kept. The last
    # sum, 0, is for an epsilon above all losses. As epsilon >= 0, only losses above 0 matter, and
    # for them e^-loss is at most 1.
    start = int(np.searchsorted(losses, 0.0, side="right"))
    high = losses[start:]
    probs = np.maximum(self.probs[start:], 0.0)
    above = np.append(np.cumsum(probs[::-1])[::-1], 0.0)
    weighted = np.append(np.cumsum((probs * np.exp(-high))[::-1])[::-1], 0.0)
    # A sum of n terms loses at most n roundings of its value. Its product with e^epsilon loses one
    # rounding more.
    rounding = (2 * np.arange(len(above), 0, -1) + 4) * np.finfo(float).eps * above

    def deltas(epsilons: Sequence[float] | np.ndarray) -> np.ndarray:
      at = np.asarray(epsilons, float)
      first = np.searchsorted(high, at, side="right")
      # An infinite e^epsilon times a sum of 0 would be NaN: the sum is 0 for an epsilon above all
      # losses, and where e^-loss underflows. A smaller power gives a larger delta.
      power = np.exp(np.minimum(at, _LARGEST_EXPONENT))
      finite = np.maximum(above[first] - power * weighted[first], 0.0) + rounding[first]
      return np.minimum(self.infinity_mass + finite, 1.0)

    return deltas


def masses_of(pld: pld_lib.PrivacyLossDistribution) -> list[LossMasses]:
  """Returns the masses for removing a record, and those for adding one if they differ."""
  pmfs = [pld._pmf_remove] if pld._symmetric else [pld._pmf_remove, pld._pmf_add]
  dense = [pmf.to_dense_pmf() for pmf in pmfs]
  return [
    LossMasses(
      interval=pmf._discretization,
      lowest=int(pmf._lower_loss),
      probs=np.asarray(pmf._probs, float),
      infinity_mass=float(pmf._infinity_mass),
    )
    for pmf in dense
  ]


def pld_of(masses: Sequence[LossMasses]) -> pld_lib.PrivacyLossDistribution:
  """Returns the privacy loss distribution with these masses, in the form of `masses_of`.

  It composes with distributions of the same interval.

  >>> from dp_accounting.pld import privacy_loss_distribution as pld_lib
  >>> whole = pld_lib.from_laplace_mechanism(1.0, value_discretization_interval=0.1)
  >>> round(float(pld_of(masses_of(whole)).get_delta_for_epsilon(0.0)), 6)
  0.393469
  """
  pmfs = [
    pld_pmf.DensePLDPmf(
      part.interval, part.lowest, part.probs.copy(), part.infinity_mass, True
    )
    for part in masses
  ]
  return pld_lib.PrivacyLossDistribution(*pmfs)
