"""Places arrays on devices of several processes, and reads them back."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from dpjax import trees
from dpjax.types import ArrayTree


def place(leaf: Any, sharding: Sharding) -> jax.Array:
  """Places the leaf on the devices of a sharding, of one process or of several.

  Args:
    leaf: an array or keys of any shape, the same in every process of the sharding. Each process
      gives its own devices their parts, and nothing is sent. An array that already spans
      processes is laid out anew.

  >>> device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  >>> place(np.ones(2, np.float32), device)
  Array([1., 1.], dtype=float32)
  """
  spans = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
  if spans or sharding.is_fully_addressable:
    return jax.device_put(leaf, sharding)
  # NumPy holds no keys, so their data are placed.
  if trees.is_key(leaf):
    data = place(jax.random.key_data(leaf), sharding)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
  held = np.asarray(leaf)
  return jax.make_array_from_callback(held.shape, sharding, lambda part: held[part])


def own_copy(tree: ArrayTree) -> Any:
  """Returns the tree with a local array in place of each leaf that spans processes.

  The local array is assembled from the parts on this process's devices. These parts must cover
  the leaf, which is not checked. Nothing is sent, so one process may call it alone.

  >>> own_copy({"x": np.ones(1)})
  {'x': array([1.])}
  """
  return jax.tree.map(_own_copy, tree)


def _own_copy(leaf: Any) -> Any:
  if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
    return leaf
  if leaf.is_fully_replicated:
    return leaf.addressable_data(0)
  whole = np.empty(leaf.shape, leaf.dtype)
  for part in leaf.addressable_shards:
    whole[part.index] = np.asarray(part.data)
  return whole
