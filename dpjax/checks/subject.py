"""What a check measures, and the row that it returns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats

from dpjax.plan import Plan
from dpjax.types import Algorithm, ArrayTree, LossFn

BATCH = 8  # examples of a checked batch
Z = 6.0  # bound on z-scores: that of a sound run exceeds it with a chance of 2e-9
SEED = 20_26  # of every random choice of a check: a repeated check gives the same numbers


class Row(NamedTuple):
  """Result of one check: a line in the table of `launch.check`."""

  name: str
  passed: bool | None  # None: does not apply to this run
  measured: float
  bound: float
  detail: str  # what was measured, in which unit


def row(measured: float, bound: float, detail: str) -> Row:
  """Returns the result of a check that passes if measured <= bound. NaN never passes.

  `CHECKS` of its module gives it its name.

  >>> row(float("nan"), 1.0, "").passed
  False
  """
  return Row("", bool(measured <= bound), float(measured), float(bound), detail)


def z_of(p: float, looked_at: float = 1) -> float:
  """Returns the z-score of the smallest of `looked_at` p-values."""
  return float(stats.norm.isf(min(p * looked_at, 1.0) / 2))


def z_of_squares(sums: np.ndarray, count: int, looked_at: int = 0) -> float:
  """Returns the z-score of the least likely sum of squares of `count` N(0, 1) values. `sums` holds
  all sums, or the smallest and the largest of `looked_at` sums."""
  tails = np.minimum(stats.chi2.cdf(sums, count), stats.chi2.sf(sums, count))
  return z_of(2 * float(np.min(tails)), looked_at or np.size(sums))


def nan_first(pair: tuple[float, Any]) -> tuple[bool, float]:
  """Returns a sort key of (number, anything) that puts NaN and infinity above every number, since
  they must never pass."""
  return not math.isfinite(pair[0]), pair[0]


def worst(deviations: Sequence[tuple[float, str]], over: str) -> Row:
  """Returns the row of the largest of several z-scores, each with the name of its statistic.

  Args:
    over: draws, steps or passes that the statistics are of.

  >>> worst([(0.5, "mean"), (float("nan"), "variance")], "9 draws").passed
  False
  """
  z, what = max(deviations, key=nan_first)
  return row(z, Z, f"largest z of {len(deviations)} statistics over {over}: {what}")


def not_applicable(why: str) -> Row:
  """Returns the result of a check that does not apply to this run, with the reason."""
  return Row("", None, float("nan"), float("nan"), why)


@dataclasses.dataclass(frozen=True)
class Subject:
  """The parts of a run. Its functions are those that training calls, so a check tests that code."""

  plan: Plan
  loss_fn: LossFn
  clipped_grad: Callable[..., Any]  # (params, batch, mask) -> ClippedSum
  transform: Callable[[jax.Array], Any]  # key -> optax transformation
  draw: Callable[..., np.ndarray]  # (num_examples, seed=, step=) -> indices
  apply: Callable[[Any, Any], Any] | None  # (params, x [B, ...]) -> outputs [B, ...]
  params: Any
  train: Any  # len() and train[indices]
  keyed: bool = False  # whether the loss reads `example.key`
  # Function that returns the `clipped_grad` of a loss, with the run's options. None if only the
  # `clipped_grad` of `loss_fn` is known.
  gradient_of: Callable[[LossFn], Callable[..., Any]] | None = None
  # Function that returns the training algorithm for a noise key. None if only the parts of a step
  # are known.
  algorithm: Callable[[jax.Array], Algorithm] | None = None
  optimizer: Any = None  # the Optax transformation after the private one, in the whole step
  release: bool = False  # whether noise is rounded to a grid, as for a release
  seed_bits: int = 128  # of the seed that `draw` gets
  # Programs that several checks run, by name. A copy by `dataclasses.replace` begins without any.
  kept: dict[Any, Any] = dataclasses.field(
    default_factory=dict, init=False, repr=False, compare=False
  )

  def once(self, name: Any, make: Callable[[], Any]) -> Any:
    """Returns what `make` returns, which is kept for the other checks of this subject."""
    if name not in self.kept:
      self.kept[name] = make()
    return self.kept[name]

  def batch(self, size: int = BATCH, start: int = 0) -> ArrayTree:
    """Returns random training examples, leaves [size, ...], with keys if the loss needs them.
    `start` selects other examples."""
    rng = np.random.default_rng(SEED + start)
    taken = self.train[rng.integers(0, len(self.train), size)]
    if not self.keyed:
      return taken
    return taken._replace(key=jax.random.split(jax.random.key(SEED + start), size))


def parts_of(
  plan: Plan,
  loss_fn: LossFn,
  *,
  clipped_grad: Callable[..., Any] | None = None,
  transform: Callable[[jax.Array], Any] | None = None,
  options: dict[str, Any],
) -> dict[str, Any]:
  """Returns fields of a `Subject`: what training makes of a plan and a loss.

  Args:
    clipped_grad, transform: the caller's own, in place of the plan's.
    options: options of `plan.clipped_grad`.
  """
  # The plan's scaling is left out: where coordinates are scaled, a check scales the loss itself.
  unscaled = dataclasses.replace(plan, scaling=None)
  gradient_of = lambda loss: unscaled.clipped_grad(loss, **options)
  # A run in slices gives the transform whole steps, so the plan here has one slice.
  whole = dataclasses.replace(plan, slices=1)
  return {
    "plan": plan,
    "loss_fn": loss_fn,
    "clipped_grad": gradient_of(loss_fn) if clipped_grad is None else clipped_grad,
    "gradient_of": gradient_of if clipped_grad is None else None,
    "transform": whole.transform if transform is None else transform,
    "draw": plan.sampler.draw,
  }
