"""Bounds memory: cuts a batch into microbatches, and adds their clipped sums.

Each example is still clipped on its own: a microbatch is never the unit of privacy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees
from dpjax.gradients.clipping import Clipped
from dpjax.gradients.convolutions import canonical_convolutions
from dpjax.gradients.exact_sum import ExactSum
from dpjax.gradients.traced_values import as_varying_as
from dpjax.types import ArrayTree


def fill(tree: ArrayTree, rows: int) -> Any:
  """Pads leaves [B, ...] -> [rows, ...] with zeros, and leaves of random keys with the last key.

  >>> fill(jnp.array([True, True]), 3)
  Array([ True,  True, False], dtype=bool)
  """

  def fill_leaf(leaf):
    missing = rows - leaf.shape[0]
    if not missing:
      return leaf
    # A key has no zero, so the last key is repeated, in a masked row.
    if trees.is_key(leaf):
      return jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)])
    pad = np.pad if isinstance(leaf, np.ndarray) else jnp.pad
    return pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))

  return jax.tree.map(fill_leaf, tree)


def in_microbatches(
  fn: Callable[[Any, Any, jax.Array], Clipped], microbatch_size: int
) -> Callable[[Any, Any, jax.Array], Clipped]:
  """Returns `fn`, computed for `microbatch_size` examples at a time.

  The last microbatch is filled up with masked padding. Sums are added in float32 or wider.
  """

  def wrapped(params, batch, mask):
    batch_size = mask.shape[0]
    count = -(-batch_size // microbatch_size)
    if count == 1:
      return fn(params, batch, mask)
    cut = lambda leaf: leaf.reshape((count, microbatch_size, *leaf.shape[1:]))
    full = fill((batch, mask), microbatch_size * count)
    parts = jax.tree.map(cut, full)  # [count, size, ...]

    # In a scan, XLA's CPU backend takes many times as long for gradients of convolutions.
    @canonical_convolutions
    def of_part(params, batch, mask):
      out = fn(params, batch, mask)
      return out.total, (out.norms, out.losses)  # [*param], ([size],) * 2

    def body(total, part):
      more, aux = of_part(params, *part)
      return total.plus(more), aux

    shapes = jax.eval_shape(fn, params, *jax.tree.map(lambda leaf: leaf[0], parts))
    # Of a shape alone: `zeros_like` refuses one that is marked as different on each device.
    zero = jax.tree.map(lambda total: jnp.zeros(total.shape, total.dtype), shapes.total)
    # A scan's carry must keep its type. Under shard_map the sums differ between devices, so the
    # zeros must be marked as different, too.
    begun = as_varying_as(parts, ExactSum.of(zero))
    total, aux = jax.lax.scan(body, begun, parts)
    norms, losses = (leaf.reshape(-1)[:batch_size] for leaf in aux)  # [count, size] -> [B]
    return Clipped(total.value(), norms, losses)

  return wrapped
