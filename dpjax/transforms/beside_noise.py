"""Numbers of a state that stand beside its noise, under the checksum of the noise.

Some transforms multiply their noise by numbers that follow from earlier outputs: the scale of an
adaptive clip norm, the sizes of coordinates. Numbers from elsewhere, such as from the data, would
be told by the size of the noise, and no event covers that. So the checksum of the noise state holds
a digest of them, too:

| what happens to the numbers                        | what follows                        |
| -------------------------------------------------- | ----------------------------------- |
| they are exchanged, mapped, or those of another run | `UserError`; NaN where it is traced |
| a whole earlier state is used again                | nothing can see it                  |

A state with such numbers is a named tuple with a field `inner`, which holds the noise, and a method
`beside_noise()`, which returns the numbers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dpjax.gradients import settling
from dpjax.noise import NoiseState
from dpjax.noise.correlated import CorrelatedNoiseState
from dpjax.types import ArrayTree

# Odd numbers with well-mixed bits: multiplying by one is a bijection modulo 2^32.
_ODD = 0x9E3779B1
_FIRST = 0x85EBCA6B
_SECOND = 0xC2B2AE35


def is_noise(part: object) -> bool:
  """Returns whether a part of a state is that of noise, with its checksum."""
  return isinstance(part, (NoiseState, CorrelatedNoiseState))


def marked(state: Any, mark: int | jax.Array) -> Any:
  """Returns the state with the mark in its noise checksum; a second call removes it.

  >>> from dpjax import noise
  >>> state = noise.init(jax.random.key(0))
  >>> int(marked(marked(state, 7), 7).checksum) == int(state.checksum)
  True
  """

  def turned(part: Any) -> Any:
    dtype = getattr(part.checksum, "dtype", None) if is_noise(part) else None
    # The transform itself reports a field that is no checksum.
    if dtype != jnp.uint32:
      return part
    return part._replace(checksum=part.checksum ^ jnp.uint32(mark))

  return jax.tree.map(turned, state, is_leaf=is_noise)


def digest(numbers: ArrayTree) -> jax.Array:
  """Returns 32 bits that depend on every number, and on its place; not 0 for zeros.

  A sum of integers is the same in any order. So devices that share an array agree on its digest.

  >>> one, other = (digest({"a": jnp.array(row)}) for row in ([1.0, 2.0], [2.0, 1.0]))
  >>> bool(one == other), bool(digest({"a": jnp.zeros(2)}) == 0)
  (False, False)
  """

  def of_arrays(leaves: Any) -> jax.Array:
    total = jnp.uint32(_ODD)
    for number, leaf in enumerate(leaves):
      if leaf.dtype.itemsize != 4:
        # No state has such numbers: something has cast them.
        leaf = leaf.astype(jnp.float32)
      if jnp.issubdtype(leaf.dtype, jnp.floating):
        # Every NaN has the same bits.
        leaf = jnp.where(jnp.isnan(leaf), jnp.float32(jnp.nan), leaf)
      bits = lax.bitcast_convert_type(leaf, jnp.uint32)
      mixed = bits ^ (_places(jnp.shape(leaf)) * jnp.uint32(_ODD))
      # The end of MurmurHash3, in which each bit changes about half of all bits.
      mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(_FIRST)
      mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(_SECOND)
      mixed = mixed ^ (mixed >> 16)
      total = total * jnp.uint32(_FIRST) + jnp.sum(mixed, dtype=jnp.uint32)
      total = total ^ jnp.uint32(number)
    return total

  # XLA may round a number anew in each fusion that reads it. What is kept must be what was read.
  arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(numbers)]
  return settling.on_settled(of_arrays, arrays)


def _places(shape: tuple[int, ...]) -> jax.Array:
  """Returns the place of each entry of an array, modulo 2^32, without a flat copy of it."""
  places = jnp.zeros(shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(len(shape))):
    along = lax.broadcasted_iota(jnp.uint32, shape, axis)
    places = places + along * jnp.uint32(stride % 2**32)
    stride *= shape[axis]
  return places


def turned(state: Any) -> Any:
  """Returns the state with the digest of its numbers in the checksum of its noise; a second call
  removes it.

  With changed numbers the second call leaves a wrong checksum, which the noise refuses.
  """
  return state._replace(inner=marked(state.inner, digest(state.beside_noise())))


def _is_outer(part: object) -> bool:
  return hasattr(part, "beside_noise")


def opened(tree: Any) -> Any:
  """Returns a tree of states in which the checksums are of the noise alone."""

  def inner(part: Any) -> Any:
    if not _is_outer(part):
      return part
    free = turned(part)
    return free._replace(inner=opened(free.inner))

  return jax.tree.map(inner, tree, is_leaf=_is_outer)


def invalid_unless(ok: Any, tree: Any) -> Any:
  """Returns a tree of states whose numbers are NaN where `ok` does not hold.

  The checksum stays right or wrong, as it was.

  Args:
    ok: scalar bool.
  """

  def checked(leaf: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.where(ok, leaf, jnp.nan) if is_float else leaf

  def invalid(part: Any) -> Any:
    if not _is_outer(part):
      return part
    numbers = jax.tree.map(checked, part.beside_noise())
    free = turned(part)
    return turned(free._replace(**numbers, inner=invalid_unless(ok, free.inner)))

  return jax.tree.map(invalid, tree, is_leaf=_is_outer)
