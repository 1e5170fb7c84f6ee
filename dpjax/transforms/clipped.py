"""What every private transform takes: stacked gradients with a mask, or a ClippedSum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dpjax import gradients
from dpjax.types import ClippedSum
from dpjax.validate import UserError

_NO_MASK = (
  "mask=None: a private transform needs update(grads, state, params, mask=batch.mask); "
  "padding that is not masked would be trained on"
)


def checked_mask(mask: Any) -> jax.Array:
  """The mask as an array; a forgotten one is an error, never a default of ones."""
  if mask is None:
    raise UserError(_NO_MASK)
  return jnp.asarray(mask, bool)


def check_bound(updates: ClippedSum, bound: float) -> None:
  """Raises where the noise for `bound` would be too small for this sum."""
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


def clipped_sum(
  updates: Any, params: Any, mask: Any, l2_clip_norm: Any, gamma: float | None = None
) -> ClippedSum:
  """The sum to which noise is added; checked, whichever form it comes in.

  Args:
    updates: leaves [B, *param], or a ClippedSum (its mask is then already applied).
    params: to check shapes with, or None.
    mask: [B] bool, needed for stacked gradients.
    l2_clip_norm: number or prefix tree; gamma: of automatic clipping, or None.

  Raises:
    UserError: no mask, no batch axis, or a sum clipped to a larger bound.

  >>> clipped_sum(jnp.array([[3.0, 4.0]]), None, [True], 1.0).total
  Array([0.6, 0.8], dtype=float32)
  """
  if isinstance(updates, ClippedSum):
    check_bound(updates, gradients.l2_bound(l2_clip_norm))
    return updates
  mask = checked_mask(mask)
  _check_stacked(updates, mask, params)
  losses = jnp.zeros(mask.shape)
  return gradients.clip_and_sum(updates, losses, mask, l2_clip_norm, gamma=gamma)
