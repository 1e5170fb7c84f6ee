"""Bounds of a service: its queue, its windows, its alarms, and the rule of a release."""

from __future__ import annotations

import dataclasses

from dpjax import validate
from dpjax.serving import drift
from dpjax.serving.rollout import StageRule
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class ServiceSettings:
  """Sizes, times, alarm levels and privacy budget of a service.

  Args:
    max_rows: largest number of rows of a request.
    max_queue: largest number of rows that wait in the queue.
    wait_ms: milliseconds that a request waits for other requests to join its batch.
    deadline: seconds within which a request must be answered.
    window: number of rows of a window of drift.
    feedback_window: number of labels of a window of accuracy. It closes at the next tick, so that a
      burst makes it longer.
    window_seconds: seconds of a window of accuracy, whatever its number of labels; None: by
      `feedback_window`. A window without labels is not released.
    psi_warning, psi_alarm: PSI of a window above which a warning or an alarm is raised. If
      `drift.by_chance` gives a larger bound, that one applies.
    latency_ms: bound on the 99th percentile of a request's milliseconds; 0: no bound.
    accuracy_drop: largest amount by which the accuracy of a window may be below the test accuracy
      of the run.
    drift_epsilon: epsilon of the noise on every window, for one row; None: exact counts.
    drift_budget: largest epsilon of all windows together; None: no bound. Windows beyond it are
      not released.
    remembered: number of requests whose answers are kept for feedback.
    rule: rule by which stages of a release end.
  """

  max_rows: int = 256
  max_queue: int = 4096
  wait_ms: float = 2.0
  deadline: float = 5.0
  window: int = 1000
  feedback_window: int = 200
  window_seconds: float | None = None
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
    if self.window_seconds is not None:
      validate.positive(window_seconds=self.window_seconds)
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
