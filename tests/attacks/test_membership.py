"""Membership attacks: the published scores, computed again here record by record; closed forms."""

import numpy as np
import pytest
from scipy import stats

from dpjax import attacks
from dpjax.attacks import MEMBERSHIP_ATTACKS, Evidence, lira, rmia
from dpjax.attacks.membership import confidence_rule, loss_rule, rmia_tuned, tune_rmia
from dpjax.attacks.roc import curve_of, rate_at
from dpjax.validate import UserError

_N, _S = 300, 16


def _gaussian(seed=0, shift=2.0, spread=1.0, num_records=_N, num_shadows=_S, balanced=True):
  """(evidence, membership): log odds N(m_i + shift [in], s_i^2), m_i and s_i a record's own."""
  rng = np.random.default_rng(seed)
  center = spread * rng.standard_normal(num_records)
  width = rng.uniform(0.5, 2.0, num_records)
  halves = attacks.random_halves(num_shadows + 1, num_records, seed=seed)
  if not balanced:  # every record in 4 to 12 of the shadows
    halves = rng.permuted(
      np.arange(num_shadows + 1)[:, None] < rng.integers(4, 13, num_records), axis=0
    )
  noise = width * rng.standard_normal(halves.shape)
  scores = center + shift * width * halves + noise
  return Evidence(scores[-1], scores[:-1], halves[:-1]), halves[-1]


def _auc(scores, membership):
  return curve_of(scores, membership).auc


def _published_lira(evidence, online, fixed):
  """The scores that the authors' script thresholds (it negates the first, and the second is
  thresholded from below), with as many shadows in as out."""
  pairs = [
    (evidence.shadows[held, i], evidence.shadows[~held, i])
    for i, held in enumerate(evidence.included.T)
  ]
  stds = [np.std(np.concatenate([pair[side] for pair in pairs])) for side in (0, 1)]
  found = []
  for t, (inside, outside) in zip(evidence.target, pairs):
    s_in = stds[0] if fixed else np.std(inside)
    s_out = stds[0 if online else 1] if fixed else np.std(outside)
    log_out = stats.norm.logpdf(t, np.median(outside), s_out + 1e-30)
    log_in = stats.norm.logpdf(t, np.median(inside), s_in + 1e-30) if online else 0.0
    found.append(log_in - log_out)
  return np.array(found)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
def test_lira_is_the_published_one(fixed, balanced):
  evidence, _ = _gaussian(balanced=balanced)
  online = lira(evidence, fixed_variance=fixed)
  offline = lira(evidence, offline=True, fixed_variance=fixed, two_sided=True)
  np.testing.assert_allclose(online, _published_lira(evidence, True, fixed), rtol=1e-9)
  np.testing.assert_allclose(offline, _published_lira(evidence, False, fixed), rtol=1e-9)


def test_offline_lira_has_the_order_of_the_papers_one_sided_test():
  evidence, _ = _gaussian()
  outside = np.where(evidence.included, np.nan, evidence.shadows)
  z = (evidence.target - np.nanmedian(outside, 0)) / np.nanstd(outside, 0)
  np.testing.assert_array_equal(
    stats.rankdata(lira(evidence, offline=True)), stats.rankdata(z)
  )
  np.testing.assert_array_equal(np.sign(z), np.sign(stats.norm.cdf(z) - 0.5))


def _published_rmia(evidence, population, gamma, a, temperature=1.0):
  """Over all pairs (x, z), with P from shadows with and without each (a None) or without."""
  p = 1 / (1 + np.exp(-evidence.target / temperature))
  q = 1 / (1 + np.exp(-evidence.shadows / temperature))
  prior = []
  for i, held in enumerate(evidence.included.T):
    out = q[~held, i].mean()
    prior.append(
      (q[held, i].mean() + out) / 2 if a is None else ((1 + a) * out + 1 - a) / 2
    )
  ratio = p / np.array(prior)
  wins = ratio[:, None] / ratio[None, population] > gamma
  others = population.sum() - population
  return wins.sum(axis=1) / others


@pytest.mark.parametrize("gamma", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("a", [None, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_rmia_is_the_published_one(gamma, a, temperature):
  evidence, membership = _gaussian(spread=2.0)
  options = {} if a is None else dict(offline=True, offline_a=a)
  options |= dict(gamma=gamma, temperature=temperature)
  for population in (np.ones(_N, bool), ~membership):
    found = rmia(evidence, population=population, **options)
    expected = _published_rmia(evidence, population, gamma, a, temperature)
    np.testing.assert_allclose(found, expected, atol=1e-12)
  assert 0 < found.mean() < 1


def _sure(seed=0, num_records=500):
  """A model that is sure of all records, and surer of its members: their order is what tells."""
  rng = np.random.default_rng(seed)
  halves = attacks.random_halves(_S + 1, num_records, seed=seed)
  center = rng.uniform(3.0, 9.0, num_records)
  odds = center + 2.0 * halves + 0.5 * rng.standard_normal(halves.shape)
  return Evidence(odds[-1], odds[:-1], halves[:-1]), halves[-1]


def _rate(scores, members):
  return rate_at(curve_of(scores, members), 0.01).tpr


@pytest.mark.parametrize("offline", [False, True])
def test_tuning_finds_what_a_fixed_gamma_misses(offline):
  evidence, members = _sure()
  tuned = _rate(rmia_tuned(evidence, offline=offline), members)
  assert _rate(rmia(evidence, offline=offline), members) < 0.25 * tuned
  assert tuned > 0.4


def test_tuning_takes_the_best_of_all_pairs_on_the_shadows():
  """Recomputed by loops: each shadow the target, its complement left out."""
  evidence, _ = _sure(num_records=120)
  gammas, temperatures = (1.5, 1.2, 2.0), (1.0, 2.0, 4.0)
  rates = {}
  for gamma in gammas:
    for temperature in temperatures:
      found = []
      for odds, held in attacks.each_as_target(evidence.shadows, evidence.included):
        everyone = np.ones(120, bool)
        scores = _published_rmia(odds, everyone, gamma, None, temperature)
        found.append(scores[held] > np.sort(scores[~held])[-1])  # .01 of 60: none may err
      rates[gamma, temperature] = np.mean([np.mean(one) for one in found])
  chosen = tune_rmia(evidence, gammas=gammas, temperatures=temperatures)
  assert rates[chosen] == pytest.approx(max(rates.values()))
  assert len({round(rate, 6) for rate in rates.values()}) >= 3


def test_tuning_reads_nothing_of_the_target():
  evidence, _ = _sure(num_records=120)
  other = Evidence(-evidence.target, evidence.shadows, evidence.included)
  assert tune_rmia(evidence) == tune_rmia(other)


def test_with_many_shadows_lira_is_the_best_test_there_is():
  """N(m, s^2) against N(m + d s, s^2), known: AUC Phi(d / sqrt 2) (Neyman and Pearson)."""
  evidence, membership = _gaussian(shift=1.5, spread=4.0, num_records=4000, num_shadows=128)
  best = stats.norm.cdf(1.5 / np.sqrt(2))
  for name in ("lira", "lira_offline"):
    assert _auc(MEMBERSHIP_ATTACKS[name](evidence), membership) == pytest.approx(
      best, abs=0.025
    )
  assert _auc(MEMBERSHIP_ATTACKS["loss"](evidence), membership) < best - 0.15


@pytest.mark.cases(long=["rmia_tuned", "rmia_tuned_offline"])
@pytest.mark.parametrize("name", MEMBERSHIP_ATTACKS)
def test_every_attack_finds_leaks_and_invents_none(name):
  leaky, held = _gaussian(shift=3.0, num_records=2000)
  assert _auc(MEMBERSHIP_ATTACKS[name](leaky), held) > 0.75
  for seed in range(3):
    tight, held = _gaussian(seed=seed, shift=0.0, num_records=2000)
    assert abs(_auc(MEMBERSHIP_ATTACKS[name](tight), held) - 0.5) < 0.05


@pytest.mark.parametrize("name", MEMBERSHIP_ATTACKS)
def test_no_attack_depends_on_the_order_of_the_shadows_or_on_other_records(name):
  evidence, _ = _gaussian(num_records=40)
  found = MEMBERSHIP_ATTACKS[name](evidence)
  order = np.random.default_rng(1).permutation(_S)
  turned = Evidence(evidence.target, evidence.shadows[order], evidence.included[order])
  np.testing.assert_allclose(MEMBERSHIP_ATTACKS[name](turned), found, atol=1e-9)
  if name in ("loss", "lira", "lira_offline"):
    first = Evidence(
      *(part[..., :7] for part in (evidence.target, evidence.shadows, evidence.included))
    )
    np.testing.assert_allclose(MEMBERSHIP_ATTACKS[name](first), found[:7])


@pytest.mark.parametrize("name", MEMBERSHIP_ATTACKS)
@pytest.mark.parametrize("value", [0.0, -attacks.signals.LARGEST, attacks.signals.LARGEST])
def test_constant_scores_tell_nothing(name, value):
  halves = attacks.random_halves(9, 50, seed=0)
  same = np.full((9, 50), value)
  found = MEMBERSHIP_ATTACKS[name](Evidence(same[-1], same[:-1], halves[:-1]))
  assert np.ptp(found) == 0 and np.isfinite(found).all()


def test_shadows_that_agree_to_the_last_bit_give_finite_scores():
  halves = attacks.random_halves(9, 50, seed=0)
  same = np.zeros((8, 50))
  for name, attack in MEMBERSHIP_ATTACKS.items():
    found = attack(Evidence(np.linspace(-5, 5, 50), same, halves[:-1]))
    assert np.isfinite(found).all(), name


def test_rules_say_yes_or_no():
  assert confidence_rule([0.81, 0.8, np.nextafter(0.8, 1)]).tolist() == [1, 0, 1]
  assert loss_rule([0.5, 0.6], mean_training_loss=0.5).tolist() == [1, 0]


def _evidence(**changes):
  halves = attacks.random_halves(4, 6, seed=1)
  parts = dict(target=np.zeros(6), shadows=np.zeros((4, 6)), included=halves)
  return Evidence(**{**parts, **changes})


_ALWAYS = attacks.random_halves(4, 6, seed=1)
_ALWAYS[:, 2] = True


@pytest.mark.cases(long=[22, 23, 24])
@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda: _evidence(target=np.zeros(7)), "target: has scores of 7 records, the shadows of"),
    (lambda: _evidence(target=np.zeros(0)), "target.shape=(0,): must be [records]"),
    (lambda: _evidence(target=[0, 0, np.nan, 0, 0, 0]), "target: 1 of 6 are NaN"),
    (lambda: _evidence(target=[0, 0, np.inf, 0, 0, 0]), "target: 1 of 6 scores are infinite"),
    (lambda: _evidence(shadows=np.full((4, 6), np.nan)), "shadows: 24 of 24 are NaN"),
    (lambda: _evidence(shadows=np.zeros((3, 6))), "included: must be bool of shape (3, 6)"),
    (lambda: _evidence(included=np.ones((4, 6))), "included: must be bool of shape (4, 6)"),
    (
      lambda: _evidence(shadows=np.zeros((1, 6)), included=np.ones((1, 6), bool)),
      "shadows: holds 1 shadow model; must hold at least 2",
    ),
    (
      lambda: lira(_evidence(included=_ALWAYS), fixed_variance=True),
      "included: 1 of 6 records are out of fewer than 1 of the 4 shadows, the first is record 2",
    ),
    (
      lambda: rmia(_evidence(included=~_ALWAYS)),
      "included: 1 of 6 records are in fewer than 1 of the 4 shadows, the first is record 2",
    ),
    (
      lambda: lira(Evidence(np.zeros(3), np.zeros((2, 3)), attacks.random_halves(2, 3, seed=0))),
      "a variance of its own (lira) needs 2; use fixed_variance=True",
    ),
    (lambda: lira(_evidence(), two_sided=True), "two_sided=True"),
    (lambda: rmia(_evidence(), gamma=0.5), "gamma=0.5"),
    (lambda: rmia(_evidence(), gamma="2"), "gamma='2'"),
    (lambda: rmia(_evidence(), temperature=0.0), "temperature=0.0"),
    (lambda: tune_rmia(_evidence(), gammas=()), "gammas: must hold at least one"),
    (lambda: tune_rmia(_evidence(), gammas=(0.5,)), "gammas[0]=0.5: must be >= 1"),
    (lambda: tune_rmia(_evidence(), temperatures=(-1.0,)), "temperature=-1.0"),
    (lambda: tune_rmia(_evidence(), fpr=0.0), "fpr=0.0"),
    (lambda: tune_rmia(_evidence(included=_ALWAYS)), "none of 4 can play the target"),
    (lambda: rmia(_evidence(), offline=True, offline_a=2), "offline_a=2"),
    (lambda: rmia(_evidence(), population=np.zeros(6, bool)), "population: must be bool [6]"),
    (lambda: rmia(_evidence(), population=np.arange(6)), "population: must be bool [6]"),
    (lambda: confidence_rule([0.5], threshold=1.5), "threshold=1.5"),
    (lambda: loss_rule([[0.5]], mean_training_loss=1), "losses.shape=(1, 1)"),
  ],
)  # fmt: skip
def test_bad_input_is_one_line(call, words):
  with pytest.raises(UserError) as caught:
    call()
  assert words in str(caught.value) and "\n" not in str(caught.value)
