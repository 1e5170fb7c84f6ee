"""Event of a number that is published with Gaussian noise relative to its smooth sensitivity."""

from __future__ import annotations

import dataclasses

import dp_accounting as dpa
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.kind import ORDERS, EventKind, register
from dpjax.accounting.proved import RELATIONS
from dpjax.accounting.text import lower, upper


@dataclasses.dataclass(frozen=True)
class SmoothSensitivityDpEvent(dpa.DpEvent):
  """The event of one number with noise of std noise_multiplier * its `beta`-smooth sensitivity."""

  beta: float
  noise_multiplier: float
  neighboring_relation: str

  def __post_init__(self):
    validate.positive(beta=self.beta, noise_multiplier=self.noise_multiplier)
    validate.one_of(RELATIONS, neighboring_relation=self.neighboring_relation)


class SmoothSensitivityKind(EventKind[SmoothSensitivityDpEvent]):
  """The accounting of noise by smooth sensitivity, by the exact divergence of the worst pair."""

  name = "smooth_sensitivity"
  event = SmoothSensitivityDpEvent
  relations = RELATIONS
  accountants = ("rdp",)

  def proofs(
    self, part: SmoothSensitivityDpEvent
  ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    # A smooth sensitivity holds for one relation alone, so the event is never converted.
    return (part.neighboring_relation,), self.accountants

  def rdp(self, part: SmoothSensitivityDpEvent) -> np.ndarray:
    # `votes` is imported here, since most runs publish no number with such noise.
    from dpjax.accounting.votes import SmoothSensitivity

    return SmoothSensitivity(part.beta, part.noise_multiplier).rdp(ORDERS)

  def describe(self, part: SmoothSensitivityDpEvent, unit: str) -> str:
    multiple = lower(part.noise_multiplier, digits=6)
    return f"Gaussian noise of {multiple} times a {upper(part.beta, digits=6)}-smooth sensitivity"


register(SmoothSensitivityKind())
