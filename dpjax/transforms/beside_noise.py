"""Guards the numbers in a state of a private transform that stand beside the key and count of its
noise.

Some decide the size of the noise: the scale of an adaptive clip norm, the sizes of coordinates. If
these came from elsewhere, such as the data, the size of the noise would reveal them, and no event
covers that. Others are secret sums: earlier noise that later noise takes off, and the clipped sum
of the slices so far. So a checksum in the state includes a digest of all these numbers:

| what happens to the numbers                        | what follows                        |
| -------------------------------------------------- | ----------------------------------- |
| they are changed, or come from another run         | `UserError`; NaN under jit          |
| a whole earlier state is used again                | cannot be detected                  |

A state with such numbers is a named tuple. Its method `beside_noise()` returns the numbers, and its
field `inner` holds the noise, if it is no noise state itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from dpjax.gradients import settling
from dpjax.noise import NoiseState
from dpjax.noise.correlated import CorrelatedNoiseState
from dpjax.types import ArrayTree

# Odd numbers with well-mixed bits. Multiplication by an odd number is a bijection modulo 2^32.
_ODD = 0x9E3779B1
_FIRST = 0x85EBCA6B
_SECOND = 0xC2B2AE35


def is_noise(part: object) -> bool:
  """Returns whether a part of a state is a noise state, which has a checksum."""
  return isinstance(part, (NoiseState, CorrelatedNoiseState))


def marked(state: Any, mark: int | jax.Array) -> Any:
  """Returns the state with `mark` in its noise checksum; a second call removes the mark.

  >>> from dpjax import noise
  >>> state = noise.init(jax.random.key(0))
  >>> int(marked(marked(state, 7), 7).checksum) == int(state.checksum)
  True
  """

  def turned(part: Any) -> Any:
    dtype = getattr(part.checksum, "dtype", None) if is_noise(part) else None
    # A field that is no checksum is left alone: the transform itself reports it.
    if dtype != jnp.uint32:
      return part
    return part._replace(checksum=part.checksum ^ jnp.uint32(mark))

  return jax.tree.map(turned, state, is_leaf=is_noise)


def digest(numbers: ArrayTree) -> jax.Array:
  """Returns 32 bits that depend on every number and its position; not 0 for zeros.

  The digest adds integers, whose sum does not depend on the order. So devices that share an array
  agree on its digest.

  >>> one, other = (digest({"a": jnp.array(row)}) for row in ([1.0, 2.0], [2.0, 1.0]))
  >>> bool(one == other), bool(digest({"a": jnp.zeros(2)}) == 0)
  (False, False)
  """

  def of_arrays(leaves: Any) -> jax.Array:
    total = jnp.uint32(_ODD)
    for number, leaf in enumerate(leaves):
      if leaf.dtype.itemsize not in (4, 8):
        # The numbers of a state have 4 or 8 bytes each. Other code has cast this one, so its digest
        # may be wrong in any way.
        leaf = leaf.astype(jnp.float32)
      if jnp.issubdtype(leaf.dtype, jnp.floating):
        # NaN has many bit patterns, which must all have the same digest.
        leaf = jnp.where(jnp.isnan(leaf), jnp.asarray(jnp.nan, leaf.dtype), leaf)
      bits = lax.bitcast_convert_type(leaf, jnp.uint32)
      mixed = bits ^ (_places(jnp.shape(bits)) * jnp.uint32(_ODD))
      # These lines are the end of MurmurHash3, by which each bit changes about half of all bits.
      mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(_FIRST)
      mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(_SECOND)
      mixed = mixed ^ (mixed >> 16)
      total = total * jnp.uint32(_FIRST) + jnp.sum(mixed, dtype=jnp.uint32)
      total = total ^ jnp.uint32(number)
    return total

  # XLA may compute a number again, and round it differently, for each use. The digest must be that
  # of the number that the state keeps.
  arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(numbers)]
  return settling.on_settled(of_arrays, arrays)


def _places(shape: tuple[int, ...]) -> jax.Array:
  """Returns the index of each entry in the flattened array, modulo 2^32, in the array's shape."""
  places = jnp.zeros(shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(len(shape))):
    along = lax.broadcasted_iota(jnp.uint32, shape, axis)
    places = places + along * jnp.uint32(stride % 2**32)
    stride *= shape[axis]
  return places


def turned(state: Any) -> Any:
  """Returns a state with the digest of its numbers in its checksum; a second call removes it.

  If the numbers change between the two calls, the checksum is wrong, and `noise` refuses the state.
  """
  # Of another type is what no transform returned, which the transform itself reports.
  if not _is_outer(state):
    return state
  mark = digest(state.beside_noise())
  if is_noise(state):
    return marked(state, mark)
  return state._replace(inner=marked(state.inner, mark))


def guarded(
  tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Returns the private transform `tx`, whose state is guarded between updates.

  Inside of `tx` the checksum covers key and count alone. It is wrong there if anything in the state
  was changed, so `noise` refuses it, and it stays wrong after the update.
  """

  def update_fn(
    updates: Any, state: Any, params: Any = None, **extra_args: Any
  ) -> tuple[Any, Any]:
    noisy, after = tx.update(updates, turned(state), params, **extra_args)
    return noisy, turned(after)

  return optax.GradientTransformationExtraArgs(
    lambda params: turned(tx.init(params)), update_fn
  )


def _is_outer(part: object) -> bool:
  return hasattr(part, "beside_noise")


def opened(tree: Any) -> Any:
  """Returns a tree of states with all digests removed, so that checksums cover the noise alone."""

  def inner(part: Any) -> Any:
    if not _is_outer(part):
      return part
    free = turned(part)
    return free if is_noise(part) else free._replace(inner=opened(free.inner))

  return jax.tree.map(inner, tree, is_leaf=_is_outer)


def invalid_unless(ok: Any, tree: Any) -> Any:
  """Returns a tree of states, in which the protected floats are NaN unless `ok` (scalar bool).

  A checksum that was right stays right, and a wrong one stays wrong.
  """

  def checked(leaf: jax.Array) -> jax.Array:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jnp.where(ok, leaf, jnp.nan) if is_float else leaf

  def invalid(part: Any) -> Any:
    # Earlier noise scales nothing.
    if not _is_outer(part) or is_noise(part):
      return part
    numbers = jax.tree.map(checked, part.beside_noise())
    free = turned(part)
    return turned(free._replace(**numbers, inner=invalid_unless(ok, free.inner)))

  return jax.tree.map(invalid, tree, is_leaf=_is_outer)
