"""The part of `launch.account` for samplers that bound how often an example takes part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dpjax import accounting, solve, validate
from dpjax.accounting import text
from dpjax.accounting.monte_carlo import MOST_APART
from dpjax.validate import UserError

# Flags for samplers that bound how often an example takes part, and for no others.
FLAGS = ("steps_apart", "bands", "num_samples")
# Flags that state a guarantee in an attacker's terms.
ATTACK_FLAGS = ("tpr", "fpr", "advantage", "mu", "bayes_risk", "prior")
_NOT = (
  *ATTACK_FLAGS,
  "epsilon",
  "epochs",
  "num_examples",
  "batch_size",
  "capacity",
  "num_selected",
  "accountant",
)
_NOT += ("neighboring_relation", "curve", "statement", "gdp", "zcdp", "tradeoff")


def runs(values: Any, levels: Sequence[float]) -> list[solve.Bounded]:
  """Returns the settings of a run for each noise multiplier, from flag values.

  Raises UserError if a flag is missing, is out of range, or does not fit the sampler.
  """
  for name in _NOT:
    if values[name].present:
      raise UserError(f"does not go with sampler={values.sampler!r}", field=name)
  if not levels:
    raise UserError(
      f"must be given for {values.sampler!r}", field="noise_multiplier", value=None
    )
  validate.integer_at_least(1, num_steps=values.num_steps)
  validate.integer_in(1, MOST_APART, steps_apart=values.steps_apart)
  validate.integer_in(1, values.steps_apart, bands=values.bands)
  bins = values.sampler == "balls_in_bins"
  prob = values.sampling_prob
  if bins and prob is not None:
    raise UserError("is 1 / steps_apart for sampler='balls_in_bins'", field="sampling_prob")
  prob = 1 / values.steps_apart if bins else prob or 0.0
  common = (values.num_steps, prob, values.steps_apart, values.delta, values.bands)
  questions = [
    solve.Bounded(values.sampler, level, *common, values.num_samples) for level in levels
  ]
  solve.check_bounded(questions[0])
  return questions


def table(asked: Iterable[solve.Bounded]) -> str:
  """Returns a text table with a row for each run and kind of epsilon."""
  lines: list[tuple[str, ...]] = [("noise_multiplier", "epsilon", "kind")]
  for run in asked:
    level = text.lower(run.noise_multiplier, digits=6)
    up = lambda value: accounting.upper(value, decimals=4)
    lines += [(level, up(value), kind) for kind, value in solve.bounded_rows(run)]
  return "\n".join(f"{level:>16}  {value:>10}  {kind}" for level, value, kind in lines)


def show(asked: Sequence[solve.Bounded]) -> None:
  """Prints the settings that all runs share, and the table."""
  first, rows = asked[0], table(asked)
  print(
    f"epsilon at delta {accounting.upper(first.delta)}; sampler {first.sampler}, steps_apart "
    f"{first.steps_apart}, sampling_prob {accounting.upper(first.sampling_prob, digits=6)}, "
    f"{first.num_steps} steps, noise of bands {first.bands}, add_or_remove_one"
  )
  print(rows)
