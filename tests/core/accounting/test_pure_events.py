"""Pure-DP events: binary randomised response dominates, Laplace noise does not."""

import fractions
import json
import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import stats

from dpjax import accounting
from dpjax.accounting import proved
from dpjax.accounting.event_kinds.elements import parts
from dpjax.accounting.event_kinds.kind import event_from_json, event_to_json
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.validate import UserError
from tests.refuses import refuses

_EPSILONS = (1e-3, 0.1, 1.0, 3.0, 10.0)


def _response_delta(eps, at, times=1):
  """The exact hockey-stick divergence of `times` binary responses, from binomials."""
  keep = 1 / (1 + math.exp(-eps))
  kept = np.arange(times + 1)
  loss = eps * (2 * kept - times)
  mass = stats.binom.pmf(kept, times, keep)
  return float(np.sum(mass * np.clip(1 - np.exp(at - loss), 0, None)))


@pytest.mark.parametrize("eps", _EPSILONS)
def test_the_pure_event_is_exactly_binary_randomized_response(eps):
  event = pure_dp_event(eps)
  for share in (0.0, 0.3, 0.7, 0.99):
    exact = _response_delta(eps, share * eps)
    found = accounting.delta(event, epsilon=share * eps)
    assert exact <= found <= exact + 5e-4 * eps
    assert found > _response_delta(0.99 * eps, share * eps)  # the test can fail
  assert accounting.delta(event, epsilon=1.001 * eps) < 1e-12


@pytest.mark.parametrize("eps, times", [(0.1, 100), (1.0, 5), (0.5, 30)])
def test_the_composition_of_pure_events_is_the_binomial_one(eps, times):
  event = accounting.compose(pure_dp_event(eps), times)
  found = accounting.epsilon(event, delta=1e-5)
  assert _response_delta(eps, found, times) <= 1e-5
  assert _response_delta(eps, 0.995 * found, times) > 1e-5
  assert found < times * eps


@pytest.mark.parametrize("eps", _EPSILONS)
def test_p26_laplace_noise_does_not_stand_for_every_pure_mechanism(eps):
  """A response is pure eps-DP, and loses more than Laplace noise of scale 1 / eps."""
  for share in (0.3, 0.7):
    laplace = accounting.delta(accounting.laplace_event(1 / eps), epsilon=share * eps)
    assert laplace < _response_delta(eps, share * eps)


@pytest.mark.parametrize("eps", [0.1, 1.0, 5.0])
def test_the_pure_event_dominates_laplace_noise_and_larger_alphabets(eps):
  many = math.exp(eps) + 9
  ten_labels = dpa.RandomizedResponseDpEvent(10 / many, 10)
  for event in (accounting.laplace_event(1 / eps), ten_labels):
    for share in (0.2, 0.6, 0.9):
      mine = accounting.delta(event, epsilon=share * eps)
      assert mine <= accounting.delta(pure_dp_event(eps), epsilon=share * eps)


@pytest.mark.parametrize("relation", proved.RELATIONS)
def test_its_epsilon_stands_as_it_is_under_every_relation(relation):
  event = accounting.compose(pure_dp_event(0.5), 10)
  pld, rdp = (
    accounting.epsilon(event, delta=1e-5, neighboring_relation=relation, accountant=by)
    for by in proved.ACCOUNTANTS
  )
  assert _response_delta(0.5, pld, 10) <= 1e-5
  assert pld < rdp < 10 * 0.5 * 1.1


def test_limits_of_randomized_response():
  assert parts(dpa.RandomizedResponseDpEvent(1.0, 5)) == {}
  assert parts(dpa.RandomizedResponseDpEvent(0.0, 1)) == {}
  assert accounting.epsilon(pure_dp_event(0.0), delta=1e-5) == 0
  for open_book in (dpa.RandomizedResponseDpEvent(0.0, 5), pure_dp_event(1e4)):
    assert accounting.epsilon(open_book, delta=1e-5) == math.inf


@pytest.mark.parametrize("noise, buckets", [(0.5, 2), (0.1, 10), (0.9, 3)])
def test_a_statement_says_the_loss_of_a_response(noise, buckets):
  # One answer has probability 1 - noise + noise / buckets, each other one noise / buckets.
  loss = math.log((1 - noise + noise / buckets) / (noise / buckets))
  event = dpa.RandomizedResponseDpEvent(noise, buckets)
  words = accounting.privacy_statement(event, delta=1e-5)
  assert f"that is ({accounting.upper(loss, digits=6)}, 0)-private" in " ".join(
    words.split()
  )


@pytest.mark.parametrize("noise, buckets", [(-0.1, 2), (1.1, 2), (math.nan, 2), (0.5, 0)])
def test_a_malformed_response_is_refused(noise, buckets):
  with pytest.raises(UserError):
    accounting.epsilon(dpa.RandomizedResponseDpEvent(noise, buckets), delta=1e-5)


@pytest.mark.parametrize("eps", [-1.0, math.nan, math.inf, "1"])
def test_a_malformed_epsilon_is_refused(eps):
  with refuses("epsilon"):
    pure_dp_event(eps)


def test_a_sampled_response_is_refused():
  event = dpa.PoissonSampledDpEvent(0.1, pure_dp_event(1.0))
  with refuses("event"):
    accounting.epsilon(event, delta=1e-5)


def test_json_ledger_and_statement_know_it():
  event = pure_dp_event(math.log(3))
  text = json.dumps(event_to_json(event))
  assert event_from_json(json.loads(text)) == event
  ledger = accounting.Ledger().charge(
    event,
    l2_clip_norm=1.0,
    neighboring_relation="add_or_remove_one",
    noise_key_id="a",
    first_step=0,
  )
  assert accounting.Ledger.from_json(ledger.to_json()) == ledger
  words = accounting.privacy_statement(event, delta=1e-5)
  assert "(1.09862, 0)-private" in words.replace("\n", " ")


@pytest.mark.cases(long=["9.9e-07", "1.1e-06"])
@pytest.mark.parametrize("epsilon", [1e-17, 1e-13, 1e-9, 9.9e-7, 1.1e-6])
def test_a_small_epsilon_is_not_rounded_to_nothing(epsilon):
  """Beside 1 float64 has steps of 1e-16: an epsilon of 1e-17 was charged as 0."""
  chance = fractions.Fraction(pure_dp_event(epsilon).noise_parameter)
  stated = 2 * (1 - chance)  # log((2 - p) / p) is no smaller
  assert stated >= fractions.Fraction(epsilon) * (1 - fractions.Fraction(1, 10**9))
