"""Event that is true under one neighbouring relation alone.

A sensitivity under replace_one says nothing of a record that comes or goes. A pure epsilon under
add_or_remove_one is twice as large for a replaced record. Accounted under another relation, such
events would cost half of what they do, or what nothing proves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld_lib

from dpjax import validate
from dpjax.accounting.event_kinds.elements import merged_parts
from dpjax.accounting.event_kinds.kind import (
  DpEvent,
  EventKind,
  Grid,
  StatedDpEvent,
  kind_of,
  register,
)
from dpjax.accounting.proved import RELATIONS


def _inner(part: StatedDpEvent) -> tuple[EventKind[Any], DpEvent]:
  return kind_of(part.event), part.event


class StatedKind(EventKind[StatedDpEvent]):
  """The accounting of the inner event, refused under all relations but one."""

  name = "stated"
  event = StatedDpEvent

  def elements(self, event: StatedDpEvent) -> Iterable[tuple[DpEvent, int]]:
    validate.one_of(RELATIONS, neighboring_relation=event.neighboring_relation)
    # What has no noise is private under no relation.
    known = lambda part: isinstance(part, dpa.NonPrivateDpEvent)
    only = lambda part: StatedDpEvent(event.neighboring_relation, part)
    counts = merged_parts(event.event).items()
    return [(part if known(part) else only(part), times) for part, times in counts]

  def relations_of(self, part: StatedDpEvent) -> tuple[str, ...]:
    kind, inner = _inner(part)
    stated = part.neighboring_relation
    return (stated,) if stated in kind.relations_of(inner) else ()

  def accountants_of(self, part: StatedDpEvent) -> tuple[str, ...]:
    kind, inner = _inner(part)
    return kind.accountants_of(inner)

  def under(self, part: StatedDpEvent, neighboring_relation: str) -> DpEvent:
    kind, inner = _inner(part)
    return kind.under(inner, neighboring_relation)

  def rdp(self, part: StatedDpEvent) -> np.ndarray:
    kind, inner = _inner(part)
    return kind.rdp(inner)

  def pld(self, part: StatedDpEvent, interval: float) -> pld_lib.PrivacyLossDistribution:
    kind, inner = _inner(part)
    return kind.pld(inner, interval)

  def grid(self, part: StatedDpEvent) -> Grid:
    kind, inner = _inner(part)
    return kind.grid(inner)

  def zcdp(self, part: StatedDpEvent) -> float:
    kind, inner = _inner(part)
    return kind.zcdp(inner)

  def gaussian_noise(self, part: StatedDpEvent) -> float | None:
    kind, inner = _inner(part)
    return kind.gaussian_noise(inner)

  def sampling_prob(self, part: StatedDpEvent) -> float | None:
    kind, inner = _inner(part)
    return kind.sampling_prob(inner)

  def describe(self, part: StatedDpEvent, unit: str) -> str:
    kind, inner = _inner(part)
    return kind.describe(inner, unit)


register(StatedKind())
