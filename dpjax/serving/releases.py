"""The model that answers, the new one of a release, and what moves a release on.

`rollout` decides by counts and times that it is given. This module holds the models and the times
of the new model's batches, and writes the journal. A line is on the disk before its content takes
effect.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dpjax.serving.journal import ServiceJournal
from dpjax.serving.predictor import Predictor, digest_of
from dpjax.serving.rollout import Rollout, StageCounts, StageRule
from dpjax.validate import UserError

# Number of batches whose times are kept.
_TIMES = 1000


class Releases:
  """Holds the model that answers and the new model of a release, and moves the release on.

  Args:
    old: model that answers.
    rule: rule by which stages of a release end.
    journal: journal that candidates, stages, promotions and roll-backs are written to.
    clock: function that returns seconds, for the duration of a stage.
  """

  def __init__(
    self,
    old: Predictor,
    rule: StageRule,
    journal: ServiceJournal,
    clock: Callable[[], float],
  ):
    self.old = old
    self.new: Predictor | None = None
    self.rollout: Rollout | None = None
    self._rule = rule
    self._journal = journal
    self._clock = clock
    self._stage_began = clock()
    # Computing times of the new model's batches in this stage, in milliseconds. Each stage has its
    # own object, so that a batch that began in an earlier stage does not count in a later one.
    self._times: collections.deque[float] = collections.deque(maxlen=_TIMES)

  def begin(self, new: Predictor) -> None:
    """Writes a new model to the journal, and begins the first stage of its release.

    Raises:
      UserError: in the cases that `check` names.
    """
    self.check(new)
    self._write("candidate", new, stage=0)
    self._enter(new, stage=0, counts=None)

  def resume(self, new: Predictor, *, stage: int, saved: Mapping[str, Any]) -> None:
    """Continues a release that an earlier start has written to the journal.

    Args:
      new: new model of the release.
      stage: number of the stage, from 0.
      saved: result of `snapshot` in this stage; {}: the stage begins anew.

    Raises:
      UserError: in the cases that `check` names, or if the rule has no such stage.
    """
    self.check(new)
    num_stages = len(self._rule.stages)
    if not 0 <= stage < num_stages:
      raise UserError(
        f"must have more than {stage} shares: the journal is in stage {stage + 1} of a release",
        field="stages",
        value=self._rule.stages,
      )
    self._enter(new, stage=stage, counts=saved.get("counts"))
    # The time that the stage lasted in earlier starts counts, too.
    self._stage_began -= saved.get("elapsed", 0.0)
    self._times.extend(saved.get("times_ms", ()))

  def check(self, new: Predictor) -> None:
    """Checks that a model can be released after the one that answers.

    Raises:
      UserError: the model takes other inputs, gives other answers, or is the same run.
    """
    if digest_of(new) == digest_of(self.old):
      # Counts are kept by run, so two models of one run could not be told apart.
      raise UserError(
        "must be another run than the one that answers", field="run", value=new.name
      )
    if new.inputs != self.old.inputs:
      raise UserError(
        f"must take and answer what {self.old.name!r} does; other shapes or labels are another "
        "service",
        field="run",
        value=new.name,
      )

  def _enter(self, new: Predictor, *, stage: int, counts: Mapping[str, Any] | None) -> None:
    """Sets the new model of a release, and begins stage `stage` with `counts`; None: all are 0."""
    self.new = new
    self.rollout = Rollout(self._rule, digest_of(new), stage=stage, counts=counts)
    self._restart_stage()

  def _restart_stage(self) -> None:
    self._stage_began = self._clock()
    self._times = collections.deque(maxlen=_TIMES)

  def advance(self, why: str) -> None:
    """Begins the next stage of a release, and writes it to the journal with the reason `why`."""
    assert self.rollout is not None and self.new is not None
    stage = self.rollout.stage + 1
    self._write(
      "stage", self.new, stage=stage, share=self.rollout.rule.stages[stage], why=why
    )
    self.rollout.advance()
    self._restart_stage()

  def promote(self, why: str) -> None:
    """Makes the new model the one that answers every request.

    Raises:
      UserError: no release is under way.
    """
    self.old = self._end("promote", why)

  def roll_back(self, why: str) -> None:
    """Withdraws the new model; the old one answers every request.

    Raises:
      UserError: no release is under way.
    """
    self._end("roll_back", why)

  def _end(self, action: str, why: str) -> Predictor:
    """Ends the release, and returns its model."""
    if (new := self.new) is None:
      raise UserError("needs a release that is under way", field="action", value=action)
    # The line is written first. After a kill before the next line of code, the service starts
    # as the line says.
    self._write(action, new, why=why)
    self.new = self.rollout = None
    return new

  def decision(self) -> tuple[str, str] | None:
    """Returns (what to do now, why), as `Rollout.decision` does; None without a release."""
    if self.rollout is None:
      return None
    p99 = float(np.percentile(self._times, 99)) if self._times else math.nan
    elapsed = self._clock() - self._stage_began
    return self.rollout.decision(p99_ms=p99, elapsed=elapsed)

  def timer(self, model: Predictor) -> Callable[[float], None]:
    """Returns a function that records the seconds of a batch of `model` that begins now. Only times
    of the new model are kept, for the stage in which the batch began."""
    times = self._times
    is_new = model is self.new

    def record(seconds: float) -> None:
      if is_new:
        times.append(round(1000 * seconds, 3))

    return record

  @property
  def stage_counts(self) -> dict[str, StageCounts] | None:
    """Counts of the current stage, a new object for each stage; None without a release."""
    return None if self.rollout is None else self.rollout.counts

  def count_request(
    self, stage: dict[str, StageCounts] | None, name: str, *, failed: bool
  ) -> bool:
    """Counts one request of the current stage, and returns whether it was counted.

    Args:
      stage: value of `stage_counts` when the request came.
      name: name of the model that got the request, "old" or "new".
      failed: whether the model gave no answer.
    """
    # A request of an earlier release or stage must not count in the current stage.
    if stage is None or stage is not self.stage_counts:
      return False
    stage[name].requests += 1
    stage[name].errors += failed
    return True

  def count_labels(self, labels: np.ndarray) -> None:
    """Adds a released window of feedback to the counts of the stage.

    Args:
      labels: [4] counts: right and wrong answers of the old model, then of the new model.
    """
    if self.rollout is None:
      return
    for place, name in ((0, "old"), (2, "new")):
      self.rollout.counts[name].right += float(labels[place])
      self.rollout.counts[name].labels += float(labels[place] + labels[place + 1])

  def snapshot(self) -> dict[str, Any] | None:
    """Returns the stage as `resume` needs it; None without a release."""
    if self.rollout is None or self.new is None:
      return None
    return {
      # A clock may go backwards. A negative time would make the next start wait longer.
      "elapsed": max(0.0, round(self._clock() - self._stage_began, 3)),
      "counts": self.rollout.plain_counts(),
      "times_ms": list(self._times),
    }

  def state(self) -> dict[str, Any] | None:
    """Returns the release as /health shows it; None without a release."""
    if self.rollout is None or self.new is None:
      return None
    return {
      "run": self.new.name,
      "stage": self.rollout.stage,
      "share": self.rollout.share,
      "counts": self.rollout.plain_counts(),
    }

  def _write(self, kind: str, new: Predictor, **values: Any) -> None:
    """Writes a line to the journal. "new" is the new model of the release, and "old" the model that
    answers from now on."""
    old = new if kind == "promote" else self.old
    self._journal.write(
      kind,
      name=new.name,
      old=digest_of(old),
      old_folder=old.folder,
      new=digest_of(new),
      new_folder=new.folder,
      **values,
    )
