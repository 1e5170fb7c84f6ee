"""Sample and aggregate: one record reaches one shard; outputs are bounded; noise is right."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpjax import accounting, mechanisms
from dpjax.mechanisms.aggregate import shards
from tests.refuses import refuses

_KEY = jax.random.key(0)


@pytest.mark.slow
def test_shards_are_disjoint_and_random():
  cut = np.asarray(shards(_KEY, jnp.arange(23), 5))
  assert cut.shape == (5, 4)
  assert np.unique(cut).size == 20
  assert (cut.reshape(-1) != np.arange(20)).any()
  pair = shards(_KEY, {"x": jnp.arange(6.0).reshape(3, 2), "y": jnp.arange(3)}, 3)
  np.testing.assert_array_equal(pair["x"][:, 0, 0] / 2, pair["y"][:, 0])


def test_one_record_reaches_one_shard():
  examples = jnp.arange(40.0)
  one = np.asarray(shards(_KEY, examples, 8))
  for index in range(0, 40, 7):
    other = np.asarray(shards(_KEY, examples.at[index].set(-99.0), 8))
    assert (one != other).any(axis=1).sum() == 1


@pytest.mark.slow
def test_row_8_the_mean_moves_by_one_shard_whatever_the_function_does():
  """A record that takes over its shard's output moves the mean by range / k, no further;
  without the clipping it moves it as far as it likes."""
  mechanism = mechanisms.SampleAndAggregateMean(1.0, num_shards=10, lower=0.0, upper=1.0)
  assert mechanism.noise(1).scale == pytest.approx(0.1)
  wild = lambda shard: jnp.where(jnp.any(shard == 7), 1e9, 0.0)
  clean = jnp.zeros(100)
  dirty = clean.at[3].set(7.0)
  one, other = (float(mechanism(_KEY, data, wild)) for data in (clean, dirty))
  assert abs(one - other) == pytest.approx(0.1, rel=1e-5)
  raw = [float(jnp.mean(jax.vmap(wild)(shards(_KEY, d, 10)))) for d in (clean, dirty)]
  assert abs(raw[0] - raw[1]) == pytest.approx(1e8)


def test_a_function_that_sees_all_shards_is_refused():
  """A fit on the host gets all shards at once: one record moved the mean by the whole range, and
  epsilon was 50 where 1 was stated."""

  def largest(shard):
    of_all = lambda shards: np.broadcast_to(np.max(shards), shards.shape[:-1])
    number = jax.ShapeDtypeStruct((), np.float32)
    return jax.pure_callback(of_all, number, shard, vmap_method="expand_dims")

  mean = mechanisms.SampleAndAggregateMean(epsilon=1.0, num_shards=50, lower=0.0, upper=1.0)
  vote = mechanisms.SampleAndAggregateVote(epsilon=1.0, num_shards=50, num_classes=2)
  for mechanism in (mean, vote):
    with refuses("fn"):
      mechanism(jax.random.key(0), np.zeros(100, np.float32), largest)


@pytest.mark.long
@pytest.mark.parametrize("delta", [0.0, 1e-5])
def test_row_8_the_noise_follows_the_dimension_and_the_shards(delta):
  mechanism = mechanisms.SampleAndAggregateMean(2.0, 20, -1.0, 3.0, delta=delta)
  draw = lambda key: mechanism(key, jnp.zeros(40), lambda shard: jnp.ones((2, 3)))
  keys = jax.random.split(_KEY, 4_000)
  residuals = np.asarray(jax.vmap(draw)(keys)).reshape(-1) - 1
  if delta == 0:
    distribution, scale = "laplace", 6 * 4 / 20 / 2.0
  else:
    z = mechanisms.analytic_noise_multiplier(2.0, delta)
    distribution, scale = "norm", z * math.sqrt(6) * 4 / 20
  assert stats.kstest(residuals / scale, distribution).pvalue > 1e-3
  for wrong in (1 / 6, 0.9, 1.1):
    assert stats.kstest(residuals / (scale * wrong), distribution).pvalue < 1e-6


@pytest.mark.slow
def test_p1_outputs_that_are_not_finite_are_bounded_too():
  mechanism = mechanisms.SampleAndAggregateMean(1e9, 2, 0.0, 10.0)
  fn = lambda shard: jnp.array([jnp.nan, jnp.inf, -jnp.inf])
  np.testing.assert_allclose(mechanism(_KEY, jnp.zeros(4), fn), [5, 10, 0], atol=1e-4)


@pytest.mark.long
def test_the_vote_is_the_noisy_argmax_of_the_counts():
  mechanism = mechanisms.SampleAndAggregateVote(1.0, num_shards=12, num_classes=3)
  assert mechanism.selection.scale == 2.0  # one vote moves: one count up, another down
  votes = jnp.array([[0, 2], [0, 2], [1, 9], [-1, 0]])
  assert mechanism.counts(votes).tolist() == [[2, 1, 0], [1, 0, 2]]
  labels = jnp.repeat(jnp.arange(3), jnp.array([24, 60, 36]))
  winner = lambda key: mechanism(
    key, labels, lambda shard: jnp.argmax(jnp.bincount(shard, length=3))
  )
  share = np.mean(np.asarray(jax.vmap(winner)(jax.random.split(_KEY, 500))) == 1)
  assert share > 0.8


@pytest.mark.long
def test_the_vote_of_many_queries_is_charged_for_each():
  mechanism = mechanisms.SampleAndAggregateVote(0.5, num_shards=10, num_classes=3)
  fn = lambda shard: jnp.zeros(4, jnp.int32)
  assert mechanism(_KEY, jnp.zeros(20), fn).shape == (4,)
  cost = lambda n: accounting.epsilon(
    mechanism.event("replace_one", num_queries=n),
    delta=1e-9,
    neighboring_relation="replace_one",
  )
  assert cost(1) == pytest.approx(0.5, rel=2e-3)
  assert cost(4) == pytest.approx(2.0, rel=2e-3)
  assert cost(200) < 0.7 * 100


@pytest.mark.cases(long=[0])
@pytest.mark.parametrize(
  "mechanism",
  [
    mechanisms.SampleAndAggregateMean(1.0, 10, 0.0, 1.0),
    mechanisms.SampleAndAggregateVote(1.0, 10, 3),
  ],
)
def test_add_or_remove_is_refused_for_all_shards_could_change(mechanism):
  """The counter-example: one record fewer, and the same key cuts every shard anew."""
  one = {frozenset(s) for s in np.asarray(shards(_KEY, jnp.arange(20), 5)).tolist()}
  other = {frozenset(s) for s in np.asarray(shards(_KEY, jnp.arange(19), 5)).tolist()}
  assert len(one - other) > 2
  for relation in ("add_or_remove_one", "replace_special"):
    with refuses("neighboring_relation"):
      mechanism.event(relation)
  event = mechanism.event("replace_one")
  found = accounting.epsilon(event, delta=1e-9, neighboring_relation="replace_one")
  assert found == pytest.approx(1.0, rel=2e-3)


@pytest.mark.cases(long=[6, 7, 8])
@pytest.mark.parametrize(
  "call, field",
  [
    (lambda: mechanisms.SampleAndAggregateMean(1.0, 1, 0.0, 1.0), "num_shards"),
    (lambda: mechanisms.SampleAndAggregateMean(1.0, 5, 1.0, 0.0), "upper"),
    (lambda: mechanisms.SampleAndAggregateMean(math.nan, 5, 0.0, 1.0), "epsilon"),
    (lambda: mechanisms.SampleAndAggregateMean(1.0, 5, 0.0, 1.0, delta=2.0), "delta"),
    (lambda: mechanisms.SampleAndAggregateVote(1.0, 5, 1), "num_classes"),
    (lambda: mechanisms.SampleAndAggregateVote(1.0, 5, 3, noise="normal"), "noise"),
    (lambda: shards(_KEY, jnp.zeros(4), 5), "num_shards"),
    (lambda: shards(_KEY, (jnp.zeros(4), jnp.zeros(5)), 2), "examples"),
    (
      lambda: mechanisms.SampleAndAggregateVote(1.0, 2, 3)(
        _KEY, jnp.zeros(4), lambda shard: shard.mean()
      ),
      "fn",
    ),
  ],
)
def test_bad_input_is_one_line(call, field):
  with refuses(field) as info:
    call()
  assert "\n" not in str(info.value)
