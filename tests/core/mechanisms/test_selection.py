"""Selection: exact laws by enumeration and quadrature, likelihood ratios, samplers."""

import functools
import itertools
import math

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

_KINDS = (
  mechanisms.Exponential,
  mechanisms.PermuteAndFlip,
  mechanisms.ReportNoisyMax,
)
_UTILITIES = np.array([0.0, 1.0, 1.5, 3.0])
_DRAWS = 100_000
_utilities = st.lists(st.floats(-5, 5), min_size=2, max_size=5)
_moves = st.lists(st.floats(-1, 1), min_size=5, max_size=5)


def _noisy_max_probs(utilities, scale, noise="laplace"):
  """P(argmax = r) = integral of f(x - u_r) prod_{s != r} F(x - u_s) dx."""
  distributions = {
    "laplace": stats.laplace,
    "gumbel": stats.gumbel_r,
    "exponential": stats.expon,
  }
  distributions, u = distributions[noise], np.asarray(utilities) / scale
  knots = np.unique(np.concatenate([[u.min() - 45], u, [u.max() + 45]]))
  nodes, weights = np.polynomial.legendre.leggauss(60)
  total = np.zeros(u.size)
  for low, high in itertools.pairwise(knots):  # smooth between the knots
    parts = np.linspace(low, high, 12)
    for a, b in itertools.pairwise(parts):
      x = (a + b) / 2 + (b - a) / 2 * nodes
      below = distributions.cdf(x[None] - u[:, None])
      for r in range(u.size):
        others = np.delete(below, r, axis=0).prod(0)
        total[r] += np.sum(weights * distributions.pdf(x - u[r]) * others) * (b - a) / 2
  return total


def _probs(mechanism, utilities):
  if isinstance(mechanism, mechanisms.ReportNoisyMax):
    return _noisy_max_probs(utilities, mechanism.scale, mechanism.noise)
  return mechanism.probs(np.asarray(utilities))


def _loss(mechanism, one, other):
  return float(np.max(np.abs(np.log(_probs(mechanism, one) / _probs(mechanism, other)))))


def _visited_in_order(utilities, scale):
  """The text of permute-and-flip, order by order."""
  accept = np.exp((utilities - utilities.max()) / scale)
  total = np.zeros(utilities.size)
  orders = list(itertools.permutations(range(utilities.size)))
  for order in orders:
    reached = 1.0
    for r in order:
      total[r] += reached * accept[r] / len(orders)
      reached *= 1 - accept[r]
  return total


def test_exact_laws():
  """McSherry and Talwar's softmax; McKenna and Sheldon's text, all orders; a quadrature."""
  exponential = mechanisms.Exponential(epsilon=1.4).probs(_UTILITIES)
  np.testing.assert_allclose(
    exponential, np.exp(0.7 * _UTILITIES) / np.sum(np.exp(0.7 * _UTILITIES))
  )
  flip = mechanisms.PermuteAndFlip(epsilon=1.4).probs(_UTILITIES)
  np.testing.assert_allclose(flip, _visited_in_order(_UTILITIES, 2 / 1.4), rtol=1e-12)
  noisy = lambda noise: _noisy_max_probs(_UTILITIES, 2 / 1.4, noise)
  np.testing.assert_allclose(noisy("gumbel"), exponential, rtol=1e-9)
  np.testing.assert_allclose(noisy("exponential"), flip, rtol=1e-9)
  assert np.abs(noisy("laplace") - flip).max() > 0.01  # the tests can tell them apart


@pytest.mark.cases(slow=[3], long=...)
@pytest.mark.parametrize(
  "mechanism",
  [
    mechanisms.Exponential(1.4),
    mechanisms.Exponential(0.7, monotonic=True),
    mechanisms.Exponential(2.8, utility_sensitivity=2.0),
    mechanisms.PermuteAndFlip(1.4),
    mechanisms.ReportNoisyMax(1.4),
    mechanisms.ReportNoisyMax(1.4, noise="gumbel"),
    mechanisms.ReportNoisyMax(1.4, noise="exponential"),
  ],
)
def test_draws_follow_the_exact_law_and_no_other(mechanism):
  utilities = jnp.broadcast_to(jnp.array(_UTILITIES, jnp.float32), (_DRAWS, 4))
  drawn = np.bincount(mechanism(jax.random.key(0), utilities), minlength=4)
  pvalue = lambda probs: stats.chisquare(drawn, _DRAWS * probs / probs.sum()).pvalue
  assert pvalue(_probs(mechanism, _UTILITIES)) > 1e-3
  for wrong in (0.9, 1.1, 2.0):
    assert pvalue(_probs(mechanism, wrong * _UTILITIES)) < 1e-6


@pytest.mark.cases(long=["PermuteAndFlip"])
@pytest.mark.parametrize("kind", _KINDS[:2])
@given(utilities=_utilities, moves=_moves, epsilon=st.floats(0.05, 5))
def test_no_neighbours_have_a_larger_ratio(kind, utilities, moves, epsilon):
  one = np.array(utilities)
  other = one + np.array(moves[: one.size])
  assert _loss(kind(epsilon), one, other) <= epsilon * (1 + 1e-9)
  same_direction = one + np.abs(moves[: one.size])
  monotonic = kind(epsilon, monotonic=True)
  assert _loss(monotonic, one, same_direction) <= epsilon * (1 + 1e-9)


@pytest.mark.cases(slow=["exponential"], long=...)
@pytest.mark.parametrize("noise", ["laplace", "gumbel", "exponential"])
def test_no_neighbours_have_a_larger_ratio_under_noisy_max(noise):
  random = np.random.default_rng(0)
  for _ in range(15):
    one, epsilon = random.normal(0, 2, 4), random.choice([0.3, 1.0, 3.0])
    moves = random.choice([-1.0, 0.0, 1.0], 4)
    mechanism = mechanisms.ReportNoisyMax(epsilon, noise=noise)
    assert _loss(mechanism, one, one + moves) <= epsilon * (1 + 1e-7)
    monotonic = mechanisms.ReportNoisyMax(epsilon, noise=noise, monotonic=True)
    assert _loss(monotonic, one, one + np.abs(moves)) <= epsilon * (1 + 1e-7)


@pytest.mark.parametrize("kind", _KINDS)
def test_half_of_the_noise_is_too_little_where_utilities_move_apart(kind):
  """Neighbours that attain (nearly) epsilon; and `monotonic` claimed wrongly is caught."""
  one = np.array([0.0, *[8.0] * 3])
  other = one + np.array([1.0, -1.0, -1.0, -1.0])
  right, wrong = kind(1.0), kind(1.0, monotonic=True)
  assert 0.9 < _loss(right, one, other) <= 1.0 + 1e-7
  assert _loss(wrong, one, other) > 1.8


def test_permute_and_flip_is_never_worse_than_the_exponential_mechanism():
  random = np.random.default_rng(1)
  gains = []
  for _ in range(50):
    utilities = random.normal(0, 3, 5)
    flip, exponential = (kind(1.0).probs(utilities) @ utilities for kind in _KINDS[1::-1])
    gains.append(flip - exponential)
  assert min(gains) >= -1e-12 and max(gains) > 0.1


def test_the_event_dominates_the_exact_mechanism():
  """Hockey-stick divergence of the true pair, at every epsilon below the pure one."""
  one = np.array([0.0, 8.0, 8.0])
  other = one + np.array([1.0, -1.0, -1.0])
  for kind in _KINDS:
    mechanism = kind(1.0)
    p, q = _probs(mechanism, one), _probs(mechanism, other)
    for at in (0.0, 0.4, 0.9):
      bound = accounting.delta(mechanism.event(), epsilon=at)
      for a, b in ((p, q), (q, p)):
        assert np.clip(a - math.exp(at) * b, 0, None).sum() <= bound
  event = mechanisms.Exponential(1.0).event()
  assert event == stated.only_under("add_or_remove_one", pure_dp_event(1.0))


def test_p9_the_relation_is_part_of_the_event():
  """Two hops from add-or-remove to replace; a replace-one utility the other way: refused."""
  add, replace = (
    mechanisms.Exponential(1.0, neighboring_relation=relation)
    for relation in ("add_or_remove_one", "replace_one")
  )
  only = functools.partial(stated.only_under, "replace_one")
  assert add.event("replace_one") == only(pure_dp_event(2.0))
  assert replace.event("replace_one") == only(pure_dp_event(1.0))
  with refuses("neighboring_relation"):
    replace.event()
  with refuses("monotonic"):
    mechanisms.Exponential(1.0, monotonic=True, neighboring_relation="replace_one")


@pytest.mark.long
@pytest.mark.parametrize("kind", _KINDS)
def test_edge_cases(kind):
  mechanism, key = kind(1.0), jax.random.key(0)
  assert mechanism(key, jnp.zeros((3, 2, 5))).shape == (3, 2)
  assert int(mechanism(key, jnp.zeros(1))) == 0
  excluded = jnp.broadcast_to(jnp.array([-jnp.inf, 0.0, 0.0]), (1000, 3))
  assert set(np.asarray(mechanism(key, excluded))) == {1, 2}
  batch = np.asarray(mechanism(key, jnp.zeros((1000, 4))))
  assert np.unique(batch).size == 4  # rows draw on their own
  jitted = jax.jit(mechanism)(key, jnp.zeros((1000, 4)))
  np.testing.assert_array_equal(batch, jitted)
  huge = jnp.array([0.0, 3e38, 1e38])
  assert int(mechanism(key, huge)) == 1


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_utilities_are_refused(kind, bad):
  with refuses("utilities"):
    kind(1.0)(jax.random.key(0), jnp.array([0.0, bad]))
  for shape in ((), (3, 0)):
    with refuses("utilities"):
      kind(1.0)(jax.random.key(0), jnp.zeros(shape))


@pytest.mark.cases(long=["1-Exponential", "1-PermuteAndFlip", "1-ReportNoisyMax"])
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "1"])
def test_bad_amounts_are_one_line(kind, bad):
  for word, call in (
    ("epsilon", lambda: kind(bad)),
    ("utility_sensitivity", lambda: kind(1.0, bad)),
  ):
    with refuses(word) as info:
      call()
    assert "\n" not in str(info.value)
  with refuses("noise"):
    mechanisms.ReportNoisyMax(1.0, noise="laplac")
