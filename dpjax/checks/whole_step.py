"""Checks of a step as a whole: the parts that the other checks look at are all that moves the
parameters. An optimizer that is handed raw gradients, or a memory of earlier batches beside
the private sum, would pass each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import trees
from dpjax.checks.subject import SEED, Row, Subject, not_applicable, row
from dpjax.types import Batch

_NAME = "step is its parts"
_SLACK = 2e-3  # relative to what a step moves: another program, rounded otherwise
_STEPS = 4


def _batches(subject: Subject) -> Iterator[Batch]:
  """Padded batches of the run's own size: many examples, none, the last slot alone, all."""
  size = subject.plan.sampler.slots
  rng = np.random.default_rng(SEED)
  masks = [
    rng.random(size) < 0.6,
    np.zeros(size, bool),
    np.arange(size) == size - 1,
    np.ones(size, bool),
  ]
  for step in range(min(_STEPS, subject.plan.num_steps)):
    yield Batch(subject.batch(size, start=step), jnp.asarray(masks[step]))


def _by_parts(subject: Subject, key: jax.Array, batches: list[Batch]) -> Iterator[Any]:
  """Parameters after each step of the clipped sum, the transform and the optimizer, and of
  nothing else."""
  tx = subject.transform(key)
  optimizer = subject.optimizer
  params = subject.params
  state, own = tx.init(params), optimizer.init(params)

  @jax.jit
  def step(params, state, own, batch):
    summed = subject.clipped_grad(params, batch.examples, batch.mask)
    noisy, state = tx.update(summed, state, params, mask=batch.mask)
    updates, own = optimizer.update(noisy, own, params)
    return optax.apply_updates(params, updates), state, own

  for batch in batches:
    params, state, own = step(params, state, own, batch)
    yield params


def _distance(a: Any, b: Any) -> float:
  squares = [
    float(np.sum((np.asarray(x, np.float64) - np.asarray(y, np.float64)) ** 2))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
  ]
  return math.sqrt(sum(squares))


def whole_step(subject: Subject) -> Row:
  """The parameters after each step are those that the clipped sum, the private transform and
  the optimizer give, over batches with many examples, one and none."""
  plan = subject.plan
  if subject.algorithm is None or subject.optimizer is None:
    return not_applicable(_NAME, "the steps are the caller's own")
  clip = plan.l2_clip_norm
  if plan.slices > 1 or subject.keyed or clip.schedule or clip.rule.adapts:
    return not_applicable(_NAME, "of slices, keys of examples or a clip norm that moves")
  key = jax.random.key(SEED)
  batches = list(_batches(subject))
  algorithm = subject.algorithm(key)
  state = algorithm.init(subject.params)
  advance: Callable[..., Any] = jax.jit(algorithm.step)
  worst, before = 0.0, subject.params
  for batch, wanted in zip(batches, _by_parts(subject, key, batches)):
    state, _ = advance(state, batch)
    moved = max(_distance(wanted, before), 1e-30)
    off = _distance(state.params, wanted) / moved
    worst = max(worst, off if math.isfinite(off) else math.inf)
    before = wanted
  rounding = 1e-6 * math.sqrt(trees.size(subject.params))
  told = f"off by this share of what one of {len(batches)} steps moves"
  return row(_NAME, worst, _SLACK + rounding, told)


CHECKS = (whole_step,)
