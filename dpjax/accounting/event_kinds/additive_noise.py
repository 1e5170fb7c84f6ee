"""Common part of the accounting of Gaussian and Laplace noise on a sum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, TypeVar

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting.event_kinds.kind import DpEvent, EventKind, with_noise
from dpjax.accounting.proved import RELATIONS
from dpjax.accounting.text import lower

Noise = TypeVar("Noise", dpa.GaussianDpEvent, dpa.LaplaceDpEvent)


class AdditiveNoiseKind(EventKind[Noise]):
  """Base class for a sum over all records, with noise relative to the bound on one record.

  Attributes:
    distribution: name of the noise's distribution in a privacy statement.
  """

  fields = ("noise_multiplier",)
  relations = RELATIONS
  event: ClassVar[type[dpa.GaussianDpEvent] | type[dpa.LaplaceDpEvent]]
  distribution: ClassVar[str]

  def elements(self, event: Noise) -> Iterable[tuple[DpEvent, int]]:
    validate.non_negative(noise_multiplier=event.noise_multiplier)
    return with_noise(event.noise_multiplier, self.event)

  def under_replace_one(self, part: Noise) -> DpEvent:
    return self.event(part.noise_multiplier / 2)

  def describe(self, part: Noise, unit: str) -> str:
    multiple = lower(part.noise_multiplier, digits=6)
    return f"{self.distribution} noise of {multiple} times the clip norm"
