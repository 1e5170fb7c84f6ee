"""Sensitivity by brute force over every participation pattern; charges that add up to it."""

import itertools
import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from dpjax import accounting
from dpjax.accounting import matrix
from dpjax.accounting.matrix import (
  amplified_costs,
  correlated_events,
  join,
  participation_costs,
)
from dpjax.noise import correlated
from tests.refuses import refuses

_STRATEGIES = {
  "independent": correlated.Independent(),
  "tree": correlated.Tree(restart_every=16),
  "tree_restarts": correlated.Tree(restart_every=3),
  "banded": correlated.BandedToeplitz.optimized(num_steps=11, bands=3),
  "wide": correlated.BandedToeplitz.optimized(num_steps=11, bands=8),
  "blt": correlated.BufferedToeplitz.optimized(num_steps=11, buffers=2, steps_apart=3),
  "inverse": correlated.InverseBanded.optimized(num_steps=11, bands=3, steps_apart=3),
}
_every = pytest.mark.parametrize("strategy", _STRATEGIES.values(), ids=_STRATEGIES)
_FACTORS = (1.0, 0.5, 2.0, 1.0, 1.0, 3.0, 0.7, 1.0, 1.2, 1.0, 0.9)


def _separated(num_steps, steps_apart, times=None):
  """Every set of steps at least steps_apart apart."""
  for size in range(1, num_steps + 1 if times is None else times + 1):
    for steps in itertools.combinations(range(num_steps), size):
      if all(b - a >= steps_apart for a, b in itertools.pairwise(steps)):
        yield list(steps)


def _cyclic(num_steps, steps_apart):
  """Every subset of every turn's steps."""
  for start in range(steps_apart):
    turn = range(start, num_steps, steps_apart)
    for size in range(1, len(turn) + 1):
      yield from map(list, itertools.combinations(turn, size))


def _brute(matrix, patterns):
  """Largest |C u| over the patterns and over all signs of the contributions."""
  worst = 0.0
  for steps in patterns:
    for signs in itertools.product((1, -1), repeat=len(steps) - 1):
      worst = max(worst, np.linalg.norm(matrix[:, steps] @ np.array([1, *signs])))
  return worst


# --- what one example adds


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), dim=st.integers(1, 4))
def test_contributions_in_many_dimensions_stay_below_the_costs(seed, dim):
  rng = np.random.default_rng(seed)
  for name, cyclic in (("tree", True), ("banded", False)):
    matrix = correlated.matrix(_STRATEGIES[name], 6)
    cost = participation_costs(
      _STRATEGIES[name], num_steps=6, steps_apart=2, cyclic=cyclic
    )[-1]
    for steps in (_cyclic if cyclic else _separated)(6, 2):
      u = rng.normal(size=(len(steps), dim))
      u /= np.linalg.norm(u, axis=1, keepdims=True)
      assert (np.linalg.norm(matrix[:, steps] @ u)) ** 2 <= cost * (1 + 1e-12)


@pytest.mark.cases(quick=["20"], long=...)
@pytest.mark.parametrize("steps_apart", [1, 3, 4, 11, 20])
def test_falling_toeplitz_matrices_agree_with_jax_privacy(steps_apart):
  toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
  strategy = _STRATEGIES["wide"]
  costs = participation_costs(strategy, num_steps=11, steps_apart=steps_apart, cyclic=False)
  peer = toeplitz.minsep_sensitivity_squared(
    np.array(strategy.coefficients), steps_apart, None, n=11
  )
  assert costs[-1] == pytest.approx(float(peer), rel=1e-5)


# --- prefixes of strategies


@_every
@pytest.mark.parametrize("factors", [(), _FACTORS], ids=["constant", "scheduled"])
@pytest.mark.parametrize("steps_apart", [1, 2, 3, 5, 20])
def test_p43_cyclic_costs_are_exact_at_every_prefix(strategy, factors, steps_apart):
  costs = participation_costs(
    strategy, num_steps=11, steps_apart=steps_apart, cyclic=True, factors=factors
  )
  rows = np.array(factors or np.ones(11))[:, None]
  matrix = correlated.matrix(strategy, 11) / rows
  for t in (1, 2, 4, 7, 11):
    whole = [range(start, t, steps_apart) for start in range(min(steps_apart, t))]
    brute = max(np.linalg.norm(matrix[:t, list(steps)].sum(1)) for steps in whole)
    assert costs[t - 1] == pytest.approx(brute**2, rel=1e-12)
  assert (np.diff(costs) >= 0).all()


@pytest.mark.parametrize("name", ["independent", "banded", "wide", "blt", "inverse"])
def test_separated_costs_of_toeplitz_strategies_are_exact_at_every_prefix(name):
  strategy = _STRATEGIES[name]
  costs = participation_costs(strategy, num_steps=11, steps_apart=3, cyclic=False)
  matrix = correlated.matrix(strategy, 11)
  for t in (1, 3, 5, 8, 11):
    brute = _brute(matrix[:t, :t], _separated(t, 3))
    assert costs[t - 1] == pytest.approx(brute**2, rel=1e-9)


@pytest.mark.parametrize("name", ["tree_restarts", "banded"])
def test_separated_costs_of_scheduled_bands_are_upper_bounds(name):
  strategy = _STRATEGIES[name]
  costs = participation_costs(
    strategy, num_steps=11, steps_apart=3, cyclic=False, factors=_FACTORS
  )
  matrix = correlated.matrix(strategy, 11) / np.array(_FACTORS)[:, None]
  for t in (1, 3, 5, 8, 11):
    brute = _brute(matrix[:t, :t], _separated(t, 3)) ** 2
    assert brute <= costs[t - 1] * (1 + 1e-12) and costs[t - 1] < 2.5 * brute


def test_what_has_no_analysis_is_refused():
  with refuses("correlation"):
    participation_costs(_STRATEGIES["tree"], num_steps=11, steps_apart=3, cyclic=False)
  for name in ("blt", "inverse", "wide"):
    with refuses("correlation"):
      amplified_costs(_STRATEGIES[name], num_steps=11, num_groups=3)


class _Negative(correlated.Independent):
  def multiply(self, x):
    return -np.array(x)


def test_a_strategy_with_negative_entries_is_refused():
  with refuses("correlation"):
    participation_costs(_Negative(), num_steps=4, steps_apart=2, cyclic=True)


class _Hidden(correlated.Independent):
  """A negative entry beside a larger one of the same row, in a column of the same turn."""

  matrix = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [-1, 0, 2, 0], [0, 0, 0, 1]])

  def multiply(self, x):
    return self.matrix @ np.asarray(x)


def test_a_negative_entry_is_found_behind_a_larger_one():
  """The sum of both columns has the length of 1, and their difference that of 3."""
  assert (_Hidden().multiply(np.array([[1.0], [0], [1], [0]])) >= 0).all()
  for counted in (participation_costs, amplified_costs):
    options = {"steps_apart": 2, "cyclic": True}
    if counted is amplified_costs:
      options = {"num_groups": 2}
    with refuses("correlation"):
      counted(_Hidden(), num_steps=4, **options)
  with refuses("num_steps", value=20000):
    participation_costs(_Hidden(), num_steps=20_000, steps_apart=2, cyclic=True)


@pytest.mark.parametrize("name", ["independent", "tree_restarts", "banded"])
@pytest.mark.parametrize("factors", [(), _FACTORS], ids=["constant", "scheduled"])
def test_amplified_costs_are_the_largest_column_of_each_turn(name, factors):
  strategy = _STRATEGIES[name]
  costs = amplified_costs(strategy, num_steps=11, num_groups=4, factors=factors)
  rows = np.array(factors or np.ones(11))[:, None]
  norms = ((correlated.matrix(strategy, 11) / rows) ** 2).sum(0)
  expected = [norms[start : start + 4].max() for start in (0, 4, 8)]
  np.testing.assert_allclose(costs, expected, rtol=1e-12)


# --- charges


def _gaussian_epsilon(noise_multiplier, delta):
  """Balle and Wang 2018, equation 6, solved for epsilon."""
  shift = 1 / noise_multiplier

  def excess(epsilon):
    left = stats.norm.cdf(shift / 2 - epsilon / shift)
    return left - np.exp(epsilon) * stats.norm.cdf(-shift / 2 - epsilon / shift) - delta

  return optimize.brentq(excess, 0, 50)


@_every
@pytest.mark.parametrize("factors", [(), _FACTORS], ids=["constant", "scheduled"])
def test_any_prefix_of_the_charges_is_the_gaussian_of_that_prefix(strategy, factors):
  z = 4.0
  events = correlated_events(
    strategy, noise_multiplier=z, num_steps=11, steps_apart=3, cyclic=True, factors=factors
  )
  rows = np.array(factors or np.ones(11))[:, None]
  matrix = correlated.matrix(strategy, 11) / rows
  for t in (1, 5, 11):
    sensitivity = _brute(matrix[:t, :t], _cyclic(t, 3))
    expected = _gaussian_epsilon(z / sensitivity, 1e-5)
    found = accounting.epsilon(join(events[:t]), delta=1e-5)
    assert expected <= found * (1 + 1e-9) and found < expected * 1.001


def test_white_noise_in_fixed_order_costs_its_passes():
  events = correlated_events(
    correlated.Independent(), noise_multiplier=3.0, num_steps=10, steps_apart=4, cyclic=True
  )
  assert [type(event).__name__ for event in events[:5]] == [
    *("GaussianDpEvent", "NoOpDpEvent", "NoOpDpEvent", "NoOpDpEvent", "GaussianDpEvent")
  ]
  found = accounting.epsilon(join(events), delta=1e-5)
  assert found == pytest.approx(_gaussian_epsilon(3.0 / math.sqrt(3), 1e-5), rel=1e-3)


@pytest.mark.cases(long=["pld"])
@pytest.mark.parametrize("name", ["pld", "rdp"])
def test_amplified_bands_are_the_composition_of_sampled_gaussians(name):
  strategy = correlated.BandedToeplitz.optimized(num_steps=40, bands=4)
  events = correlated_events(
    strategy,
    noise_multiplier=2.0,
    num_steps=38,
    steps_apart=4,
    cyclic=True,
    turn_prob=0.1,
  )
  norm = math.sqrt(np.sum(np.square(strategy.coefficients)))
  sampled = dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(2.0 / norm))
  for steps, turns in ((1, 1), (4, 1), (5, 2), (36, 9)):
    accountant = {"pld": PLDAccountant, "rdp": RdpAccountant}[name]()
    expected = accountant.compose(sampled, turns).get_epsilon(1e-5)
    prefix = join(events[:steps])
    found = accounting.epsilon(prefix, delta=1e-5, accountant=name)
    assert found == pytest.approx(expected, rel=2e-3)
  assert accounting.epsilon(join(events), delta=1e-5, accountant=name) < _gaussian_epsilon(
    2.0 / norm / math.sqrt(10), 1e-5
  )


def test_one_group_of_white_noise_is_poisson_sampling():
  events = correlated_events(
    correlated.Independent(),
    noise_multiplier=2.0,
    num_steps=3,
    steps_apart=1,
    cyclic=True,
    turn_prob=0.1,
  )
  assert events == (dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(2.0)),) * 3


def test_p9_replace_one_costs_what_half_the_noise_would():
  strategy = _STRATEGIES["banded"]
  event = lambda z: join(
    correlated_events(
      strategy, noise_multiplier=z, num_steps=11, steps_apart=3, cyclic=True
    )
  )
  doubled = accounting.epsilon(event(8.0), delta=1e-5, neighboring_relation="replace_one")
  assert doubled == pytest.approx(accounting.epsilon(event(4.0), delta=1e-5), rel=1e-6)


@pytest.mark.parametrize(
  ("options", "field"),
  [
    ({"num_steps": 0}, "num_steps"),
    ({"steps_apart": 0}, "steps_apart"),
    ({"factors": (1.0, 2.0)}, "noise_schedule"),
    ({"factors": (1.0, 2.0, 0.0, 1.0)}, "noise_schedule[2]"),
  ],
)
def test_wrong_numbers_are_named(options, field):
  defaults = dict(num_steps=4, steps_apart=2, cyclic=True)
  with refuses(field):
    participation_costs(correlated.Independent(), **{**defaults, **options})


def test_an_array_without_end_is_one_line():
  """A million steps, a hundred thousand apart, would take a terabyte."""
  with refuses("num_steps", value=1000000):
    matrix.turn_images(correlated.Independent(), 10**6, 10**5)
  with refuses("num_steps", value=200000):
    matrix.turn_images(correlated.Independent(), 200_000, 2000)


def test_groups_that_no_step_has_take_no_memory():
  """Of 10^9 groups ten have a step: what they cost is that of ten."""
  strategy = _STRATEGIES["banded"]
  costs = [amplified_costs(strategy, num_steps=10, num_groups=g) for g in (10, 10**9)]
  np.testing.assert_array_equal(*costs)
  events = correlated_events(
    strategy,
    noise_multiplier=1.0,
    num_steps=10,
    steps_apart=10**9,
    cyclic=True,
    turn_prob=0.5,
  )
  assert len(events) == 10
