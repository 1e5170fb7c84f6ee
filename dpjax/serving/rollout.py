"""Release of a new model by stages: who gets it, when its share grows, when it is withdrawn.

A hash of the request's key decides which model answers it. In one stage a key always gets the same
model, and a key that has the new model keeps it while that model's share grows. A stage ends by its
own counts and times, so that requests of an earlier stage do not count in a later one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpjax import validate
from dpjax.validate import UserError

KEEP = "keep"
ADVANCE = "advance"
PROMOTE = "promote"
ROLL_BACK = "roll_back"
# A new model is withdrawn if its accuracy is this many standard deviations below what the rule
# allows. While a stage has few requests, errors may exceed their bound by as many deviations.
_DEVIATIONS = 3.0


def position(key: str, salt: str) -> float:
  """Returns a number in [0, 1) that follows from a key and a salt alone.

  >>> position("user-1", "a") == position("user-1", "a") != position("user-1", "b")
  True
  """
  digest = hashlib.sha256(f"dpjax serve {len(salt)} {salt}{key}".encode()).digest()
  # A float64 holds 53 bits, so the quotient is exact.
  return (int.from_bytes(digest[:8]) >> 11) / 2**53


@dataclasses.dataclass(frozen=True)
class StageRule:
  """Rule by which a stage of a release ends.

  Args:
    stages: increasing shares of requests that the new model answers. After the last stage the new
      model replaces the old model.
    requests: number of requests that the new model must have got in a stage, failed ones included.
    seconds: shortest duration of a stage, in seconds.
    error_rate: largest share of requests that the new model may fail on.
    latency_ms: largest 99th percentile of the new model's computing times, in milliseconds; 0: no
      bound.
    labels: number of labels from feedback that each model must have in a stage; 0: none needed.
    accuracy_drop: largest amount by which the new model's accuracy may be below the old model's.
      It is not checked if `labels` is 0.
  """

  stages: tuple[float, ...] = (0.1, 0.5)
  requests: int = 1000
  seconds: float = 0.0
  error_rate: float = 0.01
  latency_ms: float = 200.0
  labels: int = 0
  accuracy_drop: float = 0.05

  def __post_init__(self):
    if not self.stages or list(self.stages) != sorted(set(self.stages)):
      raise UserError("must be increasing shares", field="stages", value=self.stages)
    for place, share in enumerate(self.stages):
      if not 0 < share <= 1:
        raise UserError("must be in (0, 1]", field=f"stages[{place}]", value=share)
    validate.integer_at_least(1, requests=self.requests)
    validate.integer_at_least(0, labels=self.labels)
    validate.non_negative(
      seconds=self.seconds,
      error_rate=self.error_rate,
      latency_ms=self.latency_ms,
      accuracy_drop=self.accuracy_drop,
    )


@dataclasses.dataclass
class StageCounts:
  """Counts of one model in one stage. Labels are added when their window is released."""

  requests: int = 0
  errors: int = 0
  right: float = 0.0
  labels: float = 0.0

  @property
  def accuracy(self) -> float:
    """Share of right answers among labels; NaN without labels."""
    return self.right / self.labels if self.labels > 0 else math.nan


class Rollout:
  """Holds the stage of a release and its counts, and decides what to do next.

  Args:
    rule: rule by which stages end.
    salt: name of the release, such as the digest of the new run. Another release splits keys in
      another way.
    stage: index in `rule.stages`.
    counts: counts of the models "old" and "new" in this stage, by name; None: all are 0.

  >>> rollout = Rollout(StageRule(stages=(0.25, 1.0), requests=2), salt="run")
  >>> sum(rollout.is_new(str(user)) for user in range(10_000)) // 100
  25
  >>> for _ in range(2):
  ...   rollout.counts["new"].requests += 1
  >>> rollout.decision(p99_ms=3.0, elapsed=1.0)
  ('advance', '2 requests, 0 errors, p99 3.0 ms')
  """

  def __init__(
    self,
    rule: StageRule,
    salt: str,
    *,
    stage: int = 0,
    counts: Mapping[str, Mapping[str, Any]] | None = None,
  ):
    validate.integer_in(0, len(rule.stages) - 1, stage=stage)
    self.rule = rule
    self.salt = salt
    self.stage = stage
    known = {} if counts is None else counts
    self.counts = {name: StageCounts(**known.get(name, {})) for name in ("old", "new")}

  @property
  def share(self) -> float:
    """Share of keys that the new model answers."""
    return self.rule.stages[self.stage]

  def plain_counts(self) -> dict[str, dict[str, Any]]:
    """Returns the counts of both models as dictionaries, for JSON and for the argument `counts`."""
    return {name: dataclasses.asdict(each) for name, each in self.counts.items()}

  def is_new(self, key: str) -> bool:
    """Returns whether the new model answers requests of this key."""
    return position(key, self.salt) < self.share

  def decision(self, *, p99_ms: float, elapsed: float) -> tuple[str, str]:
    """Returns (KEEP, ADVANCE, PROMOTE or ROLL_BACK, a text that says why).

    Args:
      p99_ms: 99th percentile of the new model's times in this stage; NaN if there are no times.
        A bound on the latency then decides nothing.
      elapsed: seconds since the stage began.
    """
    rule = self.rule
    new = self.counts["new"]
    why = f"{new.requests} requests, {new.errors} errors, p99 {p99_ms:.1f} ms"
    # A model that fails is withdrawn early: after a tenth of the requests that a stage needs, but
    # not before 10 requests. If a stage needs fewer than 10, all must have come.
    early = max(10, rule.requests // 10)
    enough = new.requests >= rule.requests
    if new.requests >= min(early, rule.requests):
      allowed = rule.error_rate * new.requests
      # An early decision allows three standard deviations more errors, so that one error does not
      # decide.
      slack = 0.0 if enough else _DEVIATIONS * math.sqrt(max(allowed, 1.0))
      if new.errors > allowed + slack:
        return ROLL_BACK, f"{why}; the error rate is above {rule.error_rate}"
    if self._is_worse():
      old = self.counts["old"]
      return ROLL_BACK, f"{why}; accuracy {new.accuracy:.4f}, before {old.accuracy:.4f}"
    if not enough or elapsed < rule.seconds:
      return KEEP, why
    if rule.latency_ms and math.isnan(p99_ms):
      return KEEP, f"{why}; waits for times of the new model"
    if rule.latency_ms and p99_ms > rule.latency_ms:
      return ROLL_BACK, f"{why}; the bound is {rule.latency_ms} ms"
    if rule.labels and min(each.labels for each in self.counts.values()) < rule.labels:
      return KEEP, f"{why}; waits for {rule.labels} labels of each model"
    last = self.stage == len(rule.stages) - 1
    return (PROMOTE if last else ADVANCE), why

  def _is_worse(self) -> bool:
    """Returns whether the new model's accuracy is below what the rule allows, by more than chance
    explains."""
    new = self.counts["new"]
    old = self.counts["old"]
    if not self.rule.labels or min(new.labels, old.labels) < self.rule.labels:
      return False
    variance = sum(
      max(each.accuracy * (1 - each.accuracy), 1 / each.labels) / each.labels
      for each in (new, old)
    )
    slack = _DEVIATIONS * math.sqrt(variance)
    return new.accuracy < old.accuracy - self.rule.accuracy_drop - slack

  def advance(self) -> None:
    """Begins the next stage, with all counts 0."""
    self.stage += 1
    self.counts = {name: StageCounts() for name in self.counts}


def check_weights(weights: Sequence[float], num_runs: int) -> None:
  """Raises UserError unless there is one weight in (0, 1) for each run, and they sum to 1."""
  if len(weights) != num_runs:
    raise UserError(
      f"must be {num_runs} shares, one for each run", field="weights", value=weights
    )
  if not all(0 < weight < 1 for weight in weights) or abs(sum(weights) - 1) > 1e-9:
    raise UserError(
      "must be shares in (0, 1) that sum to 1", field="weights", value=weights
    )
