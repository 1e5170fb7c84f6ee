"""What is printed against what is exactly true: never below it, and a claim that is would be
found. The oracles are closed forms and sums of SciPy's, nothing of ours."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import optimize, stats

from dpjax import sampling
from dpjax.accounting import compose, epsilon, gaussian_event, tuning
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from tests import plans

_DELTA = 1e-5


def _root(excess):
  return optimize.brentq(excess, 0.0, 200.0, xtol=1e-12) if excess(0.0) > 0 else 0.0


def _gaussian_epsilon(mu, delta=_DELTA):
  """Of two normal laws mu standard deviations apart (Balle and Wang 2018, theorem 8)."""

  def excess(eps):
    far = stats.norm.logcdf(-eps / mu - mu / 2)
    return stats.norm.cdf(mu / 2 - eps / mu) - math.exp(eps + far) - delta

  return _root(excess)


# --- many steps


@pytest.mark.cases(long=["0.7-30-pld", "5.0-1000-pld"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("steps", [2, 30, 1000, 30_000])
@pytest.mark.parametrize("z", [0.7, 5.0, 80.0])
def test_many_equal_steps_are_one_gaussian(steps, z, accountant):
  mu = math.sqrt(steps) / z
  if not 1e-3 < mu < 12:
    pytest.skip("epsilon beyond what anybody prints")
  stated = epsilon(compose(gaussian_event(z), steps), delta=_DELTA, accountant=accountant)
  exact = _gaussian_epsilon(mu)
  assert exact * (1 - 1e-9) <= stated
  assert stated <= exact * (1.02 if accountant == "pld" else 1.6) + 0.02
  fewer = _gaussian_epsilon(math.sqrt(0.9 * steps) / z)
  assert fewer < exact  # a claim for nine tenths of the steps is below the truth


@pytest.mark.cases(quick=["2"], long=...)
@pytest.mark.parametrize("seed", range(4))
def test_many_unequal_steps_add_up_their_precisions(seed):
  levels = np.exp(np.random.default_rng(seed).uniform(-0.5, 2.5, 40))
  parts = [gaussian_event(float(level)) for level in levels]
  total = dp_accounting.ComposedDpEvent(parts)
  exact = _gaussian_epsilon(math.sqrt(np.sum(levels**-2.0)))
  assert exact * (1 - 1e-9) <= epsilon(total, delta=_DELTA) <= 1.02 * exact + 0.01


# --- batches of a fixed size


def _losses(q, std, shift, grid):
  """The privacy losses of one step on a grid, rounded DOWN, and their chances: the record adds
  +1 on one side and -1 on the other with probability q, and nobody else adds anything."""
  edges = np.linspace(-12 * std - 2, 12 * std + 2, 40_001)
  middle = (edges[1:] + edges[:-1]) / 2
  log = lambda centre: np.logaddexp(
    math.log(q) + stats.norm.logpdf(middle, centre, std),
    math.log1p(-q) + stats.norm.logpdf(middle, 0.0, std),
  )
  here, there = log(shift), log(-shift)
  weight = np.exp(here) * np.diff(edges)
  places = np.floor((here - there) / grid).astype(int)
  low = places.min()
  return np.bincount(places - low, weights=weight), low


def _exact_fixed(q, std, steps, grid=2e-3, delta=_DELTA):
  """A lower bound on epsilon of `steps` steps: the losses of this one pair, rounded down."""
  one, low = _losses(q, std, 1.0, grid)
  size = steps * (len(one) - 1) + 1
  many = np.fft.irfft(np.fft.rfft(one, 2 * size) ** steps, 2 * size)[:size]
  losses = (np.arange(size) + steps * low) * grid
  many = np.maximum(many - 1e-14, 0.0)  # the rounding of the transform

  def excess(eps):
    above = losses > eps
    return float(np.sum(many[above] * -np.expm1(eps - losses[above]))) - delta

  return _root(excess)


@pytest.mark.cases(quick=["20-2.0-20", "100-3.0-20"], long=...)
@pytest.mark.parametrize("steps", [1, 20, 300])
@pytest.mark.parametrize(("batch", "z"), [(20, 2.0), (100, 3.0), (200, 1.5)])
def test_a_batch_of_fixed_size_costs_at_least_its_worst_pair(batch, z, steps):
  """Replace-one: the record is a clip norm on either side of nothing."""
  n = 1000
  plan = plans.of(
    sampler=sampling.FixedSizeSampler(batch_size=batch, num_examples=n),
    noise_multiplier=z,
    normalize_by=batch,
    num_steps=steps,
    delta=_DELTA,
    neighboring_relation="replace_one",
  )
  exact, stated = _exact_fixed(batch / n, z, steps), plan.epsilon()
  assert 0 < exact <= stated
  half = _exact_fixed(batch / n, 2 * z, steps)  # what add-or-remove would see
  assert half < 0.75 * exact


def test_the_oracle_of_fixed_batches_knows_the_gaussian():
  for steps, std in ((1, 2.0), (25, 8.0)):
    exact = _gaussian_epsilon(2 * math.sqrt(steps) / std)
    assert _exact_fixed(1 - 1e-12, std, steps) == pytest.approx(exact, rel=0.02)
    assert _exact_fixed(1 - 1e-12, std, steps) <= exact + 2e-3


# --- the best of a random number of runs


def _generating(mean, shape):
  """E[x^K] of the number of runs (Papernot and Steinke 2022, definition 1)."""
  if shape == math.inf:
    return lambda x: np.exp(mean * (x - 1))
  gamma = tuning.stopping_prob(mean, shape)
  if shape == 0:
    return lambda x: np.log1p(-(1 - gamma) * x) / math.log(gamma)
  top = lambda x: (1 - (1 - gamma) * x) ** -shape - 1
  return lambda x: top(x) / (gamma**-shape - 1)


def _exact_selection(std, mean, shape):
  """Epsilon of the largest of K draws of N(0, std) against N(1, std): the released winner."""
  points = np.linspace(-14 * std, 14 * std, 200_001)
  best = _generating(mean, shape)
  distributions = []
  for centre in (0.0, 1.0):
    mass = np.diff(best(stats.norm.cdf(points, centre, std)))
    distributions.append(np.append(np.maximum(mass, 0.0), best(np.zeros(1))[0]))
  delta = lambda p, q, eps: float(np.maximum(p - math.exp(eps) * q, 0.0).sum())
  pairs = (distributions, distributions[::-1])
  return max(_root(lambda eps, p=p, q=q: delta(p, q, eps) - _DELTA) for p, q in pairs)


@pytest.mark.cases(long=["6.0-300.0-1.0", "6.0-300.0-3.0", "6.0-300.0-inf"])
@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("mean", [2.0, 20.0, 300.0])
@pytest.mark.parametrize("std", [1.0, 6.0])
def test_choosing_the_best_run_is_never_cheaper_than_it_is(std, mean, shape):
  event = gaussian_event(std)
  chosen = repeat_and_select_event(event, mean_trials=mean, shape=shape)
  stated = epsilon(chosen, delta=_DELTA, accountant="rdp")
  exact = _exact_selection(std, mean, shape)
  assert exact <= stated
  if mean >= 20:
    assert exact > 1.1 * epsilon(event, delta=_DELTA)  # for free it would be a lie
