"""Likelihood-ratio audits of mechanisms, sound and broken."""

import math

import numpy as np
import pytest

from dpjax import auditing
from dpjax.auditing.likelihood import (
  discrete_log_ratio,
  gaussian_log_ratio,
  laplace_log_ratio,
  likelihood_ratio,
)
from dpjax.auditing.lower_bounds import gdp_lower_bound
from tests.refuses import refuses


def _laplace(scale):
  return lambda which, rng, n: (
    np.array([0.0, which]) + rng.laplace(scale=scale, size=(n, 2))
  )


def test_laplace_of_the_claimed_scale_is_not_refuted_and_half_of_it_is():
  means = ([0.0, 0.0], [0.0, 1.0])
  for scale, refuted in ((1.0, False), (0.5, True)):
    bound = likelihood_ratio(
      _laplace(scale),
      laplace_log_ratio(*means, scale),
      num_trials=20_000,
      delta=0.0,
      seed=0,
    )
    assert (bound > 1.0) == refuted and bound > 0.9 / scale * 0.9


def test_mironov_float_noise_has_no_epsilon_and_a_grid_gives_it_one():
  """In floating point fl(x + noise) tells x by its last bits. The ratio, not rounded, sees
  it: float64 Laplace noise of epsilon 1 fails by far. Rounded to a grid it does not."""

  def exact_ratio(z):
    return (np.abs(z) - np.abs(z - 1)).reshape(-1)

  def draw(which, rng, n):
    return which + rng.laplace(size=(n, 1))

  def on_grid(which, rng, n):
    return np.round(draw(which, rng, n) * 16) / 16

  options = dict(num_trials=20_000, delta=0.0, seed=0)
  assert likelihood_ratio(draw, exact_ratio, **options) > 2.0
  assert 0.8 < likelihood_ratio(on_grid, exact_ratio, **options) <= 1.0
  rounded = laplace_log_ratio(0.0, 1.0, 1.0)  # looks at the mechanism alone
  assert 0.8 < likelihood_ratio(draw, rounded, **options) <= 1.0


def test_randomised_response_is_recovered_by_its_own_ratio():
  """Keep with probability e^2 / (e^2 + 9), each other answer 1 / (e^2 + 9): epsilon 2."""
  keep, other = math.exp(2) / (math.exp(2) + 9), 1 / (math.exp(2) + 9)
  probs = np.full((2, 10), other)
  probs[0, 3] = probs[1, 7] = keep
  bound = likelihood_ratio(
    lambda which, rng, n: rng.choice(10, n, p=probs[which]),
    discrete_log_ratio(*probs),
    num_trials=50_000,
    delta=0.0,
    seed=1,
  )
  assert 1.85 < bound <= 2.0


def test_an_output_that_only_one_input_can_give_is_found():
  probs = np.array([[0.5, 0.5, 0.0], [0.5, 0.4, 0.1]])
  bound = likelihood_ratio(
    lambda which, rng, n: rng.choice(3, n, p=probs[which]),
    discrete_log_ratio(*probs),
    num_trials=10_000,
    delta=1e-3,
    seed=0,
  )
  assert bound > 4  # no epsilon is large enough; the trials bound what can be shown


def test_gaussian_log_ratio_is_scipys():
  from scipy import stats

  z = np.linspace(-3, 3, 7)[:, None] * np.ones(2)
  got = gaussian_log_ratio([0.0, 1.0], [0.5, -1.0], [1.0, 2.0])(z)
  want = sum(
    stats.norm.logpdf(z[:, i], m1, s) - stats.norm.logpdf(z[:, i], m0, s)
    for i, (m0, m1, s) in enumerate([(0.0, 0.5, 1.0), (1.0, -1.0, 2.0)])
  )
  np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.cases(long=["1.0"])
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_sound_clip_and_noise_is_not_refuted(planted, epsilon):
  found = planted.scores("none", epsilon, 20_000)
  for bound in (auditing.clopper_pearson, gdp_lower_bound):
    assert 0.3 * epsilon < bound(found, delta=planted.delta) <= epsilon


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize("bug", ["noise halved", "clipping removed", "clip after sum"])
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_planted_bugs_are_refuted(planted, bug, epsilon):
  """By the bound that holds for any mechanism: 20,000 trials suffice up to epsilon 4."""
  found = planted.scores(bug, epsilon, 20_000)
  assert auditing.clopper_pearson(found, delta=planted.delta) > epsilon


@pytest.mark.cases(long=[1])
@pytest.mark.parametrize("bug", ["noise halved", "clip after sum"])
def test_at_epsilon_8_only_the_gaussian_bound_refutes_twice_the_sensitivity(planted, bug):
  found = planted.scores(bug, 8.0, 20_000)
  assert (
    auditing.clopper_pearson(found, delta=planted.delta) < 8
  )  # 20,000 trials show at most 8.1
  assert gdp_lower_bound(found, delta=planted.delta) > 12


def test_bad_input_is_one_line():
  draw, score = _laplace(1.0), lambda z: z  # [n, 2], not [n]
  with refuses("score"):
    likelihood_ratio(draw, score, num_trials=10, delta=0.0, seed=0)
  with refuses("num_trials", value=1):
    likelihood_ratio(draw, score, num_trials=1, delta=0.0, seed=0)
