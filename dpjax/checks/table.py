"""Checks of a user's own run before it is trusted: `python -m launch.check`.

The guarantee of a run needs facts about code: no example moves the sum by more than the
sensitivity, the noise is as large as accounted, and batches are drawn as accounted. Each fact is
measured on the run's own model, gradient, transform, sampler and keys, and compared with a bound.
A pass is evidence, not a proof. A failure is a bug that voids the epsilon.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from dpjax import gradients
from dpjax.checks import batches, before_steps, charges, influence, noise_distributions, whole_step
from dpjax.experiments.checks import size_of_data
from dpjax.checks.influence import (
  cross_example_leakage as cross_example_leakage,
)
from dpjax.checks.subject import Row as Row
from dpjax.checks.subject import Subject as Subject
from dpjax.experiments.kinds.central import build, privacy
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import run_keys
from dpjax.types import LossFn
from dpjax.validate import UserError, first_line


def subject(config: TrainConfig, loaded: tuple[Any, Any] | None = None) -> Subject:
  """Returns the parts of a config's run, as used in training.

  Args:
    loaded: (training data, test data); None to load those of the config.

  Raises:
    UserError: a method without privacy, or without steps.
  """
  if config.privacy.method not in privacy.PRIVATE_METHODS:
    raise UserError(
      "promises nothing, so there is nothing to check; use 'dp_sgd' or 'dp_ftrl'",
      field="privacy.method",
      value=config.privacy.method,
    )
  if config.privacy.method == "least_squares":
    raise UserError(
      "has no steps to check; launch.audit --only=LeastSquares plays games against it",
      field="privacy.method",
      value=config.privacy.method,
    )
  loaded = build.load_data(config) if loaded is None else loaded
  # A verdict can be repeated. A release is checked with the keys of a release, which are drawn.
  seed = None if config.release else config.noise_seed or 0
  random = run_keys.drawn(config.seed, noise_seed=seed, release=config.release)
  run = build.assemble(config, loaded, random)
  plan = run.plan

  # The plan's scaling is left out: where coordinates are scaled, a check scales the loss itself.
  unscaled = dataclasses.replace(plan, scaling=None)

  def clipped_grad(loss_fn: LossFn) -> gradients.ClippedGrad:
    return unscaled.clipped_grad(
      loss_fn,
      method=config.grad_method,
      microbatch_size=config.microbatch_size,
      memory_budget=build.memory_budget(config),
    )

  return Subject(
    config=config,
    plan=plan,
    loss_fn=run.loss_fn,
    clipped_grad=clipped_grad(run.loss_fn),
    # A run in slices gives the transform whole steps, so the plan here has one slice.
    transform=dataclasses.replace(plan, slices=1).transform,
    draw=plan.sampler.draw,
    apply=run.apply,
    run_keys=build.run_keys,
    params=run.params,
    train=run.train,
    keyed=run.keyed,
    gradient_of=clipped_grad,
    # If the loss needs keys, the batches of a check contain them, so no key is given here.
    algorithm=lambda key: run.with_keys(key, None if run.keyed else run.random.local),
    guarantee=run.guarantee,
    optimizer=run.optimizer,
  )


def checks(checked: Subject) -> Iterator[Row]:
  """Yields the row of each check, in order. A check that raises an error fails."""
  fitted = (before_steps,) if checked.plan.statistics is not None else ()
  modules = (
    influence,
    whole_step,
    noise_distributions,
    *fitted,
    batches,
    charges,
    size_of_data,
  )
  for module in modules:
    for check in module.CHECKS:
      try:
        yield check(checked)
      except Exception as error:
        # The run's own code raised this, on inputs that training may meet.
        reason = f"ended in {first_line(error, with_type=True)}"
        yield Row(check.__name__.replace("_", " "), False, math.inf, 0.0, reason)


@dataclasses.dataclass(frozen=True, repr=False)
class CheckTable:
  """The results of all checks. Printing the table shows one line for each check."""

  rows: list[Row]

  @property
  def ok(self) -> bool:
    """Whether no check fails, which is evidence, not a proof."""
    return not self.failed

  @property
  def failed(self) -> list[Row]:
    """Returns the checks that fail, without those that do not apply."""
    return failed(self.rows)

  def to_json(self) -> dict[str, Any]:
    """Returns the rows as a dict for JSON, as in check.json."""
    return to_json(self.rows)

  def __repr__(self) -> str:
    return table(self.rows)

  def __iter__(self) -> Iterator[Row]:
    return iter(self.rows)

  def __len__(self) -> int:
    return len(self.rows)


def failed(rows: list[Row]) -> list[Row]:
  """Returns the checks that fail, without those that do not apply."""
  return [row for row in rows if row.passed is False]


def table(rows: list[Row]) -> str:
  """Returns the rows as text, one line for each check.

  >>> print(table([Row("noise", True, 0.5, 1.0, "z-score")]))
  pass  noise  0.5 <= 1  z-score
  """
  lines = []
  width = max(len(row.name) for row in rows)
  for row in rows:
    word, sign = ("pass", "<=") if row.passed else ("FAIL", "> ")
    numbers = f"{row.measured:.4g} {sign} {row.bound:.4g}  "
    word, numbers = ("n/a ", "") if row.passed is None else (word, numbers)
    lines.append(f"{word}  {row.name:<{width}}  {numbers}{row.detail}")
  return "\n".join(lines)


def to_json(rows: list[Row]) -> dict[str, Any]:
  """Returns the rows as a dict for check.json. Numbers that are not finite become text."""
  finite = lambda value: value if math.isfinite(value) else str(value)
  return {
    "passed": not failed(rows),
    "checks": [
      row._asdict() | {"measured": finite(row.measured), "bound": finite(row.bound)}
      for row in rows
    ],
  }
