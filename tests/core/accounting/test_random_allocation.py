"""Random allocation: never below exact integrals, simulation or a peer; near them; both ways."""

import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import integrate, optimize, special, stats

from dpjax import accounting
from dpjax.accounting import random_allocation as allocation
from dpjax.accounting.event_kinds.kind import event_from_json, event_to_json
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.accounting.loss_grid import pld_of
from dpjax.noise import correlated
from tests.refuses import refuses

_DELTA = 1e-5
_SIDES = ("removed", "added")


def _deltas(pld, epsilon):
  return [pmf.get_delta_for_epsilon(epsilon) for pmf in (pld._pmf_remove, pld._pmf_add)]


def _call(strike, shift):
  """E (X - k)_+, X = exp(s Z - s^2 / 2), for any k: 1 - k below zero."""
  safe = np.where(strike > 0, strike, 1.0)
  far = np.log(safe) / shift
  value = special.ndtr(shift / 2 - far) - safe * special.ndtr(-shift / 2 - far)
  return np.where(strike > 0, value, 1 - strike)


def _exact(noise_multiplier, epsilon, side):
  """delta of 2 steps: the second term in closed form, the first by adaptive quadrature."""
  shift = 1 / noise_multiplier
  level = math.exp(epsilon if side == "removed" else -epsilon)
  bend = (math.log(2 * level) + shift**2 / 2) / shift  # beyond it any second term will do

  def weighted(z):
    value = _call(np.array(2 * level - math.exp(shift * z - shift**2 / 2)), shift)
    return float(value) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

  cuts = [-14, min(bend, 14) - 1, min(bend, 14) - 0.01, min(bend, 14), 14 + shift]
  pieces = itertools.pairwise(cuts)
  call = sum(integrate.quad(weighted, a, b, epsabs=1e-14, limit=200)[0] for a, b in pieces)
  if side == "removed":
    return call / 2
  return (call / 2 + level - 1) / level  # (1 - a L)_+ = a ((L - 1/a)_+ + 1/a - L)


def test_the_oracle_is_the_gaussian_mechanism_where_the_others_say_nothing():
  """One step: the closed form alone, against dp_accounting."""
  call = float(_call(np.array(math.exp(1.0)), 0.8))
  assert call == pytest.approx(_gaussian_delta(1.25, 1.0), rel=1e-12)


def _gaussian_delta(noise_multiplier, epsilon):
  s = 1 / noise_multiplier
  return special.ndtr(s / 2 - epsilon / s) - math.exp(epsilon) * special.ndtr(
    -s / 2 - epsilon / s
  )


@pytest.mark.parametrize("side", _SIDES)
@pytest.mark.parametrize("z", [0.5, 0.8, 1.0, 4.0])
def test_two_steps_are_never_below_the_integral_and_near_it(z, side):
  fine = pld_of(allocation.allocation_pld(2, z, interval=1e-3 / z, cells=2**16))
  coarse = pld_of(allocation.allocation_pld(2, z, interval=0.1 / z, cells=2**10))
  compared = 0
  for epsilon in (0.0, 0.03, 0.2, 0.5, 1.0, 2.0, 4.0):
    exact = _exact(z, epsilon, side)
    if exact < 1e-8:
      continue
    found, rough = (_deltas(pld, epsilon)[_SIDES.index(side)] for pld in (fine, coarse))
    assert exact <= found + 1e-11 and exact <= rough + 1e-11
    if z >= 0.8:  # with less noise one grid of 2^16 cells is too coarse for both ends
      assert found <= 1.01 * exact + 1e-8
    compared += 1
  assert compared >= 3


@pytest.mark.parametrize("side", _SIDES)
def test_rounding_that_does_not_keep_the_mean_is_found_out(side, monkeypatch):
  """A plant: losses rounded to the grid's lower point. The comparison above sees it."""
  honest = allocation._spread

  def rounded(ratios, masses, interval, *, tilted):
    first, low, high = honest(ratios, masses, interval, tilted=tilted)
    return (first, low + high, 0 * high) if tilted else (first, 0 * low, low + high)

  monkeypatch.setattr(allocation, "_spread", rounded)
  pld = pld_of(allocation.allocation_pld(2, 1.0, interval=0.1, cells=2**16))
  assert _deltas(pld, 0.5)[_SIDES.index(side)] < _exact(1.0, 0.5, side)


@pytest.mark.parametrize("shift", [0.05, 1.0, 3.0])
def test_one_term_keeps_mass_and_mean_and_is_larger_in_convex_order(shift):
  cells, width = 2**12, 8 * math.exp(3 * shift) / 2**12
  masses, beyond = allocation._one_term(shift, width, cells, removed=False)
  grid = np.arange(cells) * width
  assert beyond == 0 and masses.sum() == pytest.approx(1, abs=1e-11)
  capped = 1 - float(_call(np.array(grid[-1]), shift))
  assert masses @ grid == pytest.approx(capped, rel=1e-10)
  for strike in (0.1, 0.9, 1.3):
    put = (masses * np.maximum(0.0, strike - grid)).sum()
    exact = float(_call(np.array(strike), shift)) + strike - 1
    assert exact <= put + 1e-13 < exact + width


@pytest.mark.parametrize("removed", [True, False])
def test_what_is_charged_for_grids_and_windows_is_small(removed):
  masses = allocation._masses_of_sum(20, 1.0, 2**14, removed=removed)
  assert 0 < masses.lost < 1e-11


def test_the_transform_errs_by_less_than_its_bound():
  """Against sums in exact integers: a coin of 8 sides, thrown 31 times."""
  one, power = np.append(0.0, np.full(8, 0.125)), np.array([0] + 8 * [1], object)
  exact = functools.reduce(np.convolve, [power] * 31)
  found, error = allocation._sum(one, None, 31, 256)
  wanted = np.array([float(Fraction(int(count), 8**31)) for count in exact])
  assert np.abs(found[: len(wanted)] - wanted).sum() + found[len(wanted) :].sum() < error
  assert error < 1e-10


def test_chernoff_is_above_what_lies_beyond():
  one = stats.binom.pmf(np.arange(9), 8, 0.4)
  for edge in (150, 180, 220):
    truth = stats.binom(400, 0.4).sf(edge - 1)
    assert truth < allocation._tail(one, None, 50, edge, above=True) < 30 * truth + 1e-300
  below = stats.binom(400, 0.4).cdf(119)
  assert below < allocation._tail(one, None, 50, 120, above=False) < 30 * below


@pytest.mark.cases(long=["0.7"])
@pytest.mark.parametrize("z", [pytest.param(0.7, marks=pytest.mark.slow), 1.0])
def test_many_steps_at_a_tiny_delta_are_not_below_importance_sampling(z):
  """50 steps, one of them, any, drawn where it tells: 1e-9 is seen to about 1 %."""
  rng, steps, count, shift = np.random.default_rng(5), 50, 40_000, 1 / z
  event = random_allocation_event(accounting.gaussian_event(z), num_steps=steps)
  for delta in (1e-6, 1e-9):
    epsilon = accounting.epsilon(event, delta=delta)
    aim = (math.log(steps * math.expm1(epsilon)) + shift**2 / 2) / shift
    normal = rng.standard_normal((count, steps))
    normal[:, 0] += aim  # which one does not matter to the sum
    weight = 1 / np.exp(aim * normal - aim**2 / 2).mean(axis=1)
    ratio = np.exp(shift * normal - shift**2 / 2).mean(axis=1)
    values = weight * np.maximum(0.0, ratio - math.exp(epsilon))
    mean, error = values.mean(), values.std() / math.sqrt(count)
    assert error < 0.03 * mean
    assert mean - 4 * error < delta < 1.02 * mean + 4 * error


def test_many_steps_are_not_below_the_simulation():
  """Monte Carlo of both directions, T = 20: its mean is within 2 %, its bound above."""
  pld = pld_of(allocation.allocation_pld(20, 0.8, interval=1e-3, cells=2**15))
  found = accounting.balls_in_bins_epsilon(
    correlated.Independent(),
    noise_multiplier=0.8,
    num_steps=20,
    num_bins=20,
    delta=1e-2,
    num_samples=200_000,
  )
  proved = pld.get_epsilon_for_delta(1e-2)
  assert 0.98 * found.estimate < proved < found.upper


def test_more_cells_and_finer_losses_only_tighten():
  sizes = [(2**12, 0.02), (2**14, 0.005), (2**16, 0.001)]
  found = [
    pld_of(allocation.allocation_pld(50, 1.0, interval=i, cells=c)).get_epsilon_for_delta(
      1e-5
    )
    for c, i in sizes
  ]
  assert found == sorted(found, reverse=True)


def test_a_pass_is_cheaper_than_one_gaussian_and_composes():
  event = random_allocation_event(accounting.gaussian_event(2.0), num_steps=8)
  one = accounting.epsilon(event, delta=_DELTA)
  assert one < accounting.epsilon(accounting.gaussian_event(2.0), delta=_DELTA)
  four = accounting.epsilon(accounting.compose(event, 4), delta=_DELTA)
  assert one < four < 4 * one


def test_one_step_and_extreme_noise_are_the_gaussian_mechanism():
  gaussian = lambda z: accounting.epsilon(accounting.gaussian_event(z), delta=_DELTA)
  of = lambda steps, z: accounting.epsilon(
    random_allocation_event(accounting.gaussian_event(z), num_steps=steps),
    delta=_DELTA,
  )
  assert of(1, 1.0) == pytest.approx(gaussian(1.0), rel=1e-3)
  assert of(50, 0.2) == pytest.approx(gaussian(0.2), rel=1e-3)
  assert of(50, 0.0) == math.inf


def test_what_is_no_pass_is_refused():
  event = random_allocation_event(accounting.gaussian_event(2.0), num_steps=8)
  with refuses("event"):
    random_allocation_event(accounting.laplace_event(2.0), num_steps=8)
  with refuses("num_steps", value=0):
    random_allocation_event(accounting.gaussian_event(2.0), num_steps=0)
  assert event_from_json(event_to_json(event)) == event


@pytest.mark.long
def test_the_published_cases_at_full_size():
  """Upper ends of pld-accounting 2.0's intervals are above, lower ends below: T = 200, 1,000,
  and 200 steps redrawn ten times, at noise 1 and delta 1e-5."""
  for num_steps, passes, low, high in [
    (200, 1, 0.383, 0.393), (1000, 1, 0.136, 0.143), (200, 10, 1.126, 1.167)
  ]:  # fmt: skip
    event = random_allocation_event(accounting.gaussian_event(1.0), num_steps=num_steps)
    found = accounting.epsilon(accounting.compose(event, passes), delta=_DELTA)
    assert low <= found <= high


@pytest.mark.long
@pytest.mark.parametrize("num_steps", [200, 1000, 100_000])
def test_many_steps_at_any_delta_cost_about_what_poisson_does(num_steps):
  event = random_allocation_event(accounting.gaussian_event(1.0), num_steps=num_steps)
  step = accounting.poisson_sampled_event(
    accounting.gaussian_event(1.0), sampling_prob=1 / num_steps
  )
  for delta in (1e-5, 1e-9):
    found = accounting.epsilon(event, delta=delta)
    poisson = accounting.epsilon(accounting.compose(step, num_steps), delta=delta)
    assert 0.85 * poisson < found < 1.01 * poisson


@pytest.mark.long
def test_calibration_finds_the_noise_of_a_pass():
  make = lambda z: random_allocation_event(accounting.gaussian_event(z), num_steps=2)
  found = accounting.calibrate_noise_multiplier(
    make, epsilon=2.0, delta=1e-3, neighboring_relation="add_or_remove_one"
  )
  exact = optimize.brentq(lambda z: _exact(z, 2.0, "removed") - 1e-3, 0.5, 3)
  assert exact < found < 1.001 * exact


def test_a_long_pass_of_little_noise_stays_amplified():
  """A loose bound on the mass beyond the window would leave the cost of one sum, 4.3."""
  event = random_allocation_event(accounting.gaussian_event(1.118), num_steps=10**5)
  assert accounting.epsilon(event, delta=1e-6) == pytest.approx(0.0108215, rel=1e-5)
