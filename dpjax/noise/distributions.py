"""From random bits to noise: one pure function for each distribution, in float32 and float64.

Float noise starts from a number u in (0, 1) of 192 bits (`WORDS` words) and E = -log(u), which is
exponential. u is read from its first word that is not zero. From u = 1/2 on (1 - 2^-8 for Laplace),
1 - u is read in this way instead. So tails reach further than with a uniform float, and an E near 0
has full relative precision.

| distribution | from                         | float32 and float64 end at         |
| ------------ | ---------------------------- | ---------------------------------- |
| exponential  | E                            | 133.8                              |
| Laplace      | E with a random sign         | 133.8 scales                       |
| normal       | sqrt(2 E) cos(angle)         | 16.3 standard deviations           |
| Gumbel       | -log(E)                      | -4.9, and 87 (133.8 in float64)    |
| Bernoulli    | u < prob, in integers        | probabilities are multiples of 2^-128 |

The true distributions exceed these ends with a probability of at most 2^-192 per number; Gumbel in
float32 with 2^-125.
"""

from __future__ import annotations

import fractions
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import core

from dpjax.parallel import made_for
from dpjax.types import Array, ArrayLike, DType

# Number of 32-bit words for one exponential draw. With 192 bits a draw reaches 192 log 2 = 133.
WORDS = 6
BERNOULLI_WORDS = INTEGER_WORDS = 4
HALF = 2**31
# Smallest first word of u for which Laplace noise is computed from 1 - u, at u = 1 - 2^-8. Nearer
# to 1, -log(u) would lose more than 8 bits.
NEAR_ONE = 2**32 - 2**24
_SCALE = 2.0**-32


# --- ordinary keys

# JAX's generator of ordinary keys (`source.new_key`). Its keys have 128 bits, where those of JAX's
# default have 64, and XLA fuses its draws with what uses them.
_OF_JAX = "threefry4x32"


def _to_key(words: jax.Array) -> jax.Array:
  return jax.random.wrap_key_data(words, impl=_OF_JAX)


def _to_words(keys: jax.Array) -> jax.Array:
  # On a CPU XLA would compute a key again wherever it is used. In a chain of keys that costs
  # minutes, since each key is computed from eight words of the one before.
  return jax.lax.optimization_barrier(jax.random.key_data(keys))


def _split(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  if made_for.platform() != "cpu":
    return _to_words(jax.random.split(_to_key(words), shape))
  return _one_by_one(words, math.prod(shape)).reshape(*shape, 4)


# Outside of a trace, a loop that is not jitted would be compiled at each call.
@functools.partial(jax.jit, static_argnums=1)
def _one_by_one(words: jax.Array, count: int) -> jax.Array:
  """Returns the words of the keys that `jax.random.split` gives, [count, 4].

  Where four words of several keys are joined to one array, XLA's CPU backend hashes a key hundreds
  of times. A loop over keys takes a hundredth of the time, and joins four numbers.
  """

  @jax.custom_batching.sequential_vmap
  def keys(words: jax.Array) -> jax.Array:
    # Key i of a split is that of `fold_in`.
    own = lambda i: jax.random.key_data(jax.random.fold_in(_to_key(words), i))
    return jax.lax.map(own, jnp.arange(count, dtype=jnp.uint32))

  return keys(words)


# The bits are those of JAX's `threefry4x32`; only keys that are made of keys are computed once.
ORDINARY: Any = jax.extend.random.define_prng_impl(
  key_shape=(4,),
  seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl=_OF_JAX)),
  split=_split,
  random_bits=lambda words, width, shape: jax.random.bits(
    _to_key(words), shape, jnp.dtype(f"uint{width}")
  ),
  fold_in=lambda words, data: _to_words(jax.random.fold_in(_to_key(words), data)),
  name="dpjax_threefry4x32",
  tag="dpjax4",
)


def is_ordinary(key: Array) -> bool:
  """Returns whether a key is one of `source.new_key`, or of JAX's own `threefry4x32`."""
  return jax.random.key_impl(key) in (ORDINARY, _OF_JAX)


def _leading(words: Sequence[Array]) -> tuple[Array, Array, Array, Array]:
  """Returns the first non-zero word, the two words after it, and the number of bits before it.

  If every word before the last three is 0, the last three are returned."""
  first, second, third = words[-3:]
  shift = jnp.full(jnp.shape(words[0]), 32 * (len(words) - 3), jnp.int32)
  for place in reversed(range(len(words) - 3)):
    here = words[place] != 0
    first = jnp.where(here, words[place], first)
    second = jnp.where(here, words[place + 1], second)
    third = jnp.where(here, words[place + 2], third)
    shift = jnp.where(here, 32 * place, shift)
  return first, second, third, shift


def _fraction(words: Sequence[Array], dtype: Any) -> tuple[Array, Array]:
  """Returns (m, shift), where m 2^-shift is the number in (0, 1) with these bits; m in (0, 1]."""
  lead, second, third, shift = _leading(words)
  # Half of the last bit is added, so that the number is never 0.
  low = (third.astype(dtype) + 0.5) * _SCALE
  return (lead.astype(dtype) + (second.astype(dtype) + low) * _SCALE) * _SCALE, shift


def exponential(words: Sequence[Array], dtype: DType, near_one: int = HALF) -> Array:
  """Returns E = -log(u) > 0 for the number u in (0, 1) whose bits are `words`.

  E falls as u rises. From u = near_one / 2^32 on, E is computed from 1 - u, so that an E near 0 has
  full relative precision.

  Args:
    words: `WORDS` arrays of uint32, the most significant first.
    dtype: float32 or float64.
    near_one: smallest value of the first word for which 1 - u is used.

  >>> nothing = (jnp.uint32(0),) * WORDS
  >>> round(float(exponential(nothing, jnp.float32)), 1)
  133.8
  """
  high, shift = _fraction(words, dtype)
  # The bound 1 is a guard: if rounding lifted `high` above 1, E would be negative.
  away = -jnp.log(jnp.minimum(high, 1)) + shift.astype(dtype) * math.log(2)
  # The inverted words represent 1 - u.
  low, small = _fraction([~word for word in words], dtype)
  powers = jnp.asarray([2.0 ** (-32 * place) for place in range(WORDS)], dtype)
  # Below the normal numbers 1 - u would be flushed to 0, and E = 0 has no logarithm.
  remainder = jnp.maximum(low * powers[small // 32], jnp.finfo(dtype).tiny)
  return jnp.where(words[0] >= jnp.uint32(near_one), -jnp.log1p(-remainder), away)


def laplace(words: Sequence[Array], sign: Array, dtype: DType) -> Array:
  """Returns Laplace noise of scale 1; the first bit of `sign`, a uint32, decides its sign."""
  return jnp.where(sign >> 31, 1.0, -1.0).astype(dtype) * exponential(
    words, dtype, NEAR_ONE
  )


def gumbel(words: Sequence[Array], dtype: DType) -> Array:
  """Returns Gumbel noise of scale 1, -log(E), where E is `exponential` of the same words."""
  return -jnp.log(exponential(words, dtype))


def normal(words: Sequence[Array], turn: Sequence[Array], dtype: DType) -> Array:
  """Returns N(0, 1) noise (Box and Muller 1958); `turn`, two words, gives the angle: 24 of its
  bits in float32, all 64 in float64."""
  angle = (turn[0] >> 8).astype(dtype) + 0.5
  if jnp.dtype(dtype) == jnp.float64:
    fine = (turn[1].astype(dtype) + 0.5) * _SCALE
    angle = (turn[0].astype(dtype) + fine) * 2.0**-8
  return jnp.sqrt(2 * exponential(words, dtype)) * jnp.cos(2 * jnp.pi * angle * 2.0**-24)


def bernoulli(words: Sequence[Array], prob: float) -> Array:
  """Returns whether u < prob, exactly, for the number u in [0, 1) whose bits are `words`.

  Args:
    words: `BERNOULLI_WORDS` arrays of uint32, the most significant first.
    prob: probability, which is rounded up to a multiple of 2^-128.

  >>> one = (jnp.uint32(0), jnp.uint32(2**31), jnp.uint32(0), jnp.uint32(0))  # u = 2^-33
  >>> bool(bernoulli(one, 2**-33)), bool(bernoulli(one, 1.01 * 2**-33))
  (False, True)
  """
  bound = math.ceil(fractions.Fraction(prob) * 2 ** (32 * BERNOULLI_WORDS))
  if bound >= 2 ** (32 * BERNOULLI_WORDS):
    return jnp.ones(jnp.shape(words[0]), bool)
  below = jnp.zeros(jnp.shape(words[0]), bool)
  # The loop starts at the least significant word. Where a word equals its limit, less significant
  # words have decided.
  for word in reversed(words):
    limit = jnp.uint32(bound % 2**32)
    below = (word < limit) | ((word == limit) & below)
    bound >>= 32
  return below


def integers(words: Sequence[Array], span: ArrayLike) -> Array:
  """Returns integers uniform on 0 .. span - 1, int32: the number with bits `words`, modulo `span`.

  Each probability is off by a factor of at most 1 + 2^-97.

  `jax.random.randint` is not used: in JAX 0.10 it is not uniform for spans above 2^16, where
  2^32 mod span overflows. Its probabilities differ by up to span / 2^32, which no event covers.

  Args:
    words: `INTEGER_WORDS` arrays of uint32, the most significant first.
    span: number in 1 .. 2^31 - 1, or an array of such numbers that broadcasts against each word.

  >>> zero, one = jnp.uint32(0), jnp.uint32(1)
  >>> int(integers((zero, zero, one, zero), 1000))  # 2^32 mod 1000
  296
  """
  shape = jnp.broadcast_shapes(jnp.shape(words[0]), jnp.shape(span))
  held = jnp.stack(words)
  span = jnp.asarray(span, jnp.uint32)

  def step(place: Array, remainder: Array) -> Array:
    # Without jit `place` is a Python integer, so the shift is converted.
    bit = (held[place // 32] >> jnp.asarray(31 - place % 32, jnp.uint32)) & 1
    # `twice` is below 2 * span, which is below 2^32, so it does not overflow.
    twice = 2 * remainder + bit
    return jnp.where(twice >= span, twice - span, twice)

  start = jnp.zeros(shape, jnp.uint32)
  return jax.lax.fori_loop(0, 32 * len(words), step, start).astype(jnp.int32)


def keys_of_leaves(key: Array, count: int, *, short: bool = False) -> Array:
  """Returns, for each of `count` arrays of noise, what `words` takes.

  That is a key, [count]. Of an ordinary key it is a key for each word, [count, WORDS + 2]: so XLA
  computes a word where it is used, and words that were parts of one array would be stored.

  Args:
    short: whether only `three_words` takes it, which needs no keys of later words.
  """
  if not is_ordinary(key):
    return jax.random.split(key, count)
  # The words of JAX's own key are taken for those of an ordinary key, whose keys are computed once.
  start = jax.random.key_data(key)
  each = 3 if short else WORDS + 2

  def made(start: Array) -> Array:
    own = jax.random.wrap_key_data(start, impl=ORDINARY)
    # All keys are made in one place: a loop for each array would take longer.
    keys = jax.vmap(lambda leaf: jax.random.split(leaf, each))(jax.random.split(own, count))
    return jax.random.key_data(keys)

  if isinstance(start, core.Tracer) and made_for.platform() == "cpu":
    # XLA's CPU backend hands more than nine small operations without operands to another thread,
    # which takes longer to wake than they take. In a branch they run one after the other. Nothing,
    # not even NaN, is below -inf, which XLA does not know.
    impossible = jax.lax.bitcast_convert_type(start[0], jnp.float32) < -jnp.inf
    never = lambda start: jnp.broadcast_to(start, (count, each, 4))
    keys = jax.lax.cond(impossible, never, made, start)
  else:
    keys = made(start)
  return jax.random.wrap_key_data(keys, impl=ORDINARY)


def three_words(key: Array, shape: tuple[int, ...]) -> tuple[Array, ...]:
  """Returns three random words, uint32 [shape] each; the first three of `words`."""
  if is_ordinary(key):
    return tuple(jax.random.bits(own_key, shape, jnp.uint32) for own_key in key[:3])
  return tuple(jax.random.bits(key, (3, *shape), jnp.uint32))


def words(key: Array, shape: tuple[int, ...]) -> tuple[tuple, tuple]:
  """Returns the `WORDS` words of u, and two words for a sign or an angle.

  Args:
    key: one of `keys_of_leaves`.
    shape: shape of each word, uint32.
  """
  if is_ordinary(key):
    high, low, turn, *more = (jax.random.bits(own, shape, jnp.uint32) for own in key)
  else:
    high, low, turn = three_words(key, shape)
    more = jax.random.bits(jax.random.fold_in(key, 1), (WORDS - 1, *shape), jnp.uint32)
  return (high, low, *more[1:]), (turn, more[0])
