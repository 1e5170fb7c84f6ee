"""Formulas of papers against exact divergences, at the ends of their ranges.

docs/design/formulas.md lists every formula, and the test that holds it against its definition.
Here are those that no other test holds at the ends: orders near the last valid one, deltas from
1e-2 to 1e-12, much and little noise. Exact values have 40 digits, since floats end before them.
"""

import itertools
import math

import dp_accounting as dpa
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib

from dpjax import accounting, sampling
from dpjax.accounting import gdp, shuffle, tuning, votes
from dpjax.accounting.epsilon import delta_curve, epsilon_of_zcdp, privacy_profile, zcdp
from dpjax.accounting.event_kinds.discrete_gaussian import DiscreteGaussianDpEvent
from dpjax.accounting.event_kinds.elements import rdp_of
from dpjax.accounting.event_kinds.kind import ORDERS
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.accounting.event_kinds.skellam import SkellamDpEvent
from dpjax.experiments.kinds.pate import vote_costs
from dpjax.mechanisms import additive

_DELTAS = (1e-2, 1e-4, 1e-6, 1e-9, 1e-12)
# Allowance for the rounding of formulas that no accountant uses as they are.
_LEAST = 1e-14


@pytest.fixture(autouse=True)
def _digits():
  with mpmath.workdps(40):
    yield


def _renyi(order, one, other):
  """Renyi divergence of two laws on finitely many outcomes, given as their masses."""
  order = mpmath.mpf(float(order))
  total = mpmath.fsum(
    p**order * q ** (1 - order) for p, q in zip(one, other, strict=True) if p
  )
  return mpmath.log(total) / (order - 1)


def _both(order, one, other):
  return float(max(_renyi(order, one, other), _renyi(order, other, one)))


def _coin(prob):
  return prob, 1 - prob


def _gaussian_delta(shift, epsilon):
  """Hockey-stick divergence of two unit Gaussians that are `shift` apart."""
  shift, epsilon = mpmath.mpf(float(shift)), mpmath.mpf(float(epsilon))
  far = mpmath.exp(epsilon) * mpmath.ncdf(-shift / 2 - epsilon / shift)
  return mpmath.ncdf(shift / 2 - epsilon / shift) - far


# --- PATE: theorem 6


@pytest.mark.parametrize("std", [0.3, 0.7, 1.5, 4.0, 40.0])
def test_no_label_of_two_classes_costs_more_than_theorem_6_says(std):
  """The chance of each class is a normal tail, and the worst orders are just inside the range."""
  better = 0
  for deviations in (0, 1, 3, 6, 10):
    gap = round(std * deviations)
    log_q = votes.log_prob_of_others([gap + 20, 20], std)
    last = 1 + std * math.sqrt(-log_q)
    orders = [1.0001, 1.5, 4.0, 20.0]
    orders += [1 + (last - 1) * share for share in (0.5, 0.99, 0.9999)]
    bounds = votes.gaussian_votes_rdp(log_q, std, orders)
    better += int((bounds < 0.9 * np.array(orders) / std**2).sum())
    chances = [_coin(mpmath.ncdf(-mpmath.mpf(g) / (mpmath.sqrt(2) * std)))
               for g in (gap, gap - 2, gap + 2)]  # fmt: skip
    for order, bound in zip(orders, bounds, strict=True):
      exact = max(_renyi(order, chances[0], other) for other in chances[1:])
      assert float(exact) <= bound * (1 + 1e-9) + _LEAST, (gap, order)
  # The data-independent bound alone would pass, too.
  assert better or std < 0.7


@pytest.mark.parametrize("std", [0.3, 1.0, 5.0, 150.0])
def test_no_check_of_a_threshold_costs_more_than_its_bound(std):
  orders = (1.0001, 1.5, 4.0, 60.0)
  for margin in (-9 * std, -2 * std, 0.0, std, 4 * std):
    bounds = votes.threshold_rdp(100.0, 100.0 + margin, std, orders)
    above = [
      _coin(mpmath.ncdf(-(mpmath.mpf(margin) - moved) / std)) for moved in (0, -1, 1)
    ]
    for order, bound in zip(orders, bounds, strict=True):
      exact = max(_renyi(order, above[0], other) for other in above[1:])
      assert float(exact) <= bound * (1 + 1e-9) + _LEAST, (margin, order)


# --- noise on integers


def _integer_law(noise, variance, reach):
  places = range(reach + 1)
  variance = mpmath.mpf(variance)
  if noise == "skellam":
    return [mpmath.exp(-variance) * mpmath.besseli(x, variance) for x in places]
  weights = [mpmath.exp(-(mpmath.mpf(x) ** 2) / (2 * variance)) for x in places]
  total = 2 * mpmath.fsum(weights) - weights[0]
  return [weight / total for weight in weights]


@pytest.mark.parametrize("noise", ["skellam", "discrete_gaussian"])
@pytest.mark.parametrize("variance", [0.02, 0.3, 3.0])
def test_integer_noise_costs_no_more_than_its_formula_at_little_noise_and_large_orders(
  noise, variance
):
  shift = 2
  # Masses near order * shift matter most for discrete Gaussian noise.
  reach = 110
  law = _integer_law(noise, variance, reach)
  places = range(-reach + shift, reach + 1 - shift)
  event = (
    SkellamDpEvent(variance, shift, shift)
    if noise == "skellam"
    else DiscreteGaussianDpEvent(variance**0.5 / shift)
  )
  curve = rdp_of({event: 1})
  for order in (2, 5, 16, 40):
    moved = [law[abs(x - shift)] for x in places]
    exact = _renyi(order, moved, [law[abs(x)] for x in places])
    assert 0.0 < float(exact) <= curve[ORDERS.index(order)] * (1 + 1e-12), order


# --- the best of several runs


def _best_of(low, mean, shape):
  """Chances (no run, best is low, best is high) where a run is low with chance `low`: the
  generating function of the number of runs."""
  if shape == math.inf:
    none = mpmath.exp(-mpmath.mpf(mean))
    all_low = mpmath.exp(mean * (low - 1))
    return none, all_low - none, 1 - all_low
  gamma = mpmath.mpf(tuning.stopping_prob(mean, shape))
  rest = 1 - (1 - gamma) * low
  if gamma == 1:
    all_low = low
  elif shape == 0:
    all_low = mpmath.log(rest) / mpmath.log(gamma)
  else:
    all_low = (rest**-shape - 1) / (gamma**-shape - 1)
  return mpmath.mpf(0), all_low, 1 - all_low


@pytest.mark.parametrize("shape", [0, 0.01, 1, 10.0, math.inf])
@pytest.mark.parametrize("pair", [(0.5, 0.4), (0.99, 0.01), (1e-6, 1e-5), (1e-9, 1e-4)])
def test_the_best_of_any_number_of_runs_costs_no_more_than_its_bound(shape, pair):
  orders = np.array([1.1, 2.0, 4.0, 16.0, 128.0])
  low, other = map(mpmath.mpf, pair)
  of_one = np.array([_both(order, _coin(low), _coin(other)) for order in orders])
  for mean in (1.0, 1.5, 30.0, 1e4):
    bounds = tuning.select_rdp(list(orders), of_one, mean_trials=mean, shape=shape)
    for one, two in ((low, other), (1 - low, 1 - other)):
      here, there = _best_of(one, mean, shape), _best_of(two, mean, shape)
      for order, bound in zip(orders, bounds, strict=True):
        assert _both(order, here, there) <= bound * (1 + 1e-9) + _LEAST, (mean, order)


# --- from Renyi divergences, rho and mu to epsilon


@pytest.mark.parametrize("delta", _DELTAS)
def test_no_conversion_gives_less_than_the_epsilon_of_a_gaussian(delta):
  for mu in (1e-6, 1e-3, 0.1, 1.0, 7.0, 100.0):
    rdp = np.array(ORDERS) * mu**2 / 2
    found = {
      "renyi": float(rdp_lib.compute_epsilon(ORDERS, list(rdp), delta)[0]),
      "votes": vote_costs._epsilon(ORDERS, rdp, delta),
      "zcdp": epsilon_of_zcdp(mu**2 / 2, delta=delta),
      "mu": gdp.epsilon(mu, delta=delta),
    }
    for name, epsilon in found.items():
      assert _gaussian_delta(mu, epsilon) <= delta, (name, mu, epsilon)
    # And the exact one is exact.
    if found["mu"] > 0:
      assert _gaussian_delta(mu, found["mu"] * (1 - 1e-6)) > delta * (1 - 1e-4)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("z", [0.1, 1.0, 30.0, 1e4])
def test_no_delta_is_below_that_of_a_gaussian(z, accountant):
  event = accounting.gaussian_event(z)
  epsilons = [0.0, 1e-6, 0.1 / z, 1 / z, 6 / z, 30.0]
  found = delta_curve(event, epsilons, accountant=accountant)
  profile = privacy_profile(event, accountant=accountant)(epsilons)
  for epsilon, *deltas in zip(epsilons, found, profile, strict=True):
    # A delta that is no float is 0.
    assert _gaussian_delta(1 / z, epsilon) <= min(deltas) * (1 + 1e-9) + 1e-300, epsilon


@pytest.mark.parametrize("epsilon", [1e-8, 1e-4, 0.1, 1.0, 8.0, 40.0])
def test_a_pure_mechanism_costs_no_less_than_randomised_response(epsilon):
  """Its Renyi divergences, rho, and the epsilon at a delta by both accountants."""
  event = pure_dp_event(epsilon)
  kept = 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon)))
  curve = rdp_of({event: 1})
  rho = zcdp(event)
  for order, bound in list(zip(ORDERS, curve, strict=True))[::12]:
    exact = _both(order, _coin(kept), _coin(1 - kept))
    assert exact <= bound and exact <= rho * order * (1 + 1e-9) + _LEAST
  for delta, accountant in itertools.product(_DELTAS, ("rdp", "pld")):
    found = accounting.epsilon(event, delta=delta, accountant=accountant)
    assert kept - mpmath.exp(mpmath.mpf(found)) * (1 - kept) <= delta * (1 + 1e-9)


@pytest.mark.parametrize("answers", [2, 3, 1000])
@pytest.mark.parametrize("uniform", [1e-9, 0.01, 0.9, 1 - 1e-9])
def test_a_response_among_many_answers_costs_no_less_than_its_law(answers, uniform):
  """The masses of the own answer, of the neighbour's, and of all others together."""
  event = dpa.RandomizedResponseDpEvent(uniform, answers)
  rare = mpmath.mpf(uniform) / answers
  own = 1 - (answers - 1) * rare
  here, there = (own, rare, 1 - own - rare), (rare, own, 1 - own - rare)
  for order, bound in list(zip(ORDERS, rdp_of({event: 1}), strict=True))[::12]:
    assert _both(order, here, there) <= bound, order
  for delta, accountant in itertools.product(_DELTAS, ("rdp", "pld")):
    found = accounting.epsilon(event, delta=delta, accountant=accountant)
    assert own - mpmath.exp(mpmath.mpf(found)) * rare <= delta * (1 + 1e-9)


# --- noise on sums


@pytest.mark.parametrize("z", [0.05, 1.0, 30.0, 1e4])
def test_laplace_divergences_are_the_closed_form(z):
  """Mironov 2017, table II."""
  curve = rdp_of({dpa.LaplaceDpEvent(z): 1})
  rate = 1 / mpmath.mpf(z)
  for order, bound in list(zip(ORDERS, curve, strict=True))[::12]:
    a = mpmath.mpf(float(order))
    both = a * mpmath.exp((a - 1) * rate) + (a - 1) * mpmath.exp(-a * rate)
    assert mpmath.log(both / (2 * a - 1)) / (a - 1) <= bound, order


@pytest.mark.parametrize("q, z", [(8.814e-3, 7.215e3), (0.0143, 8.7), (5e-5, 0.873)])
def test_rounding_never_lowers_the_divergences_of_a_poisson_sample(q, z):
  """dp_accounting's own are up to 3e-6 of themselves too low. Ten million steps add this up."""
  event = dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))
  curve = dict(zip(ORDERS, rdp_of({event: 1}), strict=True))
  share = mpmath.mpf(q)
  for order in (2.0, 12, 42, 128, 512):
    moment = mpmath.fsum(
      mpmath.binomial(order, k)
      * (1 - share) ** (order - k)
      * share**k
      * mpmath.exp(mpmath.mpf(k * (k - 1)) / (2 * mpmath.mpf(z) ** 2))
      for k in range(int(order) + 1)
    )
    exact = mpmath.log(moment) / (order - 1)
    assert exact <= curve[order] <= exact * (1 + 1e-12) + 2e-14, order


def _laplace_delta(shift, epsilon):
  """Hockey-stick divergence of two Laplace laws of scale 1 that are `shift` apart."""
  return max(mpmath.mpf(0), -mpmath.expm1((mpmath.mpf(epsilon) - shift) / 2))


@pytest.mark.parametrize("prob", [1e-4, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("z", [0.3, 2.0, 50.0])
def test_one_poisson_step_costs_no_less_than_its_closed_form(prob, z):
  """delta = q D(log(1 + (e^epsilon - 1) / q)), D of the noise alone, for a record that is removed
  (Balle, Barthe and Gaboardi 2018, theorem 8)."""
  kinds = [
    (accounting.gaussian_event(z), _gaussian_delta, accountant)
    for accountant in ("pld", "rdp")
  ]
  kinds.append((dpa.LaplaceDpEvent(z), _laplace_delta, "pld"))
  for (noise, alone, accountant), delta in itertools.product(kinds, (1e-2, 1e-12)):
    event = accounting.poisson_sampled_event(noise, sampling_prob=prob)
    found = accounting.epsilon(event, delta=delta, accountant=accountant)
    inner = mpmath.log(1 + mpmath.expm1(mpmath.mpf(found)) / mpmath.mpf(prob))
    exact = mpmath.mpf(prob) * alone(1 / z, inner)
    assert exact <= delta * (1 + 1e-9), (noise, delta, accountant)


def test_a_million_steps_cost_no_less_than_one_gaussian():
  for z, delta in itertools.product((300.0, 3000.0), (1e-2, 1e-6, 1e-9)):
    run = accounting.compose(accounting.gaussian_event(z), 10**6)
    for accountant in ("pld", "rdp"):
      found = accounting.epsilon(run, delta=delta, accountant=accountant)
      assert _gaussian_delta(1000 / z, found) <= delta * (1 + 1e-9)


@pytest.mark.parametrize("delta", [0.99, 0.3, 1e-2, 1e-12, 1e-300])
def test_the_classic_gaussian_formula_holds_in_all_of_its_range(delta):
  for epsilon in (1e-3, 0.5, 0.9999):
    noise = additive.classic_noise_multiplier(epsilon, delta)
    assert _gaussian_delta(1 / noise, epsilon) <= delta


# --- shuffling and draws above the capacity


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-8])
def test_the_closed_form_of_shuffling_holds_up_to_its_last_local_epsilon(delta):
  for num_reports in (400, 2000):
    last = math.log(num_reports / (16 * math.log(2 / delta)))
    for share in (0.02, 0.999999):
      if last <= 0:
        continue
      local = last * share
      found = shuffle.amplified_epsilon(
        local_epsilon=local, num_reports=num_reports, delta=delta
      )
      numeric = shuffle.amplified_delta(
        local_epsilon=local, num_reports=num_reports, epsilon=found
      )
      assert numeric <= delta


@pytest.mark.parametrize("num_examples, prob", [(10, 0.5), (5000, 1e-3), (5000, 0.9)])
def test_the_chance_of_a_draw_above_the_capacity_is_the_binomial_tail(num_examples, prob):
  spread = math.sqrt(num_examples * prob * (1 - prob))
  for deviations in (1, 6, 20, 60):
    capacity = int(num_examples * prob + deviations * spread)
    if not 1 <= capacity < num_examples:
      continue
    found = sampling.PoissonSampler(prob, capacity).log_overflow_prob(num_examples)
    q = mpmath.mpf(prob)
    term = mpmath.binomial(num_examples, capacity + 1)
    term *= q ** (capacity + 1) * (1 - q) ** (num_examples - capacity - 1)
    exact = term
    for k in range(capacity + 1, num_examples):
      term *= (num_examples - k) / (k + mpmath.mpf(1)) * q / (1 - q)
      exact += term
    # A bound takes the place of the tail below the smallest float64.
    assert found >= float(mpmath.log(exact)) - 1e-9
    assert found == pytest.approx(float(mpmath.log(exact)), rel=0.05)
