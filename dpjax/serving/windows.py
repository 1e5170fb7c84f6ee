"""Windows of rows and of labels: counted while requests come, released when they are full.

A window of rows holds a histogram for each of the service's bins. A window of feedback holds four
counts: which model answered, and whether it was right. With `drift_epsilon` a full window is
released under Laplace noise, and its epsilon is accounted before the noise is drawn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dpjax import mechanisms
from dpjax.experiments.run import writers
from dpjax.mechanisms.budget import Overspent
from dpjax.serving import drift
from dpjax.serving.alarms import Alarms
from dpjax.serving.drift import Bins
from dpjax.serving.journal import ServiceJournal
from dpjax.serving.predictor import Predictor, digest_of
from dpjax.serving.service_settings import ServiceSettings

# The number and the times of requests are not hidden. So neighbouring streams have equally many
# rows, and differ in one row.
STREAM_RELATION = "replace_one"
# Bins of a label from feedback: which model answered, and whether the answer was right.
FEEDBACK = Bins("feedback", num_classes=4)
_ACCURACY = "accuracy"
_BUDGET = "drift_budget"
# A window raises the alarm if its accuracy is this many standard deviations below the lowest
# accepted accuracy. With many labels, and a model as accurate as in its test, fewer than 2.3 % of
# windows raise it.
_DEVIATIONS = 2.0


def _psi_of(bins: Bins) -> str:
  return f"psi {bins.name}"


@dataclasses.dataclass(frozen=True)
class Reference:
  """Histograms that windows are compared with.

  Args:
    counts: {name of bins: counts}.
    source: origin of the counts, for readers: "public", "noised", "exact", "stream", "file".
    scale: scale of the Laplace noise on each count; 0: none.
    epsilon: epsilon that the counts cost a training record; 0 if they count no training record.
      For "exact" no epsilon holds, so it is infinite.
  """

  counts: Mapping[str, Sequence[float]]
  source: str
  scale: float = 0.0
  epsilon: float = 0.0


@dataclasses.dataclass
class OpenWindow:
  """Counts of a window of rows or labels, before its release.

  Args:
    number: number of the window, from 0, among windows of its kind in the journal.
    rows: number of rows or labels that were counted.
    counts: {name of bins: counts}.
  """

  number: int
  rows: int
  counts: dict[str, np.ndarray]

  @classmethod
  def empty(cls, number: int, bins: Sequence[Bins]) -> OpenWindow:
    """Returns a window without rows: all its counts are 0."""
    return cls(number, 0, {each.name: np.zeros(each.size, np.int64) for each in bins})

  def plain(self) -> dict[str, Any]:
    """Returns the window as a dictionary of numbers and lists, for JSON."""
    counts = {name: each.tolist() for name, each in self.counts.items()}
    return {"number": self.number, "rows": self.rows, "counts": counts}

  def restore(self, saved: Any, bins: Sequence[Bins], *, most: int | None = None) -> None:
    """Takes the counts that an earlier start saved, if they belong to this window.

    Args:
      saved: window as `plain` returned it.
      bins: bins of this window.
      most: number of rows that fill this window. Saved counts of that many rows or more are
        dropped; None: no counts are dropped for their number of rows.
    """
    # A window that was accounted or closed after the save must not be counted twice.
    if not isinstance(saved, dict) or saved["number"] != self.number:
      return
    # Counts over other bins cannot be converted to these bins.
    if not drift.fits(saved["counts"], bins):
      return
    if most is not None and saved["rows"] >= most:
      # Only counts were saved, so the rows cannot be divided into smaller windows.
      writers.note(
        f"{saved['rows']} rows of an open window are dropped; its size is {most} now"
      )
      return
    self.rows = saved["rows"]
    for name, counts in saved["counts"].items():
      self.counts[name] = np.asarray(counts, np.int64)


class Windows:
  """Holds the open windows of a service, and the results of its closed windows.

  Args:
    settings: sizes of windows, bounds and budget.
    bins: public bins of rows.
    reference: histograms that windows of rows are compared with; None: those of the first full
      window.
    journal: journal that charges, windows and references are written to.
    alarms: alarms that PSI, accuracy and the end of the budget are reported to.
    clock: function that returns seconds, for windows of labels by time.
  """

  def __init__(
    self,
    settings: ServiceSettings,
    bins: Sequence[Bins],
    reference: Reference | None,
    journal: ServiceJournal,
    alarms: Alarms,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.bins = tuple(bins)
    self.reference = reference
    self.psi: dict[str, float] = {}
    self.accuracy = math.nan
    # Number of windows of rows that this start has released.
    self.num_released = 0
    self.drift = OpenWindow.empty(0, self.bins)
    self.feedback = OpenWindow.empty(0, [FEEDBACK])
    # Full windows of rows, which the next tick releases.
    self.full: list[OpenWindow] = []
    budget = settings.drift_budget
    # A ledger needs a budget. Without a budget in the settings, it gets one that no service spends.
    self.stream_ledger = mechanisms.BudgetLedger(
      epsilon=1e12 if budget is None else budget, neighboring_relation=STREAM_RELATION
    )
    self._settings = settings
    self._journal = journal
    self._alarms = alarms
    self._clock = clock
    # When the open window of feedback began. After a restart it begins anew, with its labels.
    self._labels_since = clock()
    # Number of times that a new model has replaced the model that answers.
    self._num_models = 0
    self._is_spent_written = False
    # Whether a window was released without noise, by this start or an earlier one.
    self.any_exact = False

  @property
  def stream_epsilon(self) -> float:
    """Epsilon of all released windows together; infinite if one was released without noise."""
    return math.inf if self.any_exact else self.stream_ledger.spent[0]

  @property
  def reported(self) -> set[str]:
    """Names of the quantities whose alarms these windows raise and clear."""
    names = {_ACCURACY, *map(_psi_of, self.bins)}
    return names if self._settings.drift_epsilon is None else names | {_BUDGET}

  def count_rows(self, x: np.ndarray, answers: np.ndarray) -> None:
    """Adds rows to the open window, and closes a window whenever it has exactly its size.

    Args:
      x: inputs [n, ...] as `Predictor.raw` returned them.
      answers: result of `Predictor.classes`.
    """
    while len(x):
      size = self._settings.window - self.drift.rows
      counts = drift.exact_counts(self.bins, x[:size], answers[:size])
      for name, added in counts.items():
        self.drift.counts[name] = self.drift.counts[name] + added
      self.drift.rows += len(x[:size])
      x = x[size:]
      answers = answers[size:]
      if self.drift.rows == self._settings.window:
        self.full.append(self.drift)
        self.drift = OpenWindow.empty(self.drift.number + 1, self.bins)

  def count_labels(self, *, is_new: bool, num_right: int, num_labels: int) -> None:
    """Counts the labels of one request.

    Args:
      is_new: whether the new model of a release answered the request.
      num_right: number of labels that the answers agree with.
      num_labels: number of all labels.
    """
    place = 2 * is_new
    counts = self.feedback.counts[FEEDBACK.name]
    counts[place] += num_right
    counts[place + 1] += num_labels - num_right
    self.feedback.rows += num_labels

  def clear_labels(self) -> None:
    """Forgets the labels of the open window."""
    self.feedback.counts[FEEDBACK.name][:] = 0
    self.feedback.rows = 0
    self._labels_since = self._clock()

  def begin_model(self) -> None:
    """Begins the windows of another model. The first full window of the model is the reference.

    Windows of rows that are not released yet are dropped, since the replaced model answered some of
    their rows.
    """
    self._num_models += 1
    self.reference = None
    self.psi = {}
    # The new window gets the number of the first dropped window, of which nothing was released.
    first = min(window.number for window in (*self.full, self.drift))
    self.full = []
    self.drift = OpenWindow.empty(first, self.bins)
    self.clear_labels()

  def spend(self, what: str, epsilon: float) -> None:
    """Adds an epsilon to the stream's ledger. Raises Overspent beyond the budget.

    The ledger has one line for all windows, since a service may run for years.
    """
    spent = self.stream_ledger.spend(what, epsilon=epsilon)
    empty = dataclasses.replace(spent, charges=())
    self.stream_ledger = empty.spend("windows", epsilon=spent.spent[0])

  async def release_rows(self, window: OpenWindow, run: Predictor) -> None:
    """Releases a full window of rows, and compares it with the reference.

    Args:
      window: full window, removed from `full`.
      run: model that answers now.
    """
    model = self._num_models
    released = await self._release(window, "drift", self.bins)
    if released is None:
      return
    counts, scale = released
    # If a promotion came while the noise was drawn, the rows say nothing about the new model. Their
    # counts are written to the journal, and not compared.
    compared = {}
    if model == self._num_models:
      compared = await self._compare(window.number, counts, scale, run)
    psi = {each.name: value for each, (value, _) in compared.items()}
    self._write("drift", window, counts, scale, **({"psi": psi} if psi else {}))
    # Shown only now: a start after a kill knows from the line that these rows were released.
    self.num_released += 1
    self.psi |= psi
    for each, (value, chance) in compared.items():
      level = ""
      bound = max(self._settings.psi_warning, chance)
      alarm_bound = max(self._settings.psi_alarm, chance)
      if value > bound:
        level = "warning"
      if value > alarm_bound:
        level = "alarm"
        bound = alarm_bound
      self._alarms.report(_psi_of(each), level, value, bound)

  async def _compare(
    self, number: int, counts: Mapping[str, Any], scale: float, run: Predictor
  ) -> dict[Bins, tuple[float, float]]:
    """Compares released counts with the reference. Returns {bins: (PSI, what chance alone may
    reach)}; {} if another model answers in the end."""
    model = self._num_models
    if self.reference is None:
      self.reference = Reference(counts, "stream", scale)
      self._journal.write(
        "reference", run=digest_of(run), source="stream", counts=counts, scale=scale
      )
    # It is read once, since a promotion may replace it while a thread computes.
    reference = self.reference
    compared = {}
    for each in self.bins:
      value = drift.psi(
        counts[each.name],
        reference.counts[each.name],
        pseudo_count=drift.pseudo_count_of(reference.scale, scale),
      )
      # The simulation of windows runs in a thread, so that requests are answered meanwhile.
      chance = await asyncio.to_thread(
        drift.by_chance,
        counts[each.name],
        reference.counts[each.name],
        num_rows=self._settings.window,
        reference_scale=reference.scale,
        window_scale=scale,
        seed=number,
      )
      compared[each] = value, chance
    return compared if model == self._num_models else {}

  async def release_labels(self, run: Predictor) -> np.ndarray | None:
    """Releases the open window of feedback if it is full, or its time is over.

    Args:
      run: model that answers now. Its test accuracy is the expected accuracy.

    Returns:
      The four counts of `FEEDBACK`, none below 0; None if the window stays open, or is beyond the
      budget.
    """
    model = self._num_models
    window = self.feedback
    if not self._is_complete(window):
      return None
    self.feedback = OpenWindow.empty(window.number + 1, [FEEDBACK])
    released = await self._release(window, "feedback", (FEEDBACK,))
    if released is None:
      return None
    counts, scale = released
    if model != self._num_models:
      self._write("feedback", window, counts, scale)
      return None
    labels = np.maximum(np.asarray(counts[FEEDBACK.name], np.float64), 0)
    # Noise may leave a total of 0, so the divisor is at least 1.
    total = max(float(labels.sum()), 1.0)
    accuracy = float((labels[0] + labels[2]) / total)
    self._write("feedback", window, counts, scale, accuracy=accuracy)
    # As of rows, the accuracy is shown once its line is on the disk.
    self.accuracy = accuracy
    expected = run.result.get("test_accuracy")
    if isinstance(expected, (int, float)):
      # Variance of the accuracy by chance, plus an upper estimate of its variance by the noise on
      # four counts.
      spread = expected * (1 - expected) / total + 8 * (scale / total) ** 2
      drop = self._settings.accuracy_drop
      bound = expected - drop - _DEVIATIONS * math.sqrt(spread)
      low = self.accuracy < bound
      self._alarms.report(_ACCURACY, "alarm" if low else "", self.accuracy, bound)
    return labels

  def _is_complete(self, window: OpenWindow) -> bool:
    """Returns whether the window of feedback holds its number of labels, or lasted its time.

    When labels come is public, so that a window by time tells nothing of a label.
    """
    seconds = self._settings.window_seconds
    if seconds is None:
      return window.rows >= self._settings.feedback_window
    if self._clock() - self._labels_since < seconds:
      return False
    self._labels_since = self._clock()
    return window.rows > 0

  async def _release(
    self, window: OpenWindow, of: str, bins: Sequence[Bins]
  ) -> tuple[dict[str, Any], float] | None:
    """Returns (counts, scale of their noise) of a closed window; None beyond the budget.

    Each call spends `drift_epsilon`. If `drift_epsilon` is None, counts are exact and the scale
    is 0.
    """
    epsilon = self._settings.drift_epsilon
    if epsilon is None:
      self.any_exact = True
      return {name: counts.tolist() for name, counts in window.counts.items()}, 0.0
    what = f"{of} window {window.number}"
    try:
      self.spend(what, epsilon)
    except Overspent as error:
      if not self._is_spent_written:
        self._is_spent_written = True
        self._journal.write("spent", what=str(error))
        spent = self.stream_ledger.spent[0]
        self._alarms.report(_BUDGET, "warning", spent, self.stream_ledger.epsilon)
      return None
    spent = self.stream_ledger.spent[0]
    self._alarms.report(_BUDGET, "", spent, self.stream_ledger.epsilon)
    # The charge is on the disk before the noise is drawn. A kill after the charge wastes this
    # epsilon, but the window is never released twice.
    self._journal.write(
      "charge",
      what=what,
      of=of,
      number=window.number,
      epsilon=epsilon,
      neighboring_relation=STREAM_RELATION,
      spent=self.stream_ledger.spent[0],
    )
    return await asyncio.to_thread(
      drift.noisy_counts, window.counts, bins, epsilon=epsilon, relation=STREAM_RELATION
    )

  def _write(
    self,
    of: str,
    window: OpenWindow,
    counts: Mapping[str, Any],
    scale: float,
    **values: Any,
  ) -> None:
    """Writes the released counts of a closed window, and values computed from them, to the
    journal."""
    self._journal.write(
      "window",
      of=of,
      number=window.number,
      rows=window.rows,
      counts=counts,
      scale=scale,
      **values,
    )
