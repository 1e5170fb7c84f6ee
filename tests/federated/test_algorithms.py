"""Algorithms against what is known about them: exact limits and quadratic optima."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import data, federated, sampling
from dpjax.federated import (
  LocalWork,
  apfl,
  by_examples,
  fed_avg,
  fed_nova,
  fed_opt,
  fed_prox,
  fed_sgd,
  fine_tune,
  from_batches,
  hyp_cluster,
  loop_clients,
  mime_lite,
  scaffold,
)
from dpjax.federated.algorithms.apfl import mix
from dpjax.federated.algorithms.fed_nova import momentum_steps
from dpjax.federated.client import capped_weight
from dpjax.federated.round import params_of
from dpjax.parallel import client_states
from dpjax.plan import Plan
from tests.federated import problems, registry
from tests.refuses import refuses

_KEY = jax.random.key(0)
_LOOP = loop_clients()


def _run(algorithm, params, cohort, rounds, **init):
  state = algorithm.init(params, **init)
  for _ in range(rounds):
    state, info = algorithm.round(state, cohort)
  return state, info


def _options(**more):
  return {"map_clients": _LOOP, "key": _KEY, **more}


@jax.jit
def _mean_gradient(params, examples):
  loss = lambda p: jnp.mean(jax.vmap(problems.network, (None, 0))(p, examples))
  return jax.grad(loss)(params)


def _pooled_gradient(params, clients):
  return _mean_gradient(params, np.concatenate(clients))


def test_types_are_never_promoted_by_themselves():
  clients, params = problems.ragged(), problems.network_params()
  cohort = from_batches(clients, batch_size=2)

  def one_round():
    algorithm = fed_avg(problems.network, optax.sgd(0.1), **_options())
    return _run(algorithm, params, cohort, 1)[0].params

  free = one_round()
  with jax.numpy_dtype_promotion("strict"):
    jax.tree.map(np.testing.assert_array_equal, one_round(), free)


# --- limits that must hold exactly


@pytest.mark.long
def test_one_full_batch_local_step_is_centralised_sgd():
  clients, params = problems.ragged(), problems.network_params()
  algorithm = fed_avg(problems.network, optax.sgd(0.1), **_options(weighting=by_examples))
  state, _ = _run(algorithm, params, from_batches(clients), 1)
  gradient = _pooled_gradient(params, clients)
  expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
  problems.assert_trees_close(state.params, expected)


@pytest.mark.long
def test_fed_sgd_is_gradient_descent_whatever_the_local_batches():
  clients, params = problems.ragged(), problems.network_params()
  expected = params
  for _ in range(2):
    gradient = _pooled_gradient(expected, clients)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, gradient)
  for batch_size in (2, None):
    cohort = from_batches(clients, batch_size=batch_size)
    algorithm = fed_sgd(problems.network, optax.sgd(0.1), **_options())
    state, _ = _run(algorithm, params, cohort, 2)
    problems.assert_trees_close(state.params, expected)


@pytest.mark.long
def test_averaging_weights_is_averaging_differences():
  """One round by the book: train each client, average the weights by examples."""
  clients, params = problems.ragged(), problems.network_params()
  local = []
  for own in clients:
    trained = params
    for start in range(0, len(own), 2):
      gradient = _mean_gradient(trained, own[start : start + 2])
      trained = jax.tree.map(lambda p, g: p - 0.1 * g, trained, gradient)
    local.append(trained)
  sizes = np.array([len(own) for own in clients], np.float32)
  expected = jax.tree.map(
    lambda *leaves: sum(n * leaf for n, leaf in zip(sizes / sizes.sum(), leaves)), *local
  )
  algorithm = fed_avg(problems.network, optax.sgd(0.1), **_options(weighting=by_examples))
  state, _ = _run(algorithm, params, from_batches(clients, batch_size=2), 1)
  problems.assert_trees_close(state.params, expected)


@pytest.mark.long
def test_mu_zero_fed_prox_is_fed_avg_and_a_large_mu_stays_at_home():
  cohort = from_batches(problems.ragged(), batch_size=2)
  params = {"w": jnp.ones(3)}
  run = lambda algorithm: _run(algorithm, params, cohort, 2)[0].params
  plain = run(fed_avg(problems.quadratic, optax.sgd(0.1), **_options()))
  none = run(fed_prox(problems.quadratic, optax.sgd(0.1), mu=0.0, **_options()))
  jax.tree.map(np.testing.assert_array_equal, plain, none)
  much = run(fed_prox(problems.quadratic, optax.sgd(0.1), mu=9.0, **_options()))
  moved = lambda p: sum(
    float(jnp.sum((a - b) ** 2))
    for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(params))
  )
  assert moved(much) < 0.8 * moved(plain)


def test_fed_prox_on_a_quadratic_by_hand():
  """w <- w - lr (w - x) - lr mu (w - w0): from 0, two steps of 0.5 with mu = 1 and x = 1."""
  algorithm = fed_prox(problems.quadratic, optax.sgd(0.5), mu=1.0, **_options())
  cohort = from_batches([np.ones((2, 1), np.float32)], batch_size=1)
  state, _ = _run(algorithm, {"w": jnp.zeros(1)}, cohort, 1)
  assert float(state.params["w"][0]) == pytest.approx(0.5)  # 0.5, then 0.5 + 0.25 - 0.25


@pytest.mark.slow
def test_empty_clients_change_nothing():
  clients, params = problems.ragged((4, 3)), problems.network_params()
  nobody = [np.zeros((0, 3), np.float32)]
  make = lambda: fed_avg(problems.network, optax.sgd(0.1), **_options())
  with_them = from_batches(nobody + clients + nobody, batch_size=2)
  with_them = with_them._replace(ids=np.array([7, 0, 1, 8]))
  a, info = _run(make(), params, with_them, 1)
  b, _ = _run(make(), params, from_batches(clients, batch_size=2), 1)
  jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
  assert info.clients.update_norm[0] == info.clients.num_steps[0] == 0


def test_an_empty_cohort_leaves_a_plain_server_where_it_is():
  params = problems.network_params()
  algorithm = fed_avg(problems.network, optax.sgd(0.1), **_options())
  state, info = _run(algorithm, params, from_batches([]), 1)
  jax.tree.map(np.testing.assert_array_equal, state.params, params)
  assert int(state.round) == 1 and info.num_clients == 0


@pytest.mark.long
def test_weights_follow_the_public_rule():
  clients = [np.full((n, 1), v, np.float32) for n, v in ((1, 0.0), (4, 1.0), (100, 4.0))]
  cases = {by_examples: (4 + 400) / 105, capped_weight(4): (1 + 4) / 2.25}
  for weighting, expected in cases.items():
    algorithm = fed_avg(problems.quadratic, optax.sgd(1.0), **_options(weighting=weighting))
    state, _ = _run(algorithm, {"w": jnp.zeros(1)}, from_batches(clients), 1)
    assert float(state.params["w"][0]) == pytest.approx(expected, rel=1e-5)


def test_the_server_may_have_any_optimizer():
  """FedAdam's first step is its learning rate, in every coordinate that is not tiny."""
  cohort = from_batches([np.full((1, 2), 50.0, np.float32)])
  server_tx = fed_opt("adam", 0.25)
  algorithm = fed_avg(problems.quadratic, optax.sgd(1.0), server_tx, **_options())
  state, _ = _run(algorithm, {"w": jnp.zeros(2)}, cohort, 1)
  np.testing.assert_allclose(state.params["w"], 0.25, rtol=1e-3)


# --- heterogeneous clients: optimum x_i, and sharpness h_i, so w* = sum h x / sum h


def _sharp(w, example):
  return 0.5 * jnp.sum(example["h"] * (w["w"] - example["x"]) ** 2)


def _sharp_clients(sizes=(1, 6, 2), centres=(0.0, 1.0, -2.0), sharp=(1.0, 1.0, 1.0)):
  return [
    {"h": np.full((n, 1), h, np.float32), "x": np.full((n, 1), x, np.float32)}
    for n, x, h in zip(sizes, centres, sharp)
  ]


@pytest.mark.long
def test_fed_nova_reaches_the_optimum_where_fed_avg_is_biased():
  """Steps 1, 6 and 2 a round: FedAvg is pulled to the client with most steps."""
  cohort = from_batches(_sharp_clients(), batch_size=1)
  optimum = np.mean([0.0, 1.0, -2.0])
  final = {}
  for name, make in {"nova": fed_nova, "avg": fed_avg}.items():
    algorithm = make(_sharp, optax.sgd(0.02), **_options())
    state, _ = _run(algorithm, {"w": jnp.zeros(1)}, cohort, 150)
    final[name] = abs(float(state.params["w"][0]) - optimum)
  assert final["nova"] < 0.03 < 0.3 < final["avg"]


@pytest.mark.long
def test_fed_nova_counts_momentum_steps():
  """With momentum, tau steps go further than tau gradients; uncorrected it is biased."""
  cohort = from_batches(_sharp_clients(), batch_size=1)
  errors = []
  for steps in (momentum_steps(0.5), None):
    algorithm = fed_nova(_sharp, optax.sgd(0.005, momentum=0.5), **_options(steps=steps))
    state, _ = _run(algorithm, {"w": jnp.zeros(1)}, cohort, 250)
    errors.append(abs(float(state.params["w"][0]) + 1 / 3))
  assert errors[0] < 0.02 and errors[1] > 0.05


@pytest.mark.long
def test_scaffold_converges_where_local_steps_drift():
  """Equal steps, unequal sharpness: FedAvg's fixed point is off, SCAFFOLD's is the optimum."""
  centres, sharp = (0.0, 1.0, -2.0), (0.2, 1.0, 4.0)
  cohort = from_batches(_sharp_clients((6, 6, 6), centres, sharp), batch_size=1)
  optimum = np.dot(centres, sharp) / np.sum(sharp)
  options = _options(client_learning_rate=0.1, num_clients=3)
  algorithm = scaffold(_sharp, optax.sgd(0.1), **options)
  state, _ = _run(algorithm, {"w": jnp.zeros(1)}, cohort, 150, num_clients=3)
  drifting, _ = _run(
    fed_avg(_sharp, optax.sgd(0.1), **_options()), {"w": jnp.zeros(1)}, cohort, 150
  )
  error = lambda s: abs(float(s.params["w"][0]) - optimum)
  assert error(state) < 1e-3 and error(drifting) > 0.1
  own = np.asarray(state.memories.all()["w"]).ravel()  # c_i is the client's gradient at w*
  np.testing.assert_allclose(
    own, np.array(sharp) * (optimum - np.array(centres)), atol=2e-2
  )
  np.testing.assert_allclose(own.sum(), 0, atol=1e-2)


def test_scaffold_with_partial_cohorts_keeps_the_others_control():
  cohort = from_batches(_sharp_clients((2, 2, 2)), batch_size=1)
  part = cohort._replace(
    ids=cohort.ids[1:2], num_examples=cohort.num_examples[1:2], batches=cohort.batches[1:2]
  )
  algorithm = scaffold(
    _sharp, optax.sgd(0.1), **_options(client_learning_rate=0.1, num_clients=3)
  )
  state, _ = _run(algorithm, {"w": jnp.zeros(1)}, part, 1, num_clients=3)
  moved = np.asarray(state.memories.all()["w"]).ravel() != 0
  assert moved.tolist() == [False, True, False]
  change = float(state.memories.rows([1])["w"][0, 0]) / 3  # |S| / N of the mean change
  assert float(state.server.control["w"][0]) == pytest.approx(change, rel=1e-5)


@pytest.mark.slow
def test_mime_lite_without_statistics_is_fed_avg_and_with_momentum_uses_the_servers():
  cohort = from_batches(_sharp_clients((2, 2, 2)), batch_size=1)
  start = {"w": jnp.zeros(1)}
  plain, _ = _run(mime_lite(_sharp, optax.sgd(0.1), **_options()), start, cohort, 2)
  averaged, _ = _run(fed_avg(_sharp, optax.sgd(0.1), **_options()), start, cohort, 2)
  problems.assert_trees_close(params_of(plain), averaged.params)
  tx = optax.sgd(0.1, momentum=0.5)
  state, _ = _run(mime_lite(_sharp, tx, **_options()), start, cohort, 1)
  trace = float(jax.tree.leaves(state.server)[0][0])
  assert trace == pytest.approx(
    1 / 3, rel=1e-5
  )  # the mean gradient at 0, not along the way


# --- models for single clients


def test_fine_tuning_goes_to_each_clients_own_optimum():
  tune = fine_tune(problems.quadratic, optax.sgd(0.5), _LOOP, key=_KEY)
  clients = [np.full((8, 1), v, np.float32) for v in (1.0, -3.0)]
  own = tune({"w": jnp.zeros(1)}, from_batches(clients, batch_size=1))
  np.testing.assert_allclose(own["w"].ravel(), [1.0, -3.0], rtol=0.01)


def test_apfl_mixes_between_the_shared_and_the_own_model():
  clients = [np.full((2, 1), v, np.float32) for v in (1.0, -3.0)]
  cohort, start = from_batches(clients, batch_size=1), {"w": jnp.zeros(1)}
  shared, _ = _run(
    fed_avg(problems.quadratic, optax.sgd(0.3), **_options()), start, cohort, 20
  )
  state, _ = _run(
    apfl(problems.quadratic, optax.sgd(0.3), alpha=0.5, **_options()), start, cohort, 20,
    num_clients=2,
  )  # fmt: skip
  problems.assert_trees_close(state.params, shared.params)  # what is sent is FedAvg's
  for place, optimum in enumerate((1.0, -3.0)):
    own = jax.tree.map(lambda leaf: leaf[place], state.memories.all())
    model = mix(own.params, state.params, own.alpha)["w"]
    away = abs(float(state.params["w"][0]) - optimum)
    assert abs(float(model[0]) - optimum) < 0.3 * away


def test_hyp_cluster_finds_the_clusters():
  values = (5.0, 5.2, -5.0, 4.8, -5.2)
  clients = [np.full((3, 1), v, np.float32) for v in values]
  algorithm = hyp_cluster(problems.quadratic, optax.sgd(0.5), **_options(num_clients=5))
  start = {"w": jnp.array([[0.5], [-0.5]])}
  state, _ = _run(algorithm, start, from_batches(clients, batch_size=1), 8)
  assert state.memories.all().tolist() == [0, 0, 1, 0, 1]
  np.testing.assert_allclose(state.params["w"].ravel(), [5.0, -5.1], atol=0.05)


# --- example-level privacy inside clients


def test_a_plan_of_examples_is_for_silos_which_draw_and_count():
  """With 10 and 11 records a message had noise of two sizes, at a claimed epsilon of .73."""
  plan = Plan(
    sampler=sampling.PoissonSampler(sampling_prob=0.5, capacity=8), noise_multiplier=1.0,
    l2_clip_norm=1.0, normalize_by=2.0, num_steps=4, delta=1e-5,
  )  # fmt: skip
  loss_fn = lambda w, x: jnp.sum(w * x)
  summed_fn = plan.clipped_grad(loss_fn)
  grad = lambda params, examples, mask: (summed_fn(params, examples, mask), 0.0)
  tx = lambda key: optax.chain(plan.transform(key), optax.sgd(1.0))
  client = federated.local_training(loss_fn, tx, grad=grad)
  received = federated.client.Received(jnp.zeros(3))
  local = client.init(received, None, 2, _KEY)
  with refuses("grad"):
    client.step(received, local, jnp.zeros((2, 3)), jnp.ones(2, bool))


# --- mistakes


@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: fed_avg(_sharp, optax.sgd(1.0), key=0), "key"),
    (lambda: fed_prox(_sharp, optax.sgd(1.0), mu=-1.0, key=_KEY), "mu"),
    (lambda: fed_nova(_sharp, optax.sgd(1.0), tau_eff=0.0, key=_KEY), "tau_eff"),
    (lambda: momentum_steps(1.0), "momentum"),
    (lambda: apfl(_sharp, optax.sgd(1.0), alpha=1.5, key=_KEY), "alpha"),
    (lambda: capped_weight(0), "cap"),
    (lambda: LocalWork(epochs=0), "epochs"),
    (
      lambda: scaffold(
        _sharp, optax.sgd(1.0), key=_KEY, client_learning_rate=0.0, num_clients=1
      ),
      "client_learning_rate",
    ),
  ],
)
def test_mistakes_are_one_line(make, field):
  with refuses(field) as caught:
    make()
  assert "\n" not in str(caught.value)


def test_what_stands_in_place_of_another_argument_is_named():
  plan = Plan(
    *(sampling.PoissonSampler(sampling_prob=0.5, capacity=4), 1.0, 1.0, 1, 2),
    delta=1e-5,
    unit="user",
  )
  key = jax.random.key(0)
  central = federated.central(plan, key)
  algorithm = fed_avg(_sharp, optax.sgd(0.1), aggregator=central, key=key)
  state = algorithm.init({"w": jnp.zeros(1)})
  rows = data.from_arrays(np.zeros((2, 1)), [0, 0], num_classes=1)
  clients = data.Federation(rows, [[0], [1]])
  cases = {
    "plan": lambda: federated.central(key, plan),
    "aggregator": lambda: fed_avg(_sharp, optax.sgd(0.1), aggregator=plan, key=key),
    "client_tx": lambda: fed_avg(_sharp, 0.1, key=key),
    "server_tx": lambda: fed_avg(_sharp, optax.sgd(0.1), optax.sgd, key=key),
    "params": lambda: algorithm.init(None),
    "federation": lambda: algorithm.cohorts(rows, LocalWork()),
    "work": lambda: algorithm.cohorts(clients, 1),
    "state": lambda: algorithm.round(None, None),
    "cohort": lambda: algorithm.round(state, clients),
  }
  for field, call in cases.items():
    with refuses(field):
      call()


def test_a_client_beyond_those_that_are_remembered_is_refused():
  algorithm = scaffold(
    _sharp, optax.sgd(0.1), **_options(client_learning_rate=0.1, num_clients=2)
  )
  with refuses("num_clients", value=0):
    algorithm.init({"w": jnp.zeros(1)})
  state = algorithm.init({"w": jnp.zeros(1)}, num_clients=2)
  with refuses("client", value=2):
    algorithm.round(state, from_batches(_sharp_clients(), batch_size=1))


@pytest.mark.parametrize("ids", [(0, 99), (-1, 0), (2, 2), (0, 2**40)])
@pytest.mark.parametrize("name", sorted(registry.ALGORITHMS))
def test_a_number_that_names_no_client_is_one_line(name, ids):
  """Of every algorithm; without memories any number up to 2^31 is a client's own."""
  algorithm = registry.build(name)
  cohort = from_batches(problems.ragged((2, 2), width=3), batch_size=2)
  cohort = cohort._replace(ids=np.array(ids, np.int64))
  state = registry.start(name, algorithm)
  if state.memories is None and ids == (0, 99):
    return
  with refuses("client" if ids == (0, 99) else "cohort.ids") as caught:
    algorithm.round(state, cohort)
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def _two_rounds(name):
  algorithm = registry.build(name)
  state = registry.start(name, algorithm)
  cohort = from_batches(problems.ragged((3, 2), width=3), batch_size=2)
  for _ in range(2):
    state, _ = algorithm.round(state, cohort)
  return params_of(state)


@pytest.mark.cases(quick=[3, 8, 9, 10], slow=[2], long=...)
@pytest.mark.parametrize("name", sorted(registry.ALGORITHMS))
def test_in_double_precision_every_algorithm_ends_where_it_does_in_single(name):
  single = _two_rounds(name)
  with jax.enable_x64(True):
    double = _two_rounds(name)
  assert {leaf.dtype.name for leaf in jax.tree.leaves(double)} == {"float64"}
  # What is drawn at random is drawn anew for other types.
  if not any(word in name for word in ("compressed", "feedback", "noise")):
    problems.assert_trees_close(single, double, rtol=1e-5)


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize("ids", [[5], [-1], [0, 10**9]])
def test_rows_of_nobody_are_one_line(ids):
  states = client_states.ClientStates(np.zeros(2, np.float32), num_clients=5)
  for call in (
    lambda: states.rows(ids),
    lambda: states.replace_rows(ids, np.ones((len(ids), 2))),
  ):
    with refuses("client"):
      call()


@pytest.mark.parametrize(
  "name",
  [
    name if name == "fed_avg" else pytest.param(name, marks=pytest.mark.slow)
    for name in registry.ALGORITHMS
  ],
)
def test_clients_that_cannot_be_used_are_left_out_and_counted(name):
  """One of six sends NaN and one has no example, in every algorithm."""
  own = problems.ragged((5, 1, 0, 7, 3, 2))
  own[3][2, 1] = np.nan
  algorithm = registry.build(name)
  state = registry.start(name, algorithm)
  _, info = algorithm.round(state, federated.from_batches(own, batch_size=2))
  assert (int(info.num_clients), int(info.left_out)) == (4, 2)
  assert np.isfinite(info.train_loss) and np.isfinite(info.mean_norm)
  every = [np.full_like(rows, np.nan) for rows in own]
  _, info = algorithm.round(state, federated.from_batches(every, batch_size=2))
  assert (int(info.num_clients), int(info.left_out)) == (0, 6)
  assert np.isnan(info.train_loss) and np.isnan(info.mean_norm)
