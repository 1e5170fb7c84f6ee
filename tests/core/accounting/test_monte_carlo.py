"""The Monte-Carlo bound: right where a closed form exists, above it as often as promised."""

import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from dpjax import accounting
from dpjax.accounting import matrix, monte_carlo
from dpjax.accounting.matrix import turn_images
from dpjax.noise import correlated
from tests.refuses import refuses

_WHITE = correlated.Independent()
_BANDED = correlated.BandedToeplitz.optimized(num_steps=12, bands=3)


def _epsilon(strategy, z, steps, bins, delta, **options):
  return accounting.balls_in_bins_epsilon(
    strategy,
    noise_multiplier=z,
    num_steps=steps,
    num_bins=bins,
    delta=delta,
    **{"num_samples": 100_000, **options},
  )


def _gaussian(z, delta):
  event = accounting.gaussian_event(z)
  return accounting.epsilon(event, delta=delta)


def test_one_bin_is_the_gaussian_mechanism():
  norm = np.linalg.norm(correlated.matrix(_BANDED, 12).sum(1))
  found = _epsilon(_BANDED, 2.0 * norm, 12, 1, 0.02)
  exact = _gaussian(2.0, 0.02)
  assert found.estimate == pytest.approx(exact, rel=0.03)
  assert exact < found.upper < 1.15 * exact


@pytest.mark.slow
def test_one_pass_of_white_noise_is_the_mixture_by_quadrature():
  """Two bins, one pass: y in the plane, exactly one coordinate shifted by 1."""
  z, grid = 0.8, np.linspace(-9, 9, 1201)
  x, y = np.meshgrid(grid, grid)
  area = (grid[1] - grid[0]) ** 2
  base = np.exp(-(x**2 + y**2) / (2 * z**2)) / (2 * math.pi * z**2)
  ratio = special.logsumexp([(2 * x - 1) / (2 * z**2), (2 * y - 1) / (2 * z**2)], axis=0)
  ratio -= math.log(2)

  def delta(epsilon):
    removed = base * np.maximum(np.exp(ratio) - math.exp(epsilon), 0)
    added = base * np.maximum(1 - math.exp(epsilon) * np.exp(ratio), 0)
    return max(removed.sum(), added.sum()) * area

  exact = optimize.brentq(lambda epsilon: delta(epsilon) - 0.01, 0.01, 10)
  found = _epsilon(_WHITE, z, 2, 2, 0.01, num_samples=400_000)
  assert found.estimate == pytest.approx(exact, rel=0.02)
  assert exact < found.upper < 1.1 * exact


def test_bins_amplify_but_never_below_poisson_of_a_single_turn():
  proved = matrix.join(
    matrix.correlated_events(
      _BANDED, noise_multiplier=4.0, num_steps=12, steps_apart=4, cyclic=True
    )
  )
  deterministic = accounting.epsilon(proved, delta=1e-3)
  found = _epsilon(_BANDED, 4.0, 12, 4, 1e-3)
  assert 0.2 * deterministic < found.estimate < found.upper < deterministic


@pytest.mark.slow
def test_the_losses_agree_with_jax_privacys():
  peer = pytest.importorskip("jax_privacy.experimental.monte_carlo.sample_generation")
  batches = pytest.importorskip("jax_privacy.batch_selection")
  sampler = batches.BallsInBinsSampling(iterations=12, cycle_length=4)
  coefficients, images = np.array(_BANDED.coefficients), turn_images(_BANDED, 12, 4)
  ours = monte_carlo._losses(images.T @ images, 3.0, 20_000, 0)
  for found, present in zip(ours, (True, False)):
    theirs, _ = peer.get_privacy_loss_sample(
      sampler, 3.0, coefficients, seed=1, positive_sample=present, num_samples=2000
    )
    assert stats.ks_2samp(found, theirs).pvalue > 1e-3
    assert stats.ks_2samp(found * 1.3, theirs).pvalue < 1e-6


def test_the_bound_holds_as_often_as_promised():
  exact, missed = _gaussian(2.0, 0.02), 0
  for seed in range(60):
    found = _epsilon(_WHITE, 2.0, 1, 1, 0.02, num_samples=2000, confidence=0.9, seed=seed)
    missed += found.upper < exact
    assert found.estimate <= found.upper
  assert missed <= 12  # 6 allowed on average; more than 12 with a chance of 0.6 %
  lucky = [
    _epsilon(_WHITE, 2.0, 1, 1, 0.02, num_samples=2000, seed=seed).estimate < exact
    for seed in range(60)
  ]
  assert sum(lucky) > 15  # the estimate alone guarantees nothing


def test_same_seed_same_answer_and_more_samples_tighten():
  few = _epsilon(_BANDED, 4.0, 12, 4, 0.01, num_samples=5000)
  assert few == _epsilon(_BANDED, 4.0, 12, 4, 0.01, num_samples=5000)
  many = _epsilon(_BANDED, 4.0, 12, 4, 0.01, num_samples=200_000)
  assert many.upper - many.estimate < few.upper - few.estimate


def test_too_few_samples_certify_nothing():
  with refuses("num_samples", value=1000):
    _epsilon(_WHITE, 2.0, 4, 4, 1e-5, num_samples=1000)
