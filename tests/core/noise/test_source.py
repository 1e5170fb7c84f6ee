"""Release-mode noise: the cipher, the keys, the tails, the grid."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpjax import mechanisms, noise
from dpjax.noise import gaussian, source
from dpjax.validate import UserError
from tests.refuses import refuses

_KEY = source.key_from_bytes(bytes(range(32)))


def test_chacha20_block_is_that_of_rfc_8439_section_2_3_2():
  nonce = tuple(np.frombuffer(bytes.fromhex("000000090000004a00000000"), np.uint32))
  block = source.chacha20_blocks(jax.random.key_data(_KEY), jnp.uint32([1]), nonce)
  want = (
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
  )
  assert np.asarray(block[0], "<u4").tobytes().hex() == want


@pytest.mark.parametrize(("release", "bits"), [(False, 128), (True, 256)])
def test_p18_keys_come_from_the_operating_system(monkeypatch, release, bits):
  monkeypatch.setattr(source.secrets, "token_bytes", lambda n: bytes(range(n)))
  key = source.new_key(release=release)
  words = np.asarray(jax.random.key_data(key))
  assert words.dtype == np.uint32 and words.tobytes() == bytes(range(bits // 8))
  assert source.is_release(key) == release


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_p18_no_mechanism_draws_noise_by_a_key_that_is_no_cipher(impl):
  # What `jax.random.key(seed)` gives where jax_default_prng_impl is set, as on TPUs.
  key = jax.random.key(0, impl=impl)
  draws = {
    "gaussian": lambda key: mechanisms.Gaussian(1.0, 1.0)(key, jnp.ones(2)),
    "laplace": lambda key: source.laplace(key, jnp.ones(2), 1.0),
    "selection": lambda key: mechanisms.PermuteAndFlip(1.0, 1.0)(key, jnp.ones(2)),
    "coins": lambda key: source.bernoulli(key, 0.5, (2,)),
    "integers": lambda key: source.integers(key, (2,), 5),
    "statistics": lambda key: mechanisms.ChannelStatistics(2.0)(key, np.ones((2, 3))),
    "state": lambda key: gaussian.init(key),
  }
  for draw in draws.values():
    with refuses("key"):
      draw(key)
    with refuses("key"):
      jax.jit(draw)(key)


def test_a_text_is_no_choice_of_a_release():
  with refuses("release", value="no"):
    source.new_key(release="no")


def test_keys_that_are_no_ciphers_would_be_alike():
  key = jax.random.key(0, impl="unsafe_rbg")
  back = jax.random.fold_in(jax.random.fold_in(key, 1), 1)
  assert bool(back == key)


def test_a_release_key_has_no_seed():
  with pytest.raises(UserError, match="a release key has no seed"):
    jax.random.key(0, impl=source.IMPL)
  with pytest.raises(UserError, match="secret"):
    source.key_from_bytes(b"short")


def test_new_keys_differ():
  for release in (False, True):
    keys = [source.new_key(release=release) for _ in range(20)]
    assert len({gaussian.key_id(key) for key in keys}) == 20


@pytest.mark.long
def test_every_derived_stream_is_another():
  children = [_KEY, *jax.random.split(_KEY, 50), *(jax.random.fold_in(_KEY, i)
              for i in range(50))]  # fmt: skip
  firsts = {int(jax.random.bits(key, (), jnp.uint32)) for key in children}
  assert len(firsts) == len(children)
  assert jax.random.split(_KEY, (2, 3)).shape == (2, 3)


@pytest.mark.cases(quick=["uint32"], long=...)
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32])
def test_bits_are_uniform_and_reject_a_biased_bit(dtype):
  bits = np.asarray(jax.random.bits(_KEY, (40_000,), dtype))
  width = bits.dtype.itemsize * 8
  ones = np.array([((bits >> i) & 1).mean() for i in range(width)])
  assert np.abs(ones - 0.5).max() < 5 * 0.5 / np.sqrt(bits.size)
  biased = np.maximum(bits, np.roll(bits, 1))
  assert abs(((biased >> (width - 1)) & 1).mean() - 0.5) > 0.2


@pytest.mark.long
def test_64_bit_words_and_batched_keys(x64):
  bits = np.asarray(jax.random.bits(_KEY, (1000,), jnp.uint64))
  assert bits.dtype == np.uint64 and np.unique(bits).size == 1000
  keys = jax.random.split(_KEY, 3)
  batched = jax.vmap(lambda key: jax.random.bits(key, (4,), jnp.uint32))(keys)
  alone = [jax.random.bits(key, (4,), jnp.uint32) for key in keys]
  np.testing.assert_array_equal(batched, np.stack(alone))


@pytest.mark.cases(long=["laplace-law1"], slow=...)
@pytest.mark.parametrize(
  ("draw", "law"), [(source.gaussian, stats.norm), (source.laplace, stats.laplace)]
)
def test_noise_has_its_law_and_rejects_others(draw, law):
  x = np.asarray(draw(_KEY, jnp.zeros(200_000), 1.5)) / 1.5
  assert stats.kstest(x, law.cdf).pvalue > 1e-3
  for wrong in (0.98, 1.02):
    assert stats.kstest(x * wrong, law.cdf).pvalue < 1e-3
  second = x**2 / law.var()
  kurtosis = float(law.stats(moments="k")) + 2
  assert abs(second.mean() - 1) < 5 * np.sqrt(kurtosis / x.size)


def test_tails_reach_far_beyond_those_of_float32(monkeypatch):
  """The standard float32 normal ends at 5.42: an output at 5.5 from one input is then
  impossible from another, whatever the epsilon."""
  lowest = np.nextafter(np.float32(-1), np.float32(0))
  end = float(jnp.sqrt(2.0) * jax.lax.erf_inv(jnp.float32(lowest)))
  assert -5.5 < end < -5.3  # the smallest number that jax.random.normal can give
  zeros = jnp.zeros((), jnp.uint32)
  assert 9.4 < float(jnp.sqrt(2 * source._tail_exponential(zeros, zeros))) < 9.6
  ones = jnp.uint32(2**32 - 1)
  assert float(source._tail_exponential(ones, ones)) == 0.0  # and no NaN at the other end


def test_the_exponential_behind_both_has_exact_quantiles_in_the_tail():
  high = jnp.asarray([2**31, 2**20, 2**4, 0], jnp.uint32)
  low = jnp.asarray([0, 0, 0, 2**16], jnp.uint32)
  want = np.log(2.0) * np.array([1, 12, 28, 48])
  np.testing.assert_allclose(source._tail_exponential(high, low), want, rtol=1e-5)


@pytest.mark.slow
def test_outputs_lie_on_a_grid_that_the_data_do_not_move():
  """Sums that differ in their last bits give the same set of possible outputs: multiples of
  a power of two fixed by the standard deviation alone. Ordinary noise does not."""
  std, step = 0.7, source.grid_step(0.7)
  assert std / 32 < step <= std / 16
  state = gaussian.init(_KEY)
  for shift in (0.0, 1 / 3, 1e-6):
    out, state = noise.add_gaussian(state, jnp.full(5000, shift), std)
    cells = np.asarray(out, np.float64) / step
    np.testing.assert_array_equal(cells, np.round(cells))
  plain, _ = noise.add_gaussian(
    gaussian.init(jax.random.key(0)), jnp.full(5000, 1 / 3), std
  )
  cells = np.asarray(plain, np.float64) / step
  assert np.mean(cells == np.round(cells)) < 0.01


@pytest.mark.slow
def test_rounding_costs_almost_nothing_and_is_unbiased():
  out, _ = noise.add_gaussian(gaussian.init(_KEY), jnp.full(400_000, 0.3), 1.0)
  x = np.asarray(out, np.float64) - 0.3
  assert abs(x.std() - 1) < 5 / np.sqrt(2 * x.size)
  assert abs(x.mean()) < 5 / np.sqrt(x.size)


@pytest.mark.cases(quick=["7.152557373046875e-07"], long=...)
@pytest.mark.parametrize("shift", [0.0, 2.0**-21, 3 * 2.0**-22])
def test_every_multiple_gets_as_many_floats_whatever_the_value(shift):
  """Halves to even would give 2,049 and 2,047 in turns, and by 2^-21, half of what the floats
  there are apart, exchange the two: a value a ten-millionth of the noise away is told."""
  noise_floats = jnp.float32(8) + jnp.arange(2**15, dtype=jnp.float32) * 2.0**-20
  sums = noise_floats + jnp.float32(shift)
  count = lambda out: np.unique(out, return_counts=True)[1][1:-1]
  assert set(count(source.snap(sums, 2.0**-9))) == {2048}
  assert set(count(source.snap(-sums, 2.0**-9))) == {2048}
  assert len(set(count(jnp.round(sums / 2.0**-9)))) > 1


def test_halves_go_up_on_both_sides_of_zero_and_next_to_them():
  under = np.nextafter(np.float32(0.5), np.float32(0))
  x = jnp.asarray([0.5, -0.5, 1.5, 2.5, -2.5, under, -under, -1e-30, 0.0, 8388607.5])
  expected = [1, 0, 2, 3, -2, 0, 0, 0, 0, 8388608]
  np.testing.assert_array_equal(source.snap(x, 1.0), expected)


@pytest.mark.slow
def test_snap_is_exact_idempotent_and_keeps_what_is_too_large():
  x = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)
  once = source.snap(x, 0.125)
  np.testing.assert_array_equal(source.snap(once, 0.125), once)
  assert float(jnp.abs(once - x).max()) <= 0.0625
  huge = jnp.asarray([3e38, -1e9, jnp.inf])
  np.testing.assert_array_equal(source.snap(huge, 0.125), huge)
  with refuses("step"):
    source.snap(x, 0.1)
  with refuses("std", value=0):
    source.grid_step(0)


@pytest.mark.slow
def test_p17_steps_leaves_and_keys_share_no_noise_and_a_state_repeats():
  tree = {"a": jnp.zeros(3000), "b": jnp.zeros(3000)}
  first, state = noise.add_gaussian(gaussian.init(_KEY), tree, 1.0)
  second, _ = noise.add_gaussian(state, tree, 1.0)
  other, _ = noise.add_gaussian(gaussian.init(source.new_key(release=True)), tree, 1.0)
  draws = [first["a"], first["b"], second["a"], second["b"], other["a"]]
  off = np.corrcoef(np.stack(draws)) - np.eye(5)
  assert np.abs(off).max() < 5 / np.sqrt(3000)
  again, _ = noise.add_gaussian(gaussian.init(_KEY), tree, 1.0)
  np.testing.assert_array_equal(again["a"], first["a"])


@pytest.mark.long
def test_noise_of_a_release_key_survives_jit_and_float64_sums(x64):
  step = jax.jit(lambda state, tree: noise.add_gaussian(state, tree, 2.0))
  out, state = step(gaussian.init(_KEY), jnp.ones(10, jnp.float64))
  assert out.dtype == jnp.float64 and int(state.draws) == 1
  assert source.is_release(source.from_words(state.key))


def test_a_step_of_any_number_type_rounds_alike():
  """An int beyond 32 bits or a Fraction stopped in JAX, a float64 made float64 of float32."""
  x = jnp.array([0.3, -5.6])
  for step in (0.25, fractions.Fraction(1, 4), np.float32(0.25), np.float64(0.25)):
    out = source.snap(x, step)
    assert out.dtype == x.dtype and out.tolist() == [0.25, -5.5]
  assert source.snap(x, 2**40).tolist() == [0, 0]
  for wrong in (10**400, 3, None, "1"):
    with refuses("step"):
      source.snap(x, wrong)
  with refuses("bits", value=2.5):
    source.grid_step(1.0, bits=2.5)


def test_a_coin_takes_any_number():
  key = jax.random.key(0)
  for prob in (np.float32(1), fractions.Fraction(3, 3), 1):
    assert source.bernoulli(key, prob, (3,)).all()
  for wrong in ("a", None, [0.5], True, 1.1, math.nan):
    with refuses("prob"):
      source.bernoulli(key, wrong, (3,))
