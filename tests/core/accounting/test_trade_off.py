"""True positives and mu of Gaussian DP, read from proved pairs: against closed forms."""

import math

import numpy as np
import pytest
from scipy import special

from dpjax import accounting
from dpjax.accounting.trade_off import TradeOff, trade_off
from tests.refuses import refuses

_SLACK = 1e-5
_RATES = np.array([0.0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.99, 1.0])


def _line(mu, fpr):
  return special.ndtr(special.ndtri(fpr) + mu)


@pytest.mark.cases(quick=["50.0"], long=...)
@pytest.mark.parametrize("z", [50.0, 1.0, 0.4])
def test_a_gaussian_is_its_own_line(z):
  curve = trade_off(accounting.gaussian_event(z), slack=_SLACK)
  found, exact = curve.true_positive_rate(_RATES), _line(1 / z, _RATES)
  assert (found >= exact).all() and (found <= exact * 1.003 + _SLACK).all()
  # the slack lowers mu where delta(0) is small; never below what it may
  least = special.ndtri(special.ndtr(1 / z / 2) - _SLACK / 2) * 2
  assert 0.999 * least <= curve.mu(_SLACK) <= 1.002 / z


def test_twenty_steps_are_as_one():
  event = accounting.compose(accounting.gaussian_event(math.sqrt(20)), 20)
  assert trade_off(event, slack=_SLACK).mu(_SLACK) == pytest.approx(1, rel=2e-3)


@pytest.mark.cases(long=["pld"])
@pytest.mark.parametrize("by", ["pld", "rdp"])
def test_a_sampled_gaussian_is_below_both_lines(by):
  prob, z = 0.2, 0.8
  event = accounting.poisson_sampled_event(accounting.gaussian_event(z), sampling_prob=prob)
  curve = trade_off(event, slack=_SLACK, accountant=by)
  at = (
    np.linspace(-6, 10, 400) / z
  )  # thresholds: the likelihood ratio grows with the output
  fpr = special.ndtr(-at)
  member = prob * special.ndtr(1 / z - at) + (1 - prob) * fpr  # the record is there
  other = 1 - (prob * special.ndtr(at - 1 / z) + (1 - prob) * special.ndtr(at))
  mu = curve.mu(_SLACK)
  for rate, hit in (
    (fpr, member),
    (1 - other, special.ndtr(at)),
  ):  # and the other way round
    assert (hit <= curve.true_positive_rate(rate) + 1e-12).all()
    assert (hit <= _line(mu, rate) + _SLACK).all()
  if by == "pld":
    gap = lambda mu: np.max(member - _line(mu, fpr) - _SLACK)
    assert gap(0.99 * mu) > 0 and mu < 1 / z  # no smaller mu would do


def test_between_two_pairs_the_chord_counts():
  """Both pairs are below the Gaussian's, and their chord is not."""
  delta = lambda e: special.ndtr(0.5 - e) - np.exp(e) * special.ndtr(-0.5 - e)
  ends = np.array([0.0, 3.0])
  coarse = TradeOff(ends, np.array([*delta(ends[:1]), 1e-9]))
  assert coarse.mu(1e-6) > 1.1
  assert TradeOff(np.linspace(0, 6, 99), delta(np.linspace(0, 6, 99))).mu(
    1e-6
  ) == pytest.approx(1, rel=2e-3)


def test_the_ends():
  nothing = trade_off(accounting.gaussian_event(0), slack=_SLACK)
  assert nothing.mu(_SLACK) == math.inf and nothing.true_positive_rate(_RATES).min() == 1
  much = trade_off(accounting.gaussian_event(1e7), slack=_SLACK)
  assert much.mu(_SLACK) == 0
  np.testing.assert_allclose(much.true_positive_rate(_RATES), _RATES, atol=1e-6)
  with refuses("slack", value=0):
    much.mu(0)
  with refuses("event"):
    event = accounting.poisson_sampled_event(
      accounting.gaussian_event(1), sampling_prob=0.1
    )
    trade_off(event, slack=_SLACK, neighboring_relation="replace_one")


def test_rows_that_only_renyi_dp_proves_have_a_line_too():
  """Batches of fixed size: Renyi DP keeps a pair at each epsilon, as every proof does."""
  event = accounting.fixed_size_event(
    accounting.gaussian_event(2), num_examples=10, batch_size=1
  )
  counting = {"neighboring_relation": "replace_one", "accountant": "rdp"}
  curve = trade_off(event, slack=_SLACK, **counting)
  whole = trade_off(accounting.gaussian_event(2), slack=_SLACK, **counting)
  found = curve.true_positive_rate(_RATES)
  assert (found <= whole.true_positive_rate(_RATES) + 1e-12).all() and found[3] < 0.2
  assert 0.1 < curve.mu(_SLACK) < whole.mu(_SLACK) < 2
