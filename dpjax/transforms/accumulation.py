"""Gradient accumulation: the batch of one step comes in slices; noise and update happen once.

The sensitivity of the accumulated sum is the clip norm C only if an example is in at most ONE slice
of a step. This holds for slices that are cut from one draw, as `Plan(slices=k).batches` yields
them. It does not hold for an independent draw per slice: an example drawn k times would move the
sum by k C (pitfall P15).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import gradients, trees, validate
from dpjax.transforms.group_noise import check_groups
from dpjax.transforms.guard import Guarded, is_guarded, next_batch, with_guard
from dpjax.transforms.inputs import Mechanism, is_placeholder, open_gradients
from dpjax.types import ClipLike, ClippedSum
from dpjax.validate import UserError


class AccumulateState(NamedTuple):
  """State of `accumulate`. `total` holds clipped gradients without noise: keep it secret."""

  inner: Any  # state of the wrapped chain, which changes once per step
  total: Any  # like params, at least float32: sum of this step's clipped gradients so far
  slices: jax.Array  # int32, number of slices of this step so far

  @property
  def covered(self) -> Any:
    """Returns what the guard covers: all but the optimizer's state, whose moments may be reset."""
    # The private states have guards of their own, which are asked at the last slice only, and
    # inside of a conditional, where nothing can raise.
    private = filter(is_guarded, jax.tree.leaves(self.inner, is_leaf=is_guarded))
    return self.total, self.slices, list(private)


def accumulate(
  tx: optax.GradientTransformation,
  *,
  every: int,
  l2_clip_norm: ClipLike,
  padded_batch_size: int | None = None,
  mark: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Sums clipped gradients over `every` slices, and passes the sum to `tx` with the last slice.

  Args:
    tx: the WHOLE chain, `optax.chain(clip_and_noise(...), optimizer)`, so that noise, division and
      the optimizer's update happen once per step.
    every: number of slices of a step.
    l2_clip_norm: clip norm of the private transform inside `tx`.
    padded_batch_size: number of rows that each slice must have; None allows any number.
    mark: mark of the plan, whose states alone are accepted (`guard.mark_of`); 0 without a plan.

  Returns:
    A transform that takes `per_example_grads` with `mask=`, or a ClippedSum, of one slice. Its
    updates are zero except for the last slice of each step.

  Guarantee: that of `tx` for the whole batch, provided that no example is in two slices of a batch:
  take slices from `Plan.batches`. The state holds clipped gradients without noise: keep it secret.
  Its guard covers the sum, the count, and the state of the private transform inside, which belong
  together. The optimizer's own state may be changed.

  >>> from dpjax.transforms.clip_and_noise import clip_and_noise
  >>> private = clip_and_noise(
  ...   l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=2, key=jax.random.key(0))
  >>> tx = accumulate(private, every=2, l2_clip_norm=1.0)
  >>> state, mask = tx.init(jnp.zeros(2)), jnp.array([True])
  >>> slices = [gradients.wrap_grads(jnp.array([row])) for row in ([3.0, 4.0], [0.0, 1.0])]
  >>> first, state = tx.update(slices[0], state, mask=mask)
  >>> first, tx.update(slices[1], state, mask=mask)[0]
  (Array([0., 0.], dtype=float32), Array([0.3, 0.9], dtype=float32))
  """
  validate.integer_at_least(1, every=every)
  inner_tx = optax.with_extra_args_support(tx)
  clip = gradients.Clip.of(l2_clip_norm)
  bounds = clip.group_bounds()
  bound = clip.l2_bound
  empty = jnp.zeros(0)

  def init_fn(params) -> AccumulateState:
    start = jnp.zeros((), jnp.int32)
    if is_placeholder(params):
      return AccumulateState(tx.init(params), start, start)
    total = jax.tree.map(lambda p: jnp.zeros_like(trees.at_least_float32(p)), params)
    return AccumulateState(tx.init(params), total, start)

  def update_fn(updates, state, params=None, *, mask=None, conditions, **extra_args):
    summed, sound = open_gradients(updates, params, mask, clip, conditions)
    if padded_batch_size is not None and summed.norms.shape != (padded_batch_size,):
      raise UserError(
        f"a slice has {padded_batch_size} rows, these have {summed.norms.shape[0]}; give "
        "the slices of one logical batch, as Plan.batches yields them",
        field="updates",
      )
    if len(bounds) > 1:
      check_groups(summed, clip)
    total = trees.add(state.total, trees.nan_unless(sound, summed.total))
    slices = every * summed.slices

    def apply(total):
      whole: Any = ClippedSum(total, empty, empty, bound, bounds, slices=slices)
      return inner_tx.update(whole, state.inner, params, **extra_args)

    def wait(total):
      # Both branches of a cond must return the same shapes. No noise is drawn to find them.
      shapes, _ = jax.eval_shape(apply, total)
      return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), state.inner

    last = state.slices == every - 1
    out, inner = jax.lax.cond(last, apply, wait, total)
    total = jax.tree.map(lambda leaf: jnp.where(last, 0, leaf), total)
    place = jnp.where(last, 0, state.slices + 1)
    # With a changed count, slices of two steps could be added, and an example could come twice.
    out = trees.nan_unless(conditions.sound, out)
    return out, AccumulateState(inner, total, place)

  def turn(state: AccumulateState) -> Any:
    for private in private_states(state.inner):
      steps = next_batch(private.inner)
      return None if steps is None else steps * every + state.slices
    return None

  mechanism = Mechanism(init_fn, update_fn, AccumulateState)
  return with_guard(mechanism, mark=mark, turn=turn)


def private_states(tree: Any) -> list[Guarded]:
  """Returns the states of private transforms in a tree, such as an optimizer's state, also those
  inside of `accumulate`."""
  states = []
  for part in jax.tree.leaves(tree, is_leaf=is_guarded):
    if isinstance(part, Guarded):
      is_outer = isinstance(part.inner, AccumulateState)
      states += private_states(part.inner.inner) if is_outer else [part]
  return states
