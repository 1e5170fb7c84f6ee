"""A sum of many clipped terms, in which one term more or less changes few roundings."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class ExactSum(NamedTuple):
  """A running sum of trees, with the part that its roundings have left out.

  A plain sum of n terms, added one after the other, is rounded n times. So one more term can
  change n roundings. Here it changes one rounding, apart from much smaller ones.
  """

  total: Any
  left_out: Any

  @classmethod
  def of(cls, total: Any) -> ExactSum:
    """Returns a sum that begins with `total`, a tree of at least float32."""
    return cls(total, jax.tree.map(jnp.zeros_like, total))

  def plus(self, more: Any) -> ExactSum:
    """Returns the sum with a tree added."""
    totals, treedef = jax.tree.flatten(self.total)
    left_out = jax.tree.leaves(self.left_out)
    pairs = list(map(exact_plus, totals, left_out, jax.tree.leaves(more)))
    # There may be no arrays at all.
    total, left_out = ([pair[i] for pair in pairs] for i in range(2))
    return ExactSum(treedef.unflatten(total), treedef.unflatten(left_out))

  def value(self) -> Any:
    """Returns the sum, rounded once."""

    def rounded(total, left_out):
      # If the sum has overflowed, the left-out part is not finite, so it must not be added.
      return total + jnp.where(jnp.isfinite(left_out), left_out, 0)

    return jax.tree.map(rounded, self.total, self.left_out)


def exact_plus(
  total: jax.Array, left_out: jax.Array, more: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Adds `more` to a running sum. Returns (rounded sum, the part that this rounding leaves out)."""
  total, rest = two_sum(total, more)
  # The left-out part is added to the total at once. Otherwise it would grow, and be rounded itself.
  return two_sum(total, left_out + rest)


def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the rounded sum fl(a + b), and its exact error a + b - fl(a + b) (Knuth).

  >>> [float(x) for x in two_sum(jnp.float32(2**24), jnp.float32(1))]
  [16777216.0, 1.0]
  """
  total = a + b
  of_b = total - a
  return total, (a - (total - of_b)) + (b - of_b)
