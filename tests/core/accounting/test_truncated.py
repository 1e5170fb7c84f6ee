"""Truncated Poisson sampling against the exact divergence of tiny data sets."""

import itertools
import json
import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import stats

from dpjax import accounting
from dpjax.accounting import compose, epsilon
from dpjax.accounting.event_kinds.elements import parts
from dpjax.accounting.event_kinds.kind import event_from_json, event_to_json
from dpjax.accounting.event_kinds.truncated_poisson import truncated_poisson_event
from tests.refuses import refuses

_ZEROED = {"neighboring_relation": "replace_special"}


def _step(q, n, capacity, z):
  noise = accounting.gaussian_event(z)
  return truncated_poisson_event(noise, sampling_prob=q, num_examples=n, capacity=capacity)


def _mixture(q, n, capacity, others, own):
  """{sum: probability} of a truncated draw, by enumeration of every subset."""
  values = np.array([*others, own])
  probs = {}
  for taken in itertools.product([0, 1], repeat=n):
    rows = np.flatnonzero(taken)
    prob = q ** len(rows) * (1 - q) ** (n - len(rows))
    kept = list(itertools.combinations(rows, min(capacity, len(rows))))
    for subset in kept:
      total = float(values[list(subset)].sum())
      probs[total] = probs.get(total, 0.0) + prob / len(kept)
  return probs


def _density(law, z, y):
  return sum(p * stats.norm.pdf(y, mean, z) for mean, p in law.items())


def _exact_delta(first, second, z, eps, steps=1):
  """Hockey-stick divergence of mixtures of Gaussians, by quadrature (steps 1 or 2)."""
  y = np.linspace(-6 - 9 * z, 6 + 9 * z, 4001 if steps == 1 else 900)
  here, there = _density(first, z, y), _density(second, z, y)
  if steps == 2:
    here, there = np.outer(here, here), np.outer(there, there)
  excess = np.maximum(here - math.exp(eps) * there, 0)
  return float(excess.sum() * (y[1] - y[0]) ** steps)


_SETTINGS = [  # (q, n, capacity, z)
  (0.5, 4, 1, 1.0),
  (0.5, 4, 2, 1.0),
  (0.3, 5, 2, 0.7),
  (0.9, 5, 2, 2.0),
  (0.1, 6, 1, 1.0),
  (1.0, 5, 2, 1.5),
]
_OTHERS = [lambda n: [-1.0] * n, lambda n: [1.0] * n, lambda n: [1.0, -1.0] * n]


@pytest.mark.cases(quick=[17], long=...)
@pytest.mark.parametrize("others", _OTHERS, ids=["against", "with", "mixed"])
@pytest.mark.parametrize("setting", _SETTINGS, ids=str)
@pytest.mark.parametrize("steps", [1, 2])
def test_never_below_the_exact_divergence(setting, others, steps):
  q, n, capacity, z = setting
  with_it = _mixture(q, n, capacity, others(n)[: n - 1], 1.0)
  zeroed = _mixture(q, n, capacity, others(n)[: n - 1], 0.0)
  event = compose(_step(q, n, capacity, z), steps)
  for eps in (0.0, 0.3, 1.0, 2.0):
    claimed = accounting.delta(event, epsilon=eps, **_ZEROED)
    for pair in ((with_it, zeroed), (zeroed, with_it)):
      assert _exact_delta(*pair, z, eps, steps) <= claimed + 1e-7


@pytest.mark.slow
def test_p12_a_cut_sample_loses_more_than_poisson_sampling():
  """One record takes the slot of another, so that the sum moves by 2 C: charged as a plain
  Poisson sample this run would be promised too much. Exact, not only by our bound."""
  q, n, capacity, z, eps = 0.5, 4, 1, 1.0, 0.5
  with_it = _mixture(q, n, capacity, [-1.0] * 3, 1.0)
  zeroed = _mixture(q, n, capacity, [-1.0] * 3, 0.0)
  poisson = accounting.poisson_sampled_event(accounting.gaussian_event(z), sampling_prob=q)
  own_rate = accounting.poisson_sampled_event(  # how often the record is really in
    accounting.gaussian_event(z), sampling_prob=sum(p for s, p in with_it.items() if s > 0)
  )
  for eps in (1.0, 2.0):
    truth = max(
      _exact_delta(with_it, zeroed, z, eps), _exact_delta(zeroed, with_it, z, eps)
    )
    assert truth > 1.02 * accounting.delta(own_rate, epsilon=eps)
  run = lambda step: epsilon(compose(step, 20), delta=1e-5, **_ZEROED)
  assert run(_step(q, n, capacity, z)) > 1.2 * run(poisson)


def test_a_sample_that_cannot_overflow_is_poisson():
  step = _step(0.05, 1000, 1000, 1.1)
  plain = accounting.poisson_sampled_event(
    accounting.gaussian_event(1.1), sampling_prob=0.05
  )
  for eps in (0.5, 2.0):
    assert accounting.delta(compose(step, 100), epsilon=eps, **_ZEROED) == pytest.approx(
      accounting.delta(compose(plain, 100), epsilon=eps, **_ZEROED), rel=1e-9
    )


@pytest.mark.long
def test_costs_more_the_more_is_cut_and_tends_to_poisson():
  cost = lambda capacity: epsilon(
    compose(_step(0.05, 1000, capacity, 1.1), 20), delta=1e-5, **_ZEROED
  )
  plain = accounting.poisson_sampled_event(
    accounting.gaussian_event(1.1), sampling_prob=0.05
  )
  costs = [cost(capacity) for capacity in (45, 55, 80, 120)]
  assert all(a >= b for a, b in itertools.pairwise(costs))
  assert costs[0] > 1.3 * costs[-1]
  assert costs[-1] == pytest.approx(epsilon(compose(plain, 20), delta=1e-5), rel=1e-6)


@pytest.mark.long
def test_agrees_with_dp_accounting_asked_directly():
  event = compose(_step(0.02, 500, 14, 1.0), 10)
  accountant = dpa.pld.PLDAccountant(dpa.NeighboringRelation.REPLACE_SPECIAL)
  direct = accountant.compose(event).get_epsilon(1e-5)
  assert epsilon(event, delta=1e-5, **_ZEROED) == pytest.approx(direct, rel=2e-3)


def test_p12_truncation_is_a_kind_of_its_own_and_refused_where_unproved():
  event = _step(0.1, 100, 12, 1.0)
  assert type(event) is not dpa.PoissonSampledDpEvent and set(parts(event)) == {event}
  data = json.loads(json.dumps(event_to_json(event)))
  assert data["kind"] == "truncated_poisson"
  assert event_from_json(data) == event
  for relation in ("add_or_remove_one", "replace_one"):
    with refuses("event"):
      epsilon(event, delta=1e-5, neighboring_relation=relation)
  with refuses("event"):
    epsilon(event, delta=1e-5, accountant="rdp", **_ZEROED)
  with refuses("event"):
    truncated_poisson_event(
      accounting.laplace_event(1.0), sampling_prob=0.1, num_examples=9, capacity=3
    )
  assert epsilon(_step(0.1, 100, 12, 0.0), delta=1e-5, **_ZEROED) == math.inf


@pytest.mark.long
def test_p25_calibration_finds_the_noise():
  make = lambda z: compose(_step(0.02, 2000, 45, z), 20)
  z = accounting.calibrate_noise_multiplier(
    make, epsilon=2.0, delta=1e-5, tol=0.02, **_ZEROED
  )
  assert 1.95 < epsilon(make(z), delta=1e-5, **_ZEROED) <= 2.0


def test_the_statement_says_what_was_sampled():
  text = accounting.privacy_statement(_step(0.1, 100, 12, 1.0), delta=1e-5, **_ZEROED)
  flat = " ".join(text.split())
  assert "truncated Poisson" in flat and "of more than 12 a uniformly random" in flat
  assert "rdp not available" in flat
