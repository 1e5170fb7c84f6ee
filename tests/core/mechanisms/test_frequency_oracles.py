"""Frequency oracles: exact laws by enumeration, unbiased shares, variances, what is refused."""

import itertools
import math

import jax
import mpmath
import numpy as np
import pytest

from dpjax import accounting, mechanisms
from tests.refuses import refuses

_UNARY, _HASHED = mechanisms.OptimizedUnaryEncoding, mechanisms.OptimizedLocalHashing
_KINDS = (mechanisms.RandomizedResponse, _UNARY, _HASHED)


def _bits(epsilon, k, label):
  """Probabilities of all 2^k responses of unary encoding, by its definition alone."""
  q = 1 / (math.exp(epsilon) + 1)
  chances = [0.5 if place == label else q for place in range(k)]
  return {
    bits: math.prod(c if bit else 1 - c for bit, c in zip(bits, chances))
    for bits in itertools.product((0, 1), repeat=k)
  }


def _values(epsilon, k, label, g):
  """Probabilities of all responses of local hashing: digits of the function, then the value."""
  digits = [label // g**place % g for place in range(_HASHED(epsilon, k, g).num_digits)]
  kept = math.exp(epsilon) / (math.exp(epsilon) + g - 1)
  return {
    (*factors, value): (
      kept if value == np.dot(factors, digits) % g else (1 - kept) / (g - 1)
    )
    / g ** len(digits)
    for factors in itertools.product(range(g), repeat=len(digits))
    for value in range(g)
  }


def _law(mechanism, label):
  epsilon, k = mechanism.epsilon, mechanism.num_categories
  if isinstance(mechanism, _UNARY):
    return _bits(epsilon, k, label)
  return _values(epsilon, k, label, mechanism.buckets)


_SMALL = (_UNARY(0.4, 3), _UNARY(2.0, 4), _HASHED(1.0, 7), _HASHED(0.3, 5), _HASHED(2.0, 4))


@pytest.mark.cases(quick=[1, 2], long=...)
@pytest.mark.parametrize("mechanism", _SMALL, ids=range(len(_SMALL)))
def test_epsilon_is_exact_and_the_event_dominates_every_pair_of_labels(mechanism):
  """Largest ratio of all responses is e^epsilon; hockey sticks are below the event's."""
  laws = [_law(mechanism, label) for label in range(mechanism.num_categories)]
  event = mechanism.event("replace_one")
  largest = 0.0
  for one, other in itertools.permutations(laws, 2):
    assert sum(one.values()) == pytest.approx(1)
    largest = max(largest, *(math.log(one[r] / other[r]) for r in one))
  assert largest == pytest.approx(mechanism.epsilon)
  for share in (0.0, 0.3, 0.9):
    at = share * mechanism.epsilon
    exact = max(
      sum(max(0.0, one[r] - math.exp(at) * other[r]) for r in one)
      for one, other in itertools.permutations(laws, 2)
    )
    found = accounting.delta(event, epsilon=at, neighboring_relation="replace_one")
    assert exact <= found
    # How much is given away: at most a label of randomised response, or a chance of one hash value.
    slack = 1 / (math.exp(mechanism.epsilon) + 2) if isinstance(mechanism, _UNARY) else 1
    slack = 1 / mechanism.buckets if isinstance(mechanism, _HASHED) else slack
    assert found * (1 - slack) <= exact + 1e-3


def test_unary_encoding_costs_what_it_must_where_e_to_epsilon_is_whole():
  """e^epsilon = 4: of seven labels, randomised response has the very law of two bits."""
  mechanism = _UNARY(math.log(4) + 1e-12, 3)
  laws = [_law(mechanism, label) for label in (0, 1)]
  at = 0.5
  exact = sum(max(0.0, laws[0][r] - math.exp(at) * laws[1][r]) for r in laws[0])
  event = mechanism.event("replace_one")
  assert event.event.num_buckets == 7
  found = accounting.delta(event, epsilon=at, neighboring_relation="replace_one")
  assert exact <= found <= exact + 1e-4
  assert _UNARY(math.log(4) - 1e-12, 3).event("replace_one").event.num_buckets == 6


def _drawn_once(mechanism, label, key, n=40_000):
  responses = np.asarray(mechanism(key, np.full(n, label)))
  rows, counts = np.unique(responses.astype(int), axis=0, return_counts=True)
  return {tuple(row): count / n for row, count in zip(rows, counts)}, n


@pytest.mark.cases(slow=["hash"], long=...)
@pytest.mark.parametrize(
  "mechanism", [_UNARY(1.0, 3), _HASHED(1.0, 5, 3)], ids=["bits", "hash"]
)
def test_draws_follow_the_stated_law_and_no_other(mechanism):
  drawn, n = _drawn_once(mechanism, 2, jax.random.key(0))
  total = lambda law: sum(n * (drawn.get(r, 0) - p) ** 2 / p for r, p in law.items())
  law = _law(mechanism, 2)
  # A chi-square statistic has mean d and variance 2 d.
  freedom = len(law) - 1
  assert abs(total(law) - freedom) < 5 * math.sqrt(2 * freedom)
  for wrong in (0.8, 1.2):
    other = _law(type(mechanism)(wrong, *_rest(mechanism)), 2)
    assert total(other) > freedom + 20 * math.sqrt(2 * freedom)


def _rest(mechanism):
  hashed = isinstance(mechanism, _HASHED)
  return (mechanism.num_categories, *([mechanism.buckets] if hashed else []))


@pytest.mark.cases(quick=[1, 2], long=...)
@pytest.mark.parametrize("mechanism", _SMALL, ids=range(len(_SMALL)))
def test_shares_are_unbiased_with_the_stated_variance_over_all_responses(mechanism):
  """Mean and variance of the estimate of one response, by its definition, no draw."""
  for label in range(mechanism.num_categories):
    law = _law(mechanism, label)
    found = np.array([mechanism.frequencies(np.array([response])) for response in law])
    mean, square = (np.array(list(law.values())) @ found**power for power in (1, 2))
    truth = np.eye(mechanism.num_categories)[label]
    np.testing.assert_allclose(mean, truth, atol=1e-9)
    stated = [mechanism.variance(1, share) for share in truth]
    np.testing.assert_allclose(square - mean**2, stated)


@pytest.mark.cases(slow=["OptimizedLocalHashing-0.5"], long=...)
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
@pytest.mark.parametrize("kind", _KINDS)
def test_shares_of_many_people_are_unbiased_with_the_stated_variance(kind, epsilon):
  """Against the closed forms of Wang et al. 2017, and 400 repetitions of 200 people."""
  k, people, times = 6, 200, 400
  mechanism = kind(epsilon, k)
  e = math.exp(epsilon)
  rare = {_KINDS[0]: k - 2 + e, _UNARY: 4 * e}.get(kind)
  if rare is None:
    g = mechanism.buckets
    rare = (e + g - 1) ** 2 / (g - 1)
  assert mechanism.variance(people) == pytest.approx(rare / people / (e - 1) ** 2)
  labels = np.repeat([0, 1, 5], [120, 60, 20])
  truth = np.bincount(labels, minlength=k) / people
  responses = np.asarray(mechanism(jax.random.key(1), np.tile(labels, (times, 1))))
  found = np.array([mechanism.frequencies(r) for r in responses])
  stated = np.array([mechanism.variance(people, share) for share in truth])
  assert (np.abs(found.mean(axis=0) - truth) < 4 * np.sqrt(stated / times)).all()
  # The variance of a sample variance is about 2 / times.
  assert (np.abs(found.var(axis=0) / stated - 1) < 5 * math.sqrt(2 / times)).all()


@pytest.mark.parametrize("kind", _KINDS)
def test_the_gap_has_all_its_digits_where_it_is_small(kind):
  """1 - e^-eps k / (1 + ...) had none left of 1e6 labels at 1e-12, and the variance was 1 / 0."""
  for epsilon, k in itertools.product((1e-300, 1e-12, 1e-6, 1.0, 30.0), (2, 10**6)):
    mechanism = kind(epsilon, k)
    with mpmath.workdps(340):
      e = mpmath.exp(epsilon)
      if kind is _UNARY:
        true, other = mpmath.mpf(1) / 2, 1 / (e + 1)
      else:
        g = mechanism.buckets if kind is _HASHED else k
        true = e / (e + g - 1)
        other = 1 / mpmath.mpf(g) if kind is _HASHED else 1 / (e + g - 1)
      gap = float(true - other)
      variance = float(min(other * (1 - other) / 9 / (true - other) ** 2, 1e400))
    assert mechanism.support_gap == pytest.approx(gap, rel=1e-13)
    assert mechanism.variance(9) == pytest.approx(variance, rel=1e-12)


def test_many_labels_cost_nothing_more_than_few():
  """Which of the three is best: randomised response below 3 e^eps + 2 labels."""
  for epsilon in (0.5, 1.0, 2.0, 4.0):
    edge = 3 * math.exp(epsilon) + 2
    few, many = math.floor(edge), math.ceil(edge)
    assert _KINDS[0](epsilon, few).variance(9) < _UNARY(epsilon, few).variance(9)
    assert _KINDS[0](epsilon, many).variance(9) > _UNARY(epsilon, many).variance(9)
    # The nearest prime is never far from the best number of hash values.
    hashed = _HASHED(epsilon, many).variance(9)
    assert 1 <= hashed / _UNARY(epsilon, many).variance(9) < 1.13


def test_hash_functions_of_unlike_labels_agree_one_time_in_g():
  g, k = 3, 11
  digits = np.stack(_HASHED(1.0, k, g)._digits(np.arange(k)))
  functions = np.array(list(itertools.product(range(g), repeat=len(digits))))
  values = functions @ digits % g
  for one, other in itertools.combinations(range(k), 2):
    assert np.mean(values[:, one] == values[:, other]) == pytest.approx(1 / g)


def test_the_relation_is_replace_one_alone():
  for kind in (_UNARY, _HASHED):
    for relation in ("add_or_remove_one", "replace_special"):
      with refuses("neighboring_relation"):
        kind(1.0).event(relation)


@pytest.mark.long
def test_edge_cases():
  key = jax.random.key(0)
  unary, hashed = _UNARY(60.0, 3), _HASHED(60.0, 2**31 - 1)
  bits = np.asarray(unary(key, np.array([-5, 2, 99])))
  assert not bits[0, 1:].any() and not bits[1:, :2].any()
  far = np.asarray(hashed(key, np.array([2**31 - 2, 2**40])))
  assert far.shape == (2, 4) and (far >= 0).all() and (far < hashed.buckets).all()
  digits = np.stack(hashed._digits(np.array([2**31 - 2])))
  assert ((far[:, :-1].astype(object) @ digits)[:, 0] % hashed.buckets == far[:, -1]).all()
  for mechanism in (unary, _HASHED(1.0, 3)):
    assert mechanism(key, np.zeros((0,), int)).shape[0] == 0
    labels = np.array([0, 1, 2])
    np.testing.assert_array_equal(jax.jit(mechanism)(key, labels), mechanism(key, labels))
    assert mechanism.frequencies(mechanism(key, labels)).shape == (3,)


@pytest.mark.cases(quick=[0, 3, 6], long=...)
@pytest.mark.parametrize(
  "call, field",
  [
    (lambda: _UNARY(0.0), "epsilon"),
    (lambda: _HASHED(math.nan), "epsilon"),
    (lambda: _UNARY(1.0, 1), "num_categories"),
    (lambda: _HASHED(1.0, 9, 4), "num_buckets"),
    (lambda: _HASHED(1.0, 9, 32_771), "num_buckets"),
    (lambda: _UNARY(1.0, 3).frequencies(np.zeros((5, 2), int)), "responses"),
    (lambda: _HASHED(1.0, 3).frequencies(np.zeros((0, 2), int)), "responses"),
    (lambda: _HASHED(1.0, 3).frequencies(np.full((5, 2), 7)), "responses"),
    (lambda: _UNARY(1.0)(jax.random.key(0), np.array([0.5])), "labels"),
    (lambda: _HASHED(1.0)(jax.random.key(0), np.array([0.5])), "labels"),
    (lambda: _UNARY(1.0).variance(0), "num_responses"),
    (lambda: _UNARY(1.0).variance(5, 1.5), "share"),
  ],
)
def test_bad_input_is_one_line(call, field):
  with refuses(field) as info:
    call()
  assert "\n" not in str(info.value)
