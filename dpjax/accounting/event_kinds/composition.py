"""Events that hold other events, or none: compositions, no-ops and releases without noise."""

from __future__ import annotations

from collections.abc import Iterable

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting.event_kinds.kind import (
  DpEvent,
  EventKind,
  check_is_list,
  kind_of,
  register,
)
from dpjax.accounting.proved import RELATIONS

# Larger counts, which only a hand-made file holds, would overflow a float.
_MOST_TIMES = 2**63 - 1


class NoOpKind(EventKind[dpa.NoOpDpEvent]):
  """A run in which nothing was released."""

  name = "no_op"
  event = dpa.NoOpDpEvent

  def elements(self, event: dpa.NoOpDpEvent) -> Iterable[tuple[DpEvent, int]]:
    return ()


class NonPrivateKind(EventKind[dpa.NonPrivateDpEvent]):
  """A release without noise, whose epsilon is infinite."""

  name = "non_private"
  event = dpa.NonPrivateDpEvent
  relations = RELATIONS

  def describe(self, part: dpa.NonPrivateDpEvent, unit: str) -> str:
    return "a release without noise"


class SelfComposedKind(EventKind[dpa.SelfComposedDpEvent]):
  """Composition of one event with itself, `count` times."""

  name = "self_composed"
  event = dpa.SelfComposedDpEvent

  def elements(self, event: dpa.SelfComposedDpEvent) -> Iterable[tuple[DpEvent, int]]:
    validate.integer_in(0, _MOST_TIMES, count=event.count)
    count = int(event.count)
    # The inner event is taken apart even for 0 repetitions, so that an unknown event is refused.
    for part, times in kind_of(event.event).elements(event.event):
      if count > 0:
        yield part, times * count


class ComposedKind(EventKind[dpa.ComposedDpEvent]):
  """Several events, one after the other."""

  name = "composed"
  event = dpa.ComposedDpEvent

  def elements(self, event: dpa.ComposedDpEvent) -> Iterable[tuple[DpEvent, int]]:
    check_is_list(event.events)
    for inner in event.events:
      yield from kind_of(inner).elements(inner)


def compose(step_event: DpEvent, num_steps: int) -> DpEvent:
  """Returns the event of `num_steps` adaptive runs of `step_event`; 0 steps cost nothing.

  >>> from dpjax.accounting import gaussian_event
  >>> compose(gaussian_event(1), 0)
  NoOpDpEvent()
  >>> compose(gaussian_event(1), 3).count
  3
  """
  validate.integer_at_least(0, num_steps=num_steps)
  if num_steps == 0:
    return dpa.NoOpDpEvent()
  # The count is a Python integer, because JSON cannot write NumPy's integers.
  return dpa.SelfComposedDpEvent(step_event, int(num_steps))


register(NoOpKind(), NonPrivateKind(), SelfComposedKind(), ComposedKind())
