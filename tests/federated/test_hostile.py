"""Attacks by a stranger on the federated room that once succeeded."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import federated
from dpjax.federated import round
from dpjax.federated.cohort import Drawn, from_batches
from dpjax.federated.round import params_of
from dpjax.federated.silos import Silos
from dpjax.secure.distributed_noise import SkellamSum, skellam_mean
from dpjax.secure.encoding import Encoding
from dpjax.secure.summation import Dropout, forgiving, secure_mean
from dpjax.secure.sums import PlainSum
from tests import plans
from tests.refuses import refuses

_KEY = jax.random.key(0)


def _loss(w, x):
  return 0.5 * jnp.sum((w - x) ** 2)


def _tx(clip, noise=1.0):
  return dpjax.clip_and_noise(
    l2_clip_norm=clip, noise_multiplier=noise, normalize_by=1.0, key=_KEY
  )


@pytest.mark.cases(
  quick=["1e-14-1e-12", "0.001-1e-24", "0.001-1e-20", "0.001-1e-12"], long=...
)
@pytest.mark.parametrize("bound", [1e-24, 1e-20, 1e-12])
@pytest.mark.parametrize("length", [1e-20, 1e-14, 1e-3])
def test_messages_whose_squares_underflow_stay_within_a_tiny_clip_norm(bound, length):
  """Messages of 1e-20 had norm 0 and passed a clip norm of 1e-25 whole."""
  aggregator, many = federated.dp_mean(_tx(bound, 0.0), l2_clip_norm=bound), 10_000
  messages = jnp.full((1, many), length)
  mean, _ = aggregator.update(messages, jnp.ones(1, bool), aggregator.init(messages[0]))
  assert np.linalg.norm(np.asarray(mean, np.float64)) <= bound * (1 + 1e-5)


def test_a_clip_norm_beyond_what_float32_can_bound_is_refused():
  with refuses("l2_clip_norm", value=1e-30):
    federated.dp_mean(_tx(1.0), l2_clip_norm=1e-30)
  client = federated.local_training(_loss, optax.sgd(0.1))
  with refuses("l2_clip_norm", value=1e-30):
    federated.client_noise(client, l2_clip_norm=1e-30, noise_multiplier=1.0)


@pytest.mark.parametrize("tx", [optax.sgd(1.0), _tx(1.0, 0.0), _tx(1.0)])
def test_a_private_cohort_wants_an_aggregator_that_is_vouched_for(tx):
  """`dp_mean` of a transformation without noise, or of any other plan's, went unnoticed."""
  plan = plans.of(4, normalize_by=1.0, num_steps=2, delta=1e-3)
  cohort = from_batches([np.ones((1, 2), np.float32)])
  made = federated.fed_avg(
    _loss, optax.sgd(0.1), aggregator=federated.dp_mean(tx), key=_KEY
  )
  with refuses("aggregator"):
    made.round(made.init(jnp.zeros(2)), cohort._replace(drawn=Drawn(plan, 0)))


def test_integer_parameters_and_a_weight_of_several_numbers_are_refused_before_a_round():
  """Both ended in a traceback of JAX, in the first round."""
  loss = lambda w, x: jnp.sum((w["w"] - x) ** 2)
  with refuses("params['n']"):
    federated.fed_avg(loss, optax.sgd(0.5), key=jax.random.key(0)).init(
      {"w": jnp.zeros(2), "n": jnp.int32(3)}
    )
  with refuses("params"):
    federated.fed_avg(loss, optax.sgd(0.5), key=jax.random.key(0)).init({})
  client = federated.local_training(loss, optax.sgd(0.5))

  def finish(received, local):
    sent, memory, info = client.finish(received, local)
    return sent._replace(weight=jnp.ones(3)), memory, info

  algorithm = round.federated(
    client._replace(finish=finish), round.optimizing_server(), key=jax.random.key(0)
  )
  with refuses("weight"):
    algorithm.init({"w": jnp.zeros(2)})


def test_the_noise_of_a_plan_takes_no_other_plans_cohorts():
  """Half of the clients in a round are charged: another plan would let all of them in."""
  plan = plans.of(4, normalize_by=1.0, num_steps=2, delta=1e-3, unit="user")
  every = dpjax.PoissonSampler(sampling_prob=1.0, capacity=4)
  other = dataclasses.replace(plan, sampler=every, noise_multiplier=0.0)
  assert dataclasses.replace(plan, sampler=every).epsilon() > 1.3 * plan.epsilon()
  with refuses("plan"):
    federated.central(plan, _KEY).drawn_by(other)


@pytest.mark.slow
def test_runs_with_one_key_share_no_noise():
  """Of two algorithms or learning rates that are compared with one key. Their difference was that
  of the clients' messages, without noise."""
  x = np.zeros((4, 2), np.float32)
  dataset = dpjax.data.from_arrays(x, np.zeros(4, int), num_classes=1)
  federation = dpjax.data.Federation(dataset, [[0], [1], [2], [3]], nominal_users=4)
  sampler = dpjax.PoissonSampler(sampling_prob=0.5, capacity=8)
  plan = dpjax.Plan(sampler, 1.0, 1.0, 1.0, 2, delta=1e-3, unit="user")
  silos = Silos([plan] * 4, num_rounds=2)
  loss = lambda w, example: 0.0 * jnp.sum(w * example.x)

  def made(**options):
    return federated.fed_avg(loss, optax.sgd(1.0), key=_KEY, **options)

  for algorithm in (made(aggregator=federated.central(plan, _KEY)), made(silos=silos)):

    def params(algorithm=algorithm, **options):
      state = algorithm.init(jnp.zeros(2))
      for cohort in algorithm.cohorts(federation, federated.LocalWork(), **options):
        state, _ = algorithm.round(state, cohort)
      return np.asarray(state.params)

    assert (params() != params()).all()
    np.testing.assert_array_equal(params(rng=5), params(rng=5))
    with refuses("start"):
      params(start=1)


@pytest.mark.slow
def test_a_pass_of_clients_that_goes_on_with_another_draw_is_refused():
  """A client took part twice in a pass whose event counts it once."""
  dataset = dpjax.data.from_arrays(np.zeros((4, 2), np.float32), [0] * 4, num_classes=1)
  federation = dpjax.data.Federation(dataset, [[0], [1], [2], [3]], nominal_users=4)
  sampler = dpjax.sampling.BallsInBinsSampler(2, capacity=8)
  plan = dpjax.Plan(sampler, 1.0, 1.0, 1.0, 2, delta=1e-3, unit="user")
  aggregator = federated.central(plan, _KEY)
  loss = lambda w, example: 0.0 * jnp.sum(w * example.x)
  algorithm = federated.fed_avg(loss, optax.sgd(1.0), key=_KEY, aggregator=aggregator)
  cohorts = lambda **draw: algorithm.cohorts(federation, federated.LocalWork(), **draw)
  state, _ = algorithm.round(algorithm.init(jnp.zeros(2)), next(cohorts(rng=5)))
  for other in (next(cohorts(rng=6, start=1)), [*cohorts()][1]):
    with refuses("cohort"):
      algorithm.round(state, other)
  state, _ = algorithm.round(state, next(cohorts(rng=5, start=1)))
  assert int(state.round) == 2


@pytest.mark.slow
def test_runs_with_one_seed_of_distributed_noise_share_none():
  """With noise of 6 on the mean, the difference of two runs was that of the messages to 2e-4."""
  of = {"l2_clip_norm": 1.0, "dim": 16, "bits": 32, "max_clients": 4, "min_survivors": 4}
  mechanism = SkellamSum.sized(noise_multiplier=25.0, **of)
  plan = dpjax.Plan(dpjax.FixedSizeSampler(4, 4), 0.0, math.inf, 4.0, 1, delta=1e-3)
  x = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
  dataset = dpjax.data.from_arrays(x, np.zeros(4, int), num_classes=1)
  federation = dpjax.data.Federation(dataset, [[0], [1], [2], [3]], nominal_users=4)

  def params(rate, **options):
    algorithm = federated.fed_avg(
      lambda w, example: 0.5 * jnp.sum((w - example.x) ** 2),
      optax.sgd(rate),
      aggregator=skellam_mean(PlainSum(min_survivors=4), mechanism, seed=5).drawn_by(plan),
      key=_KEY,
    )
    state = algorithm.init(jnp.zeros(16))
    for cohort in algorithm.cohorts(federation, federated.LocalWork(), **options):
      state, _ = algorithm.round(state, cohort)
    return np.asarray(state.params)

  # Who gives one seed of the cohorts asks for the same draws and the same noise.
  difference = params(0.1, rng=5) - params(0.0, rng=5)
  np.testing.assert_allclose(difference, 0.1 * x.mean(axis=0), atol=0.01)
  assert np.abs(params(0.1) - params(0.0) - 0.1 * x.mean(axis=0)).mean() > 1.0


@pytest.mark.slow
def test_runs_whose_first_round_was_refused_share_no_noise():
  """A refused round gave back a state without the number of its run."""
  x = np.zeros((4, 2), np.float32)
  dataset = dpjax.data.from_arrays(x, np.zeros(4, int), num_classes=1)
  federation = dpjax.data.Federation(dataset, [[0], [1], [2], [3]], nominal_users=4)
  plan = dpjax.Plan(
    dpjax.PoissonSampler(sampling_prob=0.5, capacity=8), 1.0, 1.0, 1.0, 2, delta=1e-3
  )
  gone = lambda dropout, round: any(dropout.drops(round, range(4)))
  dropouts = (Dropout(prob=0.5, seed=seed) for seed in range(999))
  dropout = next(each for each in dropouts if gone(each, 0) and not gone(each, 1))
  aggregator = secure_mean(PlainSum(min_survivors=4), Encoding(4, 64.0), dropout=dropout)
  algorithm = forgiving(
    federated.fed_avg(
      lambda w, example: 0.0 * jnp.sum(w * example.x),
      optax.sgd(1.0),
      aggregator=aggregator,
      key=_KEY,
      silos=Silos([plan] * 4, num_rounds=2),
    )
  )

  def params(**options):
    state = algorithm.init(jnp.zeros(2))
    for cohort in algorithm.cohorts(federation, federated.LocalWork(), **options):
      state, info = algorithm.round(state, cohort)
    assert not info.rounds_refused
    return np.asarray(state.params)

  assert (params() != params()).all()
  np.testing.assert_array_equal(params(rng=5), params(rng=5))


def test_scaffold_keeps_its_control_at_the_mean_of_the_clients():
  """Clients without examples, or with NaN, moved c by the others' change."""
  own = [np.ones((2, 1)), np.zeros((0, 1)), np.full((1, 1), np.nan), np.full((1, 1), 5.0)]
  made = federated.scaffold(
    _loss, optax.sgd(0.1), client_learning_rate=0.1, num_clients=5, key=_KEY
  )
  state = made.init(jnp.zeros(1), 5)
  for _ in range(3):
    state, _ = made.round(state, from_batches([x.astype(np.float32) for x in own]))
    mean = np.mean(state.memories.all(), axis=0)
    assert np.abs(mean).max() > 0.1
    np.testing.assert_allclose(state.server.control, mean, rtol=1e-5)


_EXECUTIONS = {
  "loop": federated.loop_clients(),
  "vmap": federated.vmap_clients(),
  "blocks": federated.vmap_clients(clients_per_block=2),
  "pmap": federated.pmap_clients(),
}
_HOSTILE = (1e-30, 1e10, -1e30, 3e38, np.inf, -np.inf, np.nan)


def _runner(map_clients):
  """Clients' examples -> what a round without noise adds to the parameters."""
  made = federated.fed_avg(
    _loss, optax.sgd(1.0), aggregator=federated.dp_mean(_tx(0.5, 0.0), l2_clip_norm=0.5),
    key=_KEY, map_clients=map_clients,
  )  # fmt: skip

  def run(examples):
    state, _ = made.round(made.init(jnp.zeros(3)), from_batches(examples))
    return np.asarray(params_of(state), np.float64)

  return run


@pytest.mark.cases(quick=["vmap"], long=...)
@pytest.mark.parametrize("name", _EXECUTIONS)
def test_a_hostile_client_moves_no_execution_by_more_than_the_bound(name):
  """All of its examples, or one entry of one, beside others."""
  rng, run = np.random.default_rng(0), _runner(_EXECUTIONS[name])
  others = [rng.normal(size=(n, 3)).astype(np.float32) for n in (2, 1)]
  without = run([*others, np.zeros((0, 3), np.float32)])
  for value in _HOSTILE:
    whole, entry = np.full((2, 3), value, np.float32), np.ones((2, 3), np.float32)
    entry[1, 2] = value
    for mine in (whole, entry):
      moved = np.linalg.norm(run([*others, mine]) - without)
      assert moved <= 0.5 * (1 + 1e-4), (value, moved)  # and no NaN
      assert moved > 0.4 or value != 1e10  # the attack does arrive
