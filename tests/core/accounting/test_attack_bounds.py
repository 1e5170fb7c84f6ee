"""Guarantees in an attacker's terms: against closed forms, simulated attacks and each other."""

import dataclasses
import math

import numpy as np
import pytest
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special

import dpjax
from dpjax import accounting
from dpjax.accounting import attack_bounds
from dpjax.accounting.attack_bounds import bayes_risk
from dpjax.accounting.calibration import Unreachable, noise_of_profile
from dpjax.accounting.epsilon import delta_curve, privacy_profile
from dpjax.accounting.event_kinds.elements import accountable, rdp_of
from dpjax.accounting.event_kinds.kind import ORDERS
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.accounting.trade_off import TradeOff
from dpjax.validate import UserError
from tests.refuses import refuses

_DELTA = 1e-5


def _gaussian_tpr(mu, fpr):
  return special.ndtr(special.ndtri(fpr) + mu)


def _gaussian_profile(mu):
  """Delta of N(0, 1) against N(mu, 1), in closed form (Balle and Wang 2018)."""

  def deltas(epsilons):
    at = np.asarray(epsilons, float)
    upper = special.ndtr(mu / 2 - at / mu)
    return upper - np.exp(at + special.log_ndtr(-mu / 2 - at / mu))

  return deltas


def _laplace_tpr(epsilon, fpr):
  """The Neyman-Pearson test of two Laplace laws `epsilon` scales apart."""
  low = math.exp(epsilon) * fpr
  middle = 1 - math.exp(-epsilon) / (4 * fpr)
  high = 1 - math.exp(-epsilon) * (1 - fpr)
  if fpr <= math.exp(-epsilon) / 2:
    return low
  return middle if fpr <= 0.5 else high


# Each bound with the noise multiplier of one Gaussian sum that keeps it to the last digit.
_EXACT = {
  "few false positives": (
    accounting.TruePositiveRate(tpr=0.1, fpr=0.01),
    1 / (special.ndtri(0.1) - special.ndtri(0.01)),
  ),
  "many false positives": (
    accounting.TruePositiveRate(tpr=0.9, fpr=0.8),
    1 / (special.ndtri(0.9) - special.ndtri(0.8)),
  ),
  "advantage": (accounting.Advantage(0.1), 1 / (2 * special.ndtri(0.55))),
  "mu": (accounting.GaussianDp(0.5), 2.0),
  "even odds": (accounting.BayesRisk(0.4, prior=0.5), -1 / (2 * special.ndtri(0.4))),
}


@pytest.mark.parametrize("name", _EXACT)
def test_one_gaussian_needs_the_noise_of_the_closed_form(name):
  bound, exact = _EXACT[name]
  found = accounting.calibrate_noise_to_attack(
    accounting.gaussian_event, bound, delta=_DELTA
  )
  # The slack of mu, alone, may save a little noise.
  least = exact * (0.9995 if name == "mu" else 1 - 1e-9)
  assert least <= found <= exact * 1.001
  profile = privacy_profile(accounting.gaussian_event(found))
  assert bound.cost(profile, _DELTA) <= bound.limit


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_laplace_noise_has_the_rates_of_its_own_test(scale):
  profile = privacy_profile(accounting.laplace_event(scale))
  for fpr in (1e-3, 0.05, 0.3, 0.49, 0.7):
    exact = _laplace_tpr(1 / scale, fpr)
    found = accounting.true_positive_rate(profile, fpr)
    assert exact - 1e-12 <= found <= exact * (1 + 1e-3)
  exact = -math.expm1(-1 / scale / 2)
  assert exact <= attack_bounds.advantage(profile) <= exact + 1e-6
  # At even odds, and at odds of e^epsilon, beyond which the likelier answer is best.
  even = bayes_risk(profile, 0.5)
  assert (1 - exact) / 2 - 1e-6 <= even <= (1 - exact) / 2
  lopsided = 1 / (1 + math.exp(1.01 / scale))
  assert bayes_risk(profile, lopsided) == pytest.approx(lopsided, rel=1e-6)


@settings(max_examples=40)
@example(mu=0.01, fpr=0.9453125, prior=0.5)
@example(mu=1.099609375, fpr=0.853515625, prior=0.853515625)
@given(mu=st.floats(0.01, 8), fpr=st.floats(1e-6, 1 - 1e-6), prior=st.floats(1e-3, 0.999))
def test_a_profile_in_closed_form_gives_the_closed_forms(mu, fpr, prior):
  profile = _gaussian_profile(mu)
  tpr = float(_gaussian_tpr(mu, fpr))
  found = accounting.true_positive_rate(profile, fpr)
  # Never below. Above by the steps between lines, which are wide beside a small mu.
  slack = max(1e-4, 1.3e-5 / mu) * min(tpr, 1 - tpr)
  assert tpr - 1e-9 <= found <= tpr + slack + 1e-9
  # The best test of a prior: the likelihood ratio against its odds.
  at = mu / 2 + math.log((1 - prior) / prior) / mu
  exact = (1 - prior) * special.ndtr(-at) + prior * special.ndtr(at - mu)
  found = bayes_risk(profile, prior)
  assert found == pytest.approx(exact, rel=1e-6, abs=1e-9)
  # No line of a prior is above the curve: its risk is at most that of any test, also of the best.
  assert found <= min(exact, (1 - prior) * fpr + prior * (1 - tpr)) + 1e-9


_RATES = st.tuples(st.floats(1e-4, 0.99), st.floats(1e-4, 0.99)).filter(
  lambda rates: abs(rates[0] - rates[1]) > 1e-3
)


@settings(max_examples=40)
@example(rates=(0.5625, 0.564453125))
@given(rates=_RATES)
def test_any_pair_of_rates_is_kept_by_the_noise_found_and_not_by_less(rates):
  fpr, tpr = sorted(rates)
  bound = accounting.TruePositiveRate(tpr=tpr, fpr=fpr)
  found = noise_of_profile(lambda z: _gaussian_profile(1 / z), bound, delta=_DELTA)
  assert bound.cost(_gaussian_profile(1 / found), _DELTA) <= bound.limit
  exact = 1 / (special.ndtri(tpr) - special.ndtri(fpr))
  # Between two corners of the curve the search stops early, on the safe side: up to a hundredth,
  # and a few beside a mu below .01, for which the corners are far apart.
  assert exact * (1 - 1e-6) <= found <= exact * (1.01 if exact < 100 else 1.06)


@settings(max_examples=30)
@given(mu=st.floats(0.02, 5), fpr=st.one_of(st.just(0.0), st.floats(1e-12, 1)))
def test_lines_between_the_corners_of_the_curve_are_the_bound(mu, fpr):
  pairs = accounting.pairs_of(_gaussian_profile(mu), 1e-6)
  alphas, betas = pairs.points()
  assert alphas[0] == 0 and alphas[-1] == 1 and (np.diff(betas) <= 0).all()
  drawn = float(np.interp(fpr, alphas, betas))
  exact = float(1 - pairs.true_positive_rate(fpr))
  assert drawn <= exact + 1e-12
  # The steepest lines matter only below rates of e^-40, and are left out.
  assert not fpr or drawn == pytest.approx(exact, abs=1e-12)
  assert drawn <= 1 - float(_gaussian_tpr(mu, fpr)) + 1e-12


@settings(max_examples=60)
@given(
  epsilons=st.lists(st.integers(0, 600), min_size=2, max_size=6, unique=True),
  deltas=st.lists(st.floats(1e-9, 0.6), min_size=6, max_size=6),
)
def test_lines_between_the_corners_are_the_bound_of_pairs_in_any_order(epsilons, deltas):
  """Also where a larger epsilon has a larger delta, which no profile has."""
  pairs = TradeOff(np.sort(epsilons) / 100, np.array(deltas[: len(epsilons)]))
  alphas, betas = pairs.points()
  rates = np.linspace(0, 1, 301)
  drawn = np.interp(rates, alphas, betas)
  np.testing.assert_allclose(drawn, 1 - pairs.true_positive_rate(rates), atol=1e-12)


_RUN = accounting.compose(
  accounting.poisson_sampled_event(accounting.gaussian_event(0.8), sampling_prob=0.3), 4
)


@pytest.fixture(scope="module")
def simulated():
  """(statistics without the record, with it): log likelihood ratios of 2e5 runs each."""
  rng = np.random.default_rng(20260126)
  prob, std, steps, runs = 0.3, 0.8, 4, 200_000

  def ratios(is_member):
    joins = rng.random((runs, steps)) < prob if is_member else np.zeros((runs, steps))
    sums = joins + rng.normal(0, std, (runs, steps))
    # log of (1 - q) + q N(x; 1) / N(x; 0), for each step.
    return np.log1p(prob * np.expm1((sums - 0.5) / std**2)).sum(axis=1)

  return ratios(is_member=False), ratios(is_member=True)


@pytest.mark.parametrize("direction", ["removed", "added"])
def test_no_simulated_attack_on_a_sampled_sum_beats_the_bound(simulated, direction):
  without, inside = simulated
  null, other = (without, inside) if direction == "removed" else (-inside, -without)
  profile = privacy_profile(_RUN)
  pairs = accounting.pairs_of(profile, _DELTA)
  mu = pairs.mu(_DELTA)
  nearest = 1.0
  for rate in (0.003, 0.01, 0.05, 0.2, 0.5, 0.9):
    threshold = np.quantile(null, 1 - rate)
    fpr = float(np.mean(null > threshold))
    tpr = float(np.mean(other > threshold))
    # Four deviations of both rates, so that one case in 1e4 fails by chance; the key is fixed.
    error = 4 * math.sqrt(max(tpr * (1 - tpr), 1e-4) / len(other))
    fpr += 4 * math.sqrt(fpr * (1 - fpr) / len(null))
    bound = accounting.true_positive_rate(profile, fpr)
    assert tpr <= bound + error
    assert tpr <= _gaussian_tpr(mu, fpr) + _DELTA + error
    nearest = min(nearest, bound + error - tpr)
    gain = tpr - fpr
    assert gain <= attack_bounds.advantage(profile) + error
  # A test that cannot fail proves nothing: this attack refutes a bound for a little more noise,
  # in the direction that is the worse one there.
  less = accounting.compose(
    accounting.poisson_sampled_event(accounting.gaussian_event(1.0), sampling_prob=0.3), 4
  )
  wrong = privacy_profile(less)
  refuted = [
    np.mean(other > np.quantile(null, 1 - rate))
    > accounting.true_positive_rate(wrong, rate)
    for rate in (0.01, 0.2, 0.9)
  ]
  assert any(refuted) and nearest < 0.02


def test_the_profile_is_never_below_the_curve_and_hardly_above():
  counting = {"neighboring_relation": "replace_one"}
  allocated = random_allocation_event(accounting.gaussian_event(4), num_steps=4)
  epsilons = [0.0, 1.0, 9.0, 400.0]
  for event, options in (
    (_RUN, {}),
    (_RUN, {"accountant": "rdp"}),
    (accounting.laplace_event(0.7), {}),
    (accounting.compose(_RUN, 0), {}),
    (accounting.gaussian_event(0), {}),
    (allocated, counting),
  ):
    found = privacy_profile(event, **options)(epsilons)
    exact = delta_curve(event, epsilons, **options)
    if options == {"accountant": "rdp"}:
      renyi = list(rdp_of(accountable(event, **options).parts))
      exact = np.array([compute_delta(ORDERS, renyi, e)[0] for e in epsilons])
    # Sums in another order differ in the last digits.
    assert (found >= exact - 1e-15).all() and (found <= exact + 1e-10).all()


@pytest.mark.parametrize(
  ("numbers", "message"),
  [
    ({"tpr": 0.01, "fpr": 0.01}, "tpr=0.01: must be above fpr=0.01, which a guess reaches"),
    ({"tpr": 1.0, "fpr": 0.01}, r"tpr=1.0: must be in \(0, 1\)"),
    ({"tpr": 0.1, "fpr": 0.0}, r"fpr=0.0: must be in \(0, 1\)"),
    ({"tpr": math.nan, "fpr": 0.1}, r"tpr=nan: must be in \(0, 1\)"),
    ({"tpr": 0.1}, "fpr=None: must be given with tpr"),
    ({"prior": 0.1}, "bayes_risk=None: must be given with prior"),
    ({"advantage": 1.5}, r"advantage=1.5: must be in \(0, 1\)"),
    ({"mu": 0.0}, "mu=0.0: must be a finite number > 0"),
    ({"mu": math.inf}, "mu=inf: must be a finite number > 0"),
    ({"bayes_risk": 0.3, "prior": 0.2}, "bayes_risk=0.3: must be below 0.2, the error"),
    ({"bayes_risk": 0.3, "prior": 0.9}, "bayes_risk=0.3: must be below 0.0999"),
    ({"mu": 1.0, "advantage": 0.1}, "advantage, mu are numbers of several guarantees"),
  ],
)
def test_what_no_attacker_is_bounded_by_is_one_line(numbers, message):
  with pytest.raises(UserError, match=message) as error:
    attack_bounds.attack_bound(**numbers)
  assert "\n" not in str(error.value)


def test_a_bound_below_the_slack_of_the_accountant_is_one_line():
  # Delta 1e-13 of rounding is left at any noise.
  bound = accounting.Advantage(1e-14)
  with pytest.raises(Unreachable, match="even noise_multiplier=1e.06 leaves"):
    accounting.calibrate_noise_to_attack(accounting.gaussian_event, bound, delta=_DELTA)


# Its batches may be above their capacity; a sum of all costs the least to account.
_PLAN = {
  "sampler": dpjax.PoissonSampler(sampling_prob=1.0, capacity=100),
  "num_steps": 2,
  "l2_clip_norm": 1.0,
  "normalize_by": 10.0,
  "delta": _DELTA,
}


def test_a_plan_keeps_its_bound_with_the_aborts_of_its_batches():
  bound = accounting.TruePositiveRate(tpr=0.1, fpr=0.02)
  plan = dpjax.Plan.calibrated(attack=bound, **_PLAN)
  cost = bound.cost(plan.privacy_profile(), _DELTA)
  assert bound.limit * (1 - 2e-4) <= cost <= bound.limit
  # Batches that may be above their capacity cost a little more than the event alone.
  event_cost = bound.cost(privacy_profile(plan.event()), _DELTA)
  assert event_cost < cost
  less = dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier * 0.999)
  assert bound.cost(less.privacy_profile(), _DELTA) > bound.limit
  assert "In an attacker's terms (pld)" in plan.statement(100).replace("\n", " ")


@pytest.mark.parametrize(
  ("numbers", "field"),
  [({}, "epsilon"), ({"epsilon": 1.0, "attack": accounting.Advantage(0.1)}, "attack")],
)
def test_a_plan_takes_exactly_one_guarantee(numbers, field):
  with refuses(field, value=numbers.get(field)):
    dpjax.Plan.calibrated(**numbers, **_PLAN)
