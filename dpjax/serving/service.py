"""A service without its HTTP: requests, feedback, and what happens once a second.

| part                       | file                  |
| -------------------------- | --------------------- |
| bounds                     | `service_settings.py` |
| the queue of requests      | `batching.py`         |
| windows of rows and labels | `windows.py`          |
| labels for an answer       | `feedback.py`         |
| alarms                     | `alarms.py`           |
| models and releases        | `releases.py`         |
| what earlier starts left   | `replay.py`           |

State is changed in one event loop alone, so nothing here is locked. `tick` is to be called about
once a second: it closes windows, raises alarms, moves a release on, and saves counts.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpjax.accounting import upper
from dpjax.experiments.run.guarantee import OWN_EPSILON
from dpjax.serving import replay, rollout
from dpjax.serving.alarms import Alarms
from dpjax.serving.batching import Batcher, Closed, Full, Late
from dpjax.serving.drift import Bins
from dpjax.serving.feedback import AwaitedLabels
from dpjax.serving.journal import FORMAT, ServiceJournal
from dpjax.serving.predictor import Predictor
from dpjax.serving.predictor import digest_of as digest_of
from dpjax.serving.releases import Releases
from dpjax.serving.service_settings import ServiceSettings as ServiceSettings
from dpjax.serving.windows import FEEDBACK, STREAM_RELATION, Windows
from dpjax.serving.windows import Reference as Reference
from dpjax.validate import UserError

_LATENCIES = 1000
_FEWEST_LATENCIES = 100
_LATENCY = "latency p99 ms"


@dataclasses.dataclass(frozen=True)
class Answer:
  """The answer to a request of n rows.

  Args:
    id: id of the request, for `feedback`.
    run: name of the model that answered.
    logits: logits [n, K].
    answers: result of `Predictor.classes`: [n], or [n, labels].
  """

  id: str
  run: str
  logits: np.ndarray
  answers: np.ndarray


class ModelFailed(Exception):
  """Raised if a model raised an error or gave logits that are not finite.

  Attributes:
    answers: classes of such logits, whose rows were counted by them; None: there are no logits.
  """

  answers: np.ndarray | None = None


class Service:
  """Answers requests with one model, or with two during a release.

  Args:
    runs: the model that answers, and after it the new model if a release is to begin.
    journal: journal of this service.
    bins: public bins of drift.
    reference: histograms that windows are compared with; None: those of the first full window.
    settings: bounds of the service; None: the defaults.
    clock: function that returns seconds, for stages, latencies and windows of labels by time.
    load: function that loads a run from its folder, for runs that only the journal names.
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
    self.alarms = Alarms(journal)
    self.windows = Windows(self.settings, bins, reference, journal, self.alarms, clock)
    self.releases = Releases(runs[0], self.settings.rule, journal, clock)
    self._labels = AwaitedLabels(self.settings.remembered)
    self._clock = clock
    self._load = load
    self._latencies: collections.deque[float] = collections.deque(maxlen=_LATENCIES)
    # Whether counts have changed since the last save.
    self._dirty = False
    self.batcher = Batcher(
      max_queue=self.settings.max_queue,
      wait_ms=self.settings.wait_ms,
      timer=lambda model, rows: self.releases.timer(model),
    )
    try:
      self._resume(runs)
    except UserError:
      raise
    # Whoever may write there could have written anything, with its digest.
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise UserError(
        f"or the counts beside it are not what a service wrote there "
        f"({type(error).__name__}: {error!s:.80}); bring them back, or choose another --workdir",
        field=str(journal.path)[-120:],
      ) from error

  def _resume(self, runs: Sequence[Predictor]) -> None:
    """Continues where the journal ends. If the journal has no release of these runs, begins the
    release of the second run, if two are given."""
    known = {digest_of(run): run for run in runs}
    spent = replay.spent_on_windows(self.journal)
    budget = self.settings.drift_budget
    if budget is not None and spent > budget:
      raise UserError(
        f"must be at least {upper(spent)}, which earlier windows have spent",
        field="drift_budget",
        value=budget,
      )
    if spent:
      self.windows.spend("earlier windows", spent)
    self.windows.any_exact = replay.released_exactly(self.journal)
    self._spent_on_references = replay.spent_on_references(self.journal)
    if self.windows.reference is not None:
      # It may have been charged in this start, whose lines are not replayed.
      run = digest_of(runs[0])
      held = self._spent_on_references.get(run, 0.0)
      self._spent_on_references[run] = max(held, self.windows.reference.epsilon)
    self.windows.drift.number = replay.next_window(self.journal, "drift")
    self.windows.feedback.number = replay.next_window(self.journal, "feedback")
    lines = replay.own_lines(self.journal, list(known))
    line = replay.last_of(lines, "candidate", "stage", "promote", "roll_back")
    answering = digest_of(runs[0]) if line is None else line["old"]
    counts = replay.current(self.journal.saved_counts(), line, answering)
    self.windows.drift.restore(
      counts["drift"], self.windows.bins, most=self.settings.window
    )
    self.windows.feedback.restore(counts["feedback"], [FEEDBACK])
    resumed = replay.last_of(lines, "start") is not None
    latency = {_LATENCY} if self.settings.latency_ms else set()
    self.alarms.restore(lines, self.windows.reported | latency)
    self.journal.write(
      "start",
      format=FORMAT,
      runs=list(known),
      names=[run.name for run in runs],
      resumed=resumed,
    )
    if line is not None:
      self._resume_release(line, known, counts["release"] or {})
    # A release also begins here if a kill came before an earlier start wrote the candidate's line.
    elif len(runs) > 1:
      self.releases.begin(runs[1])
    since: list[dict[str, Any]] = self.journal.lines
    promoted = replay.last_of(lines, "promote")
    if promoted is not None:
      # The given reference belongs to the model that was replaced, and a reference of the stream
      # begins with the model.
      self.windows.reference = None
      since = since[promoted["line"] :]
    if self.windows.reference is None:
      self.windows.reference = replay.reference_from_stream(
        since, self.releases.old, self.windows.bins
      )

  def _resume_release(
    self, line: dict[str, Any], known: dict[str, Predictor], saved: dict[str, Any]
  ) -> None:
    """Restores the models and the stage of a release from its last line in the journal.

    After the end of the release, only the model that answers is restored.

    Args:
      line: last line of the release.
      known: {digest: model} of this start's runs.
      saved: last snapshot of this stage; {} if there is none.
    """
    self.releases.old = replay.model_of(line, "old", known, self._load)
    if not replay.is_under_way(line):
      return
    new = replay.model_of(line, "new", known, self._load)
    self.releases.resume(new, stage=line["stage"], saved=saved)

  async def predict(self, x: np.ndarray, key: str | None) -> Answer:
    """Answers one request by the old model, or in a release by the model that `key` decides.

    If the new model raises an error or its logits are not finite, the old model answers. Where
    it has logits, windows still count by them: otherwise one row that it fails on would move all
    rows of its request, in their answers and in their labels, from one model to the other.

    Args:
      x: rows, as `Predictor.raw` returned them.
      key: name of the user who asks. In a release it decides the model; None: the id of the
        request decides.

    Raises:
      Full, Late, Closed, ModelFailed: the request gets no answer.
    """
    request = secrets.token_hex(12)
    # The release is read now, since it may end while the logits are computed.
    release = self.releases.rollout
    stage = self.releases.stage_counts
    is_new = release is not None and release.is_new(request if key is None else key)
    old = self.releases.old
    model = self.releases.new if is_new and self.releases.new is not None else old
    name = "old" if model is old else "new"
    began = self._clock()
    counted: tuple[str, np.ndarray] | None = None
    try:
      logits, answers = await self._finite(model, x)
    except Late:
      # A new model that is too slow to answer has failed. No time is left to ask the old model.
      self._count_request(stage, name, failed=True)
      raise
    except ModelFailed as failure:
      self._count_request(stage, name, failed=True)
      if name == "old":
        raise
      if failure.answers is not None:
        counted = digest_of(model), failure.answers
      # The old model is asked, so that errors of the new model leave no request unanswered.
      model = old
      logits, answers = await self._finite(model, x, counts=counted is None)
    else:
      self._count_request(stage, name, failed=False)
    self._latencies.append(1000 * max(0.0, self._clock() - began))
    self._labels.add(request, *(counted or (digest_of(model), answers)))
    return Answer(request, model.name, logits, answers)

  async def _finite(
    self, model: Predictor, x: np.ndarray, *, counts: bool = True
  ) -> tuple[np.ndarray, np.ndarray]:
    """Counts rows, and returns their logits and classes if all logits are finite.

    Args:
      counts: whether the rows are to be counted, as those that another model has counted are not.

    Raises:
      Full, Late, Closed: the logits were not computed.
      ModelFailed: the model raised an error, or some logits are NaN or infinite.
    """
    try:
      logits = await self.batcher.logits(model, x, seconds=self.settings.deadline)
    except (Full, Late, Closed):
      raise
    except Exception as error:
      raise ModelFailed(f"{type(error).__name__}: {error!s:.200}") from error
    answers = model.classes(np.nan_to_num(logits))
    # A model that was replaced or withdrawn while it computed is in no window any more.
    if counts and self.windows.bins and model in (self.releases.old, self.releases.new):
      # Rows count without an answer, too. If one row could keep the others of its request out, this
      # and all later windows would differ in more rows than the noise hides.
      self.windows.count_rows(x, answers)
      self._dirty = True
    if not np.isfinite(logits).all():
      failure = ModelFailed("its logits are not finite")
      failure.answers = answers
      raise failure
    return logits, answers

  def _count_request(
    self, stage: dict[str, rollout.StageCounts] | None, name: str, *, failed: bool
  ) -> None:
    if self.releases.count_request(stage, name, failed=failed):
      self._dirty = True

  def feedback(self, request: str, labels: Sequence[Any]) -> int:
    """Counts the labels of one answered request, and returns the number of right answers.

    Raises:
      UserError: the id is unknown or was used before; the labels are not those of the model; the
        model predicts numbers.
    """
    run, num_right, num_labels = self._labels.take(
      request, labels, self.releases.old.inputs
    )
    is_new = self.releases.new is not None and run == digest_of(self.releases.new)
    # A model that was replaced or withdrawn after its answer has no counts any more.
    if is_new or run == digest_of(self.releases.old):
      self.windows.count_labels(is_new=is_new, num_right=num_right, num_labels=num_labels)
      self._dirty = True
    return num_right

  async def tick(self) -> None:
    """Closes windows, raises alarms, moves a release on, and saves counts."""
    while self.windows.full:
      await self.windows.release_rows(self.windows.full.pop(0), self.releases.old)
    stage = self.releases.stage_counts
    labels = await self.windows.release_labels(self.releases.old)
    # The stage may have ended while the noise was drawn.
    if labels is not None and stage is self.releases.stage_counts:
      self.releases.count_labels(labels)
    self._check_latency()
    self._move_release()
    # The time of a stage goes on without requests, too.
    if self._dirty or self.releases.rollout is not None:
      self._dirty = False
      try:
        # Counts are saved in a thread, since the disk may be slow.
        await asyncio.to_thread(self.journal.save_counts, self._snapshot())
      except OSError:
        self._dirty = True
        raise

  def _snapshot(self) -> dict[str, Any]:
    """Returns the counts of open windows and of the stage, as they are saved."""
    counts = {
      # The length of the journal is saved, so that missing lines are noticed.
      "lines": self.journal.num_lines,
      "run": digest_of(self.releases.old),
      "drift": self.windows.drift.plain(),
      "feedback": self.windows.feedback.plain(),
    }
    release = self.releases.snapshot()
    return counts if release is None else counts | {"release": release}

  def p99_ms(self) -> float:
    """Returns the 99th percentile of the times of the last 1,000 answered requests, in
    milliseconds. It is NaN before 100 requests are answered.
    """
    if len(self._latencies) < _FEWEST_LATENCIES:
      return math.nan
    return float(np.percentile(self._latencies, 99))

  def _check_latency(self) -> None:
    bound = self.settings.latency_ms
    value = self.p99_ms()
    if bound and not math.isnan(value):
      level = "alarm" if value > bound else ""
      self.alarms.report(_LATENCY, level, value, bound)

  def offer(self, new: Predictor) -> None:
    """Begins the release of a new model. A release that is under way ends first.

    Raises:
      UserError: the model takes other inputs than the old one, gives other answers, or is the
        same run.
    """
    # The check comes first: a refused offer must not end the release that is under way.
    self.releases.check(new)
    if self.releases.new is not None:
      self.releases.roll_back("another release begins")
    self.releases.begin(new)
    self.windows.clear_labels()
    self._dirty = True

  def promote(self, why: str) -> None:
    """Makes the new model the one that answers every request.

    Raises:
      UserError: no release is under way.
    """
    self.releases.promote(why)
    self.windows.begin_model()
    self._dirty = True

  def roll_back(self, why: str) -> None:
    """Withdraws the new model; the old one answers every request.

    Raises:
      UserError: no release is under way.
    """
    self.releases.roll_back(why)
    # Labels of the withdrawn model must not count for the next new model.
    self.windows.clear_labels()
    self._dirty = True

  def _move_release(self) -> None:
    """Withdraws, promotes or advances the new model, as the rule of the release decides."""
    decided = self.releases.decision()
    if decided is None:
      return
    decision, why = decided
    if decision == rollout.ROLL_BACK:
      self.roll_back(why)
    elif decision == rollout.PROMOTE:
      self.promote(why)
    elif decision == rollout.ADVANCE:
      self.releases.advance(why)
      # Labels of the earlier stage must not count in the new stage.
      self.windows.clear_labels()

  def health(self) -> dict[str, Any]:
    """Returns the state of the service, as /health shows it."""
    return {
      "status": "alarm" if self.alarms.raised else "ok",
      "run": self.releases.old.name,
      "row_exact": self.releases.old.row_exact,
      "differences_from_training": self.releases.old.differences,
      "release": self.releases.state(),
      "alarms": self.alarms.raised,
      "psi": self.windows.psi,
      "windows": self.windows.num_released,
      "accuracy": None if math.isnan(self.windows.accuracy) else self.windows.accuracy,
      "p99_ms": None if math.isnan(self.p99_ms()) else round(self.p99_ms(), 3),
      "waiting_rows": self.batcher.rows,
      "privacy": self._privacy(),
    }

  def _privacy(self) -> dict[str, Any]:
    """Returns the epsilon accounted for training records and for rows of the stream."""
    reference = self.windows.reference
    trained = self.releases.old.result.get("epsilon")
    # Counts of training rows cost their epsilon, also after another reference took their place. If
    # they were exact, no epsilon holds.
    spent = self._spent_on_references.get(digest_of(self.releases.old), 0.0)
    whole = None
    # The epsilon of a simulated run is that of a larger deployment, not of the records it read.
    own = self.releases.old.result.get(OWN_EPSILON, trained)
    if isinstance(own, (int, float)) and math.isfinite(spent):
      whole = own + spent
    stream = self.windows.stream_epsilon
    is_noised = self.settings.drift_epsilon is not None and math.isfinite(stream)
    return {
      "training_epsilon": trained,
      "training_epsilon_kind": self.releases.old.result.get("epsilon_kind"),
      "training_delta": self.releases.old.result.get("delta"),
      "training_relation": self.releases.old.result.get("neighboring_relation"),
      "training_unit": self.releases.old.result.get("unit"),
      "training_failed_assumptions": self.releases.old.result.get("failed_assumptions", []),
      "reference": None if reference is None else reference.source,
      "reference_epsilon": spent if math.isfinite(spent) else None,
      "training_records_epsilon": whole,
      "stream_epsilon_per_window": self.settings.drift_epsilon,
      "stream_epsilon": stream if is_noised else None,
      "stream_relation": STREAM_RELATION,
    }
