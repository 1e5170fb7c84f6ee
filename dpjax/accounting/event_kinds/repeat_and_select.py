"""The best of a random and secret number of runs: private tuning of hyper-parameters."""

from __future__ import annotations

from collections.abc import Iterable

import dp_accounting as dpa
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent

# `accounting` loads its modules when they are used. So only the few runs that select load `tuning`.
from dpjax.accounting import tuning
from dpjax.accounting.event_kinds.elements import (
  Parts,
  describe,
  merged_parts,
  rdp_of,
  under,
)
from dpjax.accounting.event_kinds.kind import ORDERS, DpEvent, EventKind, register
from dpjax.accounting.proved import RELATIONS
from dpjax.accounting.text import upper


class RepeatAndSelectKind(EventKind[RepeatAndSelectDpEvent]):
  """Release of the best of K runs of one event (Papernot and Steinke 2022, arXiv:2110.03620)."""

  name = "repeat_and_select"
  event = RepeatAndSelectDpEvent
  relations = RELATIONS
  accountants = ("rdp",)

  def elements(self, event: RepeatAndSelectDpEvent) -> Iterable[tuple[DpEvent, int]]:
    tuning.check_trials(event.mean, event.shape)
    inner = merged_parts(event.event)
    if not inner:
      return []
    if dpa.NonPrivateDpEvent() in inner:
      return [(dpa.NonPrivateDpEvent(), 1)]
    return [(_of_runs(inner, event.mean, event.shape), 1)]

  def under(self, part: RepeatAndSelectDpEvent, neighboring_relation: str) -> DpEvent:
    # Replacing a record moves the sums of every run, so each part is converted.
    runs = under(merged_parts(part.event), neighboring_relation)
    return _of_runs(runs, part.mean, part.shape)

  def rdp(self, part: RepeatAndSelectDpEvent) -> np.ndarray:
    one_run = rdp_of(merged_parts(part.event))
    return tuning.select_rdp(ORDERS, one_run, mean_trials=part.mean, shape=part.shape)

  def describe(self, part: RepeatAndSelectDpEvent, unit: str) -> str:
    return (
      "the best of a random and secret number of runs, on average "
      f"{upper(part.mean, digits=6)} (assumed: the score that selects "
      "sees public data and the run's output only, and no other run "
      f"is released; distribution of shape {part.shape:g}), each run: {describe(part.event, unit)}"
    )


def _of_runs(parts: Parts, mean: float, shape: float) -> DpEvent:
  """Returns the event of the best of K runs, each of which has these parts."""
  # Events are keys of counters and caches, so they hold tuples: lists cannot be hashed.
  run = tuple(dpa.SelfComposedDpEvent(part, times) for part, times in parts.items())
  whole = dpa.ComposedDpEvent(run)  # type: ignore[arg-type]
  return RepeatAndSelectDpEvent(whole, mean, shape)


def repeat_and_select_event(
  event: DpEvent, *, mean_trials: float, shape: float = 1.0
) -> DpEvent:
  """Returns the event of the best of K independent runs of `event`; K is random and secret.

  Only the best run is released (Papernot and Steinke 2022, arXiv:2110.03620).

  Args:
    event: event of ONE whole run, and of the score by which runs are compared, unless the score
      uses public data only. Runs may differ in hyper-parameters, if these are drawn at random,
      independently of the data, and every run costs at most `event`.
    mean_trials: mean of K, at least 1.
    shape: parameter of the distribution of K. 1 is geometric, 0 logarithmic, inf Poisson, any other
      value truncated negative binomial. A smaller finite shape costs less, and has longer tails.

  >>> from dpjax.accounting import gaussian_event
  >>> repeat_and_select_event(gaussian_event(2), mean_trials=10).mean
  10.0
  """
  tuning.check_trials(mean_trials, shape)
  return RepeatAndSelectDpEvent(event, float(mean_trials), float(shape))


register(RepeatAndSelectKind())
