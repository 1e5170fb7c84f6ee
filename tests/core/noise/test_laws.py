"""The laws of the noise, driven bit by bit: ends, order, tails, resolution, both types.

A tail of probability 2^-32 cannot be drawn in a test, but it can be CONDITIONED on: with the
first words of u fixed, the rest of the bits draw from the law's tail, whose conditional law
is known exactly. So few draws test what lies 40 scales out, and a sampler that ends at 5.42
standard deviations is rejected.
"""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

from dpjax import noise
from dpjax.noise import distributions, gaussian, source
from dpjax.noise.correlated.draw import add_correlated, init
from tests import quick_compile
from tests.refuses import refuses

_DTYPES = (jnp.float32, jnp.float64)
_N = 4_000
_MOST = 2**32 - 1


def _random_words(count, seed=0, size=_N):
  bits = np.random.default_rng(seed).integers(0, 2**32, (count, size), np.uint32)
  return tuple(jnp.asarray(row) for row in bits)


def _words(*firsts, seed=0, size=_N):
  """u with these first words and random bits after them."""
  fixed = tuple(jnp.full(size, first, jnp.uint32) for first in firsts)
  return fixed + _random_words(distributions.WORDS - len(firsts), seed, size)


def _number(words):
  """u itself, to its last bit."""
  value = sum(
    int(word) << (32 * (distributions.WORDS - 1 - i)) for i, word in enumerate(words)
  )
  return (mpmath.mpf(value) + mpmath.mpf(0.5)) / 2 ** (32 * distributions.WORDS)


@pytest.mark.cases(slow=["float64"], long=...)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_every_number_of_bits_gives_the_exact_exponential(x64, dtype):
  """Against 80 digits: from the smallest u to the largest, at full relative precision."""
  rows = [
    (0,) * 6, (0, 0, 0, 0, 0, 1), (0, 0, 0, 7, 9, 3), (0, 0, 1, _MOST, 0, 0), (0, 1, 5, 0, 0, 0),
    (1, 0, 0, 0, 0, 0), (2**20, 3, 0, 0, 0, 1), (2**31 - 1, _MOST, 0, 0, 0, 0),
    (2**31, 0, 0, 0, 0, 0), (2**32 - 2**24, 1, 0, 0, 0, 0), (_MOST, 5, 0, 0, 0, 0),
    (_MOST, _MOST, 2**31, 0, 0, 0), (_MOST, _MOST, _MOST, 17, 0, 0),
  ]  # fmt: skip
  words = tuple(jnp.asarray(column, jnp.uint32) for column in zip(*rows))
  found = np.asarray(distributions.exponential(words, dtype), np.float64)
  with mpmath.workdps(80):
    exact = np.array([float(-mpmath.log(_number(row))) for row in rows])
  np.testing.assert_allclose(found, exact, rtol=8 * float(jnp.finfo(dtype).eps))


@pytest.mark.long
@pytest.mark.parametrize("dtype", _DTYPES)
def test_the_ends_and_the_order(x64, dtype):
  zeros, ones = ((jnp.uint32(w),) * distributions.WORDS for w in (0, _MOST))
  positive, negative = jnp.uint32(_MOST), jnp.uint32(0)
  assert float(distributions.laplace(zeros, positive, dtype)) > 133
  assert float(distributions.laplace(zeros, negative, dtype)) < -133
  assert (
    float(distributions.gumbel(zeros, dtype)) < -4.8
    and float(distributions.gumbel(ones, dtype)) > 87
  )
  turns = ((jnp.uint32(0),) * 2, (jnp.uint32(2**31),) * 2)  # cos = 1, -1
  top, bottom = (float(distributions.normal(zeros, turn, dtype)) for turn in turns)
  assert top > 16.3 and bottom < -16.3
  firsts = np.unique(np.geomspace(1, _MOST, 500).astype(np.uint32))
  middle = jnp.full(firsts.size, 2**31, jnp.uint32)
  ladder = (jnp.asarray(firsts), *[middle] * (distributions.WORDS - 1))
  falling = np.diff(np.asarray(distributions.exponential(ladder, dtype), np.float64))
  assert (falling < 0).all()


@pytest.mark.cases(slow=["2-float64"], long=...)
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("zero_words", [0, 1, 2])
def test_conditional_tails_are_exponential_and_no_other(x64, dtype, zero_words):
  """Given 32 k zero bits, E - 32 k log 2 is exponential again: at 22 and at 44 scales."""
  words = _words(*(0,) * zero_words)
  beyond = np.asarray(distributions.exponential(words, dtype), np.float64)
  beyond = beyond - 32 * zero_words * np.log(2)
  assert stats.kstest(beyond, "expon").pvalue > 1e-3
  for wrong in (2 / 3, 3 / 2):
    assert stats.kstest(beyond * wrong, "expon").pvalue < 1e-6
  assert stats.kstest(np.minimum(beyond, 1.0), "expon").pvalue < 1e-6  # a cut tail
  if zero_words == 2:
    assert beyond.min() + 64 * np.log(2) > 44  # every draw lies beyond 44 scales


def _tail_normals(draw, zeros):
  """|N(0, 1)| given 32 bits of E that are zero: its CDF by numerical integration."""
  sample = np.abs(np.asarray(draw(_words(*(0,) * zeros)), np.float64))
  least = 64 * zeros * np.log(2)  # 2 E
  radius = np.sqrt(least + 2 * stats.expon.ppf((np.arange(4000) + 0.5) / 4000))
  cdf = lambda x: np.array(
    [
      1 - np.mean(np.arccos(np.minimum(1, v / radius)) * 2 / np.pi)
      for v in np.atleast_1d(x)
    ]
  )
  return sample, cdf


@pytest.mark.cases(long=["float32"])
@pytest.mark.parametrize("dtype", _DTYPES)
def test_normal_tails_follow_their_conditional_law(quick_x64, dtype):
  turn = _random_words(2, seed=9)
  draw = lambda words: distributions.normal(words, turn, dtype)
  for zeros in (1, 2):
    sample, cdf = _tail_normals(draw, zeros)
    assert sample.max() > (6.6, 9.4)[zeros - 1]
    assert stats.kstest(sample[:1000], cdf).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
      assert stats.kstest(sample[:1000] * wrong, cdf).pvalue < 1e-6
    assert stats.kstest(np.minimum(sample[:1000], 5.42), cdf).pvalue < 1e-6


def test_a_sampler_that_ends_at_5_42_is_rejected_by_the_same_test():
  """jax.random.normal's own map from bits to numbers, given what lies beyond 2^-32."""
  bits = np.random.default_rng(0).integers(0, 2**32, 1000, np.uint32)
  uniform = np.nextafter(np.float32(-1), 0) + np.float32(2) * (bits >> 9) * np.float32(
    2**-23
  )
  ended = np.abs(np.asarray(jnp.sqrt(2.0) * jax.lax.erf_inv(jnp.asarray(uniform))))
  assert ended.max() < 5.43
  _, cdf = _tail_normals(lambda words: jnp.zeros(1), 1)
  assert stats.kstest(ended, cdf).pvalue < 1e-6


@pytest.mark.slow
def test_the_training_noise_has_normal_tails_beyond_nine(monkeypatch):
  """float32 `gaussian`, with its first word driven to zero."""
  real = jax.random.bits

  def driven(key, shape, dtype):
    drawn = real(key, shape, dtype)
    return drawn.at[0].set(0) if shape[0] == 3 else drawn

  monkeypatch.setattr(jax.random, "bits", driven)
  draw = lambda words: source.gaussian(jax.random.key(0), jnp.zeros(_N), 1.0)
  sample, cdf = _tail_normals(draw, 1)
  assert sample.max() > 6.6
  assert stats.kstest(sample[:1000], cdf).pvalue > 1e-3
  assert stats.kstest(np.minimum(sample[:1000], 5.42), cdf).pvalue < 1e-6


_ORDINARY = source.key_from_bytes(bytes(range(16)))
# Two Gaussian and two Laplace numbers of this key.
_RECORDED = [
  -1.0787420272827148,
  -0.41253817081451416,
  1.720413327217102,
  0.6147293448448181,
]


@pytest.mark.cases(
  slow=[
    "laplace-law1-float32-seed",
    "laplace-law1-float64-seed",
    "gaussian-law0-float64-ordinary",
    "gaussian-law0-float32-ordinary",
    "gaussian-law0-float32-seed",
    "gaussian-law0-float64-seed",
    "laplace-law1-float32-ordinary",
  ]
)
@pytest.mark.parametrize("key", [jax.random.key(1), _ORDINARY], ids=["seed", "ordinary"])
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(
  ("draw", "law"),
  [
    (source.gaussian, stats.norm),
    (source.laplace, stats.laplace),
    (source.gumbel, stats.gumbel_r),
    (source.exponential, stats.expon),
  ],
)
def test_every_draw_has_its_law_and_no_other(quick_x64, dtype, draw, law, key):
  sample = np.asarray(draw(key, jnp.zeros(60_000, dtype), 2.0)) / 2
  assert stats.kstest(sample, law.cdf).pvalue > 1e-3
  for wrong in (2 / 3, 0.9, 1.1, 3 / 2):
    assert stats.kstest(sample * wrong, law.cdf).pvalue < 1e-6


def test_noise_of_an_ordinary_key_is_a_function_of_its_words():
  """Box and Muller in float64, from the words of JAX's own generator; and a wrong word."""
  drawn = source.gaussian(_ORDINARY, jnp.zeros(2000), 1.0)
  keys = jax.random.split(jax.random.split(_ORDINARY, 1)[0], 3)
  high, low, turn = (np.asarray(jax.random.bits(key, (2000,)), float) for key in keys)
  radius = np.sqrt(-2 * np.log((high + (low + 0.5) * 2.0**-32) * 2.0**-32))
  sign = np.where(turn >= 2**31, -1, 1)
  sine = lambda x: np.sin(np.pi / 2 * (x % 2**31 + 0.5) * 2.0**-31)
  np.testing.assert_allclose(drawn, radius * sign * sine(turn), rtol=2e-5, atol=2e-5)
  assert not np.allclose(drawn, radius * sign * sine(low), atol=0.5)


@pytest.mark.slow
def test_split_keys_have_the_bits_of_jax():
  words = jax.random.key_data(_ORDINARY)
  of_jax = jax.random.wrap_key_data(words, impl="threefry4x32")

  def split(key):
    return jax.random.key_data(jax.random.split(key, (2, 3)))

  both = (split(_ORDINARY), split(of_jax))
  np.testing.assert_array_equal(*both)
  several = jax.vmap(split)(jax.random.split(_ORDINARY, 2))
  alone = [split(key) for key in jax.random.split(_ORDINARY, 2)]
  np.testing.assert_array_equal(several, jnp.stack(alone))


def test_noise_of_an_ordinary_key_keeps_its_numbers():
  """Numbers recorded when ordinary keys came: a run goes on with the noise that it had."""
  drawn = [draw(_ORDINARY, jnp.zeros(2), 2.0) for draw in (source.gaussian, source.laplace)]
  np.testing.assert_allclose(np.concatenate(drawn), _RECORDED, rtol=1e-6)


def test_the_cosine_of_a_turn_is_exact_to_a_few_units_in_the_last_place():
  turn = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32)
  turn[:4] = [0, 2**31, 2**32 - 1, 2**31 - 1]
  exact = np.where(turn >> 31, -1, 1) * np.sin(np.pi / 2 * (turn % 2**31 + 0.5) * 2.0**-31)
  found = np.asarray(source._cosine(jnp.asarray(turn)), float)
  np.testing.assert_allclose(found, exact, rtol=4e-7)
  assert (found != 0).all()


@pytest.mark.slow
def test_words_of_an_ordinary_key_are_not_stored():
  def temporaries(key):
    tree = jnp.zeros(2**16)
    step = jax.jit(lambda state, tree: noise.add_gaussian(state, tree, 1.0))
    held = step.lower(gaussian.init(key), tree).compile().memory_analysis()
    return held.temp_size_in_bytes / tree.nbytes

  assert temporaries(_ORDINARY) < 0.1
  # JAX's default generator stores them on a CPU.
  assert temporaries(jax.random.key(0)) > 3


@pytest.mark.cases(slow=["0.999999999999"], long=...)
@pytest.mark.parametrize("prob", [1e-12, 0.3, 1 - 1e-12])
def test_coins_are_compared_exactly(prob):
  """Just below and just above the probability, at the 100th bit."""
  scaled = int(prob * 2**60) << 68
  for offset, want in ((-1, True), (1 << 20, False)):
    words = tuple(
      jnp.uint32(((scaled + offset) >> (96 - 32 * i)) & _MOST) for i in range(4)
    )
    exact = int(prob * 2**60) / 2**60
    assert bool(distributions.bernoulli(words, exact)) is want
  drawn = source.bernoulli(jax.random.key(0), 0.3, (40_000,))
  assert abs(float(drawn.mean()) - 0.3) < 5 * np.sqrt(0.21 / 40_000)


@pytest.mark.slow
def test_rare_coins_are_not_those_of_a_float32_uniform(monkeypatch):
  """P(uniform < 1e-12) is 2^-23 in float32: given a first word of zero it must be 0.004."""
  real = jax.random.bits
  monkeypatch.setattr(
    jax.random,
    "bits",
    lambda key, shape, dtype: real(key, shape, dtype) * (shape != (9000,)),
  )
  drawn = source.bernoulli(jax.random.key(0), 1e-12, (9000,))
  assert 0.002 < float(drawn.mean()) < 0.007


# --- the resolution of what it is added to


_KEYS = {
  "plain": jax.random.key(4),
  "ordinary": _ORDINARY,
  "release": source.key_from_bytes(bytes(range(32))),
}


@pytest.mark.cases(long=["laplace"])
@pytest.mark.parametrize("draw", [source.gaussian, source.laplace])
def test_float64_noise_has_random_bits_to_the_last(x64, draw):
  sample = np.asarray(draw(_KEYS["plain"], jnp.zeros(4_000, jnp.float64), 1.0))
  assert sample.dtype == np.float64
  assert np.mean(sample == sample.astype(np.float32)) < 0.01
  ordinary = sample[(np.abs(sample) > 1) & (np.abs(sample) < 2)]
  low = (ordinary.view(np.uint64) & 0xFFFF).astype(float) / 2**16
  assert stats.kstest(low, "uniform").pvalue > 1e-3
  coarse = ordinary.astype(np.float32).astype(np.float64)
  low = (coarse.view(np.uint64) & 0xFFFF).astype(float) / 2**16
  assert stats.kstest(low, "uniform").pvalue < 1e-6  # the old noise


@pytest.mark.cases(quick=["ordinary"], long=...)
@pytest.mark.parametrize("kind", _KEYS)
def test_one_output_does_not_tell_float64_neighbours_apart(x64, kind):
  """The attack on float32 noise: out - x must be a float32 number for the true x alone."""
  x = np.array([1.0, 1 + 2**-40, 1 / 3])
  state = gaussian.init(_KEYS[kind])
  out = np.asarray(noise.add_gaussian(state, jnp.asarray(x), 1.0)[0])
  coarse = lambda y: y == y.astype(np.float32)
  old = x + np.asarray(source.gaussian(_KEYS[kind], jnp.zeros(3, jnp.float32), 1.0), float)
  assert coarse(old - x).all() and not coarse(old - (x + 2**-41)).any()  # it was
  if kind == "release":
    step = source.grid_step(1.0)
    np.testing.assert_array_equal(out, np.round(out / step) * step)
  else:
    assert not coarse(out - x).any() and not coarse(out - (x + 2**-41)).any()


@pytest.mark.long
def test_float32_draws_are_those_of_published_runs(x64):
  """Numbers recorded before float64 and long tails came; also in a mixed tree."""
  tree = {"a": jnp.zeros(3, jnp.float32), "b": jnp.zeros(2, jnp.float64)}
  drawn = source.gaussian(jax.random.key(0), tree, 2.0)
  alone = source.gaussian(
    jax.random.key(0), {"a": jnp.zeros(3, jnp.bfloat16), "b": jnp.zeros(2)}, 2.0
  )
  np.testing.assert_array_equal(drawn["a"], alone["a"])
  assert drawn["a"].dtype == jnp.float32 and drawn["b"].dtype == jnp.float64
  with jax.enable_x64(False):
    narrow = source.gaussian(jax.random.key(0), {"a": jnp.zeros(3), "b": jnp.zeros(2)}, 2.0)
  np.testing.assert_array_equal(drawn["a"], narrow["a"])
  recorded = [0.11353043466806412, 2.1207871437072754, 3.2859718799591064]
  np.testing.assert_allclose(drawn["a"], recorded, rtol=1e-6)
  np.testing.assert_allclose(drawn["b"], narrow["b"], atol=1e-4)  # refined, not redrawn


def test_the_grid_holds_for_float64_beyond_the_limit_of_float32(x64):
  step = 0.0625
  x = jnp.asarray([2.0**30 + 1 / 3, 2.0**47 + 1.03125, -(2.0**40) - 0.01], jnp.float64)
  snapped = np.asarray(source.snap(x, step))
  np.testing.assert_array_equal(snapped, np.round(snapped / step) * step)
  assert np.abs(snapped - np.asarray(x)).max() <= step / 2
  huge = jnp.asarray([2.0**60, -1e300, jnp.inf], jnp.float64)
  np.testing.assert_array_equal(source.snap(huge, step), huge)


@pytest.mark.long
def test_leaves_coordinates_steps_and_laws_share_nothing(x64):
  size = 20_000
  draws = []
  for dtype in _DTYPES:
    tree = {"a": jnp.zeros(size, dtype), "b": jnp.zeros(size, dtype)}
    state = gaussian.init(jax.random.key(int(dtype == jnp.float64)))
    for _ in range(2):
      noisy, state = noise.add_gaussian(state, tree, 1.0)
      draws += [noisy["a"], noisy["b"]]
    laplace = source.laplace(jax.random.key(7), tree, 1.0)
    draws += [laplace["a"], laplace["b"]] if dtype == jnp.float64 else []
  draws = np.stack([np.asarray(x, np.float64) for x in draws])
  off = np.corrcoef(draws) - np.eye(len(draws))
  assert np.abs(off).max() < 5 / np.sqrt(size)
  lagged = [np.corrcoef(x[:-1], x[1:])[0, 1] for x in draws]
  assert np.abs(lagged).max() < 5 / np.sqrt(size)


# --- what is refused


_REFUSED = {
  "integers": (jnp.zeros(2, jnp.int32), 1.0),
  "bool": (jnp.zeros(2, bool), 1.0),
  "complex": (jnp.zeros(2, jnp.complex64), 1.0),
  "huge": (jnp.zeros(2), 1e38),
  "subnormal": (jnp.zeros(2), 1e-40),
  "negative": (jnp.zeros(2), -1.0),
  "nan": (jnp.zeros(2), float("nan")),
  "infinite": (jnp.zeros(2), float("inf")),
  "half, huge": (jnp.zeros(2, jnp.bfloat16), 1e38),
  "nested": ({"a": jnp.zeros(2), "b": jnp.zeros(2, jnp.int32)}, 1.0),
  "text": (jnp.zeros(2), "1"),
}


@pytest.mark.cases(long=[1, 9])
@pytest.mark.parametrize("name", _REFUSED)
def test_no_silent_result(name):
  tree, std = _REFUSED[name]
  state = gaussian.init(jax.random.key(0))
  correlation = noise.correlated.Independent()
  white = init(jax.random.key(0), correlation, jnp.zeros(2))
  # The names of the arguments for the arrays and for the size of the noise.
  for call, arrays, size in (
    (lambda: noise.add_gaussian(state, tree, std), "tree", "std"),
    (lambda: source.gaussian(jax.random.key(0), tree, std), "like", "std"),
    (lambda: source.laplace(jax.random.key(0), tree, std), "like", "scale"),
    (
      lambda: add_correlated(white, tree, std, correlation=correlation, num_steps=3),
      "tree",
      "std",
    ),
  ):
    with refuses(arrays if std == 1.0 else size):
      call()


@pytest.mark.long
def test_zero_size_leaves_zero_std_and_the_limits_of_std():
  empty = {"a": jnp.zeros((0, 3)), "b": jnp.zeros(2)}
  for key in _KEYS.values():
    noisy, _ = noise.add_gaussian(gaussian.init(key), empty, 1.0)
    assert noisy["a"].shape == (0, 3) and np.isfinite(noisy["b"]).all()
    assert noise.add_gaussian(gaussian.init(key), {}, 1.0)[0] == {}
  for draw, size in ((source.gaussian, "std"), (source.laplace, "scale")):
    with refuses(size, value=0.0):
      draw(jax.random.key(0), jnp.zeros(2), 0.0)
    for std in (1e36, 1e-31):  # as far as float32 goes
      drawn = np.asarray(draw(jax.random.key(0), jnp.zeros(5000), std), np.float64) / std
      assert np.isfinite(drawn).all() and np.unique(drawn).size > 4900


@pytest.mark.cases(slow=["65536", "65537", "8388607"], long=["1", "2", "3"])
@pytest.mark.parametrize("span", [1, 2, 3, 65536, 65537, 8388607, 3 * 2**29, 2**31 - 1])
def test_integers_are_the_whole_number_modulo_the_span(span):
  """All 128 bits, against Python's integers, in eager and in compiled code."""
  words = _random_words(distributions.INTEGER_WORDS, size=200)
  numbers = [
    sum(int(w) << 32 * (3 - i) for i, w in enumerate(bits)) for bits in zip(*words)
  ]
  expected = [number % span for number in numbers]
  with quick_compile.quickly():  # whole numbers have no roundings
    assert distributions.integers(words, span).tolist() == expected
    traced = jax.jit(distributions.integers)(words, jnp.full(200, span, jnp.uint32))
    assert traced.tolist() == expected and traced.dtype == jnp.int32
    few = [word[:3] for word in words]
    with jax.disable_jit():
      assert distributions.integers(few, span).tolist() == expected[:3]


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_drawn_integers_are_128_fresh_bits_each(shape):
  """Against Python, each with a span of its own: no word is used twice, none is left out."""
  spans = np.random.default_rng(0).integers(1, 2**31, shape, np.int64)
  bits = np.asarray(jax.random.bits(jax.random.key(5), (4, *shape), jnp.uint32), object)
  number = sum(bits[i] * 2 ** (32 * (3 - i)) for i in range(4))
  found = source.integers(jax.random.key(5), shape, spans)
  np.testing.assert_array_equal(found, np.asarray(number % spans.astype(object), np.int64))


@pytest.mark.parametrize("span", [0, -1, 2**31, 2**32, 1.5, np.array([3, 0, 5])])
def test_spans_that_integers_cannot_have_are_one_line(span):
  with refuses("span"):
    source.integers(jax.random.key(0), (3,), span)


def test_no_two_integers_share_their_bits():
  with refuses("span"):
    source.integers(jax.random.key(0), (1,), np.array([3, 4, 5]))
  with refuses("span"):
    source.integers(jax.random.key(0), (3,), np.array([3, 4]))


@pytest.mark.slow
def test_integers_above_two_to_the_sixteenth_are_uniform():
  """JAX's `randint` of 3 * 2^29 is below 2^30 in three of four draws instead of two of three."""
  span, draws = 3 * 2**29, 40_000
  below = lambda found: stats.binomtest(int((found < 2**30).sum()), draws, 2 / 3).pvalue
  assert below(source.integers(jax.random.key(0), (draws,), span)) > 1e-3
  assert below(jax.random.randint(jax.random.key(0), (draws,), 0, span)) < 1e-9


@pytest.mark.cases(slow=["seed"])
@pytest.mark.parametrize("key", [jax.random.key(1), _ORDINARY], ids=["seed", "ordinary"])
def test_every_program_draws_the_same_noise_to_the_last_bit(key):
  """Compilers may round a product and a sum once; then two machines, or a resume, would differ."""
  like = jnp.zeros((33, 7))
  compiled = jax.jit(lambda key: source.gaussian(key, like, 0.37))
  for step in range(4):
    own_key = jax.random.fold_in(key, step)
    np.testing.assert_array_equal(compiled(own_key), source.gaussian(own_key, like, 0.37))
