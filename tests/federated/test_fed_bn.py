"""FedBN: parameters that stay with their client, beside FedAvg, training alone, and a loop."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import federated, noise
from dpjax.federated import central, described, fed_avg, fed_bn, from_batches
from dpjax.federated.algorithms.fed_bn import join, split
from dpjax.federated.silos import Silos
from tests.federated import problems, registry
from tests.federated.test_silos import _KEY, _federation, _key_of, _plan
from tests.refuses import refuses

_OPTIONS = {"key": jax.random.key(0), "map_clients": federated.loop_clients()}
_RATE = 0.2
_ROUNDS = 3


def _loss(w, x):
  """Not a quadratic, so the order of steps matters; `norm` scales what `w` sees."""
  return jnp.sum(jnp.log(jnp.cosh(w["norm"] * x - w["w"])))


def _start():
  return {"norm": jnp.array([1.0, 0.5]), "w": jnp.array([0.3, -0.2])}


def _own(sizes=(3, 2, 4)):
  return [rows * 2 + i for i, rows in enumerate(problems.ragged(sizes, width=2))]


def _trained(algorithm, cohort, rounds=_ROUNDS, start=_start):
  state = algorithm.init(start(), num_clients=3)
  for _ in range(rounds):
    state, _ = algorithm.round(state, cohort)
  return state


def _model(state, client):
  """What a client uses, by the algorithm's own facts."""
  row = jax.tree.map(lambda leaf: leaf[0], state.memories.rows([client]))
  return described.algorithms()["fed_bn"].personal(state.params, row)


@pytest.mark.cases(quick=["shown"], slow=...)
@pytest.mark.parametrize("noisy", [False, True], ids=["shown", "noisy"])
def test_where_all_is_shared_it_is_fed_avg_bit_for_bit(noisy):
  cohort = from_batches(_own(), batch_size=1)
  ends = []
  for make in (functools.partial(fed_bn, kept=lambda name: False), fed_avg):
    aggregator = registry.PRIVATE["flat"]() if noisy else None
    options = {"server_tx": optax.adam(0.1), "aggregator": aggregator, **_OPTIONS}
    ends.append(_trained(make(_loss, optax.sgd(_RATE), **options), cohort, rounds=2))
  jax.tree.map(np.testing.assert_array_equal, ends[0].params, ends[1].params)


def test_where_all_but_an_unused_number_is_kept_clients_train_alone():
  loss = lambda w, x: _loss(w["norm"], x)
  start = lambda: {"norm": _start(), "unused": jnp.zeros(1)}
  algorithm = fed_bn(loss, optax.sgd(_RATE), **_OPTIONS)
  state = _trained(algorithm, from_batches(_own(), batch_size=1), start=start)
  jax.tree.map(np.testing.assert_array_equal, state.params, start())
  for client, rows in enumerate(_own()):
    alone = fed_avg(_loss, optax.sgd(_RATE), **_OPTIONS)
    wanted = _trained(alone, from_batches([rows], batch_size=1)).params
    problems.assert_trees_close(_model(state, client)["norm"], wanted, rtol=1e-6)


def test_it_follows_a_loop_in_float64():
  own = _own()
  w, norms = np.array([0.3, -0.2]), [np.array([1.0, 0.5]) for _ in own]
  for _ in range(_ROUNDS):
    sent = []
    for i, rows in enumerate(own):
      local = w.copy()
      for x in np.asarray(rows, np.float64):
        slope = np.tanh(norms[i] * x - local)
        local, norms[i] = local + _RATE * slope, norms[i] - _RATE * slope * x
      sent.append(local)
    w = np.mean(sent, axis=0)
  state = _trained(
    fed_bn(_loss, optax.sgd(_RATE), **_OPTIONS), from_batches(own, batch_size=1)
  )
  np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)
  np.testing.assert_array_equal(state.params["norm"], [1.0, 0.5])
  for i in range(3):
    model = _model(state, i)
    np.testing.assert_allclose(model["norm"], norms[i], rtol=1e-5)
    np.testing.assert_array_equal(model["w"], state.params["w"])


@pytest.mark.slow
def test_a_client_that_is_away_keeps_what_it_had():
  algorithm = fed_bn(_loss, optax.sgd(_RATE), **_OPTIONS)
  cohort = from_batches(_own(), batch_size=1)
  before = _trained(algorithm, cohort, rounds=1)
  two = cohort._replace(
    ids=cohort.ids[:2], num_examples=cohort.num_examples[:2], batches=cohort.batches[:2]
  )
  after, _ = algorithm.round(before, two)
  kept = lambda state: state.memories.all()["norm"]
  np.testing.assert_array_equal(kept(after)[2], kept(before)[2])
  assert not np.array_equal(kept(after)[:2], kept(before)[:2])


def test_what_is_kept_is_no_part_of_the_message_and_of_its_norm():
  """A huge change of what stays neither shows nor uses up the clip norm."""
  loss = lambda w, x: jnp.sum(w["w"] * x) + 1e6 * jnp.sum(w["norm"])
  cohort = from_batches([np.array([[0.1, 0.0]], np.float32)])
  plan = registry.plan(noise_multiplier=0.0, l2_clip_norm=1.0, normalize_by=1.0)
  algorithm = fed_bn(
    loss, optax.sgd(1.0), aggregator=central(plan, registry.NOISE), **_OPTIONS
  )
  state, info = algorithm.round(algorithm.init(_start(), 1), cohort)
  np.testing.assert_allclose(state.params["w"], [0.2, -0.2], rtol=1e-5)
  assert float(info.mean_norm) == pytest.approx(0.1) and info.upload_bits == 64
  np.testing.assert_array_equal(state.params["norm"], _start()["norm"])
  assert float(state.memories.all()["norm"][0, 0]) < -1e5


@pytest.mark.slow
def test_what_a_silo_keeps_follows_from_its_noisy_steps():
  """Shared and kept parts are clipped as one vector, and both get the noise of the step."""
  loss = lambda w, example: 0.5 * jnp.sum((w["w"] + w["norm"] - example.x) ** 2)
  federation = _federation(12, 8)
  silos = Silos((_plan(num_steps=4), _plan(num_steps=4, prob=1.0)), num_rounds=2)
  algorithm = fed_bn(loss, optax.sgd(_RATE), silos=silos, **{**_OPTIONS, "key": _KEY})
  zeros = {"norm": jnp.zeros(2), "w": jnp.zeros(2)}
  state = algorithm.init(zeros, 2)
  x = np.asarray(federation.dataset.x, np.float64)
  server, norms = np.zeros(2), np.zeros((2, 2))
  for round, cohort in enumerate(itertools.islice(algorithm.cohorts(federation, rng=3), 2)):
    state, _ = algorithm.round(state, cohort)
    deltas = []
    for silo, batches in zip(cohort.ids.tolist(), cohort.batches):
      plan, w = silos.plans[silo], server.copy()
      noise_state = noise.gaussian.init(_key_of(silo, round))
      for rows, mask in zip(batches.examples, batches.mask):
        grads = np.tile(w + norms[silo] - x[rows[mask]], 2)  # of norm, then of w
        lengths = np.linalg.norm(grads, axis=1, keepdims=True)
        total = (grads / np.maximum(lengths, 1)).sum(axis=0)
        drawn, noise_state = noise.add_gaussian(noise_state, zeros, plan.noise_multiplier)
        total += np.concatenate([drawn["norm"], drawn["w"]])
        norms[silo] -= _RATE * total[:2] / plan.normalize_by
        w = w - _RATE * total[2:] / plan.normalize_by
      deltas.append(w - server)
    server = server + np.mean(deltas, axis=0)
  np.testing.assert_allclose(state.params["w"], server, atol=1e-5)
  np.testing.assert_allclose(state.memories.all()["norm"], norms, atol=1e-5)


def test_a_part_is_named_by_a_regular_expression():
  params = {"GroupNorm_0": {"scale": 1}, "Dense_0": {"bias": 2}, "head": {"bias": 3}}
  kept = lambda pattern: jax.tree.leaves(split(params, pattern)[1])
  assert kept("norm") == [1] and kept("(^|/)head/") == [3] and kept("bias") == [2, 3]
  assert join(*split(params, "norm")) == params


@pytest.mark.parametrize("kept", ["nothing_of_it", ".", "(", lambda name: True])
def test_a_pattern_that_keeps_nothing_or_everything_is_refused(kept):
  with refuses("kept"):
    fed_bn(_loss, optax.sgd(_RATE), kept=kept, **_OPTIONS).init(_start(), 3)
