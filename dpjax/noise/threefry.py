"""Draws the random bits of JAX's own keys in code that XLA can fuse with the code that uses them.

On a CPU, JAX computes Threefry in a loop over whole arrays, which XLA does not fuse. Noise for a
leaf of n parameters then needs 48 n bytes for random words, and each draw is compiled separately.
Here the rounds are written out, so that words become noise at once and none is stored.

The bits equal those of `jax.random`, so a checkpoint made with either can go on with the other.
The keys of `fused` stay inside `dpjax.noise`; states hold the keys that users gave.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from dpjax import parallel
from dpjax.types import Array
from dpjax.validate import UserError

_NAME = "threefry2x32"
# Rotations of the rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Four
# rounds rotate by the first row, the next four by the second row, and so on.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_GROUPS = 5
_PARITY = 0x1BD11BDA
# Arrays of this many words or more are drawn by JAX's own code: counters here have 32 bits.
_MOST_WORDS = 2**32


def threefry_2x32(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[Any, Any]:
  """Encrypts counters of two words by Threefry-2x32 with 20 rounds.

  Args:
    key: words of the key, [2] uint32.
    high, low: words of the counters, uint32 of one shape.

  Returns:
    Two words of uint32 for each counter.

  >>> first, second = threefry_2x32(jnp.zeros(2, jnp.uint32), jnp.uint32(0), jnp.uint32(0))
  >>> hex(first), hex(second)  # the published test vector
  ('0x6b200159', '0x99ba4efe')
  """
  words = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
  first = high + words[0]
  second = low + words[1]
  for group in range(_GROUPS):
    for turn in _ROTATIONS[group % 2]:
      first = first + second
      second = first ^ ((second << turn) | (second >> (32 - turn)))
    first = first + words[(group + 1) % 3]
    second = second + words[(group + 2) % 3] + jnp.uint32(group + 1)
  return first, second


def _counters(shape: tuple[int, ...]) -> jax.Array:
  """Returns the index of each entry in the flattened array, uint32 [shape]."""
  places = jnp.zeros(shape, jnp.uint32)
  for axis, _ in enumerate(shape):
    # The index is a sum over axes, not a reshaped range, so XLA can shard it like the array.
    stride = jnp.uint32(math.prod(shape[axis + 1 :]))
    places = places + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
  return places


def _words_at(key: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns two random words, uint32, for each counter in `places`."""
  # Without the barrier XLA would compute a derived key again for every number.
  return threefry_2x32(jax.lax.optimization_barrier(key), jnp.uint32(0), places)


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
  kind = jnp.dtype(f"uint{bit_width}")
  if math.prod(shape) >= _MOST_WORDS:
    return jax.random.bits(jax.random.wrap_key_data(key, impl=_NAME), shape, kind)
  first, second = _words_at(key, _counters(shape))
  if bit_width == 64:
    return (first.astype(kind) << 32) | second.astype(kind)
  return (first ^ second).astype(kind)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  words = threefry_2x32(key, jnp.uint32(0), _counters(shape))
  return jnp.stack(words, axis=-1)


@functools.partial(jax.jit, inline=True)
def _fold_in(key: jax.Array, data: Any) -> jax.Array:
  words = threefry_2x32(key, jnp.uint32(0), jnp.asarray(data, jnp.uint32))
  return jnp.stack(words)


def _no_seed(seed: Any) -> jax.Array:
  raise UserError("make a key by jax.random.key", field="seed")


IMPL: Any = jax.extend.random.define_prng_impl(
  key_shape=(2,),
  seed=_no_seed,
  split=_split,
  random_bits=_random_bits,
  fold_in=_fold_in,
  name="dpjax_threefry",
  tag="fry",
)


def fused(key: Array) -> Any:
  """Returns a key with the same random bits, whose draws XLA can fuse.

  Args:
    key: typed key, or an array of typed keys. It is returned unchanged if it belongs to another
      generator, or if `jax_threefry_partitionable` is off: then bits depend on more than their
      index.

  >>> key = jax.random.key(0)
  >>> bool((jax.random.bits(fused(key), (3,)) == jax.random.bits(key, (3,))).all())
  True
  """
  config: Any = jax.config
  if not config.jax_threefry_partitionable or jax.random.key_impl(key) != _NAME:
    return key
  return jax.random.wrap_key_data(jax.random.key_data(key), impl=IMPL)


def rows(key: Array, count: int, shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
  """Draws `count` arrays of uint32 [shape]: the rows of `jax.random.bits(key, (count, *shape))`.

  >>> key = jax.random.key(0)
  >>> bool((jnp.stack(rows(fused(key), 3, (2,))) == jax.random.bits(key, (3, 2))).all())
  True
  """
  size = math.prod(shape)
  is_fused = jax.random.key_impl(key) == IMPL
  # A TPU keeps all rows in memory if they are parts of one array, 52 bytes for each number. A CPU
  # compiles one array in half the time.
  if parallel.made_for.platform() != "tpu" or not is_fused or count * size >= _MOST_WORDS:
    return tuple(jax.random.bits(key, (count, *shape), jnp.uint32))
  data = jax.random.key_data(key)
  places = _counters(shape)
  pairs = [_words_at(data, places + jnp.uint32(row * size)) for row in range(count)]
  return tuple(first ^ second for first, second in pairs)
