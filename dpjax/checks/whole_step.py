"""Checks that a whole step moves the parameters only by the parts that other checks test. Those
checks would pass an optimizer that gets raw gradients, or a memory of earlier batches beside the
private sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import trees
from dpjax.checks.subject import SEED, Row, Subject, not_applicable, row
from dpjax.sampling.batches import rows_of_slice
from dpjax.transforms.clip_scale import clip_scale
from dpjax.transforms.scale_then_privatize import ScaledLoss, coordinate_scales
from dpjax.types import Batch, ClippedSum

# Tolerance, relative to the length of a step: the run's step and its parts round differently.
_SLACK = 2e-3
_FEWEST = 5  # number of steps: one for each kind of batch
_MOST = 64
_WORK = 1e8  # limit on padded batch size x number of parameters x number of steps


def _num_steps(subject: Subject) -> int:
  """Returns the number of compared steps: fewer for a large model, whose steps are slow."""
  plan = subject.plan
  most = int(_WORK / (plan.sampler.padded_batch_size * max(trees.size(subject.params), 1)))
  # A rounding error may move a norm across an adaptive bound. That changes the bound, and every
  # later step. Rounded sums change the scales of coordinates in the same way.
  moves = plan.l2_clip_norm.rule.adapts or plan.scaling is not None
  most = _FEWEST if moves else min(max(most, _FEWEST), _MOST)
  return min(most, plan.num_steps)


def _batches(subject: Subject) -> Iterator[list[Batch]]:
  """Yields the slices of each step, padded to the size of the run's slices. In turn a slice holds
  many examples, none, the last row alone, all, and all with one that is not finite."""
  slices = subject.plan.slices
  size = rows_of_slice(subject.plan.sampler.padded_batch_size, slices)
  rng = np.random.default_rng(SEED)
  for step in range(_num_steps(subject)):
    parts = []
    for place in range(slices):
      number = step * slices + place
      masks = [
        rng.random(size) < 0.6,
        np.zeros(size, bool),
        np.arange(size) == size - 1,
        np.ones(size, bool),
        np.ones(size, bool),
      ]
      kind = number % len(masks)
      examples = subject.batch(size, start=number)
      if kind == len(masks) - 1:
        examples = _with_one_not_finite(examples)
      parts.append(Batch(examples, jnp.asarray(masks[kind])))
    yield parts


def _with_one_not_finite(examples: Any) -> Any:
  """Puts NaN into the first of the examples [B, ...], except integers and keys.

  Its gradient must be dropped. Skipping the whole step would reveal its presence.
  """

  def spoiled(leaf: Any) -> Any:
    if trees.is_key(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
      return leaf
    return jnp.asarray(leaf).at[0].set(jnp.nan)

  return jax.tree.map(spoiled, examples)


def _join(parts: list[ClippedSum]) -> ClippedSum:
  """Returns the sum of a whole step, from the sums of its slices."""
  if len(parts) == 1:
    return parts[0]
  rows = lambda name: jnp.concatenate([getattr(part, name) for part in parts])
  return ClippedSum(
    functools.reduce(trees.add, [part.total for part in parts]),
    rows("norms"),
    rows("losses"),
    parts[0].l2_bound,
    parts[0].group_bounds,
    rows("mask"),
    shortened=parts[0].shortened,
  )


class _Parts:
  """The clipped sum, the transform and the optimizer of a run, and nothing more.

  Every step starts from the run's own parameters, so that rounding errors do not accumulate.
  """

  def __init__(self, subject: Subject, key: jax.Array):
    tx = subject.transform(key)
    optimizer = subject.optimizer
    self._held = (tx.init(subject.params), optimizer.init(subject.params))

    def step(params, held, parts):
      state, opt_state = held
      scale = clip_scale(state)
      scales = coordinate_scales(state)
      grad_fn = subject.clipped_grad
      at = params
      if scales is not None:
        assert subject.gradient_of is not None
        scaled_loss = ScaledLoss(subject.loss_fn, params, scales)
        grad_fn = subject.gradient_of(scaled_loss)
        at = scaled_loss.start
      if scale is not None:
        # Dividing the loss by `scale` has the effect of a clip norm `scale` times as large.
        assert subject.gradient_of is not None
        grad_fn = subject.gradient_of(
          lambda p, example: subject.loss_fn(p, example) / scale
        )
      summed = _join([grad_fn(at, part.examples, part.mask) for part in parts])
      mask = jnp.concatenate([part.mask for part in parts])
      noisy, state = tx.update(summed, state, params, mask=mask)
      updates, opt_state = optimizer.update(noisy, opt_state, params)
      return optax.apply_updates(params, updates), (state, opt_state)

    self._step = jax.jit(step)

  def after(self, params: Any, parts: list[Batch]) -> Any:
    """Returns the parameters after one more step, from `params`, on the slices in `parts`."""
    params, self._held = self._step(params, self._held, parts)
    return params


def _distance(a: Any, b: Any) -> float:
  squares = [
    float(np.sum((np.asarray(x, np.float64) - np.asarray(y, np.float64)) ** 2))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
  ]
  return math.sqrt(sum(squares))


def whole_step(subject: Subject) -> Row:
  """Tests that clipped sum, private transform and optimizer alone give the parameters after
  each step. Batches hold many examples, one, none, and one that is not finite.

  If the loss draws from `example.key`, the keys in the batches are used.
  """
  plan = subject.plan
  if subject.algorithm is None or subject.optimizer is None:
    return not_applicable("the steps are the caller's own")
  clip = plan.l2_clip_norm
  if subject.gradient_of is None and (clip.schedule or clip.rule.adapts or plan.scaling):
    return not_applicable("of a sum of the caller's own, whose clip norm moves")
  key = jax.random.key(SEED)
  algorithm = subject.algorithm(key)
  state = algorithm.init(subject.params)
  advance: Callable[..., Any] = jax.jit(algorithm.step)
  expected = _Parts(subject, key)
  worst = 0.0
  before = subject.params
  for parts in _batches(subject):
    wanted = expected.after(before, parts)
    moved = max(_distance(wanted, before), 1e-30)
    for number, part in enumerate(parts):
      state, _ = advance(state, part)
      # Only the last slice of a step may change the parameters.
      aim = wanted if number == len(parts) - 1 else before
      off = _distance(state.params, aim) / moved
      worst = max(worst, off if math.isfinite(off) else math.inf)
    before = state.params
  rounding = 1e-6 * math.sqrt(trees.size(subject.params))
  steps = f"{_num_steps(subject)} of {plan.num_steps} steps"
  detail = f"off by this share of what a step moves; {steps}"
  return row(worst, _SLACK + rounding, detail)


CHECKS = {"step is its parts": whole_step}
