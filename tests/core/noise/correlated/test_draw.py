"""Correlated noise: the law, the key discipline, and what happens beyond the last step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import noise
from dpjax.noise import NoiseShape, correlated, gaussian, source
from dpjax.noise.correlated import draw
from tests.refuses import refuses

_BANDED = correlated.BandedToeplitz((1.0, 0.6, 0.3))
_ALL = [
  correlated.Independent(),
  correlated.Tree(restart_every=4),
  _BANDED,
  correlated.BufferedToeplitz((0.3, 0.2), (0.9, 0.5)),
  correlated.InverseBanded((1.0, -0.5, -0.125), redraw=True),
]


def _rows(correlation, *, size, steps, key=None, std=1.0, **options):
  """[steps, size]: what is added to nothing."""
  key = jax.random.key(0) if key is None else key
  zeros = jnp.zeros(size)

  def step(state, _):
    noisy, state = draw.add_correlated(
      state, zeros, std, correlation=correlation, num_steps=steps, **options
    )
    return state, noisy

  start = draw.init(key, correlation, zeros)
  return np.asarray(jax.jit(lambda s: jax.lax.scan(step, s, None, length=steps)[1])(start))


def _deviation(rows, covariance):
  """Largest entry of the sample covariance's error, in standard errors."""
  size = rows.shape[1]
  sample = rows.astype(np.float64) @ rows.T / size
  diagonal = np.diag(covariance)
  error = np.sqrt((np.outer(diagonal, diagonal) + covariance**2) / size)
  return np.abs((sample - covariance) / error).max()


@pytest.mark.cases(slow=["BufferedToeplitz", "InverseBanded"], long=...)
@pytest.mark.parametrize("correlation", _ALL, ids=lambda c: type(c).__name__)
def test_the_covariance_is_that_of_c_inverse_and_of_nothing_else(correlation):
  steps, std = 9, 1.5
  rows = _rows(correlation, size=100_000, steps=steps, std=std)
  inverse = np.linalg.inv(correlated.matrix(correlation, steps))
  covariance = std**2 * inverse @ inverse.T
  assert _deviation(rows, covariance) < 5
  assert _deviation(rows, covariance * 1.05) > 6  # the right shape, too little noise
  if not isinstance(correlation, correlated.Independent):
    assert _deviation(rows, std**2 * np.eye(steps)) > 50


def test_a_schedule_scales_the_white_noise_of_its_step():
  factors = (1.0, 2.0, 0.5, 1.0)
  rows = _rows(_BANDED, size=100_000, steps=4, factors=factors)
  root = np.linalg.inv(correlated.matrix(_BANDED, 4)) @ np.diag(factors)
  assert _deviation(rows, root @ root.T) < 5
  wrong = np.diag(factors) @ np.linalg.inv(correlated.matrix(_BANDED, 4))
  assert _deviation(rows, wrong @ wrong.T) > 50


@pytest.mark.slow
def test_the_identity_draws_exactly_what_plain_noise_draws():
  tree = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(4)}
  plain = gaussian.init(jax.random.key(5))
  state = draw.init(jax.random.key(5), correlated.Independent(), tree)
  for _ in range(3):
    expected, plain = noise.add_gaussian(plain, tree, 0.7)
    found, state = draw.add_correlated(
      state, tree, 0.7, correlation=correlated.Independent(), num_steps=3
    )
    jax.tree.map(np.testing.assert_array_equal, expected, found)
  assert int(state.draws) == int(plain.draws) == 3


@pytest.mark.cases(quick=["Independent", "InverseBanded"], long=...)
@pytest.mark.parametrize("correlation", _ALL, ids=lambda c: type(c).__name__)
def test_p16_p35_a_resumed_state_goes_on_bit_for_bit_also_when_donated(correlation):
  tree = {"w": jnp.ones((5, 3))}

  def step(state):
    return draw.add_correlated(state, tree, 1.0, correlation=correlation, num_steps=9)

  run = functools.partial(jax.jit, donate_argnums=0)(step)
  whole, state = [], draw.init(jax.random.key(1), correlation, tree)
  for i in range(9):
    if i == 5:
      rest = jax.tree.map(np.asarray, (state.draws, state.memory))
      saved = (np.asarray(state.key), rest)
    noisy, state = run(state)
    whole.append(np.asarray(noisy["w"]))
  draws, memory = jax.tree.map(jnp.asarray, saved[1])
  state = draw.CorrelatedNoiseState(jnp.asarray(saved[0]), draws, memory)
  for expected in whole[5:]:
    noisy, state = run(state)
    np.testing.assert_array_equal(noisy["w"], expected)
  assert len({row.tobytes() for row in whole}) == 9  # no step repeats another's noise


@pytest.mark.slow
def test_p43_a_step_that_was_not_accounted_for_raises_or_is_nan():
  state = draw.init(jax.random.key(0), _BANDED, jnp.zeros(3))
  step = functools.partial(draw.add_correlated, correlation=_BANDED, num_steps=2)
  for _ in range(2):
    noisy, state = step(state, jnp.zeros(3), 1.0)
    assert np.isfinite(noisy).all()
  with refuses("step", value=2):
    step(state, jnp.zeros(3), 1.0)
  noisy, _ = jax.jit(lambda s: step(s, jnp.zeros(3), 1.0))(state)
  assert np.isnan(noisy).all()


@pytest.mark.slow
def test_release_keys_round_the_noisy_sum_to_a_public_grid():
  key = source.key_from_bytes(bytes(range(32)))
  rows = _rows(_BANDED, size=2000, steps=4, key=key, std=1.5, factors=(1.0, 1.0, 0.5, 1.0))
  grid = source.grid_step(1.5 * 0.5)
  np.testing.assert_array_equal(np.round(rows / grid) * grid, rows)
  assert len(np.unique(rows)) > 50
  coarser = source.grid_step(1.5)  # that of most steps, not of all
  assert not np.array_equal(np.round(rows / coarser) * coarser, rows)
  plain = _rows(_BANDED, size=2000, steps=4, std=1.5)
  assert not np.array_equal(np.round(plain / grid) * grid, plain)


def test_half_precision_sums_are_noised_in_float32():
  state = draw.init(jax.random.key(0), _BANDED, jnp.zeros(3, jnp.bfloat16))
  noisy, _ = draw.add_correlated(
    state, jnp.zeros(3, jnp.bfloat16), 1.0, correlation=_BANDED, num_steps=1
  )
  assert noisy.dtype == jnp.float32


def _shown(strategy, steps, entry):
  """Returns (how far equal gradients of norm 1 move C times the releases, std of its noise).

  An example takes part in step `steps` - 2, with `entry` in each coordinate. C times the releases
  is what an attacker looks at; all of it is post-processing.
  """
  dim = round(entry**-2)
  c = correlated.matrix(strategy, steps)
  seen = []
  for size in (0.0, entry):
    state = draw.init(jax.random.key(0), strategy, jnp.zeros(dim))
    releases = []
    for step in range(steps):
      term = jnp.full(dim, size if step == steps - 2 else 0.0, jnp.float32)
      noisy, state = draw.add_correlated(
        state, term, 1.0, correlation=strategy, num_steps=steps
      )
      releases.append(np.asarray(noisy, np.float64))
    seen.append(c @ np.array(releases))
  return np.linalg.norm(seen[1] - seen[0]), seen[0][-2:].std()


@pytest.mark.slow
def test_noise_that_grows_would_round_gradients_up_and_cannot_be_made():
  """With C of bands 1, 2 noise doubles in each step. In step 18 it has ulps of 2^-5, and gradients
  of .51 ulps in 3,936 coordinates became 1.3 times as long: at noise multiplier 1 and delta 1e-5
  11.5 was claimed for a Gaussian of 2.24, and it was one of 2.93, which is 16.2."""
  with refuses("coefficients[1]", value=2.0):
    correlated.BandedToeplitz((1.0, 2.0))
  growing = object.__new__(correlated.BandedToeplitz)
  object.__setattr__(growing, "coefficients", (1.0, 2.0))
  entry = 0.51 * 2.0**-5
  shift, std = _shown(growing, 20, entry)
  assert 0.95 < std < 1.05 and shift > 1.2 * np.hypot(1, 2)
  # The largest noise that can be made.
  shift, std = _shown(correlated.BandedToeplitz((1.0, 1.0)), 20, entry)
  assert 0.95 < std < 1.05 and shift < (1 + 1e-4) * np.hypot(1, 1)


def test_noise_of_a_million_times_the_size_does_not_come_back_in_a_later_step():
  factors = (1e6, 1.0)
  assert NoiseShape(schedule=factors).by_step
  with refuses("noise_schedule"):
    NoiseShape(schedule=factors, correlation=_BANDED)
