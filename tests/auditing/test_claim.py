"""A claim's pairs, all at once, against guesses: a right claim stands, a wrong one falls."""

import numpy as np
import pytest
from scipy import special

from dpjax import accounting, auditing
from dpjax.accounting.trade_off import TradeOff, all_pairs
from dpjax.auditing import lower_bounds, verdict
from dpjax.auditing.scores import CanaryScores, Scores


def _gaussian_claim(mu):
  return all_pairs(accounting.gaussian_event(1 / mu))


def _scores(mu, num_canaries, rng):
  """White noise along canaries that are in by fair coins: mu-Gaussian DP, exactly."""
  coins = rng.random(num_canaries) < 0.5
  return CanaryScores.separate(rng.normal(size=num_canaries) + mu * coins, coins)


@pytest.mark.cases(quick=["0.5"], long=...)
@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_the_lines_of_both_rates_are_inverse(mu):
  claim = _gaussian_claim(mu)
  rates = np.linspace(0.001, 0.999, 97)
  there = claim.true_positive_rate(rates)
  np.testing.assert_allclose(claim.false_positive_rate(there), rates, rtol=1e-9)
  exact = special.ndtr(special.ndtri(rates) - mu)
  found = claim.false_positive_rate(rates)
  assert (found <= exact + 1e-12).all() and (exact - found < 2e-3).all()
  assert claim.total_variation >= 2 * special.ndtr(mu / 2) - 1
  assert claim.total_variation < 2 * special.ndtr(mu / 2) - 1 + 1e-3


@pytest.mark.cases(long=["0-10"])
@pytest.mark.parametrize(("correct", "guesses"), [(40, 40), (55, 60), (30, 60), (0, 10)])
def test_a_gaussian_claim_is_refuted_where_algorithm_3_refutes_its_mu(correct, guesses):
  """But for the claim's chords, which only make it weaker."""
  claim, numbers = (
    _gaussian_claim(1.0),
    {"correct": correct, "guesses": guesses, "num_canaries": 100},
  )
  levels = np.geomspace(1e-8, 1, 33)
  found = lower_bounds._too_many(claim.false_positive_rate, levels, **numbers)
  near = [
    [lower_bounds._fdp_refuted(mu, significance=level, **numbers) for level in levels]
    for mu in (1.0, 1.02)
  ]
  assert (found <= near[0]).all() and (found >= near[1]).all()


@pytest.mark.cases(quick=["0.5-300"], long=...)
@pytest.mark.parametrize(("mu", "num_canaries"), [(1.0, 60), (2.0, 60), (0.5, 300)])
def test_what_keeps_its_claim_is_refuted_as_seldom_as_the_p_values_say(mu, num_canaries):
  rng, claim = np.random.default_rng(0), _gaussian_claim(mu)
  runs = [_scores(mu, num_canaries, rng) for _ in range(200)]
  proved = np.array([lower_bounds.claim_p_value(scores, claim) for scores in runs])
  alarms = np.array([lower_bounds.alarm_p_value(scores, claim) for scores in runs])
  for level in (0.01, 0.05, 0.2):
    chance = 3 * np.sqrt(level * (1 - level) / len(runs))
    assert (proved <= level).mean() <= level + chance
    assert (alarms <= level).mean() <= level + chance


def test_a_canary_that_leaks_with_a_small_chance_is_within_a_delta_and_not_refuted():
  """All canaries at once, in one run of 20: the worst that (0, .05)-DP allows."""
  rng, claim = np.random.default_rng(0), TradeOff(np.zeros(1), np.array([0.05]))
  refuted = 0
  for _ in range(400):
    coins = rng.random(40) < 0.5
    leaked = rng.random() < 0.05
    scores = coins.astype(float) if leaked else rng.random(40)
    parted = CanaryScores.separate(scores, coins)
    refuted += lower_bounds.claim_p_value(parted, claim) <= 0.05
  assert refuted <= 20 + 3 * np.sqrt(19)


@pytest.mark.cases(long=["1.0"])
@pytest.mark.parametrize("mu", [0.5, 1.0])
def test_a_mechanism_of_a_tenth_of_the_noise_is_refuted(mu):
  rng, claim = np.random.default_rng(0), _gaussian_claim(mu)
  scores = _scores(10 * mu, 400, rng)
  assert lower_bounds.claim_p_value(scores, claim) < 0.005
  assert lower_bounds.alarm_p_value(scores, claim) < 1e-12
  halved = Scores(scores.outside, scores.inside)  # low where it should be high
  assert lower_bounds.claim_p_value(halved, claim) == 1.0


def test_an_alarm_is_no_refutation_and_says_what_it_takes_for_granted():
  rng, claim = np.random.default_rng(0), _gaussian_claim(1.0)
  scores = _scores(20.0, 40, rng)
  found = auditing.audit(scores, delta=1e-3, epsilon_claimed=4.0, claim=claim)
  assert found.refuted and found.verdict.startswith(
    "ALARM: such guesses have probability <="
  )
  assert "if canaries are independent" in found.verdict
  assert found.to_json()["can_refute"] and found.to_json()["ceiling"]["epsilon_lower"] < 4
  audit = auditing.audit(scores, delta=1e-3, epsilon_claimed=4.0)
  assert not audit.refuted and not audit.can_refute
  assert "so few canaries CANNOT refute it" in audit.verdict


@pytest.mark.parametrize("num_inside", [1, 20, 39])
def test_the_ceiling_is_of_the_coins_that_fell(num_inside):
  """Uneven coins leave less to show than even ones, and no scores show more than theirs."""
  perfect = Scores(inside=np.full(num_inside, 5.0), outside=np.zeros(40 - num_inside))
  report = auditing.audit(perfect, delta=1e-3, epsilon_claimed=4.0)
  assert report.ceiling is not None
  assert report.ceiling.epsilon_lower == report.epsilon_lower
  even = verdict.ceiling(40, delta=1e-3, method="one_run")
  assert report.ceiling.epsilon_lower <= even.epsilon_lower


@pytest.mark.parametrize("num_inside", [0, 40, -1])
def test_coins_that_fell_on_one_side_have_no_ceiling(num_inside):
  with pytest.raises(ValueError, match="must be an integer >= 1"):
    verdict.ceiling(40, num_inside=num_inside, delta=1e-3, method="one_run")
