"""Sparse vector: exact transcript probabilities by quadrature, the price, the halt."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpjax import accounting, mechanisms
from tests.refuses import refuses


def _transcripts(length, max_above, so_far=()):
  """Every possible list of answers; it ends after `max_above` hits."""
  if len(so_far) == length or sum(so_far) == max_above:
    yield so_far
  else:
    for above in (False, True):
      yield from _transcripts(length, max_above, (*so_far, above))


def _prob(answers, queries, mechanism, query_scale=None):
  """Integral over the noisy threshold t of prod_i P(query_i + noise >= t or < t)."""
  scale = mechanism.query_scale if query_scale is None else query_scale
  centre, width = mechanism.threshold, mechanism.threshold_scale
  knots = np.unique([centre, *queries, centre - 40 * width, centre + 40 * width])
  nodes, weights = np.polynomial.legendre.leggauss(40)
  total = 0.0
  for low, high in itertools.pairwise(knots):
    edges = np.linspace(low, high, 25)
    t = (edges[1:] + edges[:-1])[:, None] / 2 + np.diff(edges)[:, None] / 2 * nodes
    value = stats.laplace.pdf(t, centre, width)
    for above, query in zip(answers, queries):
      if scale == 0:
        value = value * ((query >= t) == above)
      else:
        side = stats.laplace.sf if above else stats.laplace.cdf
        value = value * side(t, query, scale)
    total += float(np.sum(value * weights * np.diff(edges)[:, None] / 2))
  return total


def _worst(mechanism, one, other, query_scale=None):
  """hits -> the largest |log-ratio| among the transcripts with so many hits."""
  worst = {}
  for answers in _transcripts(len(one), mechanism.max_above):
    p, q = (_prob(answers, qs, mechanism, query_scale) for qs in (one, other))
    if max(p, q) < 1e-30:
      continue
    loss = abs(math.log(p / q)) if min(p, q) > 0 else math.inf
    worst[sum(answers)] = max(worst.get(sum(answers), 0.0), loss)
  return worst


_ONE = np.array([0.0, 0.0, 0.0, 0.0])
_APART = np.array([1.0, -1.0, -1.0, 1.0])


@pytest.mark.parametrize("max_above", [1, 2])
def test_the_quadrature_knows_all_transcripts(max_above):
  mechanism = mechanisms.SparseVector(1.0, threshold=0.5, max_above=max_above)
  total = sum(_prob(a, _ONE, mechanism) for a in _transcripts(4, max_above))
  assert total == pytest.approx(1.0, abs=1e-9)


@pytest.mark.cases(long=["False-2", "True-2"])
@pytest.mark.parametrize("max_above", [1, 2])
@pytest.mark.parametrize("monotonic", [False, True])
def test_every_transcript_costs_the_threshold_and_its_hits(max_above, monotonic):
  mechanism = mechanisms.SparseVector(
    1.5, threshold=0.5, max_above=max_above, monotonic=monotonic
  )
  steps = mechanism.threshold_epsilon, mechanism.hit_epsilon
  assert steps[0] + max_above * steps[1] == pytest.approx(1.5)
  random = np.random.default_rng(0)
  for _ in range(4):
    one = random.normal(0, 2, 4)
    moves = random.choice([-1.0, 1.0], 4)
    other = one + (np.abs(moves) if monotonic else moves)
    for hits, loss in _worst(mechanism, one, other).items():
      assert loss <= steps[0] + hits * steps[1] + 1e-7


def test_the_bound_is_nearly_attained():
  """Many queries below move one way, the hit the other way: no slack to sell."""
  mechanism = mechanisms.SparseVector(1.0, threshold=0.0, max_above=1)
  one = np.array([2.0, 2.0, 2.0, 2.0, 2.0, -20.0])
  moved = one + np.array([1.0, 1.0, 1.0, 1.0, 1.0, -1.0])
  answers = (False,) * 5 + (True,)
  loss = math.log(_prob(answers, one, mechanism) / _prob(answers, moved, mechanism))
  assert 0.85 < loss <= 1.0


@pytest.mark.parametrize("wrong_scale", [0.0, 0.5])
def test_too_little_noise_on_the_queries_is_caught(wrong_scale):
  """Without it (a published variant, refuted by Lyu, Su and Li) no epsilon holds."""
  mechanism = mechanisms.SparseVector(1.0, threshold=0.5, max_above=2)
  scale = wrong_scale * mechanism.query_scale / 2
  worst = _worst(mechanism, _ONE, _ONE + _APART, query_scale=scale)
  assert max(worst.values()) > 1.2


def test_without_the_halt_the_price_of_one_hit_is_too_low():
  """Four hits at the noise of one: the log-ratio exceeds epsilon."""
  one_hit = mechanisms.SparseVector(1.0, threshold=0.0, max_above=1)
  answers = (False,) * 5 + (True,) * 4
  one, other = (np.array([2.0 + m] * 5 + [-20.0 - m] * 4) for m in (0.0, 1.0))
  p, q = (_prob(answers, queries, one_hit) for queries in (one, other))
  assert math.log(p / q) > 2.0


@pytest.mark.cases(slow=["2"], long=...)
@pytest.mark.parametrize("max_above", [1, 2])
def test_draws_follow_the_exact_transcripts_and_no_others(max_above):
  mechanism = mechanisms.SparseVector(2.0, threshold=1.0, max_above=max_above)
  queries = jnp.array([0.0, 3.0, -2.0])
  keys = jax.random.split(jax.random.key(0), 20_000)
  drawn = jax.jit(jax.vmap(mechanism, (0, None)))(keys, queries)
  rows = [
    tuple(row[:n].tolist())
    for row, n in zip(np.asarray(drawn.above), np.asarray(drawn.asked).sum(1))
  ]
  known = list(_transcripts(3, max_above))
  counts = np.array([rows.count(answers) for answers in known])
  assert counts.sum() == 20_000

  def pvalue(other):
    probs = np.array([_prob(a, np.asarray(queries, float), other) for a in known])
    return stats.chisquare(counts, 20_000 * probs / probs.sum()).pvalue

  assert pvalue(mechanism) > 1e-3
  for wrong in (1.7, 2.4):
    other = mechanisms.SparseVector(wrong, threshold=1.0, max_above=max_above)
    assert pvalue(other) < 1e-6


@pytest.mark.slow
def test_the_stream_ends_after_the_last_hit_and_steps_equal_the_stream():
  mechanism = mechanisms.SparseVector(5.0, threshold=100.0, max_above=2, epsilon_values=4.0)
  queries = jnp.array([0.0, 900.0, 0.0, 800.0, 900.0, 0.0])
  answers = mechanism(jax.random.key(1), queries)
  assert answers.above.tolist() == [False, True, False, True, False, False]
  assert answers.asked.tolist() == [True] * 4 + [False] * 2
  assert np.isfinite(answers.value).tolist() == answers.above.tolist()
  np.testing.assert_allclose(answers.value[1], 900, atol=10)
  state = mechanism.init(jax.random.key(1))
  for i, query in enumerate(queries):
    answer, state = mechanism.step(state, query)
    assert bool(answer.above) == bool(answers.above[i])
    np.testing.assert_allclose(answer.value, answers.value[i], rtol=1e-5)
  assert int(state.num_above) == 2


@pytest.mark.slow
def test_values_are_fresh_and_have_their_own_noise():
  """The value is not the one that was compared: that one is above the threshold."""
  mechanism = mechanisms.SparseVector(0.2, threshold=0.0, max_above=1, epsilon_values=0.5)
  keys = jax.random.split(jax.random.key(2), 20_000)
  drawn = jax.jit(jax.vmap(mechanism, (0, None)))(keys, jnp.zeros(1))
  values = np.asarray(drawn.value)[np.asarray(drawn.above)]
  assert stats.kstest(values / 2.0, "laplace").pvalue > 1e-3
  for wrong in (0.8, 1.25):
    assert stats.kstest(values / (2.0 * wrong), "laplace").pvalue < 1e-4


def test_the_price_is_the_whole_of_it_unless_a_filter_counts_the_hits():
  mechanism = mechanisms.SparseVector(1.0, threshold=0.0, max_above=4)
  cost = lambda **options: accounting.epsilon(mechanism.event(**options), delta=1e-12)
  assert cost() == pytest.approx(1.0, rel=1e-3)
  assert cost(num_above=0) == pytest.approx(mechanism.threshold_epsilon, rel=1e-3)
  assert cost(num_above=4) == pytest.approx(1.0, rel=1e-3)
  with_values = mechanisms.SparseVector(1.0, threshold=0.0, max_above=4, epsilon_values=2.0)
  total = accounting.epsilon(with_values.event(), delta=1e-12)
  assert total == pytest.approx(3.0, rel=2e-3)
  two = accounting.epsilon(with_values.event(num_above=2), delta=1e-12)
  half = mechanism.threshold_epsilon + 2 * mechanism.hit_epsilon + 1.0
  assert two == pytest.approx(half, rel=2e-3)
  with refuses("neighboring_relation"):
    mechanisms.SparseVector(1.0, threshold=0.0, neighboring_relation="replace_one").event()


@pytest.mark.parametrize(
  "options, field",
  [
    ({"epsilon": 0.0}, "epsilon"),
    ({"epsilon": math.nan}, "epsilon"),
    ({"threshold": math.nan}, "threshold"),
    ({"threshold": "high"}, "threshold"),
    ({"sensitivity": math.nan}, "sensitivity"),
    ({"max_above": 0}, "max_above"),
    ({"epsilon_values": -1.0}, "epsilon_values"),
    ({"monotonic": True, "neighboring_relation": "replace_one"}, "monotonic"),
  ],
)
def test_bad_input_is_one_line(options, field):
  with refuses(field) as info:
    mechanisms.SparseVector(**{"epsilon": 1.0, "threshold": 0.0, **options})
  assert "\n" not in str(info.value)


def test_bad_queries_are_refused():
  mechanism = mechanisms.SparseVector(1.0, threshold=0.0)
  for bad in (jnp.array([0.0, jnp.nan]), jnp.zeros((2, 2))):
    with refuses("queries"):
      mechanism(jax.random.key(0), bad)
  with refuses("num_above"):
    mechanism.event(num_above=2)
