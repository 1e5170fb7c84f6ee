"""Randomised response: keep rates, the exact likelihood ratio, unbiased frequencies."""

import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpjax import accounting, mechanisms
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.mechanisms import stated
from tests.refuses import refuses

_N = 100_000


def _law(mechanism, label):
  """The stated probabilities of the responses to `label`."""
  k = mechanism.num_categories
  other = 1 / (math.exp(mechanism.epsilon) + k - 1)
  return np.where(np.arange(k) == label, math.exp(mechanism.epsilon) * other, other)


@pytest.mark.cases(slow=["1.0-0.232"], long=...)
@pytest.mark.parametrize("epsilon, keep", [(2.0, 0.4509), (1.0, 0.2320)])
def test_t11_keep_rates_of_ten_labels(epsilon, keep):
  mechanism = mechanisms.RandomizedResponse(epsilon, num_categories=10)
  assert mechanism.keep_prob == pytest.approx(keep, abs=5e-5)
  responses = mechanism(jax.random.key(0), jnp.full(_N, 3))
  rate = float(np.mean(np.asarray(responses) == 3))
  assert abs(rate - keep) < 4 * math.sqrt(keep * (1 - keep) / _N)


@pytest.mark.parametrize("k", [2, 3, 10])
def test_draws_follow_the_law_and_no_other(k):
  mechanism = mechanisms.RandomizedResponse(1.0, num_categories=k)
  drawn = np.bincount(mechanism(jax.random.key(1), jnp.full(_N, k - 1)), minlength=k)
  pvalue = lambda probs: stats.chisquare(drawn, _N * probs).pvalue
  assert pvalue(_law(mechanism, k - 1)) > 1e-3
  for wrong in (0.9, 1.1):
    other = mechanisms.RandomizedResponse(wrong, num_categories=k)
    assert pvalue(_law(other, k - 1)) < 1e-6


@given(epsilon=st.floats(0.01, 12), k=st.integers(2, 20))
def test_t11_the_log_ratio_is_epsilon_exactly(epsilon, k):
  mechanism = mechanisms.RandomizedResponse(epsilon, num_categories=k)
  other = mechanism.noise_parameter / k
  assert math.log(mechanism.keep_prob / other) == pytest.approx(epsilon, rel=1e-9)
  probs = _law(mechanism, 0)
  assert probs[0] == pytest.approx(mechanism.keep_prob)
  assert probs.sum() == pytest.approx(1)


@pytest.mark.parametrize("k", [2, 5, 50])
def test_the_event_is_the_exact_hockey_stick(k):
  mechanism = mechanisms.RandomizedResponse(2.0, num_categories=k)
  p, q = _law(mechanism, 0), _law(mechanism, 1)
  event = mechanism.event("replace_one")
  response = dpa.RandomizedResponseDpEvent(mechanism.noise_parameter, k)
  assert event == stated.only_under("replace_one", response)
  for at in (0.0, 1.0, 1.9):
    exact = np.clip(p - math.exp(at) * q, 0, None).sum()
    found = accounting.delta(event, epsilon=at, neighboring_relation="replace_one")
    assert exact <= found <= exact + 1e-3
    pure = accounting.delta(pure_dp_event(2.0), epsilon=at)
    assert found <= pure + 1e-3
  assert (k == 2) == (pure_dp_event(2.0).num_buckets == k)


def test_add_or_remove_is_refused():
  """That somebody responded is visible: only the label is hidden."""
  for relation in ("add_or_remove_one", "replace_special"):
    with refuses("neighboring_relation"):
      mechanisms.RandomizedResponse(1.0).event(relation)


def test_frequencies_are_unbiased():
  labels = np.repeat(np.arange(3), [_N // 2, _N // 3, _N - _N // 2 - _N // 3])
  mechanism = mechanisms.RandomizedResponse(1.0, num_categories=3)
  responses = mechanism(jax.random.key(2), labels)
  truth = np.bincount(labels) / _N
  std = math.sqrt(0.25 / _N) / (1 - mechanism.noise_parameter)
  assert np.abs(mechanism.frequencies(responses) - truth).max() < 4 * std
  raw = np.bincount(responses) / _N
  assert np.abs(raw - truth).max() > 10 * std  # uncorrected shares are biased


@pytest.mark.slow
def test_edge_cases():
  mechanism, key = mechanisms.RandomizedResponse(60.0, num_categories=4), jax.random.key(0)
  labels = jnp.array([[-5, 0, 3, 99]])
  assert mechanism(key, labels).tolist() == [[0, 0, 3, 3]]
  assert mechanism(key, jnp.array([True, False])).tolist() == [1, 0]
  assert mechanism(key, jnp.zeros((0,), int)).shape == (0,)
  np.testing.assert_array_equal(jax.jit(mechanism)(key, labels), mechanism(key, labels))


@pytest.mark.cases(quick=[0, 1], long=...)
@pytest.mark.parametrize(
  "call, field",
  [
    (lambda: mechanisms.RandomizedResponse(0.0), "epsilon"),
    (lambda: mechanisms.RandomizedResponse(math.nan), "epsilon"),
    (lambda: mechanisms.RandomizedResponse(1.0, num_categories=1), "num_categories"),
    (lambda: mechanisms.RandomizedResponse(1.0, num_categories=2.5), "num_categories"),
    (
      lambda: mechanisms.RandomizedResponse(1.0)(jax.random.key(0), jnp.array([0.5])),
      "labels",
    ),
  ],
)
def test_bad_input_is_one_line(call, field):
  with refuses(field) as info:
    call()
  assert "\n" not in str(info.value)
