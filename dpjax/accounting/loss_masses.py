"""A privacy loss distribution of dp_accounting as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld_lib

# Function from epsilons >= 0, [k], to their deltas, [k]. The deltas are upper bounds that hold at
# once.
Profile = Callable[[Sequence[float] | np.ndarray], np.ndarray]


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
