"""ROC and rates: against scikit-learn and simulated truth; ties; what too few records show."""

import math

import numpy as np
import pytest
from scipy import special, stats
from sklearn import metrics

from dpjax import attacks
from dpjax.attacks import roc
from tests.refuses import refuses


def _normal(seed, members=500, others=700, shift=1.0, digits=None):
  rng = np.random.default_rng(seed)
  truth = np.arange(members + others) < members
  scores = rng.standard_normal(truth.size) + shift * truth
  return (scores if digits is None else scores.round(digits)), truth


@pytest.mark.parametrize("digits", [None, 1, 0])  # 0: nearly all scores are equal to others
def test_the_curve_is_that_of_scikit_learn(digits):
  scores, truth = _normal(0, digits=digits)
  curve = roc.curve_of(scores, truth)
  fpr, tpr, thresholds = metrics.roc_curve(truth, scores, drop_intermediate=False)
  np.testing.assert_allclose(curve.fpr, fpr)
  np.testing.assert_allclose(curve.tpr, tpr)
  np.testing.assert_allclose(curve.thresholds[1:], thresholds[1:])
  found = attacks.measure(scores, truth)
  assert found.auc == pytest.approx(metrics.roc_auc_score(truth, scores))
  assert found.balanced_accuracy == pytest.approx(np.max((tpr + 1 - fpr) / 2))
  for rate in found.rates:  # the published convention: the last point within the rate
    assert rate.tpr == pytest.approx(tpr[fpr <= rate.fpr][-1])


def test_only_the_order_of_scores_counts():
  scores, truth = _normal(1)
  for other in (np.exp(scores), 1e-300 * scores, np.where(scores > 3, np.inf, scores)):
    same = attacks.measure(other, truth)
    if np.isfinite(other).all():
      assert same[:6] == attacks.measure(scores, truth)[:6]
  assert roc.curve_of([np.inf, -np.inf], np.array([True, False])).auc == 1


def test_equal_scores_are_never_parted():
  truth = np.arange(2000) >= 1000
  found = attacks.measure(np.zeros(2000), truth)
  assert found.auc == 0.5 and found.balanced_accuracy == 0.5
  assert [rate.tpr for rate in found.rates] == [0, 0]


def test_intervals_are_exact():
  """Clopper and Pearson 1934: the tails of the binomial law, by those of the beta law."""
  for count, n in ((0, 1), (3, 10), (10, 10), (499, 500)):
    low = stats.beta.ppf(0.025, count, n - count + 1) if count else 0.0
    high = stats.beta.ppf(0.975, count + 1, n - count) if count < n else 1.0
    np.testing.assert_allclose(roc.exact_interval(count, n, 0.95), (low, high), atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("shift", [0.0, 1.0, 3.0])
def test_intervals_hold_the_truth_as_often_as_they_say(shift):
  """400 experiments, 95 % intervals: fewer than 32 misses (of 20 expected, at most)."""
  auc = stats.norm.cdf(shift / np.sqrt(2))
  best = stats.norm.cdf(shift / 2)
  misses = np.zeros(4, int)
  for seed in range(400):
    found = attacks.measure(*_normal(seed, 60, 150, shift), fprs=(0.02,))
    rate = found.rates[0]
    threshold = found.curve.thresholds[np.searchsorted(found.curve.false_positives, 4) - 1]
    fpr, tpr = stats.norm.sf(threshold), stats.norm.sf(threshold - shift)
    pairs = (
      (auc, found.auc_interval),
      (best, found.balanced_accuracy_interval),
      (fpr, rate.fpr_interval),
      (tpr, rate.tpr_interval),
    )
    misses += [not low <= value <= high for value, (low, high) in pairs]
  assert (misses < 32).all(), misses


def test_a_rate_that_so_few_non_members_cannot_show_is_marked():
  truth = np.arange(1000) >= 500
  found = attacks.measure(np.arange(1000.0), truth)
  assert not found.rates[0].resolved and found.rates[1].resolved
  assert found.rates[0].fpr_interval[1] > 0.001  # nobody knows that it is as small as asked
  assert "| < 1.0000 (" in attacks.table({"loss": found})
  exact = roc.rate_at(roc.curve_of(np.arange(2000.0), np.arange(2000) >= 1000), 0.001)
  assert exact.resolved and exact.allowed == 1  # 0.001 * 1000, whatever it is in binary


_TRUTH = np.array([True, False])


@pytest.mark.cases(long=[10])
@pytest.mark.parametrize(
  ("call", "field"),
  [
    (
      lambda: attacks.measure([1, 2], np.array([True, True])),
      "membership",
    ),
    (
      lambda: attacks.measure([1, 2], np.array([False, False])),
      "membership",
    ),
    (lambda: attacks.measure([], np.array([], bool)), "membership"),
    (lambda: attacks.measure([1, np.nan], _TRUTH), "scores"),
    (lambda: attacks.measure([1, 2, 3], _TRUTH), "membership"),
    (lambda: attacks.measure([1, 2], np.array([1, 0])), "membership"),
    (lambda: attacks.measure([1, 2], _TRUTH, fprs=(0.0,)), "fpr"),
    (lambda: attacks.measure([1, 2], _TRUTH, confidence=95), "confidence"),
    (lambda: attacks.measure([1, 2], _TRUTH, fprs=0.1), "fprs"),
    (
      lambda: attacks.table(
        {str(f): attacks.measure([1, 2], _TRUTH, fprs=[f]) for f in (0.1, 0.2)}
      ),
      "leakages",
    ),
  ],
)
def test_bad_input_is_one_line(call, field):
  with refuses(field):
    call()


def test_the_loss_tail_is_counted_and_estimates_what_lira_finds():
  """By loops, and on models whose hard members alone are pulled to the head."""
  rng = np.random.default_rng(0)
  truth = np.arange(4000) < 2000
  scores = rng.standard_normal(4000)
  for fnr in (0.001, 0.01, 0.1):
    floor = np.sort(scores[truth])[math.floor(fnr * 2000)]
    expected = np.mean(scores[~truth] < floor)
    assert roc.loss_tail(scores, truth, fnr=fnr).tpr == pytest.approx(expected)
  hard = rng.random(4000) < 0.2  # a fifth, which only memory makes easy
  center = np.where(hard, np.where(truth, 4.0, -8.0), 4.0)
  tail = roc.loss_tail(center + rng.standard_normal(4000), truth, fnr=0.001)
  assert tail.tpr == pytest.approx(0.2, abs=0.03)
  assert tail.tpr_interval[0] < 0.2 < tail.tpr_interval[1]


def test_the_strongest_of_many_attacks_is_partly_the_luckiest():
  # Fifteen attacks that know nothing: the threshold's true rate is 1 - threshold. Intervals of one
  # attack would be above it in one of seven choices.
  rng = np.random.default_rng(0)
  truth = np.arange(400) < 200
  above = []
  for _ in range(12):
    scores = rng.random((15, 400))
    curves = {str(k): roc.curve_of(score, truth) for k, score in enumerate(scores)}
    best = roc.strongest(curves, fpr=0.01)
    threshold = np.sort(scores[int(best.name)][~truth])[-3]
    alone = roc.rate_at(curves[best.name], 0.01).tpr_interval[0]
    above.append((alone > 1 - threshold, best.rate.tpr_interval[0] > 1 - threshold))
  alone, chosen = np.mean(above, axis=0)
  assert alone > 0.1 and chosen <= 0.05


def test_a_choice_of_attacks_without_an_interval_is_refused():
  truth = np.arange(4) < 2
  with refuses("confidence"):
    roc.strongest({"sure": roc.curve_of(truth + 0.0, truth)}, fpr=0.1, confidence=1.0)


def test_records_that_several_targets_are_asked_about_count_once():
  """A tenth of 200 records leaks in each of 17 targets: 1,700 members are not independent."""
  rng = np.random.default_rng(0)
  missed = []
  for _ in range(40):
    leaks = rng.random(200) < 0.1
    truth = _halves(rng)
    scores = rng.standard_normal((17, 200)) + 6 * (leaks & truth)
    # Members are above the threshold if they leak, or as often as non-members.
    real = 0.1 + 0.9 * special.ndtr(-np.quantile(scores[~truth], 0.99))
    ends = [
      roc.measure(*map(shape, (scores, truth)), fprs=(0.01,)).rates[0].tpr_interval
      for shape in (np.ravel, np.asarray)
    ]
    missed.append([not low <= real <= high for low, high in ends])
  as_many, as_one = np.mean(missed, axis=0)
  assert as_many > 0.2 and as_one <= 0.05


def _halves(rng, num_targets=17, count=200):
  """Each record is a member of eight targets."""
  order = np.arange(num_targets)[:, None] * np.ones(count, int)
  return rng.permuted(order, axis=0) < 8


def test_intervals_of_pooled_rates_hold_the_rate_and_are_chernoffs():
  truth = np.tile(np.arange(40) < 20, (3, 1))
  scores = truth + np.random.default_rng(0).standard_normal(truth.shape)
  found = roc.measure(scores, truth, fprs=(0.1,))
  flat = roc.measure(scores.ravel(), truth.ravel(), fprs=(0.1,))
  assert (found.auc, found.rates[0].tpr) == (flat.auc, flat.rates[0].tpr)
  for mine, other in zip(
    (found.auc_interval, found.balanced_accuracy_interval, *found.rates[0][3::2]),
    (flat.auc_interval, flat.balanced_accuracy_interval, *flat.rates[0][3::2]),
  ):
    assert mine[0] <= other[0] <= other[1] <= mine[1]
  rate, (low, high) = found.rates[0].tpr, found.rates[0].tpr_interval
  for end in (low, high):
    apart = rate * math.log(rate / end) + (1 - rate) * math.log((1 - rate) / (1 - end))
    assert 20 * apart == pytest.approx(math.log(2 / 0.05))
