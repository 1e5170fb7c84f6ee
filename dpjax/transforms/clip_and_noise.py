"""Clip each example, sum, add Gaussian noise, divide by a public constant."""

from __future__ import annotations

from typing import Any

import jax
import optax

from dpjax import gradients, noise, trees, validate
from dpjax.noise import NoiseState
from dpjax.transforms import group_noise
from dpjax.transforms.clipped import clipped_sum
from dpjax.validate import UserError


def check_arguments(
  l2_clip_norm: Any, noise_multiplier: float, normalize_by: float, key: Any
) -> None:
  """Raises UserError, naming the argument, unless a private transform can be made of them."""
  gradients.check_clip_norm(l2_clip_norm, False)
  validate.non_negative(noise_multiplier=noise_multiplier)
  validate.positive(normalize_by=normalize_by)
  if not trees.is_key(key):
    raise UserError(f"key={key!r}: must be a typed key, jax.random.key(...)")
  if noise_multiplier:
    validate.positive(noise_std=noise_multiplier * gradients.l2_bound(l2_clip_norm))


def clip_and_noise(
  *,
  l2_clip_norm: Any,
  noise_multiplier: float,
  normalize_by: float,
  key: jax.Array,
  clipping: str = "flat",
  gamma: float = 0.01,
  noise_shares: Any = None,
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
    clipping, gamma: of stacked gradients; see `dpjax.clipped_grad`.
    noise_shares: tree like `l2_clip_norm` of each group's share of the privacy budget;
      group g then gets noise of standard deviation z C_g / sqrt(share_g), at the same
      noise multiplier z for the accountant (see `transforms/group_noise.py`).

  A group whose bound is 0 is frozen: its update is exactly 0.

  Guarantee: each update is the post-processing of a Gaussian mechanism with noise
  multiplier z on a sum of sensitivity C (add/remove-one) for any mask and any gradients,
  an empty batch included. Account for it with `dpjax.Plan`, which builds this transform.

  Raises:
    UserError: mask missing or of another length, gradients without a batch axis, a
      ClippedSum clipped to a larger bound, a non-positive clip norm or divisor.

  >>> import jax.numpy as jnp
  >>> tx = clip_and_noise(
  ...   l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=2, key=jax.random.key(0))
  >>> grads = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5], [9.0, 9.0]])}
  >>> mask = jnp.array([True, True, False])
  >>> params = {"w": jnp.zeros(2)}
  >>> tx.update(grads, tx.init(params), params, mask=mask)[0]["w"]
  Array([0.3 , 0.65], dtype=float32)
  """
  check_arguments(l2_clip_norm, noise_multiplier, normalize_by, key)
  validate.one_of(gradients.CLIPPINGS, clipping=clipping)
  automatic = gamma if clipping == "automatic" else None
  gradients.check_clip_norm(l2_clip_norm, False, automatic)
  std = noise_multiplier * gradients.l2_bound(l2_clip_norm) if noise_multiplier else 0.0
  weights = group_noise.group_weights(l2_clip_norm, noise_shares)
  alike = all(weight == 1 for weight in jax.tree.leaves(weights))

  def init_fn(params) -> NoiseState:
    del params
    return noise.init(key)

  def update_fn(updates, state, params=None, *, mask=None, **extra_args):
    del extra_args
    summed = clipped_sum(updates, params, mask, l2_clip_norm, automatic)
    if noise_shares is not None:
      group_noise.check_groups(summed, l2_clip_norm)
    total = summed.total if alike else group_noise.weighted(summed.total, weights)
    noisy, state = noise.add_gaussian(state, total, std)
    noisy = noisy if alike else group_noise.unweighted(noisy, weights)
    return trees.scale(noisy, 1.0 / normalize_by), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
