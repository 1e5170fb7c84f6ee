"""Some of the parameters first: the rest has no gradient, and does not move."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import training
from dpjax.types import Batch
from tests import plans

_RNG = np.random.default_rng(0)
_PARAMS = {
  name: jnp.asarray(_RNG.normal(size=(3, 3)), jnp.float32) for name in ("below", "head")
}
_X = jnp.asarray(_RNG.normal(size=(8, 3)), jnp.float32)


def _loss(params, x):
  return jnp.sum(jnp.tanh(x @ params["below"]) @ params["head"] * x)


_IN_HEAD = "head".__eq__


def test_what_is_not_trained_has_no_gradient_and_does_not_move():
  loss, tx = training.of_part(_loss, optax.sgd(1.0), _IN_HEAD)
  grads = jax.grad(loss)(_PARAMS, _X[0])
  whole = jax.grad(_loss)(_PARAMS, _X[0])
  np.testing.assert_allclose(grads["head"], whole["head"], rtol=1e-5)
  assert not np.any(grads["below"]) and np.any(whole["below"])
  updates, _ = tx.update(whole, tx.init(_PARAMS), _PARAMS)
  np.testing.assert_allclose(updates["head"], -whole["head"], rtol=1e-5)
  assert not np.any(updates["below"])


@pytest.mark.cases(slow=["vmap"], long=...)
@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_examples_are_clipped_by_what_is_trained_alone(method):
  loss, _ = training.of_part(_loss, optax.sgd(1.0), _IN_HEAD)
  grad_fn = dpjax.clipped_grad(loss, l2_clip_norm=0.3, method=method)
  found = grad_fn(_PARAMS, _X, True)
  assert not np.any(found.total["below"])
  alone = lambda head, x: _loss({**_PARAMS, **head}, x)
  expected = dpjax.clipped_grad(alone, l2_clip_norm=0.3)(
    {"head": _PARAMS["head"]}, _X, True
  )
  np.testing.assert_allclose(found.total["head"], expected.total["head"], rtol=1e-4)
  np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)


def _plan(noise_multiplier):
  return plans.of(8, noise_multiplier=noise_multiplier, normalize_by=4.0)


@pytest.mark.cases(slow=[1], long=...)
@pytest.mark.parametrize("tx", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.1)])
def test_what_is_not_trained_stays_and_states_go_from_one_to_the_other(tx):
  make = lambda loss, tx: training.dp_sgd(loss, _plan(1.0), tx, noise_key=jax.random.key(0))
  first, then = make(*training.of_part(_loss, tx, _IN_HEAD)), make(_loss, tx)
  batch = Batch(_X, jnp.ones(8, bool))
  state, _ = first.step(first.init(_PARAMS), batch)
  np.testing.assert_array_equal(state.params["below"], _PARAMS["below"])
  assert np.all(state.params["head"] != _PARAMS["head"])
  assert jax.tree.structure(state) == jax.tree.structure(then.init(_PARAMS))
  after, _ = then.step(state, batch)
  assert np.all(after.params["below"] != state.params["below"])


@pytest.mark.slow
def test_both_kinds_of_steps_draw_from_one_sequence_of_noise():
  """The noise of a step is that of its number, whichever kind it is: no two are alike."""
  plan, nothing = _plan(1.0), Batch(_X, jnp.zeros(8, bool))
  make = lambda loss, tx: training.dp_sgd(loss, plan, tx, noise_key=jax.random.key(0))
  tx = optax.sgd(1.0)
  first, then = make(*training.of_part(_loss, tx, _IN_HEAD)), make(_loss, tx)

  def moves(kinds):
    state, found = then.init(_PARAMS), []
    for kind in kinds:
      after, _ = kind.step(state, nothing)
      found.append(np.asarray(after.params["head"] - state.params["head"]))
      state = after
    return found

  mixed, plain = moves([first, first, then]), moves([then, then, then])
  np.testing.assert_allclose(mixed, plain, atol=1e-6)
  assert not np.allclose(plain[0], plain[1])
