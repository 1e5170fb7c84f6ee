"""What every private transform takes: stacked gradients with a mask, or a ClippedSum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dpjax import gradients
from dpjax.types import ArrayLike, ClipLike, ClippedSum, Params, Updates
from dpjax.validate import UserError


def check_bound(updates: ClippedSum, bound: float) -> None:
  """Raises where the noise for `bound` would be too small for this sum."""
  if updates.l2_bound > bound * (1 + 1e-12):
    raise UserError(
      f"l2_clip_norm={bound!r}: the ClippedSum was clipped to {updates.l2_bound!r}; "
      "its noise would be too small"
    )


def check_updates(updates: Updates | ClippedSum, params: Params | None) -> None:
  """Raises unless gradients (and parameters, where given) are real floating point."""
  tree = updates.total if isinstance(updates, ClippedSum) else updates
  gradients.check_real(updates=tree)
  if params is not None:
    gradients.check_real(params=params)
  if not jax.tree.leaves(tree):
    raise UserError("updates: must hold at least one array")


def _check_precision(total: Any) -> None:
  """Raises where rounding could move a sum by more than one example may."""
  dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(total)}
  low = sorted(str(dtype) for dtype in dtypes if jnp.finfo(dtype).bits < 32)
  if low:
    raise UserError(
      f"updates: the total of a ClippedSum must be at least float32, not {low[0]}"
    )


def _check_stacked(updates: Any, params: Any) -> int:
  sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(updates)}
  if len(sizes) != 1 or () in sizes:
    raise UserError(
      "updates: gradients must be stacked per example, [B, *param], but leading axes are "
      f"{sorted(map(str, sizes))}"
    )
  if params is not None:
    stacked = [jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(updates)]
    if stacked != [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]:
      raise UserError("updates: must be per-example gradients, [B, *param] for every leaf")
  return sizes.pop()[0]


def clipped_sum(
  updates: Updates | ClippedSum,
  params: Params | None,
  mask: ArrayLike | None,
  l2_clip_norm: ClipLike,
) -> ClippedSum:
  """The sum to which noise is added; checked, whichever form it comes in.

  Args:
    updates: leaves [B, *param], or a ClippedSum (its mask is then already applied).
    params: to check shapes with, or None.
    mask: [B] bool, or True; needed for stacked gradients.
    l2_clip_norm: a `Clip`, or the number or prefix tree of a flat one.

  Raises:
    UserError: no mask, no batch axis, gradients that are not real floating point, or a
      sum clipped to a larger bound.

  >>> clipped_sum(jnp.array([[3.0, 4.0]]), None, jnp.array([True]), 1.0).total
  Array([0.6, 0.8], dtype=float32)
  """
  clip = gradients.Clip.of(l2_clip_norm)
  check_updates(updates, params)
  if isinstance(updates, ClippedSum):
    check_bound(updates, clip.l2_bound)
    _check_precision(updates.total)
    return updates
  mask = gradients.checked_mask(mask, _check_stacked(updates, params))
  return gradients.clip_and_sum(updates, jnp.zeros(mask.shape), mask, clip)
