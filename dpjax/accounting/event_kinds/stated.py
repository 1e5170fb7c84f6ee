"""Event that is true under one neighbouring relation alone.

A sensitivity under replace_one says nothing of a record that comes or goes. A pure epsilon under
add_or_remove_one is twice as large for a replaced record. Accounted under another relation, such
events would cost half of what they do, or what nothing proves.
"""

from __future__ import annotations

from collections.abc import Iterable

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting.event_kinds.elements import merged_parts
from dpjax.accounting.event_kinds.kind import (
  DpEvent,
  EventKind,
  StatedDpEvent,
  kind_of,
  register,
)
from dpjax.accounting.proved import RELATIONS


class StatedKind(EventKind[StatedDpEvent]):
  """The accounting of the inner event, refused under all relations but one."""

  name = "stated"
  event = StatedDpEvent

  def elements(self, event: StatedDpEvent) -> Iterable[tuple[DpEvent, int]]:
    validate.one_of(RELATIONS, neighboring_relation=event.neighboring_relation)
    relation = event.neighboring_relation
    for part, times in merged_parts(event.event).items():
      # What has no noise is private under no relation. A part is stated once, as accountants look
      # at what is within: nested statements that differ have no relation in common.
      stated = isinstance(part, StatedDpEvent) and part.neighboring_relation == relation
      known = stated or isinstance(part, dpa.NonPrivateDpEvent)
      yield part if known else StatedDpEvent(relation, part), times

  def proofs(self, part: StatedDpEvent) -> tuple[tuple[str, ...], tuple[str, ...]]:
    relations, accountants = kind_of(part.event).proofs(part.event)
    stated = part.neighboring_relation
    return (stated,) if stated in relations else (), accountants

  # Accountants compose what this returns, so the kind needs no analysis of its own.
  def under(self, part: StatedDpEvent, neighboring_relation: str) -> DpEvent:
    return kind_of(part.event).under(part.event, neighboring_relation)

  def zcdp(self, part: StatedDpEvent) -> float:
    return kind_of(part.event).zcdp(part.event)

  def describe(self, part: StatedDpEvent, unit: str) -> str:
    return kind_of(part.event).describe(part.event, unit)


register(StatedKind())
