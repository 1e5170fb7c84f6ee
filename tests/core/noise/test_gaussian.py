"""The law of the noise (both ways) and the discipline of its keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from dpjax import noise
from dpjax.noise import gaussian, source
from dpjax.noise.gaussian import state_at


def _draw(std, size=20_000, key=0):
  state = gaussian.init(jax.random.key(key))
  tree, _ = noise.add_gaussian(state, {"w": jnp.zeros(size), "b": jnp.zeros(size)}, std)
  return np.asarray(tree["w"]), np.asarray(tree["b"])


@pytest.mark.slow
def test_the_law_is_normal_with_the_right_std_and_no_other():
  sample = _draw(1.7)[0]
  assert stats.kstest(sample / 1.7, "norm").pvalue > 1e-3
  for wrong in (2 / 3, 0.9, 1.1, 3 / 2):
    assert stats.kstest(sample / (1.7 * wrong), "norm").pvalue < 1e-6


@pytest.mark.slow
def test_p17_leaves_steps_and_keys_are_uncorrelated():
  first, second = _draw(1.0)
  other_key = _draw(1.0, key=1)[0]
  state = gaussian.init(jax.random.key(0))
  _, state = noise.add_gaussian(state, {"w": first, "b": second}, 1.0)
  later = np.asarray(noise.add_gaussian(state, jnp.zeros(20_000), 1.0)[0])
  for a, b in ((first, second), (first, other_key), (first, later), (second, later)):
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(20_000)
  assert np.corrcoef(first, first)[0, 1] == pytest.approx(1.0)  # the test can fail


@pytest.mark.slow
def test_p20_noise_is_at_least_float32():
  state = gaussian.init(jax.random.key(0))
  out, _ = noise.add_gaussian(state, jnp.zeros(1000, jnp.bfloat16), 1e-3)
  assert out.dtype == jnp.float32
  assert np.unique(out).size > 950  # bfloat16 would have far fewer distinct values


def test_p35_donating_the_state_keeps_the_callers_key_and_moves_the_noise():
  key = jax.random.key(0)
  step = jax.jit(lambda s, x: noise.add_gaussian(s, x, 1.0), donate_argnums=0)
  one, state = step(gaussian.init(key), jnp.zeros(8))
  two, state = step(state, jnp.zeros(8))
  assert not np.allclose(one, two)
  again, _ = step(gaussian.init(key), jnp.zeros(8))  # the key is alive after donation
  np.testing.assert_array_equal(one, again)
  assert int(state.draws) == 2


@pytest.mark.slow
def test_the_state_alone_determines_the_next_draw():
  state = gaussian.init(jax.random.key(3))
  for _ in range(3):
    _, state = noise.add_gaussian(state, jnp.zeros(4), 1.0)
  rebuilt = state_at(jax.random.key(3), 3)
  a, _ = noise.add_gaussian(state, jnp.zeros(4), 1.0)
  b, _ = noise.add_gaussian(rebuilt, jnp.zeros(4), 1.0)
  np.testing.assert_array_equal(a, b)


def test_the_default_noise_has_tails_beyond_those_of_float32(monkeypatch):
  """Extreme bits must give extreme noise; jax.random.normal cannot pass 5.42."""
  smallest = lambda key, shape, dtype: jnp.zeros(shape, dtype)
  monkeypatch.setattr(jax.random, "bits", smallest)
  drawn = source.gaussian(jax.random.key(0), jnp.zeros(4), 1.0)
  assert float(jnp.abs(drawn).min()) > 9.0


def test_what_has_noise_keeps_its_bits_where_it_is_computed_once():
  odd = jnp.array([jnp.nan, jnp.inf, -jnp.inf, -0.0, 2e-38, 3.3e38, 0.1], jnp.float32)
  for once in (gaussian._compute_once, jax.jit(gaussian._compute_once)):
    np.testing.assert_array_equal(once(odd).view(np.uint32), odd.view(np.uint32))


@pytest.mark.slow
def test_an_optimizer_with_two_moments_has_its_noise_drawn_once():
  """XLA would repeat work of integers for each moment, and a word of noise is nothing else."""
  key = source.new_key()
  tx = optax.adam(0.1)

  def step(state, total, moments, sound):
    noisy, state = gaussian.add_gaussian(state, total, 1.0, sound=sound)
    return tx.update(noisy, moments), state

  total = jnp.zeros(300)
  arguments = (gaussian.init(key), total, tx.init(total), jnp.array(True))
  program = str(jax.jit(step).lower(*arguments).compile().as_text())
  # The noise is 120 shifts in one kernel, 40 for each word. Apart, the words of its radius were 80,
  # and each moment had another 40.
  shifts = [kernel.count(" shift-left(") for kernel in program.split("\n\n")]
  assert sorted(shifts)[-2] < 80 < 120 <= max(shifts)
