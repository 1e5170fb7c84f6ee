"""What the checks of `launch.check` look at, and what each of them answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax.plan import Plan
from dpjax.runs.central.config import TrainConfig
from dpjax.runs.streams import Streams
from dpjax.types import Example, LossFn

BATCH = 8  # examples of a checked batch
SEED = 20_26  # of every random choice of a check: a repeated check gives the same numbers


class Row(NamedTuple):
  """One line of the table."""

  name: str
  passed: bool | None  # None: does not apply to this run
  measured: float
  bound: float
  detail: str  # what was measured, in which unit


def row(name: str, measured: float, bound: float, detail: str) -> Row:
  """A check that passes where measured <= bound; NaN never passes.

  >>> row("x", float("nan"), 1.0, "").passed
  False
  """
  return Row(name, bool(measured <= bound), float(measured), float(bound), detail)


def not_applicable(name: str, why: str) -> Row:
  """A check that has nothing to look at in this run."""
  return Row(name, None, float("nan"), float("nan"), why)


class Subject(NamedTuple):
  """The parts of a run, each as a function, so that a check sees what really runs."""

  config: TrainConfig
  plan: Plan
  loss_fn: LossFn
  clipped_grad: Callable[..., Any]  # (params, batch, mask) -> ClippedSum
  transform: Callable[[jax.Array], Any]  # key -> optax transformation
  draw: Callable[..., np.ndarray]  # (num_examples, seed=, step=) -> indices
  apply: Callable[[Any, Any], Any]  # (params, x [B, ...]) -> outputs [B, ...]
  streams: Callable[..., Streams]  # (config, digest of other data than its own)
  params: Any
  train: Any

  def batch(self) -> Example:
    """A few training examples, with keys if the loss needs them; leaves [BATCH, ...]."""
    rng = np.random.default_rng(SEED)
    taken = self.train[rng.integers(0, len(self.train), BATCH)]
    if self.config.augmentation == "none":
      return taken
    return taken._replace(key=jax.random.split(jax.random.key(SEED), BATCH))
