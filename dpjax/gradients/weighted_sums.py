"""Sums of arrays [B, ...] with a weight for each example, for clipped sums and averages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees
from dpjax.branches import rarely_taken
from dpjax.parallel import made_for
from dpjax.types import ArrayTree


def weighted_sum(tree: ArrayTree, weights: jax.Array, all_finite: Any = False) -> Any:
  """Returns sum_i weights[i] * leaf[i] for each leaf, in float32 or wider. A weight of exactly 0
  drops its example, even if the leaf holds NaN or infinity there.

  Args:
    tree: leaves [B, ...].
    weights: [B].
    all_finite: scalar bool (may be traced). Pass True only if every leaf is finite: then the
      step that drops NaN and infinity at weight 0 is skipped.

  >>> weighted_sum(jnp.array([[1.0, 2.0], [jnp.nan, 1.0]]), jnp.array([0.5, 0.0]))
  Array([0.5, 1. ], dtype=float32)
  """
  return jax.lax.cond(all_finite, _dot_all, _dot_kept, tree, weights)


def _dot_all(tree: Any, weights: jax.Array) -> Any:
  of_leaf = lambda leaf: dot_examples(weights, trees.at_least_float32(leaf))
  return jax.tree.map(of_leaf, tree)


@rarely_taken
def _dot_kept(tree: Any, weights: jax.Array) -> Any:
  def kept(leaf):
    # The leaf is widened before zeros are filled in, since some 8-bit floats have no zero.
    leaf = trees.at_least_float32(leaf)
    return jnp.where((weights != 0).reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, 0)

  return _dot_all(jax.tree.map(kept, tree), weights)


def dot_examples(weights: jax.Array, leaf: jax.Array) -> jax.Array:
  """Returns sum_i weights[i] leaf[i] in full precision: with a lower one, such as TF32, a
  clipped term could come out longer than the clip norm.

  More than `trees.ADDED_AT_ONCE` float32 terms are added in parts, for smaller rounding errors.
  """
  highest = jax.lax.Precision.HIGHEST
  weights = weights.astype(leaf.dtype)
  count = leaf.shape[0]
  parts = -(-count // trees.ADDED_AT_ONCE)
  if parts <= 1 or jnp.finfo(leaf.dtype).bits > 32:
    return _dot_in_rows(weights, leaf)
  # A number of parts that divides the batch needs no copy. Otherwise the last part is padded.
  parts = next((d for d in range(parts, 4 * parts + 1) if count % d == 0), parts)
  missing = -count % parts
  if missing:
    weights, leaf = (
      jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for x in (weights, leaf)
    )
  cut = lambda x: x.reshape(parts, -1, *x.shape[1:])
  return trees.pairwise_sum(
    jnp.einsum("mn,mn...->m...", cut(weights), cut(leaf), precision=highest)
  )


def _dot_in_rows(weights: jax.Array, leaf: jax.Array) -> jax.Array:
  """Returns sum_i weights[i] leaf[i], on a CPU as a product whose result has two rows.

  XLA's CPU backend compiles each product with one row by itself, in 10 ms. For two rows it calls a
  library. So each half of leaf[i] is a row, and is multiplied by 0 for the other half's result. If
  it is not finite, it makes both halves NaN.
  """
  highest = jax.lax.Precision.HIGHEST
  count = leaf.shape[0]
  if made_for.platform() != "cpu" or not leaf.size or leaf.size // count % 2:
    return jnp.tensordot(weights, leaf, axes=1, precision=highest)
  rows = np.eye(2, dtype=weights.dtype)[:, None] * weights[None, :, None]  # [2, B, 2]
  both = rows.reshape(2, 2 * count)
  total = jax.lax.dot(both, leaf.reshape(2 * count, -1), precision=highest)
  return total.reshape(leaf.shape[1:])
