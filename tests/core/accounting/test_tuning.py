"""The best of K runs: exact laws, dp_accounting asked directly, and refusals."""

import json
import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib
from scipy import special, stats

from dpjax import accounting
from dpjax.accounting import epsilon, tuning
from dpjax.accounting.event_kinds.elements import accountants_for
from dpjax.accounting.event_kinds.kind import event_from_json, event_to_json
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from dpjax.accounting.event_kinds.truncated_poisson import truncated_poisson_event
from tests.refuses import refuses

_LAWS = [(10.0, 1.0), (10.0, 0.0), (4.0, 0.5), (30.0, 3.0), (10.0, math.inf), (1.0, 1.0)]
_ORDERS = np.array(rdp_lib.DEFAULT_RDP_ORDERS)


def _law(mean, shape, size=6000):
  """P(K = k) for k < size, from definition 1 of arXiv:2110.03620."""
  k = np.arange(size)
  if shape == math.inf:
    return stats.poisson.pmf(k, mean)
  gamma = tuning.stopping_prob(mean, shape)
  if gamma == 1:
    return (k == 1).astype(float)
  if shape == 0:
    weight = np.where(k > 0, (1 - gamma) ** k / np.maximum(k, 1), 0)
  else:
    weight = stats.nbinom.pmf(k, shape, gamma) * (k > 0)
  return weight / weight.sum()


@pytest.mark.parametrize("law", _LAWS, ids=str)
def test_agrees_with_dp_accounting_asked_directly(law):
  mean, shape = law
  once = dpa.SelfComposedDpEvent(
    dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(1.1)), 1000
  )
  found = epsilon(
    repeat_and_select_event(once, mean_trials=mean, shape=shape),
    delta=1e-5,
    accountant="rdp",
  )
  direct = dpa.rdp.RdpAccountant().compose(
    dpa.dp_event.RepeatAndSelectDpEvent(once, mean, shape)
  )
  assert found == pytest.approx(direct.get_epsilon(1e-5), rel=1e-6)
  assert found >= epsilon(once, delta=1e-5, accountant="rdp")


@pytest.mark.parametrize("law", _LAWS, ids=str)
@pytest.mark.parametrize("eps", [0.1, 1.0])
def test_p40_the_bound_is_above_the_exact_divergence_and_one_run_is_not(law, eps):
  """Runs of randomised response, the best one is a 1: P(best = 0) is the law's generating
  function, so that the exact divergence of the selection is known."""
  mean, shape = law
  pmf = _law(mean, shape)
  low = 1 / (1 + math.exp(eps))
  none = lambda zero: pmf[0]  # K = 0: nothing is released
  best_zero = lambda zero: float((pmf * zero ** np.arange(pmf.size))[1:].sum())
  outcomes = [
    np.array([none(zero), best_zero(zero), 1 - none(zero) - best_zero(zero)])
    for zero in (low, 1 - low)
  ]

  def exact(order):
    logs = [np.log(np.maximum(outcome, 1e-300)) for outcome in outcomes]
    pairs = (logs, logs[::-1])
    terms = [order * p + (1 - order) * q for p, q in pairs]
    return max(special.logsumexp(term) for term in terms) / (order - 1)

  part = pure_dp_event(eps)
  accountant = dpa.rdp.RdpAccountant(
    neighboring_relation=dpa.NeighboringRelation.REPLACE_ONE
  )
  one_run = accountant.compose(part).rdp
  bound = tuning.select_rdp(list(_ORDERS), one_run, mean_trials=mean, shape=shape)
  truth = np.array([exact(order) for order in _ORDERS])
  assert (truth <= bound * (1 + 1e-9) + 1e-12).all()
  if mean >= 10:
    assert (truth > 1.05 * one_run).any()  # selection for free would be a false guarantee


@pytest.mark.parametrize("law", _LAWS, ids=str)
def test_trials_are_drawn_from_the_law(law):
  mean, shape = law
  rng = np.random.default_rng(0)
  draws = [tuning.draw_trials(rng, mean_trials=mean, shape=shape) for _ in range(4000)]
  pmf = _law(mean, shape)
  assert np.mean(draws) == pytest.approx(mean, rel=0.15)
  if mean == 1:
    assert set(draws) == {1}
    return
  counts = np.bincount(draws, minlength=pmf.size)[: pmf.size]

  def pvalue(law):
    keep = law * 4000 >= 5
    expected = np.append(law[keep], law[~keep].sum()) * 4000
    observed = np.append(counts[keep], 4000 - counts[keep].sum())
    return stats.chisquare(observed, expected * 4000 / expected.sum()).pvalue

  assert pvalue(pmf) > 1e-3
  assert pvalue(_law(mean * 1.3, shape)) < 1e-4


def test_a_shape_near_zero_is_drawn_at_once_and_is_nearly_logarithmic():
  """Drawing until the negative binomial number is above zero would never end."""
  rng = np.random.default_rng(0)
  draws = [tuning.draw_trials(rng, mean_trials=10, shape=1e-300) for _ in range(4000)]
  gamma = tuning.stopping_prob(10, 0.0)
  assert min(draws) == 1
  assert np.mean(np.equal(draws, 1)) == pytest.approx(
    stats.logser.pmf(1, 1 - gamma), abs=0.03
  )


@pytest.mark.parametrize("shape", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("mean", [1.001, 3.0, 500.0])
def test_the_stopping_probability_gives_the_mean_on_the_safe_side(mean, shape):
  gamma = tuning.stopping_prob(mean, shape)
  assert tuning._mean(gamma, shape) == pytest.approx(mean, rel=1e-6)
  assert tuning._mean(gamma, shape) >= mean * (1 - 1e-12)
  assert tuning.mean_of(mean, shape) >= max(mean, tuning._mean(gamma, shape))


@pytest.mark.parametrize("mean", [2.0, 50.0])
def test_the_mean_that_is_accounted_is_that_of_the_draws(mean):
  """Near Poisson's law, a stopping probability that is barely rounded moves the mean."""
  shape = 1e6
  gamma = tuning.stopping_prob(mean, shape)
  exact = stats.nbinom.mean(shape, gamma) / -math.expm1(shape * math.log(gamma))
  assert tuning.mean_of(mean, shape) == pytest.approx(exact, rel=1e-9)
  assert exact > mean * (1 + 1e-5)


def test_selection_composes_and_takes_every_sampler_that_rdp_knows():
  fixed = accounting.fixed_size_event(
    accounting.gaussian_event(4.0), num_examples=1000, batch_size=10
  )
  options = {"delta": 1e-5, "accountant": "rdp", "neighboring_relation": "replace_one"}
  once = accounting.compose(fixed, 100)
  chosen = repeat_and_select_event(once, mean_trials=5)
  assert epsilon(chosen, **options) > epsilon(once, **options)
  twice = dpa.ComposedDpEvent([chosen, chosen])
  assert epsilon(twice, **options) > epsilon(chosen, **options)
  gaussian = repeat_and_select_event(accounting.gaussian_event(4.0), mean_trials=5)
  halved = repeat_and_select_event(accounting.gaussian_event(2.0), mean_trials=5)
  assert epsilon(gaussian, **options) == pytest.approx(
    epsilon(halved, delta=1e-5, accountant="rdp"), rel=1e-9
  )
  both = dpa.ComposedDpEvent([accounting.gaussian_event(3.0), accounting.laplace_event(9)])
  mixed = repeat_and_select_event(both, mean_trials=5)
  assert math.isfinite(epsilon(mixed, delta=1e-5, accountant="rdp"))
  nothing = repeat_and_select_event(dpa.NoOpDpEvent(), mean_trials=5)
  assert epsilon(nothing, delta=1e-5, accountant="rdp") == 0
  no_noise = repeat_and_select_event(accounting.gaussian_event(0), mean_trials=5)
  assert epsilon(no_noise, delta=1e-5, accountant="rdp") == math.inf


@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_json_and_the_words(shape):
  event = repeat_and_select_event(accounting.gaussian_event(2), mean_trials=8, shape=shape)
  text = json.dumps(event_to_json(event), allow_nan=False)
  assert event_from_json(json.loads(text)) == event
  words = accounting.privacy_statement(event, delta=1e-5, accountants=("rdp",))
  assert "the best of a random and secret number of runs" in " ".join(words.split())


def test_refusals_name_the_way_out():
  event = repeat_and_select_event(accounting.gaussian_event(2), mean_trials=8)
  with refuses("event"):
    epsilon(event, delta=1e-5)
  cut = truncated_poisson_event(
    accounting.gaussian_event(1), sampling_prob=0.1, num_examples=50, capacity=7
  )
  with refuses("event"):
    epsilon(
      repeat_and_select_event(cut, mean_trials=2),
      delta=1e-5,
      accountant="rdp",
      neighboring_relation="replace_special",
    )
  # What is refused is not offered either.
  best = repeat_and_select_event(cut, mean_trials=2)
  assert accountants_for(event, "add_or_remove_one") == ("rdp",)
  assert accountants_for(best, "replace_special") == ()
  assert accountants_for(cut, "replace_special") == ("pld",)
  for options in ({"mean_trials": 0.5}, {"mean_trials": math.nan}):
    with refuses("mean_trials"):
      repeat_and_select_event(accounting.gaussian_event(2), **options)
  for shape in (-1.0, math.nan):
    with refuses("shape"):
      repeat_and_select_event(accounting.gaussian_event(2), mean_trials=2, shape=shape)
