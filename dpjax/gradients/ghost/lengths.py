"""Norms of one example, with a bound on what underflow may have removed.

A square below the smallest normal number (1e-38 in float32) becomes 0. So a sum of n squares may
lack n times that number. A product of two such sums lacks more. `longest` is the norm with the
largest possible loss added. It is never less than the true norm, up to rounding. It equals `norm`
bit for bit unless squares are near the smallest normal number. A norm that overflows is infinite or
NaN. If underflow or overflow changes the clip factor, `scaled` gives the norm in another pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpjax import trees
from dpjax.types import Array, ArrayTree


class Length(NamedTuple):
  """The computed norm of a gradient, and an upper bound on the true one."""

  norm: Any  # [...]
  longest: Any  # the same shape


def tiny(x: Array) -> float:
  """Returns the smallest normal number of an array's type.

  A square that underflows to 0 loses less than this."""
  return float(jnp.finfo(x.dtype).tiny)


def from_square(
  square: jax.Array,
  lost: Array | float,
  reach: Array | float = 0.0,
  more: Array | float = 0.0,
) -> Length:
  """Returns the length sqrt(square) + reach.

  `square` may be too small by up to `lost`, and `reach` by up to `more`.
  """
  norm = jnp.sqrt(square)
  longest = jnp.sqrt(square + lost)
  return Length(norm + reach, longest + (reach + more))


def of(x: jax.Array, keep: int = 0) -> Length:
  """Returns norms over all axes but the first `keep`, in float32 or wider.

  >>> of(jnp.array([[3.0, 4.0]]), keep=1)
  Length(norm=Array([5.], dtype=float32), longest=Array([5.], dtype=float32))
  """
  x = trees.at_least_float32(x)
  # Dimensions of size 1 are removed: with them XLA's CPU backend would materialise the squares.
  flat = jnp.squeeze(x)
  first = keep - x.shape[:keep].count(1)
  square = jnp.sum(flat * flat, axis=tuple(range(first, flat.ndim)))
  count = math.prod(x.shape[keep:])
  return from_square(square.reshape(x.shape[:keep]), count * tiny(x))


def scaled(tree: ArrayTree) -> Length:
  """Returns the norm of all numbers of a tree, which are scaled before they are squared. It is
  correct for all finite numbers, but needs extra passes.

  >>> scaled({"w": jnp.array([3e30]), "b": jnp.array(4e30)}).norm == 5e30
  Array(True, dtype=bool)
  """
  flat = [trees.at_least_float32(x).ravel() for x in jax.tree.leaves(tree)]
  # All leaves become one array, since each reduction would be compiled separately.
  (norm,) = trees.scaled_norms([jnp.concatenate([jnp.zeros(1), *flat])[None]])
  return Length(norm, norm)


def joined(lengths: Sequence[Length]) -> Length:
  """Returns the length of a gradient whose parts have these lengths."""
  norms, longest = zip(*lengths)
  return Length(trees.root_sum_squares(list(norms)), trees.root_sum_squares(list(longest)))
