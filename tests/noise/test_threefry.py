"""Bits that XLA fuses are those of `jax.random`, and leave no words in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import noise
from dpjax.noise import source, threefry
from dpjax.parallel import made_for, targets

_SEEDS = st.integers(0, 2**32 - 1)


def _same(one, other):
  assert one.dtype == other.dtype
  np.testing.assert_array_equal(one, other)


def _words(key):
  return jax.random.key_data(key)


@settings(max_examples=25, deadline=None)
@given(_SEEDS, st.sampled_from([(), (0,), (5,), (3, 1, 4)]), st.sampled_from([8, 16, 32]))
def test_bits_are_those_of_jax(seed, shape, width):
  key = jax.random.key(seed)
  kind = f"uint{width}"
  _same(
    jax.random.bits(threefry.fused(key), shape, kind), jax.random.bits(key, shape, kind)
  )


@settings(max_examples=25, deadline=None)
@given(_SEEDS, st.sampled_from([1, 3, (2, 3)]), st.integers(0, 2**32 - 1))
def test_derived_keys_are_those_of_jax(seed, shape, data):
  key = jax.random.key(seed)
  fused = threefry.fused(key)
  _same(_words(jax.random.split(fused, shape)), _words(jax.random.split(key, shape)))
  _same(_words(jax.random.fold_in(fused, data)), _words(jax.random.fold_in(key, data)))


def test_words_of_64_bits_are_those_of_jax(x64):
  key = jax.random.key(3)
  fused = threefry.fused(key)
  _same(jax.random.bits(fused, (7,), "uint64"), jax.random.bits(key, (7,), "uint64"))


def test_many_keys_at_once_have_their_own_streams():
  keys = jax.random.split(jax.random.key(1), 4)
  drawn = jax.vmap(lambda key: jax.random.bits(threefry.fused(key), (3,)))(keys)
  _same(drawn, jax.vmap(lambda key: jax.random.bits(key, (3,)))(keys))
  assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_generators_stay_what_they_are(impl):
  key = jax.random.key(0, impl=impl)
  assert threefry.fused(key) is key
  secret = source.key_from_bytes(bytes(32))
  assert threefry.fused(secret) is secret


def test_the_old_order_of_bits_is_left_to_jax():
  key = jax.random.key(0)
  with jax.threefry_partitionable(False):
    assert threefry.fused(key) is key


def test_noise_is_a_function_of_jax_s_words():
  key = jax.random.key(5)
  drawn = source.gaussian(key, jnp.zeros(1000), 1.0)
  high, low, turn = np.asarray(
    jax.random.bits(jax.random.split(key, 1)[0], (3, 1000)), np.float64
  )
  uniform = (high + (low + 0.5) * 2.0**-32) * 2.0**-32
  angle = 2 * np.pi * (turn // 2**8 + 0.5) * 2.0**-24
  np.testing.assert_allclose(
    drawn, np.sqrt(-2 * np.log(uniform)) * np.cos(angle), rtol=2e-5, atol=2e-5
  )


def test_no_words_stay_in_memory(monkeypatch):
  def temporaries():
    tree = jnp.zeros(2**16)
    # A function of its own each time: nothing traced is taken from a cache.
    step = jax.jit(lambda state, tree: noise.add_gaussian(state, tree, 1.0))
    held = step.lower(noise.init(jax.random.key(0)), tree).compile().memory_analysis()
    return held.temp_size_in_bytes / tree.nbytes

  assert temporaries() < 0.1
  monkeypatch.setattr(threefry, "fused", lambda key: key)
  assert temporaries() > 3


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_rows_for_a_tpu_are_those_for_a_cpu(shape):
  key = threefry.fused(jax.random.key(2))
  here = threefry.rows(key, 3, shape)
  with made_for.compiling_for(targets.parse("tpu:v5e:1x1")):
    for_tpu = threefry.rows(key, 3, shape)
  _same(jnp.stack(here), jnp.stack(for_tpu))
