"""Balls in bins with correlated noise, proved: above the integral and the simulation."""

import math

import numpy as np
import pytest

from dpjax import accounting
from dpjax.accounting import matrix
from dpjax.accounting.event_kinds import elements
from dpjax.accounting.matrix import correlated_events
from dpjax.noise import correlated
from tests.refuses import refuses

_PAIR = correlated.BandedToeplitz((1.0, 0.5))


def _exact(gram, epsilon):
  """delta of two bins, the larger direction, by the lognormals' plane."""
  z, width = np.linspace(-9, 9, 1801, retstep=True)
  weight = np.exp(-z * z / 2) * width / math.sqrt(2 * math.pi)
  root = np.linalg.cholesky(gram)
  first = np.exp(root[0, 0] * z - gram[0, 0] / 2)[:, None]
  second = np.exp(root[1, 0] * z[:, None] + root[1, 1] * z - gram[1, 1] / 2)
  ratio = (first + second) / 2
  removed = np.maximum(ratio - math.exp(epsilon), 0)
  added = np.maximum(1 - math.exp(epsilon) * ratio, 0)
  return max(float(weight @ side @ weight) for side in (removed, added))


def _event(z, spacing=1):
  return accounting.balls_in_bins_event(
    _PAIR, noise_multiplier=z, num_steps=2, num_bins=2, spacing=spacing
  )


@pytest.mark.cases(long=["0.8"])
@pytest.mark.parametrize("z", [pytest.param(0.8, marks=pytest.mark.slow), 1.5])
def test_two_bins_of_correlated_noise_are_never_below_the_integral(z):
  gram = np.array([[1.25, 0.5], [0.5, 1.0]]) / z**2
  for epsilon in (0.2, 1.0, 2.0):
    exact = _exact(gram, epsilon)
    for spacing in (1, 2):
      assert exact < accounting.delta(_event(z, spacing), epsilon=epsilon)
    assert accounting.delta(_event(z), epsilon=epsilon) < 2 * exact


def test_without_what_bins_have_in_common_it_would_be_too_little():
  """A plant: a pass of random allocation of the whole norm, or of what is left, alone."""
  exact = _exact(np.array([[1.25, 0.5], [0.5, 1.0]]), 2.0)
  *_, alone = _event(1.0).events
  assert accounting.delta(alone, epsilon=2.0) < exact


def test_noise_that_is_not_correlated_is_random_allocation():
  event = accounting.balls_in_bins_event(
    correlated.Independent(), noise_multiplier=2.0, num_steps=12, num_bins=4
  )
  (once,) = elements.parts(event)
  assert (once.num_steps, once.noise_multiplier) == (4, pytest.approx(2 / math.sqrt(3)))


@pytest.mark.cases(long=["tree"], slow=...)
@pytest.mark.parametrize(
  "strategy",
  [
    correlated.BandedToeplitz.optimized(num_steps=12, bands=2),
    pytest.param(correlated.Tree(12), marks=pytest.mark.slow),
  ],
  ids=["banded", "tree"],
)
def test_it_is_above_the_simulation_and_below_no_amplification(strategy):
  common = dict(noise_multiplier=4.0, num_steps=12, num_bins=6, delta=1e-3)
  found = accounting.balls_in_bins_epsilon(strategy, num_samples=100_000, **common)
  proved = accounting.balls_in_bins_proved(strategy, **common)
  renyi = accounting.balls_in_bins_proved(strategy, accountant="rdp", **common)
  events = correlated_events(
    strategy, noise_multiplier=4.0, num_steps=12, steps_apart=6, cyclic=True
  )
  plain = accounting.epsilon(matrix.join(events), delta=1e-3)
  assert 0.97 * found.estimate < proved <= plain * 1.001
  assert proved < renyi


def test_spacings_are_checked():
  with refuses("spacing", value=3):
    _event(1.0, 3)
