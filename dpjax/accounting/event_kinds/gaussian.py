"""Gaussian noise on a sum of clipped records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dp_accounting as dpa
from dp_accounting.pld import privacy_loss_distribution as pld_lib

from dpjax import validate
from dpjax.accounting.event_kinds.kind import DpEvent, EventKind, level
from dpjax.accounting.proved import RELATIONS, Proved
from dpjax.accounting.text import lower


class GaussianKind(EventKind):
  """A sum over every record, with Gaussian noise."""

  name = "gaussian"
  event = dpa.GaussianDpEvent
  fields = ("noise_multiplier",)
  proof = Proved(RELATIONS)

  def elements(self, event: Any) -> Iterable[tuple[DpEvent, int]]:
    validate.non_negative(noise_multiplier=event.noise_multiplier)
    noise_multiplier = level(event.noise_multiplier)
    if not noise_multiplier:
      # No accountant is asked about a sum without noise: its epsilon is infinite.
      return [(dpa.NonPrivateDpEvent(), 1)]
    return [(dpa.GaussianDpEvent(noise_multiplier), 1)]

  def under_replace_one(self, part: Any) -> DpEvent:
    # Exchanging a record moves a clipped sum by up to 2 C.
    return dpa.GaussianDpEvent(part.noise_multiplier / 2)

  def pld(self, part: Any, interval: float) -> pld_lib.PrivacyLossDistribution:
    return sampled_gaussian_pld(part.noise_multiplier, interval, sampling_prob=1.0)

  def renyi_two(self, part: Any) -> float:
    return 1 / part.noise_multiplier**2

  def largest_loss(self, part: Any) -> float:
    shift = 1 / part.noise_multiplier
    # The loss is normal with mean shift^2 / 2 and deviation shift.
    return shift**2 / 2 + 10 * shift

  def mu_squared(self, part: Any) -> tuple[float, bool]:
    return part.noise_multiplier**-2, True

  def describe(self, part: Any, unit: str) -> str:
    multiple = lower(part.noise_multiplier, digits=6)
    return f"Gaussian noise of {multiple} times the clip norm"


def sampled_gaussian_pld(
  noise_multiplier: float, interval: float, *, sampling_prob: float
) -> pld_lib.PrivacyLossDistribution:
  """Returns the privacy loss of a Gaussian sum over a Poisson sample, on a grid of interval.

  It connects the dots between grid points (Doroshenko et al. 2022, arXiv:2207.04380), which is
  pessimistic at any interval.
  """
  return pld_lib.from_gaussian_mechanism(
    noise_multiplier,
    sampling_prob=sampling_prob,
    value_discretization_interval=interval,
  )


def gaussian_event(noise_multiplier: float) -> DpEvent:
  """Returns the event of one Gaussian sum: noise of std `noise_multiplier * l2_clip_norm`.

  Zero noise is allowed here and costs an infinite epsilon.

  >>> gaussian_event(2)
  GaussianDpEvent(noise_multiplier=2.0)
  """
  validate.non_negative(noise_multiplier=noise_multiplier)
  return dpa.GaussianDpEvent(float(noise_multiplier))
