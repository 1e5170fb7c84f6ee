"""b-min-sep by simulation: its likelihood ratio against all sets of steps, one by one."""

import itertools
import math

import numpy as np
import pytest

from dpjax import accounting, sampling
from dpjax.accounting import monte_carlo
from dpjax.accounting.matrix import correlated_events, join
from dpjax.noise import correlated
from tests.refuses import refuses

_BANDED = correlated.BandedToeplitz((1.0, 0.6))
_WHITE = correlated.Independent()


def _chance(steps, num_steps, prob, steps_apart):
  """Of exactly these steps, by a walk over when the example is free."""
  rate = prob / (1 + (steps_apart - 1) * prob)
  total = 0.0
  for free in range(steps_apart):
    weight, lock = (rate if free else 1 - (steps_apart - 1) * rate), free
    for t in range(num_steps):
      if t < lock:
        weight *= t not in steps
      elif t in steps:
        weight, lock = weight * prob, t + steps_apart
      else:
        weight *= 1 - prob
    total += weight
  return total


@pytest.mark.parametrize("steps_apart", [2, 3])
def test_the_walk_is_the_sum_over_all_sets(steps_apart):
  num_steps, prob, noise = 6, 0.3, 0.7
  matrix = correlated.matrix(_BANDED, num_steps)
  columns = monte_carlo._columns(_BANDED, num_steps)
  run = monte_carlo._MinSep(columns, noise, prob, steps_apart)
  outputs = np.random.default_rng(0).standard_normal((num_steps + 2, 20)) * 2
  expected, mass = np.zeros(20), 0.0
  for chosen in itertools.product([0, 1], repeat=num_steps):
    steps = set(np.flatnonzero(chosen))
    chance = _chance(steps, num_steps, prob, steps_apart)
    image = matrix @ np.array(chosen) / noise
    expected += chance * np.exp(image @ outputs[:num_steps] - image @ image / 2)
    mass += chance
  assert mass == pytest.approx(1)
  np.testing.assert_allclose(run._log_ratio(outputs), np.log(expected), rtol=1e-9)


def test_those_who_take_part_do_so_as_the_sampler_draws_them():
  """The mean output of each step, and 1 / L under P has mean 1: chances and draws agree."""
  sampler = sampling.MinSepSampler(turn_prob=0.4, steps_apart=3, num_steps=7, capacity=9)
  columns = monte_carlo._columns(_WHITE, 7)
  run = monte_carlo._MinSep(columns, 2.0, 0.4, 3)
  outputs = np.zeros((8, 40_000))
  run._take_part(np.random.default_rng(1), outputs)
  assert set(np.unique(outputs)) == {0.0, 0.5}
  np.testing.assert_allclose(
    2 * outputs[:7].mean(axis=1), sampler.sampling_prob, atol=0.012
  )
  losses = run.losses(np.random.default_rng(2), 40_000, True)
  assert np.exp(-losses).mean() == pytest.approx(1, abs=0.02)
  broken = run._replace(turn_prob=0.2).losses
  assert abs(np.exp(broken(np.random.default_rng(2), 40_000, False)).mean() - 1) < 0.05


def _epsilon(strategy, z, **options):
  return monte_carlo.min_sep_epsilon(
    strategy, noise_multiplier=z, **{"num_samples": 60_000, **options}
  )


def test_without_a_distance_it_is_poisson_sampling():
  found = _epsilon(_WHITE, 1.0, num_steps=6, turn_prob=0.2, steps_apart=1, delta=0.01)
  step = accounting.poisson_sampled_event(accounting.gaussian_event(1.0), sampling_prob=0.2)
  exact = accounting.epsilon(accounting.compose(step, 6), delta=0.01)
  assert found.estimate == pytest.approx(exact, rel=0.04)
  assert exact < found.upper < 1.25 * exact


def test_who_takes_part_for_sure_has_no_amplification():
  found = _epsilon(_WHITE, 2.0, num_steps=4, turn_prob=1.0, steps_apart=1, delta=0.02)
  exact = accounting.epsilon(accounting.gaussian_event(1.0), delta=0.02)
  assert found.estimate == pytest.approx(exact, rel=0.03) and found.upper > exact


def test_it_amplifies_correlated_noise_below_what_is_proved():
  events = correlated_events(
    _BANDED, noise_multiplier=2.0, num_steps=12, steps_apart=4, cyclic=False
  )
  proved = accounting.epsilon(join(events), delta=0.01)
  found = _epsilon(_BANDED, 2.0, num_steps=12, turn_prob=0.1, steps_apart=4, delta=0.01)
  assert 0.1 * proved < found.estimate < found.upper < 0.8 * proved


def test_many_turns_of_little_noise_do_not_overflow():
  run = monte_carlo._MinSep(np.ones((1, 400)), 0.2, 0.9, 1)
  assert math.isfinite(run.losses(np.random.default_rng(0), 4, True).max())


def test_more_bands_than_the_distance_are_refused():
  with refuses("correlation"):
    _epsilon(_BANDED, 1.0, num_steps=4, turn_prob=0.2, steps_apart=1, delta=0.01)
  with refuses("num_samples", value=10):
    _epsilon(
      _WHITE, 1.0, num_steps=4, turn_prob=0.2, steps_apart=1, delta=0.01, num_samples=10
    )


@pytest.mark.cases(quick=["0.5-0.02"], long=...)
@pytest.mark.parametrize("prob, noise", [(0.5, 0.02), (1.0, 0.02), (0.5, 0.001)])
def test_little_noise_is_never_below_the_closed_form(prob, noise):
  """One Gaussian step with so little noise costs more than the grid holds."""
  given = dict(noise_multiplier=noise, num_steps=1, turn_prob=prob, steps_apart=1)
  found = monte_carlo.min_sep_epsilon(_WHITE, **given, delta=0.01, num_samples=2_000)
  assert found.estimate == found.upper == math.inf
