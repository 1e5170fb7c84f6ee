"""Gradient accumulation: the batch of one step comes in slices; noise and update happen once.

The sensitivity of the accumulated sum is the clip norm C only if an example is in at most ONE slice
of a step. This holds for slices that are cut from one draw (`dpjax.sampling.slices`,
`Plan(slices=k).batches`). It does not hold for an independent draw per slice: an example drawn k
times would move the sum by k C (pitfall P15).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import core

from dpjax import gradients, trees, validate
from dpjax.noise.state import changed, check_count
from dpjax.transforms.beside_noise import digest
from dpjax.transforms.clipped import check_start, clipped_sum, is_placeholder
from dpjax.transforms.group_noise import check_groups
from dpjax.types import ClipLike, ClippedSum
from dpjax.validate import UserError


class AccumulateState(NamedTuple):
  """State of `accumulate`. `total` holds clipped gradients without noise: keep it secret."""

  inner: Any  # state of the wrapped chain, which changes once per step
  total: Any  # like params, at least float32: sum of this step's clipped gradients so far
  slices: jax.Array  # int32, number of slices of this step so far
  checksum: Any = None  # uint32, of total and slices; None is refused


def accumulate(
  tx: optax.GradientTransformation,
  *,
  every: int,
  l2_clip_norm: ClipLike,
  padded_batch_size: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Sums clipped gradients over `every` slices, and passes the sum to `tx` with the last slice.

  Args:
    tx: the WHOLE chain, `optax.chain(clip_and_noise(...), optimizer)`, so that noise, division and
      the optimizer's update happen once per step.
    every: number of slices of a step.
    l2_clip_norm: clip norm of the private transform inside `tx`.
    padded_batch_size: number of rows that each slice must have; None allows any number.

  Returns:
    A transform that takes `per_example_grads` with `mask=`, or a ClippedSum, of one slice. Its
    updates are zero except for the last slice of each step.

  Guarantee: that of `tx` for the whole batch, provided that no example is in two slices of a batch:
  take slices from `Plan.batches`. The state holds clipped gradients without noise: keep it secret.

  >>> from dpjax.transforms.clip_and_noise import clip_and_noise
  >>> private = clip_and_noise(
  ...   l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=2, key=jax.random.key(0))
  >>> tx = accumulate(private, every=2, l2_clip_norm=1.0)
  >>> state, mask = tx.init(jnp.zeros(2)), jnp.array([True])
  >>> slices = [gradients.stacked(jnp.array([row])) for row in ([3.0, 4.0], [0.0, 1.0])]
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
    check_start(params)
    start = jnp.zeros((), jnp.int32)
    if is_placeholder(params):
      return AccumulateState(tx.init(params), start, start, start)
    total = jax.tree.map(lambda p: jnp.zeros_like(trees.at_least_float32(p)), params)
    return AccumulateState(tx.init(params), total, start, digest((total, start)))

  def update_fn(updates, state, params=None, *, mask=None, **extra_args):
    off = _changed_bits(state)
    summed = clipped_sum(updates, params, mask, clip)
    if padded_batch_size is not None and summed.norms.shape != (padded_batch_size,):
      raise UserError(
        f"a slice has {padded_batch_size} rows, these have {summed.norms.shape[0]}; give "
        "the slices of one logical batch, as Plan.batches yields them",
        field="updates",
      )
    if len(bounds) > 1:
      check_groups(summed, clip)
    total = trees.add(state.total, summed.total)
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
    # With a changed count, slices of two steps could be added, and an example could come twice.
    out = jax.tree.map(lambda leaf: jnp.where(off == 0, leaf, jnp.nan), out)
    total = jax.tree.map(lambda leaf: jnp.where(last, 0, leaf), total)
    place = jnp.where(last, 0, state.slices + 1)
    # A wrong checksum stays wrong.
    return out, AccumulateState(inner, total, place, digest((total, place)) ^ off)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def whole_steps_only(
  tx: optax.GradientTransformationExtraArgs, every: int
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx`, restricted to inputs that are the sum of a whole step of `every` slices.

  `accumulate` computes such a sum. Noise on single slices would not cover a step: one more row
  moves other rows across every cut, and so changes two rows of each slice. Noise on the sum of
  several steps would not be enough either, since an example may be in each of these steps.
  """

  # The declared type of `tx` does not include ClippedSum.
  inner: Any = tx

  def update_fn(updates, state, params=None, **extra_args):
    slices = updates.slices if isinstance(updates, ClippedSum) else 1
    if slices != every:
      raise UserError(
        f"this transform takes the sum of so many, a whole step's, not of {slices}; "
        "give it to plan.accumulated(...), with the optimizer behind it",
        field="slices",
        value=every,
      )
    return inner.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def _changed_bits(state: AccumulateState) -> jax.Array:
  """Returns 0 if total and count of slices are those that `accumulate` returned, else the bits in
  which their checksum is wrong. Raises UserError if it is known to be wrong."""
  if not isinstance(state, AccumulateState):
    raise UserError(
      f"{type(state).__name__}: must be what init and update of `accumulate` "
      "return; restore it with tx.init(params) as the target",
      field="state",
    )
  check_count("state.slices", state.slices, state.checksum)
  off = jnp.asarray(state.checksum).astype(jnp.uint32) ^ digest((state.total, state.slices))
  # Under tracing the state is not known: `update_fn` makes the updates NaN if it was changed.
  if not isinstance(off, core.Tracer) and bool(off):
    raise changed("state.slices", state.slices)
  return off
