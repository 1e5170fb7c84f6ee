"""Checks the input of every private transform: sealed gradients with a mask, or a ClippedSum."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpjax import gradients, sealed, trees
from dpjax.types import ArrayLike, ClipLike, ClippedSum, Params, PerExampleGrads, Updates
from dpjax.validate import UserError


def check_bound(updates: ClippedSum, bound: float) -> None:
  """Raises UserError if this sum was clipped to more than `bound`, for which noise is drawn."""
  # The factor allows for rounding, since bounds are computed as roots of sums.
  if updates.l2_bound > bound * (1 + 1e-12):
    raise UserError(
      f"the ClippedSum was clipped to {updates.l2_bound!r}; its noise would be too small",
      field="l2_clip_norm",
      value=bound,
    )


def check_whole(**named: Any) -> None:
  """Raises UserError if a wrapper, such as `optax.masked`, has left out a part of a tree.

  A private transform of one part clips that part to the whole bound, so all parts together may
  exceed it. And parts of one shape that share a key would get the same noise.

  >>> check_whole(params={"w": optax.MaskedNode()})  # doctest: +ELLIPSIS
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: params: hold optax.MaskedNode: plan.transform must stand first ...
  """
  is_masked = lambda leaf: isinstance(leaf, optax.MaskedNode)
  for name, tree in named.items():
    if any(map(is_masked, jax.tree.leaves(tree, is_leaf=is_masked))):
      raise UserError(
        "hold optax.MaskedNode: plan.transform must stand first in optax.chain, "
        "outside of masked, multi_transform and partition, which choose among what "
        "follows it",
        field=name,
      )


def check_arguments(extra_args: Mapping[str, Any]) -> None:
  """Raises UserError for arguments that a chain would pass on to the optimizer without noise.

  Some Optax optimizers read the loss of the batch: `polyak_sgd`, `reduce_on_plateau`, line
  searches. One example may move that loss, and so the update, by any amount.

  >>> check_arguments({"value": 0.5})  # doctest: +ELLIPSIS
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: update(value=...): goes past the noise to the optimizer; ...
  """
  # `count` is for `adaptive_clip_and_noise`; no optimizer reads it.
  names = [name for name in extra_args if name != "count"]
  if names:
    raise UserError(
      f"update({names[0]}=...): goes past the noise to the optimizer; a loss or "
      "gradient of private examples must not; if it is public, call plan.transform and the "
      "optimizer one after the other, and give it to the optimizer's update alone"
    )


def check_start(params: Any) -> None:
  """Raises UserError if a part of the parameters is left out, or Optax calls init in an update.

  A state that is made anew in the middle of a run draws the noise of the first steps again, and
  counts from 0. `optax.lookahead` with reset_state=True makes such a state at every
  synchronisation.
  """
  check_whole(params=params)
  frame = sys._getframe(1)
  while frame is not None:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package == "optax" and "update" in frame.f_code.co_name:
      raise UserError(
        "Optax makes it again within an update, so the noise of the first steps "
        "would be drawn again and not be counted; give reset_state=False, or put "
        "plan.transform outside",
        field="state",
      )
    frame = frame.f_back


def is_placeholder(params: Any) -> bool:
  """Returns whether `params` is the placeholder with which `optax.tree_map_params` calls init.

  With this call Optax finds the parts of a state that are shaped like the parameters, for example
  to reset Adam's moments. In this call the `init` of a private transform leaves sums of gradients
  and earlier noise out of the state, so that Optax does not change them.
  """
  return type(params).__name__ == "_ParamsPlaceholder"


def _with_its_bounds(updates: ClippedSum) -> ClippedSum:
  """Returns the sum if its bounds are unchanged since its creation. Otherwise raises UserError, or
  sets the total to NaN under jit."""

  def exchanged() -> UserError:
    return UserError(
      "is not the bound that this ClippedSum was made with; give the transform what "
      "plan.clipped_grad returns, with nothing exchanged",
      field="updates.l2_bound",
      value=updates.l2_bound,
    )

  is_this_seal = sealed.is_seal_of(updates.seal, *updates.bounds)
  total = trees.only_where(is_this_seal, updates.total, exchanged)
  return dataclasses.replace(updates, total=total)


def gradients_of(updates: PerExampleGrads | ClippedSum) -> Updates:
  """Returns the arrays in a transform's input: leaves [B, *param], or [*param] of a ClippedSum.

  Raises:
    UserError: a bare tree of arrays, which other code may have changed; an incomplete tree.
  """
  if isinstance(updates, ClippedSum):
    if not sealed.is_closed(updates.seal):
      raise UserError(sealed.MISPLACED)
    check_whole(updates=updates.total)
    return updates.total
  if not isinstance(updates, PerExampleGrads):
    if type(updates).__module__.startswith("flax.nnx"):
      raise UserError(
        f"bare gradients ({type(updates).__name__}): nnx.Optimizer unwraps gradients; use "
        "updates, state = tx.update(grads, state, params) and optax.apply_updates",
        field="updates",
      )
    raise UserError(
      f"bare gradients ({type(updates).__name__}): must be those of "
      "dpjax.per_example_grads or plan.clipped_grad, or dpjax.stacked(grads) "
      "where row i follows from example i alone; plan.transform must stand first "
      "in optax.chain, and once",
      field="updates",
    )
  check_whole(updates=updates.leaves)
  return updates.arrays


def check_updates(updates: PerExampleGrads | ClippedSum, params: Params | None) -> Updates:
  """Returns the arrays of the gradients. Raises UserError unless they, and `params` if given, are
  whole trees of real floating point, and there is at least one array."""
  tree = gradients_of(updates)
  gradients.check_real(updates=tree)
  if params is not None:
    check_whole(params=params)
    gradients.check_real(params=params)
  if not jax.tree.leaves(tree):
    raise UserError("must hold at least one array", field="updates")
  return tree


def _check_one_sum(updates: ClippedSum, params: Any) -> None:
  """Raises UserError for stacked sums, whose noise would cover only one, and for wrong shapes."""
  shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(updates.total)]
  expected = (
    None if params is None else [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
  )
  # The seal of one sum has shape (). In stacked sums it has an axis.
  if updates.seal.shape != () or shapes != (shapes if expected is None else expected):
    raise UserError(
      f"a ClippedSum of shapes {str(shapes)[:60]}: must be one sum, with the "
      f"shapes of params, {str(expected)[:60]}; several models go by jax.vmap, "
      "with a key each",
      field="updates",
    )


def _check_stacked(updates: Any, params: Any) -> int:
  sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(updates)}
  if len(sizes) != 1 or () in sizes:
    raise UserError(
      "gradients must be stacked per example, [B, *param], but leading axes are "
      f"{sorted(map(str, sizes))}",
      field="updates",
    )
  if params is not None:
    stacked = [jnp.shape(leaf)[1:] for leaf in jax.tree.leaves(updates)]
    if stacked != [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]:
      raise UserError(
        "must be per-example gradients, [B, *param] for every leaf", field="updates"
      )
  return sizes.pop()[0]


def _once(summed: ClippedSum, numbers: jax.Array) -> ClippedSum:
  """Returns the sum if no row number comes twice. Otherwise raises UserError, or sets the total to
  NaN under jit."""
  ordered = jnp.sort(numbers)
  # Padding has the number 0, and may repeat.
  twice = jnp.any((ordered[1:] == ordered[:-1]) & (ordered[1:] > 0))

  def counted_twice() -> UserError:
    return UserError(
      "a row of the gradients comes twice, so a record would count twice; where "
      "they are of different examples, computed in parts, give "
      "dpjax.stacked(grads.arrays)",
      field="updates",
    )

  total = trees.only_where(~twice, summed.total, counted_twice)
  return dataclasses.replace(summed, total=total)


def clipped_sum(
  updates: PerExampleGrads | ClippedSum,
  params: Params | None,
  mask: ArrayLike | None,
  l2_clip_norm: ClipLike,
) -> ClippedSum:
  """Checks either form of input, and returns the clipped sum to which noise is added.

  Args:
    updates: `PerExampleGrads` with leaves [B, *param], or a ClippedSum (mask already applied).
    params: parameters whose shapes the gradients must have, or None.
    mask: [B] bool, or True for all rows; needed if `updates` are stacked and hold no mask.
    l2_clip_norm: a `Clip`, or the number or prefix tree of a flat `Clip`.

  Raises:
    UserError: bare arrays, no mask, no batch axis, gradients that are not real floating
      point, a row that comes twice (NaN under jit); a sum that was clipped to a larger bound, was
      changed (NaN under jit), is several sums, or is below float32.

  >>> grads = gradients.stacked(jnp.array([[3.0, 4.0]]))
  >>> clipped_sum(grads, None, jnp.array([True]), 1.0).total
  Array([0.6, 0.8], dtype=float32)
  """
  clip = gradients.Clip.of(l2_clip_norm)
  arrays = check_updates(updates, params)
  if isinstance(updates, ClippedSum):
    check_bound(updates, clip.l2_bound)
    # In half precision, rounding could move a sum by more than one example may.
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(updates.total)}
    low = sorted(str(dtype) for dtype in dtypes if jnp.finfo(dtype).bits < 32)
    if low:
      raise UserError(
        f"the total of a ClippedSum must be at least float32, not {low[0]}", field="updates"
      )
    _check_one_sum(updates, params)
    return _with_its_bounds(updates)
  size = _check_stacked(arrays, params)
  known = updates.mask
  if known is not None:
    # The gradients and the caller may both give a mask. A row counts only if both include it.
    known = gradients.checked_mask(known, size)
    mask = known if mask is None else known & gradients.checked_mask(mask, size)
  mask = gradients.checked_mask(mask, size)
  numbers = jnp.where(mask, updates.numbers(size), 0)
  # Row number 0 is padding, whatever the masks say.
  mask = numbers > 0
  # Losses are unknown here and not needed, so zeros take their place.
  summed = gradients.clip_and_sum(arrays, jnp.zeros(mask.shape), mask, clip)
  return _once(summed, numbers)
