"""Renyi curves of integer noise against divergences added up term by term."""

import math

import numpy as np
import pytest
from scipy import special, stats

from dpjax import accounting
from dpjax.accounting import discrete
from dpjax.accounting.event_kinds import kind
from dpjax.accounting.event_kinds.discrete_gaussian import DiscreteGaussianDpEvent
from dpjax.accounting.event_kinds.skellam import SkellamDpEvent
from tests.refuses import refuses

_REACH = 400
_X = np.arange(-_REACH, _REACH + 1)


def _gaussian_law(variance):
  weight = np.exp(-(_X.astype(float) ** 2) / (2 * variance))
  return weight / weight.sum()


def _skellam_law(variance):
  return stats.skellam.pmf(_X, variance / 2, variance / 2)


def _renyi(law, shift, order):
  """Of noise + shift from noise, in one coordinate, over what floats can hold."""
  moved = np.roll(law, shift)
  keep = (law > 1e-280) & (moved > 1e-280)
  logs = order * np.log(moved[keep]) + (1 - order) * np.log(law[keep])
  return special.logsumexp(logs) / (order - 1)


def _curve(event, order):
  return float(kind.kind_of(event).rdp(event)[kind.ORDERS.index(order)])


def _skellam(variance, l2, l1=None):
  return SkellamDpEvent(variance, l2, l2 if l1 is None else l1)


@pytest.mark.parametrize("variance", [0.3, 1.0, 9.0, 50.0])
@pytest.mark.parametrize("shift", [1, 2, 5])
def test_discrete_gaussian_is_bounded_and_large_noise_is_gaussian(variance, shift):
  event = DiscreteGaussianDpEvent(math.sqrt(variance) / shift)
  for order in (2, 3, 8, 20):
    exact = _renyi(_gaussian_law(variance), shift, order)
    assert exact <= _curve(event, order) * (1 + 1e-9)
  assert _renyi(_gaussian_law(50.0), shift, 2) == pytest.approx(
    2 * shift**2 / 100, rel=1e-6
  )


@pytest.mark.parametrize("variance", [0.5, 2.0, 10.0, 60.0])
@pytest.mark.parametrize("shift", [1, 2, 5])
def test_skellam_is_bounded_and_the_bound_is_tight_for_large_noise(variance, shift):
  bound = _skellam(variance, shift)
  for order in (2, 3, 8):
    exact = _renyi(_skellam_law(variance), shift, order)
    assert exact <= _curve(bound, order) * (1 + 1e-9)
  if variance == 60.0:  # and of a law with a tenth more variance it would be none
    wider = _skellam(66.0, shift)
    assert _renyi(_skellam_law(60.0), shift, 2) > _curve(wider, 2)


def test_skellam_in_several_dimensions_adds_up():
  """(2, -1, 1): the divergence of a product is a sum; L2^2 = 6, L1 = 4."""
  law, shifts = _skellam_law(12.0), (2, -1, 1)
  bound = _skellam(12.0, math.sqrt(6), 4.0)
  for order in (2, 5, 16):
    exact = sum(_renyi(law, shift, order) for shift in shifts)
    assert exact <= _curve(bound, order) <= 1.6 * exact


def _epsilon(event, num_steps=1):
  return accounting.epsilon(
    accounting.compose(event, num_steps),
    delta=1e-5,
    neighboring_relation="replace_special",
    accountant="rdp",
  )


def test_fine_grids_cost_what_gaussian_noise_costs():
  gaussian = _epsilon(accounting.gaussian_event(5.0), 10)
  l2 = 2.0**14
  noise = _skellam((5 * l2) ** 2, l2, discrete.l1_sensitivity(l2, 1000))
  found = _epsilon(noise, 10)
  assert found == pytest.approx(gaussian, rel=0.01)
  assert found >= gaussian * (1 - 5e-3)


def test_p37_fewer_survivors_raise_or_cost_more():
  shares = discrete.DistributedNoise.sized(total_variance=4000.0, min_survivors=40)
  l1 = discrete.l1_sensitivity(20.0, 10)

  def cost(noise, survivors):
    return _epsilon(_skellam(noise.share_variance * survivors, 20.0, l1))

  shares.check_survivors(40)
  shares.check_survivors(100)
  with refuses("survivors", value=39) as got:
    shares.check_survivors(39)
  assert "\n" not in str(got.value)
  assert cost(shares, 20) > cost(shares, 39) > cost(shares, 40) >= cost(shares, 60)
  # sized for 100 clients of whom 40 survive: the epsilon of 100 would be a false guarantee
  hopeful = discrete.DistributedNoise.sized(total_variance=4000.0, min_survivors=100)
  assert cost(hopeful, 40) > 1.4 * cost(shares, 40)


def test_p21_the_price_of_rounding_is_in_the_sensitivity():
  """Coarse grid, many dimensions: the rounded vector is longer, and costs more."""
  cost = lambda l2: _epsilon(_skellam(1e4, l2, discrete.l1_sensitivity(l2, 4096)))
  before, after = 10.0, math.sqrt(10.0**2 + 4096 / 4 + 10.0 + 32.0)
  assert cost(after) > 2 * cost(before)


@pytest.mark.parametrize("dim", [1, 3, 50])
def test_l1_of_integer_vectors(dim):
  rng = np.random.default_rng(0)
  for _ in range(200):
    vector = rng.integers(-2, 3, dim) * (rng.random(dim) < 0.3)
    norm = float(np.linalg.norm(vector))
    if norm > 0:
      assert np.abs(vector).sum() <= discrete.l1_sensitivity(norm, dim) * (1 + 1e-12)


@pytest.mark.parametrize(
  ("make", "field", "value"),
  [
    (lambda: DiscreteGaussianDpEvent(-1.0), "noise_multiplier", -1.0),
    (lambda: _skellam(1.0, math.nan, 1.0), "l2_sensitivity", math.nan),
    (lambda: discrete.l1_sensitivity(1.0, 0), "dim", 0),
    (lambda: discrete.DistributedNoise(1.0, 0), "min_survivors", 0),
    (lambda: discrete.DistributedNoise(0.0, 3), "share_variance", 0.0),
  ],
)
def test_bad_input_is_one_line(make, field, value):
  with refuses(field, value=value):
    make()


@pytest.mark.parametrize(("variance", "shift"), [(4, 1), (9, 6), (0.3, 1)])
def test_the_event_bounds_the_divergence_of_discrete_gaussians(variance, shift):
  """The divergence of two lattice laws, summed point by point, at orders that accountants use."""
  x = np.arange(-400, 401)
  log = lambda middle: -((x - middle) ** 2) / (2 * variance)
  normal = lambda weights: weights - special.logsumexp(weights)
  p, q = normal(log(shift)), normal(log(0))
  event = DiscreteGaussianDpEvent(math.sqrt(variance) / shift)
  stated = kind.kind_of(event).rdp(event)
  for order, bound in zip(kind.ORDERS, stated):
    if order <= 20:
      exact = special.logsumexp(order * p + (1 - order) * q) / (order - 1)
      assert 0.8 * bound * (variance > 1) <= exact <= bound * (1 + 1e-9)
  with refuses("event"):
    accounting.epsilon(event, delta=1e-5, accountant="pld")
