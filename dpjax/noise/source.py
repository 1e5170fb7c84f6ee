"""All float noise of dpjax, its keys, and its release mode: noise rounded to a public grid.

Whoever knows a key can subtract its noise. `new_key` draws keys from the operating system's entropy
(`secrets`), so nobody can guess them. `jax.random.fold_in`, `split` and `bits` take each kind:

| key                     | bits of secret | random bits come from        | noisy sums are       |
| ----------------------- | -------------- | ---------------------------- | -------------------- |
| `new_key()`             | 128            | `threefry4x32`               | floating-point sums  |
| `new_key(release=True)` | 256            | ChaCha20 (RFC 8439)          | on the public grid   |
| `jax.random.key(seed)`  | those of seed  | JAX's default                | floating-point sums  |

A key of a seed is for tests: anyone who guesses the seed has the noise.

ALL float noise for privacy is drawn here, under either kind of key. A test reads the source code
and refuses the float samplers of JAX and NumPy, whose tails end too early (float32 normal: 5.42
standard deviations; an output beyond that would rule out one of two neighbours). Noise has the
resolution of what it is added to: float64 leaves get float64 noise, because coarser noise would
leave their low bits unprotected.

| draw                         | ends at               | mass that is missing, per number |
| ---------------------------- | --------------------- | -------------------------------- |
| float32 `gaussian`           | 9.49 std              | 2^-65 = 3e-20                    |
| float64, or `long_tails`     | 16.3 std              | 2^-192                           |
| `laplace`, `exponential`     | 133 scales            | 2^-192                           |
| `gumbel`                     | -4.9 and 87 or more   | 2^-125 in float32                |

Missing mass m adds at most (1 + e^epsilon) m to delta, for each number and each draw.

With a release key `dpjax.noise` rounds the noisy sum to a public grid by `snap`. The reason: in
floating point, the set of numbers that x + noise can be depends on x, and so reveals x
(Mironov 2012). What is guaranteed, and what is not:

| claim                                                    | status                        |
| -------------------------------------------------------- | ----------------------------- |
| rounding weakens no guarantee                            | proved: post-processing       |
| outputs are multiples of a step fixed by public numbers  | exact                         |
| every grid point within 9 std can be output for every x  | by counting floats per cell   |
| the chance of a grid point is that of a rounded Gaussian | up to about 2^-15 in float32, |
|                                                          | 2^-44 in float64, NOT proved  |
| timing, and copies of the key in memory                  | not protected                 |

The step is between 1/32 and 1/16 of the standard deviation, so that one grid cell holds about 2^15
floats (2^44 in float64). A number beyond 2^23 steps (2^52 in float64) is a multiple already. The
rounding adds less than 0.02 % to the standard deviation.
"""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import core

from dpjax import closed_over, trees, validate
from dpjax.noise import distributions
from dpjax.types import Array, ArrayLike, ArrayTree, DType
from dpjax.validate import UserError

ORDINARY = distributions.ORDINARY
ORDINARY_BYTES = 16
KEY_BYTES = 32
_CONSTANTS = np.frombuffer(b"expand 32-byte k", np.uint32)
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
# First word of ChaCha20's nonce. It differs by use, so that no two uses share a block.
_BITS = 0
_SPLIT = 1
_FOLD = 2
# sin(pi x / 2) / x as a polynomial in x^2, interpolated at Chebyshev's points of x^2 in [0, 1].
_SINE = (
  1.5707963267680645, -0.6459640955740901, 0.07969260368538653, -0.004681657706889848,
  0.0001602545899051696, -3.431788892764113e-06,
)  # fmt: skip
# Word positions of the quarter rounds: a column round, then a diagonal round.
_QUARTERS = (
  (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
  (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip


def _rotate(x: jax.Array, by: int) -> jax.Array:
  return (x << by) | (x >> (32 - by))


def _quarter_round(a, b, c, d):
  for by_d, by_b in ((16, 12), (8, 7)):
    a = a + b
    d = _rotate(d ^ a, by_d)
    c = c + d
    b = _rotate(b ^ c, by_b)
  return a, b, c, d


def _double_round(_: Any, state: tuple) -> tuple:
  words = list(state)
  for at in _QUARTERS:
    turned = _quarter_round(*(words[i] for i in at))
    for i, word in zip(at, turned):
      words[i] = word
  return tuple(words)


def chacha20_blocks(key: jax.Array, counters: jax.Array, nonce: tuple) -> jax.Array:
  """Returns blocks of the ChaCha20 stream (RFC 8439, section 2.3).

  Args:
    key: words of the key, [8] uint32.
    counters: number of each block, [n] uint32.
    nonce: three words, uint32.

  Returns:
    Words of the blocks, [n, 16] uint32.
  """
  like = jnp.zeros_like(counters)
  start = tuple(
    like + jnp.asarray(word, jnp.uint32)
    for word in (*_CONSTANTS, *(key[i] for i in range(8)), counters, *nonce)
  )
  end = jax.lax.fori_loop(0, 10, _double_round, start)
  return jnp.stack([a + b for a, b in zip(start, end)], axis=-1)


def _no_seed(seed: Any) -> jax.Array:
  raise UserError(
    "a release key has no seed; make one by dpjax.new_key(release=True)", field="seed"
  )


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  counters = jnp.arange(math.prod(shape), dtype=jnp.uint32)
  return chacha20_blocks(key, counters, (_SPLIT, 0, 0))[:, :8].reshape(*shape, 8)


def _fold_in(key: jax.Array, data: Any) -> jax.Array:
  counters = jnp.asarray(data, jnp.uint32).reshape(1)
  return chacha20_blocks(key, counters, (_FOLD, 0, 0))[0, :8]


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
  size = math.prod(shape)
  words_each = max(1, bit_width // 32)
  counters = jnp.arange(-(-size * words_each // 16), dtype=jnp.uint32)
  words = chacha20_blocks(key, counters, (_BITS, 0, 0)).reshape(-1)[: size * words_each]
  if bit_width == 64:
    pairs = words.reshape(size, 2).astype(jnp.uint64)
    return ((pairs[:, 0] << 32) | pairs[:, 1]).reshape(shape)
  return words.astype(f"uint{bit_width}").reshape(shape)


IMPL: Any = jax.extend.random.define_prng_impl(
  key_shape=(8,),
  seed=_no_seed,
  split=_split,
  random_bits=_random_bits,
  fold_in=_fold_in,
  name="dpjax_chacha20",
  tag="chacha20",
)


# Generators of noise, by the number of words of their keys.
_GENERATORS = {2: "threefry2x32", 4: ORDINARY, 8: IMPL}


def key_from_bytes(secret: bytes) -> jax.Array:
  """Returns the key with these bytes, which must be secret and random.

  With 32 bytes it is a release key, with 16 an ordinary key (`new_key`).

  >>> is_release(key_from_bytes(bytes(range(32))))
  True
  """
  if len(secret) not in (KEY_BYTES, ORDINARY_BYTES):
    raise UserError(
      f"must be {KEY_BYTES} or {ORDINARY_BYTES} bytes, got {len(secret)}", field="secret"
    )
  return from_words(np.frombuffer(secret, np.uint32))


def new_key(*, release: bool = False) -> jax.Array:
  """Draws a secret key from the operating system's entropy, new at each call.

  Args:
    release: False: a key of 128 bits, with the bits of JAX's `threefry4x32`. True: one of 256 bits,
      whose noise comes from ChaCha20 and is rounded to a public grid.

  >>> bool(new_key() == new_key())
  False
  >>> is_release(new_key()), is_release(new_key(release=True))
  (False, True)
  """
  validate.flag(release=release)
  return key_from_bytes(secrets.token_bytes(KEY_BYTES if release else ORDINARY_BYTES))


def is_release(key: Array) -> bool:
  """Returns whether noise under a key is rounded to the public grid; works during tracing.

  >>> is_release(jax.random.key(0))
  False
  """
  return trees.is_key(key) and jax.random.key_impl(key) == IMPL


def check_generator(key: Array, name: str = "key") -> Array:
  """Returns the key, if it is of a generator that noise may be drawn from.

  Raises:
    UserError: a key of a generator other than threefry2x32, threefry4x32 and release keys. Some of
      these, such as `rbg`, are no ciphers: noise of two draws could be alike. Of `unsafe_rbg` it
      is, since there `fold_in` of 1 and 2 gives the key of `fold_in` of 2 and 1.
  """
  impl = jax.random.key_impl(key)
  if impl not in _GENERATORS.values() and not distributions.is_ordinary(key):
    raise UserError(
      "no key of a generator that noise is drawn from; make one by dpjax.new_key()",
      field=name,
      value=impl,
    )
  return key


def to_words(key: Array, name: str = "key") -> jax.Array:
  """Returns the words of a key, uint32 [..., words], a copy. States hold them in place of the key.

  Savers of arrays write words, where a typed key fails or cannot be restored. The number of words
  says which generator the key belongs to.

  Raises:
    UserError: a key of a generator that `check_generator` refuses.

  >>> key = jax.random.key(0)
  >>> bool(from_words(to_words(key)) == key)
  True
  """
  return jnp.copy(jax.random.key_data(check_generator(key, name)))


def from_words(words: Any, name: str = "key") -> jax.Array:
  """Returns the typed key with these words; a typed key is returned unchanged.

  Raises UserError for words that are not those of a key.
  """
  if trees.is_key(words):
    return words
  dtype, shape = jnp.result_type(words), jnp.shape(words)
  if dtype != jnp.uint32 or not shape or shape[-1] not in _GENERATORS:
    raise UserError(
      f"{dtype}{list(shape)}: must be the uint32 words of a key; change nothing in a "
      "state, and restore it whole",
      field=name,
    )
  return jax.random.wrap_key_data(jnp.asarray(words), impl=_GENERATORS[shape[-1]])


# --- draws


def noise_dtype(dtype: DType, name: str = "tree") -> Any:
  """Returns the type in which numbers of `dtype` get noise: `dtype`, but at least float32.

  Raises UserError for a `dtype` that is not real floating-point.

  >>> noise_dtype(jnp.bfloat16)
  dtype('float32')
  """
  if dtype not in FLOATS:
    raise UserError(
      f"holds {dtype}; noise is added to real floating-point numbers only", field=name
    )
  return trees.wide_dtype(jax.dtypes.canonicalize_dtype(dtype))


def as_floats(tree: ArrayTree) -> Any:
  """Casts each leaf to the type in which it gets noise; UserError for a leaf that is not floats."""
  leaves, treedef = jax.tree.flatten(tree)
  for place, leaf in enumerate(map(jnp.asarray, leaves)):
    leaves[place] = leaf.astype(noise_dtype(leaf.dtype))
  return treedef.unflatten(leaves)


def check_scale(scale: ArrayLike, dtype: DType, name: str = "std") -> Any:
  """Returns the scale as a float; a traced scale is returned unchecked.

  Raises UserError if noise of this scale would overflow or vanish in `dtype`.

  >>> check_scale(1e37, jnp.float32)  # doctest: +ELLIPSIS
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: std=1e+37: must be in [4.93e-32, 1.33e+36], or its noise ...
  """
  if isinstance(scale, core.Tracer):
    return scale
  number: Any = scale
  if isinstance(number, jax.Array | np.ndarray) and number.ndim == 0:
    number = number.item()
  info = jnp.finfo(dtype)
  least = float(info.tiny) * 2.0 ** (info.nmant - 1)
  # Noise reaches 134 scales (`distributions.WORDS`), which is below 2^8.
  most = float(info.max) / 2.0**8
  if isinstance(number, float) and least <= number <= most:
    return number if isinstance(number, closed_over.Number) else float(number)
  validate.positive(**{name: number})
  if not least <= number <= most:
    raise UserError(
      f"must be in [{least:.3g}, {most:.3g}], or its noise leaves the range of "
      f"{jnp.dtype(dtype)}",
      field=name,
      value=number,
    )
  return float(number)


def _tail_exponential(high: jax.Array, low: jax.Array) -> jax.Array:
  """Returns -log of a uniform number in (0, 1] with these 64 bits: at most 45.1."""
  uniform = (
    high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * 2.0**-32
  ) * 2.0**-32
  return -jnp.log(jnp.minimum(uniform, 1.0))


def _cosine(turn: jax.Array) -> jax.Array:
  """Returns the cosine of a uniform angle, from 32 bits: a random sign times sin(pi x / 2)."""
  # x is uniform in (0, 1]; near 0 it has the full precision of floats, so no cosine is 0.
  x = ((turn << 1).astype(jnp.float32) + 1) * 2.0**-32
  square = x * x
  value = jnp.float32(_SINE[-1])
  for coefficient in _SINE[-2::-1]:
    # All values are above -2, so the maximum changes none. Without it a compiler may round product
    # and sum once, and another program would draw other last bits.
    value = jnp.maximum(value * square, -2.0) + jnp.float32(coefficient)
  return jnp.where(turn >> 31, -x, x) * value


def _short_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Draws N(0, 1) in float32 from 96 bits (Box and Muller 1958), with tails up to 9.49."""
  high, low, turn = distributions.three_words(key, shape)
  radius = jnp.sqrt(2 * _tail_exponential(high, low))
  # A polynomial takes a tenth of the time of `jnp.cos`.
  if distributions.is_ordinary(key):
    return radius * _cosine(turn)
  # Keys of other generators keep the bits of their noise.
  angle = 2 * jnp.pi * ((turn >> 8).astype(jnp.float32) + 0.5) * 2.0**-24
  return radius * jnp.cos(angle)


def _per_leaf(
  sample: Callable, key: jax.Array, like: Any, scale: Any, name: str, short: bool = False
) -> Any:
  """Draws noise for each leaf by sample(words, two more words, dtype), times `scale`.

  With `short`, float32 leaves get normal noise from 96 bits instead. This is faster, and has
  shorter tails."""
  leaves, treedef = jax.tree.flatten(like)
  dtypes = [
    noise_dtype(getattr(leaf, "dtype", None) or jnp.result_type(leaf), "like")
    for leaf in leaves
  ]
  three = short and set(dtypes) <= {jnp.dtype(jnp.float32)}
  keys = distributions.keys_of_leaves(
    check_generator(key), max(len(leaves), 1), short=three
  )
  drawn = []
  for own_key, leaf, dtype in zip(keys, leaves, dtypes):
    factor = closed_over.within(check_scale(scale, dtype, name), dtype)
    shape = jnp.shape(leaf)
    if short and dtype == jnp.float32:
      unit = _short_normal(own_key, shape)
    else:
      unit = sample(*distributions.words(own_key, shape), dtype)
    drawn.append((factor * unit).astype(dtype))
  return treedef.unflatten(drawn)


def gaussian(
  key: jax.Array, like: ArrayTree, std: float, *, long_tails: bool = False
) -> Any:
  """Draws independent N(0, std^2) noise for every scalar of `like`, in its type, at least float32.

  Tails reach 9.49 std in float32 and 16.3 std in float64; with `long_tails` 16.3 std in both.

  Raises UserError for leaves that are not real floats, or a std so large or small that noise would
  overflow or vanish.

  >>> drawn = gaussian(key_from_bytes(bytes(32)), {"w": jnp.zeros(3, jnp.bfloat16)}, 2.0)
  >>> drawn["w"].shape, drawn["w"].dtype
  ((3,), dtype('float32'))
  """
  return _per_leaf(distributions.normal, key, like, std, "std", short=not long_tails)


def laplace(key: jax.Array, like: ArrayTree, scale: float) -> Any:
  """Draws independent Laplace noise for every scalar of `like`, with tails up to 133 scales."""
  sample = lambda words, more, dtype: distributions.laplace(words, more[0], dtype)
  return _per_leaf(sample, key, like, scale, "scale")


def gumbel(key: jax.Array, like: ArrayTree, scale: float = 1.0) -> Any:
  """Draws independent Gumbel noise of `scale` for every scalar of `like`."""
  sample = lambda words, more, dtype: distributions.gumbel(words, dtype)
  return _per_leaf(sample, key, like, scale, "scale")


def exponential(key: jax.Array, like: ArrayTree, scale: float = 1.0) -> Any:
  """Draws independent exponential noise of mean `scale` for every scalar of `like`."""
  sample = lambda words, more, dtype: distributions.exponential(words, dtype)
  return _per_leaf(sample, key, like, scale, "scale")


def bernoulli(key: jax.Array, prob: float, shape: tuple[int, ...]) -> jax.Array:
  """Draws coins [shape] whose probability is `prob`, rounded up to a multiple of 2^-128.

  Comparing with a uniform float32 would round `prob` to a multiple of 2^-23.

  >>> int(bernoulli(key_from_bytes(bytes(32)), 1.0, (5,)).sum())
  5
  """
  validate.number_in(0, 1, prob=prob)
  # A rational number is kept as it is, since `distributions.bernoulli` reads it exactly.
  prob = prob if isinstance(prob, numbers.Rational) else float(prob)
  first = jax.random.bits(check_generator(key), shape, jnp.uint32)
  more = (distributions.BERNOULLI_WORDS - 1, *shape)
  more_words = jax.random.bits(jax.random.fold_in(key, 1), more, jnp.uint32)
  return distributions.bernoulli((first, *more_words), prob)


def integers(key: jax.Array, shape: tuple[int, ...], span: ArrayLike) -> jax.Array:
  """Draws int32 [shape], uniform on 0 .. span - 1; a probability is off by a factor <= 1 + 2^-97.

  Args:
    span: number from 1 to 2^31 - 1 for all draws, or an array [shape] with one for each draw.

  >>> integers(key_from_bytes(bytes(32)), (5,), 1).tolist()
  [0, 0, 0, 0, 0]

  Raises:
    UserError: spans of another shape, or outside of the range if their values are known.
  """
  if jnp.ndim(span) and jnp.shape(span) != tuple(shape):
    raise UserError(
      f"has shape {jnp.shape(span)}; must be one for each of {shape}", field="span"
    )
  if not isinstance(span, core.Tracer):
    known = np.asarray(span)
    if known.size and not (
      known.dtype.kind in "iu" and known.min() >= 1 and known.max() < 2**31
    ):
      raise UserError("must be integers in [1, 2^31 - 1]", field="span", value=span)
  words = (distributions.INTEGER_WORDS, *shape)
  bits = jax.random.bits(check_generator(key), words, jnp.uint32)
  return distributions.integers(tuple(bits), span)


# --- the grid


def grid_step(std: float, bits: int = 4) -> float:
  """Returns the step of the public grid: the largest power of two up to std / 2^bits.

  >>> grid_step(1.0), grid_step(1.9), grid_step(1.0, bits=12)
  (0.0625, 0.0625, 0.000244140625)
  """
  validate.positive(std=std)
  validate.integer_in(0, 1074, bits=bits)
  # frexp gives floor(log2 std) + 1 exactly, where a logarithm could round to the next integer.
  step = math.ldexp(1.0, math.frexp(std)[1] - 1 - int(bits))
  if step == 0:
    raise UserError("too small for a grid", field="std", value=std)
  return step


def check_step(dtype: DType | None = None, /, **named: float) -> None:
  """Raises UserError unless each value is a power of two, well within `dtype`'s range if given.

  >>> check_step(step=0.25)
  """
  validate.positive(**named)
  for name, step in named.items():
    if math.frexp(step)[0] != 0.5:
      raise UserError(
        "must be a power of two, so that rounding is exact", field=name, value=step
      )
    if dtype is None:
      continue
    info = jnp.finfo(dtype)
    if not 2.0**8 * float(info.tiny) <= step <= 2.0**-8 * float(info.max):
      raise UserError(f"outside the range of {dtype}", field=name, value=step)


def snap(tree: ArrayTree, step: float) -> Any:
  """Rounds every scalar to the nearest multiple of `step`, a power of two; halves go up.

  The result is exact. A number beyond 2^23 steps in float32, 2^52 in float64, is a multiple already
  and is kept. All halves go up, so that equally many floats round to each multiple. With halves to
  even, every second multiple would get one more float at each end. Then a rounded sum would
  reveal something of its last bits before rounding.

  >>> snap(jnp.array([0.26, -0.3, 1e30]), 0.25)
  Array([ 2.5e-01, -2.5e-01,  1.0e+30], dtype=float32)
  """
  check_step(step=step)
  # A Python float does not change the type of a leaf.
  step = float(step)

  def rounded(leaf):
    noise_dtype(leaf.dtype)
    check_step(leaf.dtype, step=step)
    info = jnp.finfo(leaf.dtype)
    limit = min(step * 2.0**info.nmant, float(info.max))
    steps = leaf / step
    # `steps + 0.5` could be rounded. The difference to the floor is exact near a half.
    below = jnp.floor(steps)
    nearest = below + (steps - below >= 0.5)
    return jnp.where(jnp.abs(leaf) <= limit, nearest * step, leaf)

  return jax.tree.map(rounded, jax.tree.map(jnp.asarray, tree))
