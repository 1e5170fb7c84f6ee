"""What a check measures, and the row that it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax.plan import Plan
from dpjax.types import Algorithm, ArrayTree, LossFn

BATCH = 8  # examples of a checked batch
SEED = 20_26  # of every random choice of a check: a repeated check gives the same numbers


class Row(NamedTuple):
  """Result of one check: a line in the table of `launch.check`."""

  name: str
  passed: bool | None  # None: does not apply to this run
  measured: float
  bound: float
  detail: str  # what was measured, in which unit


def row(name: str, measured: float, bound: float, detail: str) -> Row:
  """Returns the result of a check that passes if measured <= bound. NaN never passes.

  >>> row("x", float("nan"), 1.0, "").passed
  False
  """
  return Row(name, bool(measured <= bound), float(measured), float(bound), detail)


def not_applicable(name: str, why: str) -> Row:
  """Returns the result of a check that does not apply to this run, with the reason."""
  return Row(name, None, float("nan"), float("nan"), why)


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

  def batch(self, size: int = BATCH, start: int = 0) -> ArrayTree:
    """Returns random training examples, leaves [size, ...], with keys if the loss needs them.
    `start` selects other examples."""
    rng = np.random.default_rng(SEED + start)
    taken = self.train[rng.integers(0, len(self.train), size)]
    if not self.keyed:
      return taken
    return taken._replace(key=jax.random.split(jax.random.key(SEED + start), size))
