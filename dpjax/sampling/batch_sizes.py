"""Batch size and steps per pass for a sampling probability: one place for runs and accounting."""

from __future__ import annotations

import math

from dpjax import validate
from dpjax.validate import UserError

# Probability below which float64 cannot tell whether 1 / sampling_prob is a whole number.
_LEAST_PROB = 1e-15


def whole_batch_size(sampling_prob: float, num_examples: int) -> int:
  """Returns the fixed batch size for a sampling probability.

  It is sampling_prob * num_examples, rounded, and at least 1. Runs and accounting must both call
  this function, so that they use the same size.

  >>> whole_batch_size(0.015, 100), whole_batch_size(1e-6, 100)
  (2, 1)
  """
  validate.probability(sampling_prob=sampling_prob)
  validate.integer_at_least(1, num_examples=num_examples)
  return max(1, round(sampling_prob * num_examples))


def steps_per_pass(sampling_prob: float, times: int = 1) -> int:
  """Returns the number of steps of a pass, in which every record takes part `times` times.

  This number is times / sampling_prob, rounded, and at least `times`.

  >>> steps_per_pass(0.25), steps_per_pass(0.3, times=3)
  (4, 10)
  """
  return max(times, round(times / sampling_prob))


def whole_passes(sampling_prob: float, times: int = 1) -> bool:
  """Returns whether times / sampling_prob, the number of steps of a pass, is a whole number.

  >>> whole_passes(0.25), whole_passes(0.3), whole_passes(0.3, times=3)
  (True, False, True)
  """
  steps = steps_per_pass(sampling_prob, times)
  # Floats such as 1 / 3 are not exact, so the comparison allows for rounding.
  return math.isclose(steps * sampling_prob, times, rel_tol=1e-9)


def check_passes(
  sampling_prob: float, purpose: str, *, name: str = "sampling_prob", times: int = 1
) -> None:
  """Raises UserError unless a pass is a whole number of steps; used by runs and accounting.

  Args:
    purpose: name of the sampler, for the message.
    name: name of the field, for the message.
    times: number of times that a pass takes each record.
  """
  validate.probability(**{name: sampling_prob})
  least = times * _LEAST_PROB
  if sampling_prob < least:
    raise UserError(
      f"must be at least {least}, for {purpose}", field=name, value=sampling_prob
    )
  if not whole_passes(sampling_prob, times):
    raise UserError(
      f"must be {times} / a whole number, the steps of a pass, for {purpose}; "
      f"{times / steps_per_pass(sampling_prob, times)!r} is near",
      field=name,
      value=sampling_prob,
    )
