"""Laplace noise on a sum of records that are clipped in L1 norm."""

from __future__ import annotations

import dp_accounting as dpa
from dp_accounting.pld import privacy_loss_distribution as pld_lib

from dpjax import validate
from dpjax.accounting.event_kinds.additive_noise import AdditiveNoiseKind
from dpjax.accounting.event_kinds.kind import DpEvent, zcdp_of_pure

# Largest exponent of e at which dp_accounting's mixture of two densities does not overflow float64.
_LARGEST_EXPONENT = 700.0


class LaplaceKind(AdditiveNoiseKind[dpa.LaplaceDpEvent]):
  """A sum over every record, with Laplace noise. The noise multiplier is scale / L1 bound."""

  name = "laplace"
  event = dpa.LaplaceDpEvent
  distribution = "Laplace"

  def pld(
    self, part: dpa.LaplaceDpEvent, interval: float
  ) -> pld_lib.PrivacyLossDistribution:
    return sampled_laplace_pld(part.noise_multiplier, interval, sampling_prob=1.0)

  def renyi_two(self, part: dpa.LaplaceDpEvent) -> float:
    # With little noise the pure bound 1 / z is smaller than 1 / z^2, the value of Gaussian noise.
    return min(1 / part.noise_multiplier**2, 1 / part.noise_multiplier)

  def zcdp(self, part: dpa.LaplaceDpEvent) -> float:
    return zcdp_of_pure(self.largest_loss(part))

  def largest_loss(self, part: dpa.LaplaceDpEvent) -> float:
    # Laplace noise gives pure differential privacy, so the loss is bounded.
    return 1 / part.noise_multiplier


def sampled_laplace_pld(
  noise_multiplier: float, interval: float, *, sampling_prob: float
) -> pld_lib.PrivacyLossDistribution:
  """Returns the privacy loss of a Laplace sum over a Poisson sample, on a grid of `interval`.

  If e^(1 / noise_multiplier) overflows, the sum over all records is accounted instead, which costs
  no less.
  """
  if 1 / noise_multiplier > _LARGEST_EXPONENT:
    sampling_prob = 1.0
  return pld_lib.from_laplace_mechanism(
    noise_multiplier,
    sampling_prob=sampling_prob,
    value_discretization_interval=interval,
  )


def laplace_event(noise_multiplier: float) -> DpEvent:
  """Returns the event of one Laplace sum. The scale is noise_multiplier * the L1 bound of a record.

  >>> laplace_event(2)
  LaplaceDpEvent(noise_multiplier=2.0)
  """
  validate.non_negative(noise_multiplier=noise_multiplier)
  return dpa.LaplaceDpEvent(float(noise_multiplier))
