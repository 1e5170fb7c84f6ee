"""Norms of one example, with a bound on what underflow may have removed.

A square below the smallest normal number (1e-38 in float32) becomes 0. So a sum of n squares may
lack n times that number. A product of two such sums lacks more. `longest` is the norm with the
largest possible loss added. It is never less than the true norm, up to rounding. It equals `norm`
bit for bit unless squares are near the smallest normal number. A norm that overflows is infinite or
NaN. If underflow or overflow changes the clip factor, `scaled_norm` gives the norm in another pass.
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


def scaled_norm(tree: ArrayTree) -> Length:
  """Returns the norm of all numbers of a tree, which are scaled before they are squared. It is
  correct for all finite numbers, but needs extra passes.

  >>> scaled_norm({"w": jnp.array([3e30]), "b": jnp.array(4e30)}).norm == 5e30
  Array(True, dtype=bool)
  """
  flat = [trees.at_least_float32(x).ravel() for x in jax.tree.leaves(tree)]
  # All leaves become one array, since each reduction would be compiled separately.
  first = jnp.zeros(1, flat[0].dtype if flat else None)
  (norm,) = trees.scaled_norms([jnp.concatenate([first, *flat])[None]])
  return Length(norm, norm)


def join(lengths: Sequence[Length]) -> Length:
  """Returns the length of a gradient whose parts have these lengths."""
  norms, longest = zip(*lengths)
  return Length(trees.root_sum_squares(list(norms)), trees.root_sum_squares(list(longest)))


class Norms(NamedTuple):
  """Norms of a unit's gradients, and arrays that the first pass keeps for the sum."""

  lengths: tuple[Length, ...]  # per leaf of the unit: [B]
  held: Any = None  # per-example products or gradients [B, ...]; None if none are kept
  # Sum of the lengths of the rows of both sides, [B]. Underflow in a row of one side is multiplied
  # by the length of the row on the other side. None if not measured.
  extent: Any = None
  # Upper bound on the norm that the sum of the rows would have if none cancelled, [B]. None if not
  # measured, or for a single row.
  reach: Any = None
  # Whether all numbers behind a row of `held` are finite, [B]. None if rows are formed apart.
  finite: Any = None

  def finish(self) -> Norms:
    """Adds norms to held gradients that lack them, from the very arrays that are summed."""
    if self.lengths or self.held is None:
      return self
    each = [of(x.reshape(x.shape[0], -1), keep=1) for x in self.held]
    return self._replace(lengths=tuple(each)).unless_damaged()

  def unless_damaged(self) -> Norms:
    """Returns the norms, with NaN for an example whose arrays had to be made harmless."""
    if self.finite is None:
      return self
    known = jax.tree.map(lambda x: jnp.where(self.finite, x, jnp.nan), self.lengths)
    return self._replace(lengths=known)

  def at_most(self, longest: Sequence[jax.Array]) -> Norms:
    """Returns norms with upper bounds cut to `longest`, [B] for each leaf of the unit."""
    pairs = zip(self.lengths, longest)
    held = tuple(
      Length(length.norm, jnp.minimum(length.longest, most)) for length, most in pairs
    )
    return self._replace(lengths=held)
