"""The line of a guarantee: closed forms, outside oracles, and verdicts that are nowhere wrong."""

import functools
import itertools

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from dpjax import accounting, attacks, auditing
from dpjax.attacks import allowed
from dpjax.attacks.roc import curve_of
from dpjax.auditing.scores import Scores
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.federated.privacy import make_plan
from tests import plans
from tests.refuses import refuses

_FPRS = np.concatenate([[0.0], np.geomspace(1e-6, 0.5, 25), [0.9, 1.0]])


def test_epsilon_delta_is_met_by_the_mechanism_that_attains_it():
  """Reveal with probability delta, else randomised response: tests of it reach the line."""
  epsilon, delta = 1.3, 0.05
  line, kept = allowed.by_epsilon(epsilon, delta), 1 - delta
  yes = (
    kept * np.exp(epsilon) / (1 + np.exp(epsilon))
  )  # "in" said by who is in, not revealed
  no = kept / (1 + np.exp(epsilon))  # said by who is out
  corners = [(0.0, delta), (no, delta + yes), (no + yes, 1.0)]
  for fpr, tpr in corners:
    assert line([fpr])[0] == pytest.approx(tpr)
  weights = np.linspace(0, 1, 7)
  for (f0, t0), (f1, t1) in itertools.pairwise(corners):  # between corners: a straight line
    np.testing.assert_allclose(line(f0 + weights * (f1 - f0)), t0 + weights * (t1 - t0))


@pytest.mark.cases(quick=["4.0"], long=...)
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
def test_an_event_allows_what_gaussian_dp_does_and_a_little_more(multiplier):
  mu = 1 / multiplier
  exact = allowed.by_mu(mu)(_FPRS)
  np.testing.assert_allclose(exact[1:-1], stats.norm.cdf(stats.norm.ppf(_FPRS[1:-1]) + mu))
  for accountant, spare in (("pld", 0.002), ("rdp", 0.3)):
    line = allowed.by_event(accounting.gaussian_event(multiplier), accountant=accountant)
    assert (line(_FPRS) >= exact - 1e-9).all()
    assert (line(_FPRS) <= exact + spare).all()
    assert line([0.0])[0] <= 1e-8


def test_no_test_of_a_laplace_release_crosses_the_line_of_its_event():
  """The exact trade-off curve of Laplace noise, by thresholds on its output."""
  line = allowed.by_event(dp_accounting.LaplaceDpEvent(1.0))
  at = np.linspace(-8, 9, 400)
  fpr, tpr = stats.laplace.sf(at), stats.laplace.sf(at - 1)
  assert (tpr <= line(fpr) + 1e-9).all()
  assert (line(fpr) - tpr).max() < 0.02  # and some come close


_plan = functools.partial(plans.of, 200, prob=0.1, normalize_by=100, num_steps=30)


@pytest.mark.slow
def test_a_plan_allows_no_less_than_its_event_and_no_more_than_its_printed_epsilon():
  plan = _plan()
  line, whole = allowed.by_plan(plan), allowed.by_event(plan.event())
  own = allowed.by_epsilon(plan.epsilon(), plan.delta)
  assert (line(_FPRS) >= whole(_FPRS) - 1e-9).all()  # overflow is paid for
  middle = (_FPRS > 1e-3) & (_FPRS < 0.5)
  assert (line(_FPRS)[middle] < own(_FPRS)[middle]).all()
  assert (allowed.by_plan(plan, steps=3)(_FPRS) <= line(_FPRS) + 1e-12).all()
  assert line.words == "proved by pld, add_or_remove_one"


@pytest.mark.parametrize("line", [allowed.by_epsilon(0, 0), allowed.by_mu(0)])
def test_perfect_privacy_is_the_diagonal(line):
  np.testing.assert_allclose(line(_FPRS), _FPRS)


@pytest.mark.parametrize("line", [allowed.by_epsilon(800.0, 0.1), allowed.by_mu(50.0)])
def test_huge_promises_forbid_nothing(line):
  found = line(_FPRS)
  assert np.isfinite(found).all() and (found[1:] == 1).all()


def _attack(mu, n, seed):
  """The best attack on a mu-Gaussian-DP mechanism: n records in, n out."""
  truth = np.arange(2 * n) < n
  noise = np.random.default_rng(seed).standard_normal(2 * n)
  return curve_of(noise + mu * truth, truth)


@pytest.mark.long
def test_verdicts_at_the_line_are_wrong_no_more_often_than_they_say():
  """The best attack there is against its own line: "above" is false, at most 5 %."""
  line = allowed.by_mu(1.0)
  verdicts = [attacks.judge(_attack(1.0, 1500, seed), line).verdict for seed in range(200)]
  assert verdicts.count("above") + verdicts.count("below") <= 10


@pytest.mark.parametrize(("mu", "n", "expected"), [
  (2.5, 5000, "above"),
  (0.2, 20000, "below"),
  (2.5, 20, "cannot tell"),
  (0.2, 100, "cannot tell"),
])  # fmt: skip
def test_verdicts_away_from_the_line(mu, n, expected):
  for seed in range(5):
    found = attacks.judge(_attack(mu, n, seed), allowed.by_mu(1.0))
    assert found.verdict == expected
    assert "1-Gaussian DP" in found.words and "\n" not in found.words


def test_a_leak_above_the_line_is_refuted_by_the_audit_of_the_same_scores():
  truth = np.arange(4000) < 2000
  values = np.random.default_rng(0).standard_normal(4000) + 6 * truth
  assert (
    attacks.judge(curve_of(values, truth), allowed.by_epsilon(1, 1e-5)).verdict == "above"
  )
  scores = Scores(values[truth], values[~truth])
  assert auditing.audit(scores, delta=1e-5, epsilon_claimed=1.0).refuted


@pytest.mark.cases(long=["privacy2-replace_special"])
@pytest.mark.parametrize(
  ("privacy", "relation"),
  [
    ({"privacy.sampler": "poisson"}, "add_or_remove_one"),
    ({"privacy.sampler": "fixed_size"}, "replace_one"),
    ({"privacy": "dp_ftrl"}, "replace_special"),
  ],
)
def test_the_plan_of_a_federated_run_has_a_line_for_users(privacy, relation):
  """Canary clients along axes of their own, the best that an adversary of one round sees."""
  numbers = {"privacy.epsilon": None, "privacy.noise_multiplier": 2.0, "num_rounds": 1}
  numbers |= {"clients_per_round": 100.0, "partition.num_clients": 100}
  config = fields.replace_all(fields.replace_all(FedConfig(), numbers), privacy)
  plan, _ = make_plan(config, 100)
  line = allowed.by_plan(plan)
  assert relation in line.words and line.words.startswith("proved")
  apart = 2.0 if relation == "replace_one" else 1.0  # clip norms between in and out
  mu = apart / plan.noise_multiplier
  exact = allowed.by_mu(mu)(_FPRS)
  assert (line(_FPRS) >= exact - 1e-9).all() and (line(_FPRS) <= exact + 0.3).all()
  assert attacks.judge(_attack(mu, 5000, 0), line).verdict != "above"
  assert attacks.judge(_attack(5 * mu, 5000, 0), line).verdict == "above"  # a fifth of it


def test_a_record_that_takes_anothers_place_is_two_steps():
  """Gaussian noise: out and in are orthogonal, sqrt(2) C apart, or opposite, 2 C."""
  line = allowed.by_event(accounting.gaussian_event(2.0))
  two = allowed.replacement_line(line)(_FPRS)
  assert (two >= allowed.by_mu(2 / 2.0)(_FPRS) - 1e-9).all()
  assert (line([0.1]) < allowed.by_mu(2**0.5 / 2)([0.1])).all()  # one step is not enough


@pytest.mark.cases(long=[5, 6, 7])
@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda: allowed.by_epsilon(-1, 0), "epsilon"),
    (lambda: allowed.by_epsilon(np.inf, 0), "epsilon"),
    (lambda: allowed.by_epsilon(1, 1), "delta"),
    (lambda: allowed.by_mu(np.nan), "mu"),
    (lambda: allowed.by_mu(1.0)([1.5]), "fpr"),
    (lambda: allowed.by_plan(_plan(noise_multiplier=0.0)), "plan"),
    (
      lambda: allowed.by_event(dp_accounting.NonPrivateDpEvent()),
      "event",
    ),
    (
      lambda: attacks.judge(_attack(1, 10, 0), allowed.by_mu(1), fprs=()),
      "fprs",
    ),
  ],
)
def test_bad_input_is_one_line(call, field):
  with refuses(field):
    call()
