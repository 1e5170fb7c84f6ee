"""Small functions over parameter trees. Nothing here knows about privacy."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Squares of float32 numbers beyond 2**64 overflow; scaled by this they do not.
_RESCUE = 2.0**-64


def at_least_float32(x: jax.Array) -> jax.Array:
  """Casts half-precision floats up to float32; leaves float32 and float64 alone.

  >>> at_least_float32(jnp.ones(2, jnp.bfloat16)).dtype
  dtype('float32')
  """
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _per_example_square(leaf: jax.Array, scale: float = 1.0) -> jax.Array:
  flat = at_least_float32(leaf).reshape(leaf.shape[0], -1) * scale
  return jnp.sum(flat * flat, axis=1)


def per_example_norms(tree: Any) -> jax.Array:
  """L2 norm of each example's slice over all leaves: leaves [B, ...] -> [B].

  Computed in float32 or wider. A finite gradient whose square overflows still gets
  its true norm; a non-finite one gets a non-finite norm.

  >>> per_example_norms({"a": jnp.array([[3.0], [0.0]]), "b": jnp.array([4.0, 2.0])})
  Array([5., 2.], dtype=float32)
  """
  leaves = jax.tree.leaves(tree)
  plain = jnp.sqrt(sum(_per_example_square(leaf) for leaf in leaves))
  scaled = sum(_per_example_square(leaf, _RESCUE) for leaf in leaves)
  return jnp.where(jnp.isfinite(plain), plain, jnp.sqrt(scaled) / _RESCUE)


def weighted_sum(tree: Any, weights: jax.Array, all_finite: Any = False) -> Any:
  """sum_i weights[i] * leaf[i], in float32 or wider; a weight of exactly 0 drops its
  example even where the leaf holds NaN or infinity.

  Args:
    tree: leaves [B, ...].
    weights: [B].
    all_finite: scalar bool (may be traced). True promises that every leaf is finite:
      one matrix product per leaf, without the pass that removes NaN and infinity.

  >>> weighted_sum(jnp.array([[1.0, 2.0], [jnp.nan, 1.0]]), jnp.array([0.5, 0.0]))
  Array([0.5, 1. ], dtype=float32)
  """

  def dot(leaf):
    leaf = at_least_float32(leaf)
    return jnp.tensordot(weights.astype(leaf.dtype), leaf, axes=1)

  def dropped(leaf):
    return jnp.where((weights != 0).reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf, 0)

  def careful(tree):
    return jax.tree.map(lambda leaf: dot(dropped(leaf)), tree)

  return jax.lax.cond(all_finite, lambda tree: jax.tree.map(dot, tree), careful, tree)


def is_key(leaf: Any) -> bool:
  """Whether a leaf is a typed random key (or an array of them).

  >>> is_key(jax.random.key(0)), is_key(jnp.zeros(2)), is_key(None)
  (True, False, False)
  """
  dtype = getattr(leaf, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def add(a: Any, b: Any) -> Any:
  """Leafwise a + b."""
  return jax.tree.map(jnp.add, a, b)


def scale(tree: Any, factor: Any) -> Any:
  """Leafwise tree * factor."""
  return jax.tree.map(lambda leaf: leaf * factor, tree)


def size(tree: Any) -> int:
  """Number of scalars in the tree.

  >>> size({"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)})
  16
  """
  return sum(int(np.prod(np.shape(leaf))) for leaf in jax.tree.leaves(tree))


def sha256(tree: Any) -> str:
  """Fingerprint of a tree: paths, dtypes, shapes and every byte.

  >>> sha256({"w": jnp.zeros(2)}) == sha256({"w": jnp.zeros(2)})
  True
  >>> sha256({"w": jnp.zeros(2)}) == sha256({"w": jnp.zeros(3)})
  False
  """
  digest = hashlib.sha256()
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    array = np.asarray(leaf)
    digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()
