"""Clip each example, sum, add Gaussian noise, divide by a public constant."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpjax import gradients, noise, trees, validate
from dpjax.noise import NoiseState
from dpjax.types import ClippedSum
from dpjax.validate import UserError

_NO_MASK = (
  "mask=None: clip_and_noise needs update(grads, state, params, mask=batch.mask); "
  "padding that is not masked would be trained on"
)


def _check_bound(updates: ClippedSum, bound: float) -> None:
  if updates.l2_bound > bound * (1 + 1e-12):
    raise UserError(
      f"l2_clip_norm={bound!r}: the ClippedSum was clipped to {updates.l2_bound!r}; "
      "its noise would be too small"
    )


def _check_stacked(updates: Any, mask: jax.Array, params: Any) -> None:
  for leaf in jax.tree.leaves(updates):
    if leaf.shape[:1] != mask.shape:
      raise UserError(
        f"mask.shape={mask.shape}: gradients must be stacked per example, [B, *param], "
        f"but a leaf has shape {leaf.shape}"
      )
  if params is not None:
    stacked = [leaf.shape[1:] for leaf in jax.tree.leaves(updates)]
    if stacked != [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]:
      raise UserError("updates: must be per-example gradients, [B, *param] for every leaf")


def clip_and_noise(
  *, l2_clip_norm: Any, noise_multiplier: float, normalize_by: float, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
  """Clips per-example gradients, sums, adds Gaussian noise, divides by a public constant.

  The Gaussian mechanism of DP-SGD (Abadi et al. 2016, Algorithm 1) as an Optax
  transformation: `update(grads, state, params, *, mask)` with grads either stacked per
  example (leaves [B, *param], with `mask` [B]) or a `dpjax.types.ClippedSum` (mask then
  already applied). Works in `optax.chain`, under jit, with donated state.

  Args:
    l2_clip_norm: bound C on one example's gradient, or a prefix tree of bounds.
    noise_multiplier: z; the noise on the SUM has standard deviation z * C in every
      coordinate (C = sqrt(sum C_l^2) for a tree of bounds). 0 adds no noise.
    normalize_by: public constant that the noisy sum is divided by, such as the EXPECTED
      batch size; never the realised one.
    key: a typed key, `jax.random.key(...)`. There is no default.

  Guarantee: each update is the post-processing of a Gaussian mechanism with noise
  multiplier z on a sum of sensitivity C (add/remove-one) for any mask and any gradients,
  an empty batch included. Account for it with `dpjax.Plan`, which builds this transform.

  Raises:
    UserError: mask missing or of another length, gradients without a batch axis, a
      ClippedSum clipped to a larger bound, a non-positive clip norm or divisor.

  >>> tx = clip_and_noise(
  ...   l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=2, key=jax.random.key(0))
  >>> grads = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5], [9.0, 9.0]])}
  >>> mask = jnp.array([True, True, False])
  >>> params = {"w": jnp.zeros(2)}
  >>> tx.update(grads, tx.init(params), params, mask=mask)[0]["w"]
  Array([0.3 , 0.65], dtype=float32)
  """
  gradients.check_clip_norm(l2_clip_norm, False)
  validate.non_negative(noise_multiplier=noise_multiplier)
  validate.positive(normalize_by=normalize_by)
  if not trees.is_key(key):
    raise UserError(f"key={key!r}: must be a typed key, jax.random.key(...)")
  bound = gradients.l2_bound(l2_clip_norm)
  std = noise_multiplier * bound if noise_multiplier else 0.0
  validate.non_negative(noise_std=std)

  def init_fn(params) -> NoiseState:
    del params
    return noise.init(key)

  def clipped(updates, params, mask) -> ClippedSum:
    if isinstance(updates, ClippedSum):
      _check_bound(updates, bound)
      return updates
    if mask is None:
      raise UserError(_NO_MASK)
    mask = jnp.asarray(mask, bool)
    _check_stacked(updates, mask, params)
    return gradients.clip_and_sum(updates, jnp.zeros(mask.shape), mask, l2_clip_norm)

  def update_fn(updates, state, params=None, *, mask=None, **extra_args):
    del extra_args
    total = clipped(updates, params, mask).total
    noisy, state = noise.add_gaussian(state, total, std)
    return trees.scale(noisy, 1.0 / normalize_by), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
