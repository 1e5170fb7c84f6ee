"""InfoRMIA, BaVarIA, quantile regression, attack networks: by loops, integrals and known truth."""

import math

import numpy as np
import pytest
from scipy import special, stats

from dpjax import attacks
from dpjax.attacks import Evidence
from dpjax.attacks.attack_network import attack_network
from dpjax.attacks.difficulty import quantile_regression
from dpjax.attacks.membership import bavaria, informia
from dpjax.attacks.queries import augment, mean_score
from dpjax.attacks.roc import curve_of
from tests.refuses import refuses


def _evidence(seed=0, num_records=40, num_shadows=10):
  rng = np.random.default_rng(seed)
  halves = attacks.random_halves(num_shadows + 1, num_records, seed=seed)
  width = rng.uniform(0.3, 2.0, num_records)
  odds = 3 * rng.standard_normal(num_records) + 2 * halves
  odds = odds + width * rng.standard_normal(halves.shape)
  return Evidence(odds[-1], odds[:-1], halves[:-1])


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("some", [False, True])
def test_informia_is_the_mean_log_ratio_over_all_others(offline, some):
  evidence = _evidence()
  population = np.arange(40) % 3 == 0 if some else np.ones(40, bool)
  sigmoid = lambda odds: 1 / (1 + np.exp(-odds / 3.0))
  ratios = []
  for odds, column, held in zip(evidence.target, evidence.shadows.T, evidence.included.T):
    prior = sigmoid(column[~held]).mean()
    other = 0.4 * prior + 0.6 if offline else sigmoid(column[held]).mean()
    ratios.append(sigmoid(odds) / ((prior + other) / 2))
  expected = [
    np.mean([np.log(x / z) for j, z in enumerate(ratios) if population[j] and j != i])
    for i, x in enumerate(ratios)
  ]
  found = informia(
    evidence, population=population, temperature=3.0, offline=offline, offline_a=0.4
  )
  np.testing.assert_allclose(found, expected, atol=1e-12)


def _integrated(t, shadows, pooled, weight):
  """p(t | shadows) by sums over the variance; the mean, flat, is integrated by hand."""
  k, center = len(shadows), shadows.mean()
  variance = np.geomspace(1e-4, 1e4, 20_001)
  log = stats.invgamma.logpdf(variance, weight / 2, scale=weight * pooled / 2)
  log -= (k - 1) / 2 * np.log(variance) + np.sum((shadows - center) ** 2) / (2 * variance)
  mass = np.exp(log - log.max()) * variance  # equal steps of the logarithm
  further = stats.norm.pdf(t, center, np.sqrt(variance * (1 + 1 / k)))
  return np.sum(mass * further) / np.sum(mass)


def test_bavaria_is_what_the_integral_over_all_variances_says():
  evidence, weight = _evidence(), 3.0
  logs = []
  for inside in (True, False):
    parts = [
      column[held == inside]
      for column, held in zip(evidence.shadows.T, evidence.included.T)
    ]
    pooled = sum(np.sum((part - part.mean()) ** 2) for part in parts)
    pooled /= sum(len(part) - 1 for part in parts)
    rows = zip(evidence.target, parts)
    logs.append(np.log([_integrated(t, part, pooled, weight) for t, part in rows]))
  found = bavaria(evidence, prior_weight=weight)
  np.testing.assert_allclose(found, logs[0] - logs[1], rtol=1e-5, atol=1e-6)


def test_bavaria_offline_is_the_logit_of_students_cdf():
  evidence = _evidence()
  found = bavaria(evidence, offline=True, prior_weight=0.0)
  for score, t, column, held in zip(
    found, evidence.target, evidence.shadows.T, evidence.included.T
  ):
    out = column[~held]
    scale = out.std(ddof=1) * np.sqrt(1 + 1 / len(out))
    below = stats.t.cdf((t - out.mean()) / scale, len(out) - 1)
    assert score == pytest.approx(np.log(below / (1 - below)), rel=1e-6)


def test_a_heavy_prior_is_one_gaussian_variance_for_all():
  evidence = _evidence()
  found = bavaria(evidence, prior_weight=1e9)
  expected = []
  for inside in (True, False):
    side = np.where(evidence.included == inside, evidence.shadows, np.nan)
    count = np.sum(evidence.included == inside, axis=0)
    pooled = np.nansum((side - np.nanmean(side, 0)) ** 2) / np.sum(count - 1)
    std = np.sqrt(pooled * (1 + 1 / count))
    expected.append(stats.norm.logpdf(evidence.target, np.nanmean(side, 0), std))
  np.testing.assert_allclose(found, expected[0] - expected[1], atol=1e-5)


def test_with_few_shadows_a_prior_is_better_than_one_variance_and_than_one_for_each():
  """Widths that differ, four shadows a side: the AUC of BaVarIA is above both of LiRA's."""
  rng = np.random.default_rng(3)
  halves = attacks.random_halves(9, 4000, seed=3)
  width = np.exp(rng.normal(0, 0.7, 4000))
  odds = 3 * rng.standard_normal(4000) + width * (
    2 * halves + rng.standard_normal((9, 4000))
  )
  evidence, members = Evidence(odds[-1], odds[:-1], halves[:-1]), halves[-1]
  auc = lambda scores: curve_of(scores, members).auc
  others = auc(attacks.lira(evidence)), auc(attacks.lira(evidence, fixed_variance=True))
  assert auc(bavaria(evidence)) > max(others) + 0.005


def _regression(seed=0, n=800):
  """Log odds of non-members: N(5 x, 1), so that one threshold for all finds easy records."""
  rng = np.random.default_rng(seed)
  x = rng.uniform(0, 2, (n, 1))
  return 5 * x[:, 0] + rng.standard_normal(n), x


@pytest.mark.slow
def test_quantile_regression_keeps_its_false_positives_and_sees_what_one_threshold_does_not():
  """Of members the log odds are three deviations higher; the rates are means over known records."""
  wrong, right, plain = [], [], []
  for seed in range(5):
    known, seen = _regression(3 * seed)
    outside, fresh = _regression(3 * seed + 1)
    inside, places = _regression(3 * seed + 2)
    odds = np.concatenate([outside, inside + 3.0])
    places = np.concatenate([fresh, places])
    scores = quantile_regression(
      odds, places, known_log_odds=known, known_features=seen, fpr=0.05
    )
    called = np.split(scores > 0, 2)
    wrong.append(called[0].mean())
    right.append(called[1].mean())
    plain.append(np.mean(inside + 3.0 > np.quantile(known, 0.95)))
  assert np.mean(wrong) == pytest.approx(0.05, abs=0.02)
  assert np.mean(right) > 0.7 > 2 * np.mean(plain)


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"fpr": 0.0}, "fpr"),
    ({"fpr": 1e-4}, "fpr"),
    (
      {"features": np.zeros((3, 1))},
      "features.shape",
    ),
    ({"features": np.zeros((2, 2))}, "features.shape"),
    ({"log_odds": [0.0, np.inf]}, "log_odds"),
    ({"known_features": np.full((800, 1), np.nan)}, "known_features"),
    ({"seed": -1}, "seed"),
  ],
)
def test_bad_input_of_quantile_regression_is_one_line(change, field):
  known, seen = _regression()
  given = dict(log_odds=[0.0, 1.0], features=np.zeros((2, 1)))
  given |= dict(known_log_odds=known, known_features=seen) | change
  with refuses(field):
    quantile_regression(given.pop("log_odds"), given.pop("features"), **given)


def _answers(rng, held, labels, shift=2.0):
  """Probabilities of two classes; a member's log odds are higher by `shift`, in class 1 lower."""
  moved = np.where(labels == 0, shift, -shift) * held
  odds = rng.normal(0, 1, held.shape) + moved
  own = special.expit(odds)
  first = np.where(labels == 0, own, 1 - own)
  return np.stack([first, 1 - first], axis=-1)


@pytest.mark.slow
def test_attack_networks_reach_the_best_test_of_each_class_where_one_threshold_is_blind():
  """Log odds N(0, 1) and N(+-2, 1): the best test has AUC Phi(2 / sqrt 2) in each class."""
  rng, n = np.random.default_rng(0), 400
  labels = np.arange(n) % 2
  held = attacks.random_halves(6, n, seed=0)
  answers = _answers(rng, held, labels)
  target = rng.random(n) < 0.5
  asked = _answers(rng, target, labels)
  scores = attack_network(asked, labels, shadow_answers=answers, included=held)
  best = stats.norm.cdf(2 / math.sqrt(2))
  for label in (0, 1):
    mine = labels == label
    assert curve_of(scores[mine], target[mine]).auc == pytest.approx(best, abs=0.05)
  own = np.take_along_axis(asked, labels[:, None], axis=1)[:, 0]
  assert abs(curve_of(own, target).auc - 0.5) < 0.1
  assert curve_of(scores, target).auc > best - 0.06
  # Members that answers do not show are not found.
  silent = attack_network(
    _answers(rng, target, labels, shift=0.0), labels, shadow_answers=answers, included=held
  )
  assert abs(curve_of(silent, target).auc - 0.5) < 0.1


def test_a_class_that_no_shadow_left_out_says_nothing():
  answers = np.full((2, 4, 2), 0.5)
  scores = attack_network(
    answers[0], np.zeros(4, int), shadow_answers=answers, included=np.ones((2, 4), bool)
  )
  assert scores.tolist() == [0.5] * 4


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"answers": np.full((4, 3), 0.5)}, "shadow_answers.shape"),
    ({"answers": np.full(4, 0.5)}, "answers.shape"),
    ({"answers": np.full((4, 2), 1.5)}, "answers"),
    ({"included": np.ones((2, 4))}, "included"),
    ({"labels": np.zeros(3, int)}, "labels"),
    ({"labels": np.zeros(4)}, "labels"),
  ],
)
def test_bad_input_of_an_attack_network_is_one_line(change, field):
  given = {"answers": np.full((4, 2), 0.5), "labels": np.zeros(4, int)} | change
  known = {"shadow_answers": np.full((2, 4, 2), 0.5), "included": np.ones((2, 4), bool)}
  known["included"] = given.pop("included", known["included"])
  with refuses(field):
    attack_network(**given, **known)


def test_bad_settings_are_one_line():
  for call, words in (
    (lambda: bavaria(_evidence(), prior_weight=-1.0), "prior_weight"),
    (lambda: informia(_evidence(), temperature=0.0), "temperature"),
    (lambda: informia(_evidence(), population=np.zeros(40, bool)), "population"),
  ):
    with refuses(words):
      call()


def test_queries_are_flips_and_shifts_with_reflected_edges():
  """Pixel by pixel."""
  x = np.random.default_rng(0).random((2, 5, 6, 1))
  copies = augment(x, 18, shift=2)
  assert len({copy.tobytes() for copy in copies}) == 18
  np.testing.assert_array_equal(copies[0], x)
  inside = lambda place, size: abs(place) if place < size else 2 * (size - 1) - place
  places = [(0, 0), (0, 2), (0, -2), (2, 0), (-2, 0), (2, 2), (2, -2), (-2, 2), (-2, -2)]
  for number, (down, right) in enumerate(places):
    for row in range(5):
      for column in range(6):
        expected = x[:, inside(row - down, 5), inside(column - right, 6)]
        np.testing.assert_array_equal(copies[2 * number][:, row, column], expected)
        np.testing.assert_array_equal(copies[2 * number + 1][:, row, 5 - column], expected)


def test_more_looks_at_a_record_are_a_better_attack():
  """Queries with noise of their own: the mean of 8 sees sqrt(8) times further."""
  rng = np.random.default_rng(0)
  halves = attacks.random_halves(9, 2000, seed=0)
  odds = 2 * rng.standard_normal(2000) + halves + 2 * rng.standard_normal((8, 9, 2000))
  queries = [Evidence(one[-1], one[:-1], halves[:-1]) for one in odds]
  auc = lambda scores: curve_of(scores, halves[-1]).auc
  lira = attacks.MEMBERSHIP_ATTACKS["lira_fixed"]
  one, eight = (auc(mean_score(lira, queries[:k])) for k in (1, 8))
  assert one < 0.65 and eight > one + 0.1
  np.testing.assert_array_equal(mean_score(lira, queries[:1]), lira(queries[0]))


def test_bad_queries_are_one_line():
  images = np.zeros((1, 3, 3, 1))
  for call, words in (
    (lambda: augment(images, 19), "num_queries"),
    (lambda: augment(images, 3, shift=3), "shift"),
    (lambda: augment(np.zeros((1, 3)), 2), "num_queries"),
    (lambda: mean_score(bavaria, []), "queries"),
  ):
    with refuses(words):
      call()
