"""A service without its HTTP: models, drift, alarms and releases, on top of a journal.

Everything but the logits is computed in one event loop, so nothing here is locked. `tick` is to be
called about once a second: it closes windows, raises alarms, moves a release on, and saves counts.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dpjax import data, mechanisms, validate
from dpjax.mechanisms import Overspent
from dpjax.serving import drift, rollout
from dpjax.serving.batching import Batcher, Closed, Full, Late
from dpjax.serving.drift import Bins
from dpjax.serving.journal import ServiceJournal
from dpjax.serving.predictor import Predictor
from dpjax.serving.rollout import Rollout, StageRule
from dpjax.validate import UserError

# Number and times of requests are not hidden, so a row is replaced and none comes or goes.
STREAM_RELATION = "replace_one"
# Bins of one label from feedback: which model answered, and whether it was right.
_FEEDBACK = Bins("feedback", num_classes=4)
_LATENCIES = 1000
_FEWEST_LATENCIES = 100
# Standard deviations by which an accuracy must be low before chance is ruled out.
_DEVIATIONS = 2.0


@dataclasses.dataclass(frozen=True)
class ServiceSettings:
  """Bounds of a service.

  Args:
    max_rows: most rows of a request.
    max_queue: most rows that wait.
    wait_ms: milliseconds that a request waits for others to be computed with.
    deadline: seconds within which a request is answered.
    window: rows of a window of drift.
    feedback_window: labels of a window of accuracy.
    psi_warning, psi_alarm: PSI of a window above which it is told.
    latency_ms: bound on the 99th percentile of a request's milliseconds; 0: none.
    accuracy_drop: by how much the accuracy of a window may be below that of the run's test.
    drift_epsilon: epsilon of the noise on every window, for one row; None: exact counts.
    drift_budget: epsilon of all windows together; None: any. Windows beyond it are not released.
    remembered: answers that are kept for feedback.
    rule: when stages of a release end.
  """

  max_rows: int = 256
  max_queue: int = 4096
  wait_ms: float = 2.0
  deadline: float = 5.0
  window: int = 1000
  feedback_window: int = 200
  psi_warning: float = drift.WARNING
  psi_alarm: float = drift.ALARM
  latency_ms: float = 200.0
  accuracy_drop: float = 0.05
  drift_epsilon: float | None = None
  drift_budget: float | None = None
  remembered: int = 100_000
  rule: StageRule = dataclasses.field(default_factory=StageRule)

  def __post_init__(self):
    counts = ("max_rows", "max_queue", "window", "feedback_window", "remembered")
    validate.integer_at_least(1, **{name: getattr(self, name) for name in counts})
    validate.positive(deadline=self.deadline, psi_warning=self.psi_warning)
    validate.non_negative(
      wait_ms=self.wait_ms,
      latency_ms=self.latency_ms,
      accuracy_drop=self.accuracy_drop,
    )
    if not self.psi_alarm >= self.psi_warning:
      raise UserError(
        f"must be >= psi_warning={self.psi_warning}",
        field="psi_alarm",
        value=self.psi_alarm,
      )
    if self.drift_epsilon is not None:
      validate.positive(drift_epsilon=self.drift_epsilon)
    if self.drift_budget is not None:
      validate.positive(drift_budget=self.drift_budget)
      if self.drift_epsilon is None:
        raise UserError(
          "would be ignored, it needs drift_epsilon",
          field="drift_budget",
          value=self.drift_budget,
        )


@dataclasses.dataclass(frozen=True)
class Reference:
  """Histograms that windows are compared with.

  Args:
    counts: {name of bins: counts}.
    source: where they are from, for people: "public", "noised", "exact", "stream", "file".
    scale: scale of the Laplace noise on each count; 0: none.
    epsilon: what they cost a training record; 0 where no training record is in them.
  """

  counts: Mapping[str, Sequence[float]]
  source: str
  scale: float = 0.0
  epsilon: float = 0.0


@dataclasses.dataclass(frozen=True)
class Answer:
  """The answer to a request."""

  id: str
  run: str
  logits: np.ndarray
  answers: np.ndarray


@dataclasses.dataclass
class _Window:
  """Counts of an open window."""

  number: int
  rows: int
  counts: dict[str, np.ndarray]


def _fresh_window(number: int, bins: Sequence[Bins]) -> _Window:
  return _Window(number, 0, {each.name: np.zeros(each.size, np.int64) for each in bins})


class ModelFailed(Exception):
  """Raised where no model gave finite logits."""


class Service:
  """Answers requests with one model, or with two during a release.

  Args:
    runs: the model that answers, and in a release the new one.
    journal: of this service.
    bins: public bins of drift.
    reference: what windows are compared with; None: the first whole window.
    settings: bounds.
    clock: seconds, for stages and latencies.
    load: loads a run that the journal names and `runs` does not hold: one that was released later.
  """

  def __init__(
    self,
    runs: Sequence[Predictor],
    journal: ServiceJournal,
    *,
    bins: Sequence[Bins] = (),
    reference: Reference | None = None,
    settings: ServiceSettings | None = None,
    clock: Callable[[], float] = time.monotonic,
    load: Callable[[str], Predictor] = Predictor.load,
  ):
    self.settings = ServiceSettings() if settings is None else settings
    self.journal = journal
    self.bins = tuple(bins)
    self.old = runs[0]
    self.new: Predictor | None = None
    self.rollout: Rollout | None = None
    self.reference = reference
    self.psi: dict[str, float] = {}
    self.accuracy = math.nan
    self.alarms: dict[str, dict[str, Any]] = {}
    self.counted: collections.Counter[tuple[str, str]] = collections.Counter()
    self.windows_closed = 0
    self.observers: list[Callable[[str, float], None]] = []
    self._clock = clock
    self._stage_began = clock()
    self._latencies: collections.deque[float] = collections.deque(maxlen=_LATENCIES)
    self._times: dict[str, collections.deque[float]] = {
      name: collections.deque(maxlen=_LATENCIES) for name in ("old", "new")
    }
    self._remembered: collections.OrderedDict[str, tuple[str, np.ndarray]] = (
      collections.OrderedDict()
    )
    self._closed: list[_Window] = []
    self._chance: dict[str, float] = {}
    self._dirty = False
    self._spent_told = False
    self._window = _fresh_window(0, self.bins)
    self._feedback = _fresh_window(0, [_FEEDBACK])
    self._load = load
    budget = self.settings.drift_budget
    # A ledger needs a number: without a budget it is beyond what any service can spend.
    self.stream_ledger = mechanisms.BudgetLedger(
      epsilon=1e12 if budget is None else budget, neighboring_relation=STREAM_RELATION
    )
    self.batcher = Batcher(
      max_queue=self.settings.max_queue,
      wait_ms=self.settings.wait_ms,
      computed=self._computed,
    )
    self._resume(runs)

  # --- what an earlier start has left

  def _resume(self, runs: Sequence[Predictor]) -> None:
    """Goes on where the journal ends; begins a release where its runs are others."""
    known = {digest_of(run): run for run in runs}
    charges = self.journal.of_kind("charge")
    if charges:
      # One line for all: what they cost together stands in the last.
      self._spend("earlier windows", charges[-1]["spent"])
    windows = self.journal.of_kind("window") + self.journal.of_kind("charge")
    closed = {
      kind: max((line["number"] for line in windows if line["of"] == kind), default=-1)
      for kind in ("drift", "feedback")
    }
    self._window.number = closed["drift"] + 1
    self._feedback.number = closed["feedback"] + 1
    self._restore_counts(self.journal.saved_counts())
    same = [
      line for line in self.journal.of_kind("start") if set(line["runs"]) == set(known)
    ]
    resumed = bool(same) and self.journal.of_kind("start")[-1] in same
    self.journal.write(
      "start", runs=list(known), names=[run.name for run in runs], resumed=resumed
    )
    if resumed:
      self._restore_release(known)
    elif len(runs) > 1:
      self._begin(runs[1], stage=0)
    if self.old is not runs[0]:
      # The given reference is of the model that was replaced.
      self.reference = None
    self._restore_reference()

  def _restore_counts(self, held: Mapping[str, Any]) -> None:
    windows = (
      ("drift", self._window, self.bins),
      ("feedback", self._feedback, [_FEEDBACK]),
    )
    for name, window, bins in windows:
      saved = held.get(name)
      # A window that was charged or closed since then must not be counted twice.
      if not isinstance(saved, dict) or saved["number"] != window.number:
        continue
      # Other bins than before: their counts say nothing about these.
      if not drift.fits(saved["counts"], bins):
        continue
      window.rows = saved["rows"]
      for key, counts in saved["counts"].items():
        window.counts[key] = np.asarray(counts, np.int64)

  def _restore_reference(self) -> None:
    """Takes the newest reference from the stream, where none is given."""
    lines = self.journal.of_kind("reference")
    of_run = [line for line in lines if line["run"] == digest_of(self.old)]
    line = of_run[-1] if of_run else None
    if self.reference is not None or line is None or line["source"] != "stream":
      return
    if drift.fits(line["counts"], self.bins):
      self.reference = Reference(line["counts"], line["source"], line["scale"])

  def _restore_release(self, known: Mapping[str, Predictor]) -> None:
    """Finds the models and the stage that the last lines of a release leave."""
    kinds = ("candidate", "stage", "promote", "roll_back")
    state: dict[str, Any] = {}
    for line in self.journal.lines:
      if line["kind"] == "start" and set(line["runs"]) != set(known):
        state = {}
      if line["kind"] in kinds:
        state = line
    if not state:
      return
    self.old = self._of_line(known, state, "old")
    if state["kind"] in ("candidate", "stage"):
      new = self._of_line(known, state, "new")
      held = self.journal.saved_counts().get("release") or {}
      same = held.get("stage") == state["stage"] and held.get("new") == state["new"]
      counts = held.get("counts") if same else None
      self._begin(new, stage=state["stage"], counts=counts, write=False)
      # Seconds of a stage that were before the kill count as well.
      self._stage_began -= held.get("elapsed", 0.0) if same else 0.0

  def _of_line(
    self, known: Mapping[str, Predictor], line: Mapping[str, Any], which: str
  ) -> Predictor:
    """Returns the model that a line of the journal names."""
    digest = line[which]
    if digest in known:
      return known[digest]
    folder = line[f"{which}_folder"]
    run = self._load(folder)
    if digest_of(run) != digest:
      raise UserError(
        f"{folder[-100:]!r}: is not the run that the journal released from there; bring it back, "
        "or choose another --workdir"
      )
    return run

  # --- requests

  async def predict(self, x: np.ndarray, key: str | None) -> Answer:
    """Answers one request of rows that `raw` has checked.

    Raises:
      Full, Late, Closed, ModelFailed: it has no answer.
    """
    request = secrets.token_hex(12)
    is_new = self.rollout is not None and self.rollout.is_new(
      request if key is None else key
    )
    model = self.new if is_new and self.new is not None else self.old
    began = self._clock()
    release = self.rollout
    name = "new" if model is self.new else "old"
    try:
      logits = await self._finite(model, x)
    except Late:
      # A new model that is too slow to answer has failed, and there is no time for the old one.
      self._count_release(release, name, failed=True)
      raise
    except ModelFailed:
      self._count_release(release, name, failed=True)
      if name == "old":
        raise
      # The old model still works: a broken release must cost nobody an answer.
      model = self.old
      logits = await self._finite(model, x)
    else:
      self._count_release(release, name, failed=False)
    answers = model.classes(logits)
    self._latencies.append(1000 * (self._clock() - began))
    self._count_rows(x, answers)
    self._remembered[request] = (name if model is not self.old else "old", answers)
    while len(self._remembered) > self.settings.remembered:
      self._remembered.popitem(last=False)
    return Answer(request, model.name, logits, answers)

  async def _finite(self, model: Predictor, x: np.ndarray) -> np.ndarray:
    try:
      logits = await self.batcher.logits(model, x, seconds=self.settings.deadline)
    except (Full, Late, Closed):
      raise
    except Exception as error:
      raise ModelFailed(f"{type(error).__name__}: {error!s:.200}") from error
    if not np.isfinite(logits).all():
      raise ModelFailed("its logits are not finite")
    return logits

  def _count_release(self, release: Rollout | None, name: str, *, failed: bool) -> None:
    # A request of an earlier release or stage says nothing about this one.
    if release is None or release is not self.rollout:
      return
    release.counts[name].requests += 1
    release.counts[name].errors += failed
    self._dirty = True

  def _computed(self, model: Predictor, seconds: float, rows: int) -> None:
    if self.rollout is not None:
      self._times["new" if model is self.new else "old"].append(1000 * seconds)

  def _count_rows(self, x: np.ndarray, answers: np.ndarray) -> None:
    """Counts rows in windows, cut at their exact sizes."""
    if not self.bins:
      return
    self._dirty = True
    while len(x):
      size = self.settings.window - self._window.rows
      counts = drift.exact_counts(self.bins, x[:size], answers[:size])
      for name, found in counts.items():
        self._window.counts[name] = self._window.counts[name] + found
      self._window.rows += len(x[:size])
      x = x[size:]
      answers = answers[size:]
      if self._window.rows == self.settings.window:
        self._closed.append(self._window)
        self._window = _fresh_window(self._window.number + 1, self.bins)

  def feedback(self, request: str, labels: Sequence[Any]) -> int:
    """Counts the labels of one answered request; returns how many answers were right.

    Raises:
      UserError: an unknown or a second use of an id, other labels than the model has, a model
        of numbers.
    """
    inputs = self.old.inputs
    if isinstance(inputs.target, data.Interval):
      raise UserError("needs a model of classes or labels", field="feedback")
    if request not in self._remembered:
      raise UserError(
        "is no id of an answer that waits for labels (each is taken once)", field="id"
      )
    name, answers = self._remembered[request]
    if not isinstance(labels, list) or len(labels) != len(answers):
      raise UserError(f"must be a list of {len(answers)}, one for each row", field="labels")
    if inputs.target is None:
      truth = np.array([_class_of(label, inputs.labels) for label in labels])
      right = answers == truth
    else:
      truth = np.array([_row_of(label, inputs.labels) for label in labels])
      right = (answers == truth).all(axis=1)
    # Each id counts once: the same label sent twice must not weigh twice.
    del self._remembered[request]
    place = 2 * (name == "new")
    hits = int(right.sum())
    counts = self._feedback.counts[_FEEDBACK.name]
    counts[place] += hits
    counts[place + 1] += len(answers) - hits
    self._feedback.rows += len(answers)
    self._dirty = True
    return hits

  # --- once a second

  async def tick(self) -> None:
    """Closes windows, raises alarms, moves a release on, and saves counts."""
    while self._closed:
      await self._close_drift(self._closed.pop(0))
    if self._feedback.rows >= self.settings.feedback_window:
      window = self._feedback
      self._feedback = _fresh_window(window.number + 1, [_FEEDBACK])
      await self._close_feedback(window)
    self._check_latency()
    self._move_release()
    if self._dirty:
      self._dirty = False
      await asyncio.to_thread(self.journal.save_counts, self._snapshot())

  def _snapshot(self) -> dict[str, Any]:
    """Returns counts of open windows and of the stage."""
    found: dict[str, Any] = {}
    for name, window in (("drift", self._window), ("feedback", self._feedback)):
      counts = {key: value.tolist() for key, value in window.counts.items()}
      found[name] = {"number": window.number, "rows": window.rows, "counts": counts}
    if self.rollout is not None and self.new is not None:
      found["release"] = {
        "new": digest_of(self.new),
        "stage": self.rollout.stage,
        "elapsed": round(self._clock() - self._stage_began, 3),
        "counts": self.rollout.plain_counts(),
      }
    return found

  def _spend(self, what: str, epsilon: float) -> None:
    """Charges the stream's ledger, as one line of all windows: a service may run for years."""
    charged = self.stream_ledger.spend(what, epsilon=epsilon)
    empty = dataclasses.replace(charged, charges=())
    self.stream_ledger = empty.spend("windows", epsilon=charged.spent[0])

  async def _released(
    self, window: _Window, of: str, bins: Sequence[Bins]
  ) -> tuple[dict[str, Any], float] | None:
    """Returns (counts, scale of their noise) of a closed window; None beyond the budget."""
    epsilon = self.settings.drift_epsilon
    if epsilon is None:
      return {name: counts.tolist() for name, counts in window.counts.items()}, 0.0
    what = f"{of} window {window.number}"
    try:
      self._spend(what, epsilon)
    except Overspent as error:
      if not self._spent_told:
        self._spent_told = True
        self.journal.write("spent", what=str(error))
        self._raise_alarm("drift_budget", "warning", self.stream_ledger.spent[0], 0.0)
      return None
    # On the disk before the noise: a kill in between wastes epsilon, and never spends it twice.
    self.journal.write(
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

  async def _close_drift(self, window: _Window) -> None:
    released = await self._released(window, "drift", self.bins)
    if released is None:
      return
    counts, scale = released
    self.windows_closed += 1
    if self.reference is None:
      self.reference = Reference(counts, "stream", scale)
      self._chance = {}
      self.journal.write(
        "reference", run=digest_of(self.old), source="stream", counts=counts, scale=scale
      )
    for each in self.bins:
      if each.name not in self._chance:
        self._chance[each.name] = await asyncio.to_thread(
          drift.by_chance,
          self.reference.counts[each.name],
          self.settings.window,
          reference_scale=self.reference.scale,
          window_scale=scale,
        )
      chance = self._chance[each.name]
      value = drift.psi(
        counts[each.name],
        self.reference.counts[each.name],
        pseudo_count=drift.pseudo_count_of(self.reference.scale, scale),
      )
      self.psi[each.name] = value
      level = ""
      bound = max(self.settings.psi_warning, chance)
      alarm_bound = max(self.settings.psi_alarm, chance)
      if value > bound:
        level = "warning"
      if value > alarm_bound:
        level = "alarm"
        bound = alarm_bound
      self._raise_alarm(f"psi {each.name}", level, value, bound)
    self._write_window("drift", window, counts, scale, psi=self.psi)

  async def _close_feedback(self, window: _Window) -> None:
    released = await self._released(window, "feedback", (_FEEDBACK,))
    if released is None:
      return
    counts, scale = released
    found = np.maximum(np.asarray(counts[_FEEDBACK.name], np.float64), 0)
    right = found[0] + found[2]
    total = max(float(found.sum()), 1.0)
    self.accuracy = float(right / total)
    expected = self.old.result.get("test_accuracy")
    if isinstance(expected, (int, float)):
      # Chance, and the noise on four counts.
      spread = expected * (1 - expected) / total + 8 * (scale / total) ** 2
      bound = expected - self.settings.accuracy_drop - _DEVIATIONS * math.sqrt(spread)
      low = self.accuracy < bound
      self._raise_alarm("accuracy", "alarm" if low else "", self.accuracy, bound)
    if self.rollout is not None:
      for place, name in ((0, "old"), (2, "new")):
        self.rollout.counts[name].right += float(found[place])
        self.rollout.counts[name].labels += float(found[place] + found[place + 1])
    self._write_window("feedback", window, counts, scale, accuracy=self.accuracy)

  def _write_window(
    self, of: str, window: _Window, counts: Mapping[str, Any], scale: float, **values: Any
  ) -> None:
    """Writes what a closed window released, and what follows from it."""
    self.journal.write(
      "window",
      of=of,
      number=window.number,
      rows=window.rows,
      counts=counts,
      scale=scale,
      **values,
    )

  def p99_ms(self) -> float:
    """Returns the 99th percentile of the last 1,000 requests; NaN before there are 100."""
    if len(self._latencies) < _FEWEST_LATENCIES:
      return math.nan
    return float(np.percentile(self._latencies, 99))

  def _check_latency(self) -> None:
    bound = self.settings.latency_ms
    value = self.p99_ms()
    if bound and not math.isnan(value):
      self._raise_alarm("latency p99 ms", "alarm" if value > bound else "", value, bound)

  def _raise_alarm(self, name: str, level: str, value: float, bound: float) -> None:
    """Raises an alarm, changes its level, or clears it; the journal has each change."""
    before = self.alarms.get(name, {}).get("level", "")
    if level:
      self.alarms[name] = {"level": level, "value": value, "bound": bound}
    else:
      self.alarms.pop(name, None)
    if level != before:
      self.journal.write(
        "alarm", name=name, level=level or "clear", value=value, bound=bound
      )

  # --- releases

  def _begin(
    self,
    new: Predictor,
    *,
    stage: int,
    counts: Mapping[str, Any] | None = None,
    write: bool = True,
  ) -> None:
    if new.inputs != self.old.inputs:
      raise UserError(
        f"must take and answer what {self.old.name!r} does; other shapes or labels are another "
        "service",
        field="run",
        value=new.name,
      )
    if write:
      self._write_release("candidate", new, stage=stage)
    self.new = new
    self.rollout = Rollout(self.settings.rule, digest_of(new), stage=stage, counts=counts)
    self._restart_stage()

  def _restart_stage(self) -> None:
    self._stage_began = self._clock()
    self._times["new"].clear()

  def _write_release(self, kind: str, new: Predictor, **values: Any) -> None:
    old = new if kind == "promote" else self.old
    self.journal.write(
      kind,
      name=new.name,
      old=digest_of(old),
      old_folder=old.folder,
      new=digest_of(new),
      new_folder=new.folder,
      **values,
    )

  def offer(self, new: Predictor) -> None:
    """Begins the release of a new model, in place of one that is under way."""
    if self.new is not None:
      self.roll_back("another release begins")
    self._begin(new, stage=0)

  def promote(self, why: str) -> None:
    """Makes the new model the one that answers every request."""
    if self.new is None:
      raise UserError("needs a release that is under way", field="action", value="promote")
    # The line first: a kill in between leaves a service that starts with the new model.
    self._write_release("promote", self.new, why=why)
    self.old = self.new
    self.new = None
    self.rollout = None
    # What the old model answered is no reference for the new one.
    self.reference = None
    self.psi = {}

  def roll_back(self, why: str) -> None:
    """Takes the new model back."""
    if self.new is None:
      raise UserError(
        "needs a release that is under way", field="action", value="roll_back"
      )
    self._write_release("roll_back", self.new, why=why)
    self.new = None
    self.rollout = None

  def _move_release(self) -> None:
    if self.rollout is None or self.new is None:
      return
    times = self._times["new"]
    p99 = float(np.percentile(times, 99)) if times else math.nan
    elapsed = self._clock() - self._stage_began
    decision, why = self.rollout.decision(p99_ms=p99, elapsed=elapsed)
    if decision == rollout.ROLL_BACK:
      self.roll_back(why)
    elif decision == rollout.PROMOTE:
      self.promote(why)
    elif decision == rollout.ADVANCE:
      stage = self.rollout.stage + 1
      share = self.rollout.rule.stages[stage]
      self._write_release("stage", self.new, stage=stage, share=share, why=why)
      self.rollout.advance()
      # Labels of the stage before are not labels of this one.
      self._feedback.counts[_FEEDBACK.name][:] = 0
      self._feedback.rows = 0
      self._restart_stage()

  # --- for people

  def health(self) -> dict[str, Any]:
    """Returns the state of the service, as /health shows it."""
    result = self.old.result
    found: dict[str, Any] = {
      "status": "alarm" if self.alarms else "ok",
      "run": self.old.name,
      "row_exact": self.old.row_exact,
      "differences_from_training": self.old.differences,
      "release": None,
      "alarms": self.alarms,
      "psi": self.psi,
      "windows": self.windows_closed,
      "accuracy": None if math.isnan(self.accuracy) else self.accuracy,
      "p99_ms": None if math.isnan(self.p99_ms()) else round(self.p99_ms(), 3),
      "waiting_rows": self.batcher.rows,
    }
    if self.rollout is not None and self.new is not None:
      found["release"] = {
        "run": self.new.name,
        "stage": self.rollout.stage,
        "share": self.rollout.share,
        "counts": self.rollout.plain_counts(),
      }
    reference = self.reference
    spent = 0.0 if reference is None else reference.epsilon
    trained = result.get("epsilon")
    is_exact = reference is not None and reference.source == "exact"
    whole = None
    if isinstance(trained, (int, float)) and not is_exact:
      whole = trained + spent
    found["privacy"] = {
      "training_epsilon": trained,
      "training_delta": result.get("delta"),
      "reference": None if reference is None else reference.source,
      "reference_epsilon": None if is_exact else spent,
      "training_records_epsilon": whole,
      "stream_epsilon_per_window": self.settings.drift_epsilon,
      "stream_epsilon": None
      if self.settings.drift_epsilon is None
      else self.stream_ledger.spent[0],
      "stream_relation": STREAM_RELATION,
    }
    return found


def digest_of(run: Predictor) -> str:
  """Returns the name of a run's result, which its folder cannot share with another run."""
  return str(run.result["run_sha256"])


def _class_of(label: Any, labels: Sequence[str]) -> int:
  """Returns the class of a label: its name, or its number."""
  if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(labels):
    return label
  if isinstance(label, str) and label in labels:
    return list(labels).index(label)
  raise UserError(
    f"must be of the {len(labels)} classes, by name or by number",
    field="labels",
    value=label,
  )


def _row_of(label: Any, labels: Sequence[str]) -> list[int]:
  """Returns the 0 and 1 of several labels of one row."""
  is_row = isinstance(label, list) and len(label) == len(labels)
  if not is_row or not all(value in (0, 1) for value in label):
    raise UserError(
      f"must be {len(labels)} numbers of 0 and 1 for each row", field="labels"
    )
  return [int(value) for value in label]
