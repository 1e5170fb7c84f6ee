"""Checks of gradients and batches, for every way to compute a clipped sum.

Gradients must be real numbers. A mask must say which rows are examples and which are padding.
"""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.types import Array, ArrayLike, ArrayTree, Batch
from dpjax.validate import UserError, Verbatim

_NO_MASK = (
  "must be given: mask=batch.mask, or True where every row is an example; padding "
  "that is not masked would be trained on"
)


def checked_mask(mask: ArrayLike | None, size: int) -> Array:
  """Returns the mask as a [size] bool array. A missing mask is an error, not a default of
  ones.

  >>> checked_mask(True, 2)
  Array([ True,  True], dtype=bool)
  >>> checked_mask(None, 2)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: mask=None: must be given: mask=batch.mask, or True where ...
  """
  # False would make a step that learns from no example.
  if mask is None or mask is False:
    raise UserError(_NO_MASK, field="mask", value=mask)
  try:
    mask = jnp.asarray(mask)
  # JAX raises these for text, objects, or rows of several lengths.
  except (TypeError, ValueError):
    # An error is one line, so line breaks in the repr become spaces.
    shown = " ".join(repr(mask).split())
    raise UserError(
      f"must be a bool array [{size}], such as batch.mask, or True",
      field="mask",
      value=Verbatim(f"{shown:.60}"),
    ) from None
  if mask.dtype != bool:
    raise UserError(
      "must be bool; give a batch of examples and its mask, not two arrays of data",
      field="mask.dtype",
      value=mask.dtype,
    )
  if mask.shape not in ((), (size,)):
    raise UserError(
      f"must be ({size},), the batch size", field="mask.shape", value=mask.shape
    )
  return jnp.broadcast_to(mask, (size,))


def examples_and_mask(batch: ArrayTree, mask: ArrayLike | None) -> tuple[Any, Any]:
  """Returns examples and mask, from a padded `Batch` or from two arguments.

  A `Batch` whose mask has two axes holds the rows of several users (`dpjax.sampling.user_loss`).
  It is passed on as data, and `mask` says which users are real.

  Raises:
    UserError: `mask` is given beside a padded `Batch`, which already holds a mask.
  """
  if not isinstance(batch, Batch) or jnp.ndim(batch.mask) > 1:
    return batch, mask
  if mask is not None:
    raise UserError(
      "must be left out where the batch is a dpjax.types.Batch, which has its own",
      field="mask",
    )
  return batch.examples, batch.mask


def origin_of(batch: Any) -> Any:
  """Returns `Batch.origin` with the number -1 for rows of padding; None for rows of one's own.

  Padding was perhaps added later, such as for a mesh, with any numbers. Its run is that of the
  batch, or 0, so that a batch of padding alone has a run, too.
  """
  if not isinstance(batch, Batch) or batch.origin is None:
    return None
  origin = jnp.asarray(batch.origin)
  if jnp.shape(batch.mask) != origin.shape[:-1]:
    return origin
  number = jnp.where(batch.mask, origin[..., 0], -1)
  return jnp.concatenate([number[..., None], origin[..., 1:]], axis=-1)


def masked_batch(batch: Any) -> Batch:
  """Returns a batch of a step, which must hold its mask.

  >>> masked_batch([1.0, 2.0])
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: batch=list: must be a dpjax.types.Batch of examples and their mask, ...
  """
  if not isinstance(batch, Batch):
    raise UserError(
      "must be a dpjax.types.Batch of examples and their mask, such as plan.batches yields, and "
      "not its examples alone; padding that is not masked would be trained on",
      field="batch",
      value=Verbatim(type(batch).__name__),
    )
  return batch


def check_arrays(**named: Any) -> None:
  """Raises UserError unless every leaf of each tree holds numbers, bools or random keys.

  >>> check_arrays(batch={"x": ["a"]})
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: batch['x'][0]: is str, must be numbers, which JAX can hold...
  """
  for name, tree in named.items():
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      dtype = getattr(leaf, "dtype", None)
      known = isinstance(leaf, numbers.Number)
      if dtype is not None:
        known = jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.number)
      if not known and not trees.is_key(leaf):
        place = f"{name}{jax.tree_util.keystr(path)}"
        if callable(leaf):
          raise UserError(
            "is a function, must be numbers; of Equinox give the params of params, static = "
            "eqx.partition(model, eqx.is_inexact_array), and call eqx.combine(params, static) in "
            "the loss",
            field=place,
          )
        kind = type(leaf).__name__ if dtype is None else dtype
        raise UserError(
          f"is {kind}, must be numbers, which JAX can hold; `for batch in plan.batches(data)` "
          "makes batches of a data set",
          field=place,
        )


def check_real(**named: Any) -> None:
  """Raises UserError unless each tree holds arrays, all of real floating point.

  Integers have no gradient. Real Gaussian noise would cover only one part of a complex number.

  >>> check_real(params={"w": jnp.ones(2, jnp.complex64)})
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: params['w']: dtype complex64 must be real floating point
  """
  check_arrays(**named)
  for name, tree in named.items():
    if not jax.tree.leaves(tree):
      raise UserError("must hold at least one array", field=name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      # A key has no result type. A Python number gets the type that JAX would give it.
      dtype = jnp.result_type(leaf) if not trees.is_key(leaf) else leaf.dtype
      if not jnp.issubdtype(dtype, jnp.floating):
        place = f"{name}{jax.tree_util.keystr(path)}"
        raise UserError(f"dtype {dtype} must be real floating point", field=place)
