"""Algorithms against NumPy loops of the pseudocode in their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpjax import federated
from dpjax.federated import apfl, fed_opt, from_batches, loop_clients
from tests.federated import problems
from tests.refuses import refuses

_OPTIONS = {"key": jax.random.key(0), "map_clients": loop_clients()}


# --- Reddi et al. 2021, algorithm 2


def _reddi(name, differences, x, *, eta, beta_1, beta_2, tau):
  """Lines 10 to 15, on given mean differences; v_-1 = tau^2, m_-1 = 0."""
  m, v, path = np.zeros_like(x), np.full_like(x, tau**2), []
  for delta in differences:
    m = beta_1 * m + (1 - beta_1) * delta
    if name == "adagrad":
      v = v + delta**2
    elif name == "yogi":
      v = v - (1 - beta_2) * delta**2 * np.sign(v - delta**2)
    else:
      v = beta_2 * v + (1 - beta_2) * delta**2
    x = x + eta * m / (np.sqrt(v) + tau)
    path.append(x)
  return np.stack(path)


@pytest.mark.parametrize(
  ("name", "given", "used"),
  [
    ("adam", {}, {"beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}),
    ("yogi", {}, {"beta_1": 0.9, "beta_2": 0.99, "tau": 1e-3}),
    ("adagrad", {}, {"beta_1": 0.0, "beta_2": 0.99, "tau": 1e-3}),
    ("adam", {"beta_1": 0.5, "beta_2": 0.7, "tau": 0.3}, None),
    ("yogi", {"beta_1": 0.0, "beta_2": 0.0, "tau": 0.3}, None),
    ("adagrad", {"beta_1": 0.9, "tau": 0.05}, {"beta_1": 0.9, "beta_2": 0.99, "tau": 0.05}),
  ],
)
def test_the_servers_optimizers_are_the_papers(name, given, used):
  used = given if used is None else used
  rng = np.random.default_rng(0)
  sizes = np.array([1.0, 0.0, 1e-4, 1.0, 30.0, 0.1, 0.0, 1e-3])[:, None]
  differences, x = rng.normal(size=(8, 4)) * sizes, rng.normal(size=4)
  expected = _reddi(name, differences, x, eta=0.2, **used)
  tx = fed_opt(name, 0.2, **given)
  params = jnp.asarray(x, jnp.float32)
  state = tx.init(params)
  for delta, wanted in zip(differences, expected):
    updates, state = tx.update(jnp.asarray(-delta, jnp.float32), state, params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, wanted, rtol=2e-5, atol=2e-6)


def test_the_optimizers_of_optax_are_others():
  """The oracle above tells them apart: bias correction, v_-1, and where tau stands."""
  delta, x = np.array([0.3]), np.zeros(1)
  one = lambda tx: float(tx.update(jnp.array([-0.3]), tx.init(jnp.zeros(1)))[0][0])
  ours = {"adam": optax.adam(0.2, 0.9, 0.99, eps=1e-3), "adagrad": optax.adagrad(0.2, 0.0)}
  for name, tx in ours.items():
    first = 0.9 if name == "adam" else 0.0
    paper = _reddi(name, [delta], x, eta=0.2, beta_1=first, beta_2=0.99, tau=1e-3)[0, 0]
    assert abs(one(tx) - paper) > 1e-4 * paper


@pytest.mark.cases(quick=["yogi"], long=...)
@pytest.mark.parametrize("name", ["adam", "yogi", "adagrad"])
def test_a_run_of_fed_opt_is_algorithm_2(name):
  """Two rounds of clients with two local steps each, all in NumPy beside it."""
  own, eta_l, x = problems.ragged((2, 2), width=2), 0.1, np.array([1.0, -2.0])
  server_tx = fed_opt(name, 0.5, tau=0.1)
  algorithm = federated.fed_avg(problems.quadratic, optax.sgd(eta_l), server_tx, **_OPTIONS)
  state, differences = algorithm.init({"w": jnp.asarray(x, jnp.float32)}), []
  path = [x]
  beta_1 = 0.0 if name == "adagrad" else 0.9
  for _ in range(2):
    state, _ = algorithm.round(state, from_batches(own, batch_size=1))
    local = []
    for rows in own:
      w = path[-1]
      for row in rows:
        w = w - eta_l * (w - row)
      local.append(w)
    differences.append(np.mean(local, 0) - path[-1])
    path = _reddi(name, differences, x, eta=0.5, beta_1=beta_1, beta_2=0.99, tau=0.1)
  np.testing.assert_allclose(state.params["w"], path[-1], rtol=1e-4)


@pytest.mark.parametrize(
  ("change", "field"),
  [
    ({"tau": 0.0}, "tau"),
    ({"beta_1": 1.0}, "beta_1"),
    ({"beta_2": -0.1}, "beta_2"),
    ({"learning_rate": 0.0}, "learning_rate"),
  ],
)
def test_wrong_numbers_are_named(change, field):
  with refuses(field):
    fed_opt("adam", **{"learning_rate": 0.1, **change})


# --- Deng et al. 2020, algorithm 1, and the update of alpha of its section 4


def _loss(w, example):
  """Not a quadratic: where the gradient is taken matters."""
  return jnp.sum(jnp.log(jnp.cosh(w["w"] - example)))


def _gradient(w, x):
  return np.tanh(w - x)


def _deng(own, w, *, eta, eta_alpha, alpha, rounds):
  """w, v_i and alpha_i after so many rounds of one pass each, examples one by one."""
  v, alphas = [w.copy() for _ in own], [alpha] * len(own)
  for _ in range(rounds):
    sent = []
    for i, rows in enumerate(own):
      w_i = w.copy()
      for step, x in enumerate(rows):
        mixture = alphas[i] * v[i] + (1 - alphas[i]) * w_i  # of the values before the step
        at_mixture = _gradient(mixture, x)
        slope = np.sum((v[i] - w_i) * at_mixture)
        w_i = w_i - eta * _gradient(w_i, x)
        v[i] = v[i] - eta * alphas[i] * at_mixture
        if step == 0:
          alphas[i] = np.clip(alphas[i] - eta_alpha * slope, 0, 1)
      sent.append(w_i)
    w = np.mean(sent, axis=0)
  return w, np.stack(v), np.array(alphas)


@pytest.mark.cases(quick=["20.0"], long=...)
@pytest.mark.parametrize("eta_alpha", [0.0, 0.3, 20.0])
def test_apfl_is_algorithm_1(eta_alpha):
  own = [rows * 2 + i for i, rows in enumerate(problems.ragged((3, 2, 4), width=2))]
  start = np.array([0.5, -1.0])
  numbers = dict(eta=0.4, eta_alpha=eta_alpha, alpha=0.6, rounds=3)
  w, v, alphas = _deng(own, start, **numbers)
  algorithm = apfl(
    _loss, optax.sgd(0.4), alpha=0.6, alpha_learning_rate=eta_alpha, **_OPTIONS
  )
  state = algorithm.init({"w": jnp.asarray(start, jnp.float32)}, num_clients=3)
  for _ in range(3):
    state, _ = algorithm.round(state, from_batches(own, batch_size=1))
  np.testing.assert_allclose(state.params["w"], w, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(state.memories.all().params["w"], v, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(state.memories.all().alpha, alphas, rtol=1e-4, atol=1e-5)
  moved = np.abs(alphas - 0.6).max()
  assert moved == 0 if not eta_alpha else moved > 0.01
  assert eta_alpha < 1 or set(alphas) & {0.0, 1.0}  # projected


@pytest.mark.slow
def test_apfl_at_the_ends_of_alpha():
  own = problems.ragged((3, 2), width=2)
  cohort = from_batches(own, batch_size=1)
  for alpha in (0.0, 1.0):
    algorithm = apfl(_loss, optax.sgd(0.4), alpha=alpha, **_OPTIONS)
    start = {"w": jnp.zeros(2)}
    state, _ = algorithm.round(algorithm.init(start, num_clients=2), cohort)
    _, alone, _ = _deng(own, np.zeros(2), eta=0.4, eta_alpha=0.0, alpha=alpha, rounds=1)
    np.testing.assert_allclose(
      state.memories.all().params["w"], alone, rtol=1e-4, atol=1e-6
    )
  with refuses("alpha_learning_rate", value=-1):
    apfl(_loss, optax.sgd(0.4), alpha_learning_rate=-1, **_OPTIONS)
