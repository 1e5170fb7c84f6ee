"""Values of a traced program: stored in memory before they are used, or different on each device.

Stored values (`on_settled`): every use sees the same rounding. XLA may compute a value anew inside
each fusion that reads it, with other roundings (fused multiply-add, more digits of half precision).
Where terms cancel, a norm and the sum that it bounds would then belong to different gradients. On
accelerators an optimization barrier prevents that. XLA's CPU backend drops barriers before it
fuses, but does not fuse through a conditional whose outcome it cannot tell. So a conditional is
used there. On a GPU it would wait for the host.

Different values (`as_varying_as`): if a value is the same on all devices of a `shard_map`, JAX adds
its gradient up over the devices. That is too early for gradients that must first be clipped example
by example. So parameters (and the taps of `ghost.tapped`) are first marked as different on each
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from dpjax import trees
from dpjax.parallel import made_for
from dpjax.types import ArrayTree


def as_varying_as(reference: ArrayTree, tree: ArrayTree) -> Any:
  """Marks the tree as different on every device along the axes for which `reference` is marked.

  Outside `shard_map` this changes nothing.
  """
  axes = trees.varying_axes(reference)
  if not axes:
    return tree

  def mark(leaf):
    missing = tuple(sorted(axes - trees.varying_axes(leaf)))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf

  return jax.tree.map(mark, tree)


def zeros_of(shapes: ArrayTree, reference: ArrayTree) -> Any:
  """Returns zeros of these shapes and types, marked as `as_varying_as(reference, ...)` marks them.

  So they have the type of what is computed from `reference`, as the other branch of a conditional.
  """
  # Of a shape alone: `zeros_like` refuses one that is marked as different on each device.
  zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
  return as_varying_as(reference, zeros)


def on_settled(fn: Callable[[Any], Any], tree: ArrayTree) -> Any:
  """Calls fn(tree), where fn sees every array of the tree as it is stored in memory.

  Outside of a trace this is an ordinary call, since nothing is fused there. On a CPU it is also an
  ordinary call under an outer `jax.vmap`, since JAX turns the conditional into a select.

  >>> float(jax.jit(lambda x: on_settled(jnp.sum, x * 2.0))(jnp.ones(3)))
  6.0
  """
  leaves, treedef = jax.tree.flatten(tree)
  # The condition below compares a float with -inf. Keys have no order, and integers no -inf.
  is_float = lambda leaf: leaf.size and jnp.issubdtype(leaf.dtype, jnp.floating)
  floats = list(filter(is_float, leaves))
  if not any([isinstance(leaf, Tracer) for leaf in floats]):
    return fn(tree)
  # XLA cannot tell that two operands are one array, and would read it twice. For example, a product
  # and the bias that is added to it have one array of cotangents.
  distinct = {id(leaf): leaf for leaf in leaves}

  def on_stored(arrays):
    stored = dict(zip(distinct, arrays))
    return fn(treedef.unflatten([stored[id(leaf)] for leaf in leaves]))

  arrays = list(distinct.values())
  if made_for.platform() != "cpu":
    return on_stored(lax.optimization_barrier(arrays))
  shapes = []

  def on_whole(flat):
    results = on_stored([jnp.reshape(x, whole.shape) for x, whole in zip(flat, arrays)])
    shapes.append(jax.eval_shape(lambda: results))
    return results

  def never(_):
    # JAX traces the branch above first, so `fn` is traced once.
    return zeros_of(shapes[0] if shapes else jax.eval_shape(fn, tree), arrays)

  # Dimensions of size 1 are removed. For them XLA's CPU backend would choose another layout in the
  # branch, and copy the array.
  flat = list(map(jnp.squeeze, arrays))
  # Nothing, not even NaN, is below -inf. XLA does not know that, so it keeps the conditional.
  possible = ~(jnp.ravel(floats[0])[0] < -jnp.inf)
  return lax.cond(possible, on_whole, never, flat)
