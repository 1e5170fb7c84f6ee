"""Gaussian noise on a sum of clipped records."""

from __future__ import annotations

import dp_accounting as dpa
from dp_accounting.pld import privacy_loss_distribution as pld_lib

from dpjax import validate
from dpjax.accounting.event_kinds.additive_noise import AdditiveNoiseKind
from dpjax.accounting.event_kinds.kind import DpEvent


class GaussianKind(AdditiveNoiseKind[dpa.GaussianDpEvent]):
  """A sum over every record, with Gaussian noise."""

  name = "gaussian"
  event = dpa.GaussianDpEvent
  distribution = "Gaussian"

  def pld(
    self, part: dpa.GaussianDpEvent, interval: float
  ) -> pld_lib.PrivacyLossDistribution:
    return sampled_gaussian_pld(part.noise_multiplier, interval, sampling_prob=1.0)

  def renyi_two(self, part: dpa.GaussianDpEvent) -> float:
    return 1 / part.noise_multiplier**2

  def largest_loss(self, part: dpa.GaussianDpEvent) -> float:
    shift = 1 / part.noise_multiplier
    # The loss is normal, of mean shift^2 / 2 and standard deviation `shift`.
    return shift**2 / 2 + 10 * shift

  def mu_squared(self, part: dpa.GaussianDpEvent) -> tuple[float, bool]:
    return part.noise_multiplier**-2, True

  def zcdp(self, part: dpa.GaussianDpEvent) -> float:
    # This value is exact (Bun and Steinke 2016, arXiv:1605.02065, proposition 1.6).
    return 0.5 / part.noise_multiplier**2

  def gaussian_noise(self, part: dpa.GaussianDpEvent) -> float:
    return part.noise_multiplier


def sampled_gaussian_pld(
  noise_multiplier: float, interval: float, *, sampling_prob: float
) -> pld_lib.PrivacyLossDistribution:
  """Returns the privacy loss of a Gaussian sum over a Poisson sample, on a grid of `interval`.

  Connecting the dots between grid points makes the result an upper bound at any interval
  (Doroshenko et al. 2022, arXiv:2207.04380).
  """
  return pld_lib.from_gaussian_mechanism(
    noise_multiplier,
    sampling_prob=sampling_prob,
    value_discretization_interval=interval,
  )


def gaussian_event(noise_multiplier: float) -> DpEvent:
  """Returns the event of one Gaussian sum with noise of std `noise_multiplier * l2_clip_norm`.

  A noise multiplier of 0 is allowed, and has an infinite epsilon.

  >>> gaussian_event(2)
  GaussianDpEvent(noise_multiplier=2.0)
  """
  validate.non_negative(noise_multiplier=noise_multiplier)
  return dpa.GaussianDpEvent(float(noise_multiplier))
