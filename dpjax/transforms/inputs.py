"""The one door of every private transform: what its input must be, and how it is opened.

`open_gradients` takes sealed gradients with a mask, or a ClippedSum, and returns the clipped sum to
which noise is added. Nothing else opens gradients for a private transform.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dpjax import gradients, sealed, trees
from dpjax.gradients.arguments import check_arrays, check_real, checked_mask
from dpjax.gradients.clipping import clip_and_sum
from dpjax.types import ArrayLike, ClippedSum, Params, PerExampleGrads
from dpjax.validate import UserError


class Conditions(NamedTuple):
  """What an update must meet beside its clip. The guard states it, and `open_gradients` asks it."""

  sound: Any = True  # [] bool, may be traced: whether the state is one that may be used
  rows: int | None = None  # largest number of examples; None for no limit
  slices: int | None = (
    None  # number of slices that the sum must add up; None for any number
  )


class Mechanism(NamedTuple):
  """A private transform without its guard: it opens gradients, adds noise and divides.

  `update(updates, state, params, *, mask, conditions)` returns (update, next state), all NaN where
  the conditions do not hold. One with a query takes `count`, too. `guard.with_guard` calls it.
  """

  init: Callable[..., Any]
  update: Callable[..., Any]
  state: type = object  # of its states


def refuse_arguments(extra_args: Mapping[str, Any]) -> None:
  """Raises UserError: a chain would pass these arguments on to the optimizer without noise.

  Some Optax optimizers read the loss of the batch: `polyak_sgd`, `reduce_on_plateau`, line
  searches. One example may move that loss, and so the update, by any amount.

  >>> refuse_arguments({"value": 0.5})  # doctest: +ELLIPSIS
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: value: goes past the noise to the optimizer; ...
  """
  name = next(iter(extra_args))
  raise UserError(
    "goes past the noise to the optimizer; a loss or gradient of private examples must not; if "
    "it is public, call plan.transform and the optimizer one after the other, and give it to the "
    "optimizer's update alone",
    field=name,
  )


def check_start(params: Any) -> None:
  """Raises UserError if a part of the parameters is left out or no array, or Optax calls init in an
  update.

  A state that is made anew in the middle of a run draws the noise of the first steps again, and
  counts from 0. `optax.lookahead` with reset_state=True makes such a state at every
  synchronisation.
  """
  leaves = _check_whole("params", params)
  # Without parameters (None) there is nothing that the state could be like.
  if not (leaves or params is None or is_placeholder(params)):
    raise UserError("must hold at least one array", field="params")
  check_arrays(params=params)
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


def _check_whole(name: str, tree: Any) -> list[Any]:
  """Returns the leaves. Raises UserError if a wrapper, such as `optax.masked`, has left some out.

  A private transform of one part clips that part to the whole bound, so all parts together may
  exceed it. And parts of one shape that share a key would get the same noise.

  >>> _check_whole("params", {"w": optax.MaskedNode()})  # doctest: +ELLIPSIS
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: params: hold optax.MaskedNode: plan.transform must stand first ...
  """
  leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode))
  for leaf in leaves:
    if isinstance(leaf, optax.MaskedNode):
      raise UserError(
        "hold optax.MaskedNode: plan.transform must stand first in optax.chain, "
        "outside of masked, multi_transform and partition, which choose among what "
        "follows it",
        field=name,
      )
  return leaves


def _check_real(name: str, tree: Any) -> list[Any]:
  """Returns the shapes of a whole tree of real floats. Raises UserError if it is none."""
  shapes = []
  for leaf in _check_whole(name, tree):
    # Each leaf is asked here, and the whole tree only where one is odd: it may be Python's float.
    if not jnp.issubdtype(getattr(leaf, "dtype", object), jnp.floating):
      check_real(**{name: tree})
    shapes.append(jnp.shape(leaf))
  return shapes


def arrays_of(updates: Any) -> Any:
  """Returns the arrays in a transform's input: leaves [B, *param], or [*param] of a ClippedSum.

  Raises:
    UserError: a bare tree of arrays, which other code may have changed; an incomplete tree.
  """
  if isinstance(updates, ClippedSum):
    if not sealed.is_closed(updates.seal):
      raise UserError(sealed.MISPLACED, field="gradients")
    return updates.total
  if isinstance(updates, PerExampleGrads):
    _check_whole("updates", updates.leaves)
    return updates.arrays
  if type(updates).__module__.startswith("flax.nnx"):
    raise UserError(
      f"bare gradients ({type(updates).__name__}): nnx.Optimizer unwraps gradients; use "
      "updates, state = tx.update(grads, state, params) and optax.apply_updates",
      field="updates",
    )
  raise UserError(
    f"bare gradients ({type(updates).__name__}): must be those of "
    "dpjax.per_example_grads or plan.clipped_grad, or dpjax.wrap_grads(grads) "
    "where row i follows from example i alone; plan.transform must stand first "
    "in optax.chain, and once",
    field="updates",
  )


def open_gradients(
  updates: PerExampleGrads | ClippedSum,
  params: Params | None,
  mask: ArrayLike | None,
  clip: gradients.Clip,
  conditions: Conditions,
) -> tuple[ClippedSum, Any]:
  """Returns (the clipped sum to which noise is added; whether it is sound, [] bool).

  Where the second is traced, the caller makes all NaN that it computes from an unsound sum.

  Args:
    updates: `PerExampleGrads` with leaves [B, *param], or a ClippedSum (mask already applied).
    params: parameters whose shapes the gradients must have, or None.
    mask: [B] bool, or True for all rows; needed if `updates` are stacked and hold no mask.
    clip: clip for which noise is drawn.
    conditions: what else the update must meet.

  Raises:
    UserError: bare arrays, a part of a tree, no mask, no batch axis, gradients that are not real
      floating point, a row that comes twice; a sum that was clipped to a larger bound, was changed,
      is several sums, is below float32, or adds up another number of slices; too many examples.
      Rows, bounds and examples that are traced make the sum unsound instead.

  >>> grads = gradients.wrap_grads(jnp.array([[3.0, 4.0]]))
  >>> open_gradients(grads, None, True, gradients.Clip(1.0), Conditions())[0].total
  Array([0.6, 0.8], dtype=float32)
  """
  slices = getattr(updates, "slices", 1)
  if conditions.slices not in (None, slices):
    raise UserError(
      f"this transform takes the sum of so many, a whole step's, not of {slices}; "
      "give it to plan.accumulated(...), with the optimizer behind it",
      field="slices",
      value=conditions.slices,
    )
  arrays = arrays_of(updates)
  shapes = _check_real("updates", arrays)
  wanted = None if params is None else _check_real("params", params)
  if not shapes:
    raise UserError("must hold at least one array", field="updates")
  if isinstance(updates, ClippedSum):
    summed, sound = _check_sum(updates, shapes, wanted, clip)
  else:
    summed, sound = _sum_rows(updates, arrays, shapes, wanted, mask, clip)
  sound = sound & conditions.sound
  rows = conditions.rows

  def too_many() -> UserError:
    # The number of examples may be that of all data, and secret.
    return UserError(
      f"must be of at most {rows} examples, more than this plan ever draws, so its "
      "epsilon is not theirs; take batches from plan.batches, or plan for the larger ones",
      field="updates",
    )

  # At most `rows` rows cannot hold too many examples, whatever the mask.
  if rows is not None and summed.mask is not None and jnp.size(summed.mask) > rows:
    sound = sound & trees.require(jnp.sum(summed.mask) <= rows, too_many)
  return summed, sound


def _check_sum(
  summed: ClippedSum, shapes: list[Any], wanted: list[Any] | None, clip: gradients.Clip
) -> tuple[ClippedSum, Any]:
  """Returns a ClippedSum, and whether its bounds are those that it was made with."""
  bound = clip.l2_bound
  # The factor allows for rounding, since bounds are computed as roots of sums. NaN is refused, too.
  if not 0 <= summed.l2_bound <= bound * (1 + 1e-12):
    raise UserError(
      f"the ClippedSum was clipped to {summed.l2_bound!r}; its noise would be too small",
      field="l2_clip_norm",
      value=bound,
    )
  for leaf in jax.tree.leaves(summed.total):
    # In half precision, rounding could move a sum by more than one example may.
    dtype = jnp.result_type(leaf)
    if jnp.finfo(dtype).bits < 32:
      raise UserError(
        f"the total of a ClippedSum must be at least float32, not {dtype}", field="updates"
      )
  # The seal of one sum has shape (). In stacked sums, whose noise would cover only one, it has an
  # axis.
  if summed.seal.shape != () or wanted not in (None, shapes):
    raise UserError(
      f"a ClippedSum of shapes {str(shapes)[:60]}: must be one sum, with the "
      f"shapes of params, {str(wanted)[:60]}; several models go by jax.vmap, "
      "with a key each",
      field="updates",
    )

  def exchanged() -> UserError:
    return UserError(
      "is not the bound that this ClippedSum was made with; give the transform what "
      "plan.clipped_grad returns, with nothing exchanged",
      field="updates.l2_bound",
      value=summed.l2_bound,
    )

  return summed, trees.require(sealed.is_seal_of(summed.seal, *summed.bounds), exchanged)


def _sum_rows(
  updates: PerExampleGrads,
  arrays: Any,
  shapes: list[Any],
  wanted: list[Any] | None,
  mask: Any,
  clip: gradients.Clip,
) -> tuple[ClippedSum, Any]:
  """Returns the clipped sum of stacked gradients, and whether no row comes twice."""
  sizes = {shape[:1] for shape in shapes}
  if len(sizes) != 1 or () in sizes:
    raise UserError(
      "gradients must be stacked per example, [B, *param], but leading axes are "
      f"{sorted(map(str, sizes))}",
      field="updates",
    )
  if wanted not in (None, [shape[1:] for shape in shapes]):
    raise UserError(
      "must be per-example gradients, [B, *param] for every leaf", field="updates"
    )
  (size,) = sizes.pop()
  known = updates.mask
  if known is not None:
    # The gradients and the caller may both give a mask. A row counts only if both include it.
    known = checked_mask(known, size)
    mask = known if mask is None else known & checked_mask(mask, size)
  mask = checked_mask(mask, size)
  numbers = jnp.where(mask, updates.numbers(size), 0)
  # Row number 0 is padding, whatever the masks say.
  mask = numbers > 0
  # Losses are unknown here and not needed, so zeros take their place.
  summed = clip_and_sum(arrays, jnp.zeros(mask.shape), mask, clip)
  ordered = jnp.sort(numbers)
  # Padding has the number 0, and may repeat.
  twice = jnp.any((ordered[1:] == ordered[:-1]) & (ordered[1:] > 0))

  def counted_twice() -> UserError:
    return UserError(
      "a row of the gradients comes twice, so a record would count twice; where "
      "they are of different examples, computed in parts, give "
      "dpjax.wrap_grads(grads.arrays)",
      field="updates",
    )

  return summed, trees.require(~twice, counted_twice)


def divide_rows(updates: PerExampleGrads | ClippedSum, scales: Any) -> Any:
  """Divides stacked gradients by public or private numbers, before they are clipped.

  Args:
    updates: input of a private transform. A ClippedSum is returned as it is: its loss was divided.
    scales: one number, or a tree like the parameters.
  """
  arrays = arrays_of(updates)
  # Types are checked first, since the division turns integers into floats, which pass later checks.
  if not _check_real("updates", arrays):
    raise UserError("must hold at least one array", field="updates")
  if isinstance(updates, ClippedSum):
    return updates
  # Half precision has too narrow a range for the quotient.
  wide = jax.tree.map(trees.at_least_float32, arrays)
  if isinstance(scales, jax.Array) and not scales.ndim:
    divided = jax.tree.map(lambda leaf: leaf / scales, wide)
  else:
    divided = jax.tree.map(lambda leaf, scale: leaf / scale[None], wide, scales)
  return PerExampleGrads.of(divided, updates.mask, updates.rows)
