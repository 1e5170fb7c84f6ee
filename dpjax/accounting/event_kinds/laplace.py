"""Laplace noise on a sum of records that are clipped in L1 norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dp_accounting as dpa
from dp_accounting.pld import privacy_loss_distribution as pld_lib

from dpjax import validate
from dpjax.accounting.event_kinds.kind import DpEvent, EventKind, level
from dpjax.accounting.proved import RELATIONS, Proved
from dpjax.accounting.text import lower


class LaplaceKind(EventKind):
  """A sum over every record, with Laplace noise; its multiplier is scale / L1 bound."""

  name = "laplace"
  event = dpa.LaplaceDpEvent
  fields = ("noise_multiplier",)
  proof = Proved(RELATIONS)

  def elements(self, event: Any) -> Iterable[tuple[DpEvent, int]]:
    validate.non_negative(noise_multiplier=event.noise_multiplier)
    noise_multiplier = level(event.noise_multiplier)
    if not noise_multiplier:
      return [(dpa.NonPrivateDpEvent(), 1)]
    return [(dpa.LaplaceDpEvent(noise_multiplier), 1)]

  def under_replace_one(self, part: Any) -> DpEvent:
    # Exchanging a record moves a clipped sum by up to twice the L1 bound.
    return dpa.LaplaceDpEvent(part.noise_multiplier / 2)

  def pld(self, part: Any, interval: float) -> pld_lib.PrivacyLossDistribution:
    return sampled_laplace_pld(part.noise_multiplier, interval, sampling_prob=1.0)

  def renyi_two(self, part: Any) -> float:
    # The pure bound 1 / z is smaller than the Gaussian guess where there is little noise.
    return min(1 / part.noise_multiplier**2, 1 / part.noise_multiplier)

  def largest_loss(self, part: Any) -> float:
    # The loss of Laplace noise is bounded: pure differential privacy.
    return 1 / part.noise_multiplier

  def describe(self, part: Any, unit: str) -> str:
    multiple = lower(part.noise_multiplier, digits=6)
    return f"Laplace noise of {multiple} times the clip norm"


def sampled_laplace_pld(
  noise_multiplier: float, interval: float, *, sampling_prob: float
) -> pld_lib.PrivacyLossDistribution:
  """Returns the privacy loss of a Laplace sum over a Poisson sample, on a grid of interval."""
  return pld_lib.from_laplace_mechanism(
    noise_multiplier,
    sampling_prob=sampling_prob,
    value_discretization_interval=interval,
  )


def laplace_event(noise_multiplier: float) -> DpEvent:
  """Returns the event of one Laplace sum: scale `noise_multiplier` * the L1 bound of one record.

  >>> laplace_event(2)
  LaplaceDpEvent(noise_multiplier=2.0)
  """
  validate.non_negative(noise_multiplier=noise_multiplier)
  return dpa.LaplaceDpEvent(float(noise_multiplier))
