"""Every private state goes through the savers of other libraries and back, bit for bit."""

import dataclasses
import functools
import io
import pickle

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import dpjax
from dpjax import federated, mechanisms, noise, sampling, trees
from dpjax.noise import source
from dpjax.types import Batch
from dpjax.validate import UserError
from tests import plans
from tests.core import test_plan_spent

_PARAMS = test_plan_spent._PARAMS
_KEYS = {
  "ordinary": source.key_from_bytes(bytes(range(16))),
  "release": source.key_from_bytes(bytes(range(32))),
  "seed": jax.random.key(3),
}


def _of_plan(name, key):
  plan = test_plan_spent._PLANS[name]
  tx = plan.accumulated(optax.chain(plan.transform(key), optax.adam(0.1)), rows=8)
  summed = test_plan_spent.summed_of(plan)
  return tx.init(_PARAMS), lambda state: tx.update(summed, state, _PARAMS)[1]


def _of_training(key):
  plan = plans.of()
  loss_fn = lambda params, example: jnp.sum((params["w"] - example) ** 2)
  init, step = dpjax.training.dp_sgd(
    loss_fn, plan, optax.sgd(0.1, momentum=0.9), noise_key=key, ema_decay=0.9
  )
  batch = Batch(np.ones((8, 3), np.float32), np.ones(8, bool))
  return init({"w": jnp.zeros(3)}), lambda state: step(state, batch)[0]


def _of_pass(key):
  """A state that remembers of which draw its batches are."""
  sampler = sampling.CyclicSampler(steps_per_pass=2, num_examples=8)
  plan = dpjax.Plan(
    sampler, 1.0, 1.0, 4, 2, delta=1e-5, neighboring_relation="replace_special"
  )
  tx = plan.transform(key)
  grad_fn = plan.clipped_grad(lambda w, x: jnp.sum(w * x))
  batches = list(plan.batches(np.ones((8, 1), np.float32), rng=0))

  def update(state):
    after = tx.update(grad_fn(jnp.zeros(1), batches[int(state.inner.draws)]), state)[1]
    assert after.run < 0 and plan.spent(after).steps == state.inner.draws + 1
    return after

  return tx.init(jnp.zeros(1)), update


def _of_queries(key):
  found = mechanisms.SparseVector(epsilon=1.0, threshold=0.0, sensitivity=1.0, max_above=2)
  return found.init(key), lambda state: found.step(state, jnp.float32(0.5))[1]


_STATES = {
  name: functools.partial(_of_plan, name) for name in sorted(test_plan_spent._PLANS)
} | {"dp_sgd": _of_training, "a pass": _of_pass, "sparse vector": _of_queries}


def _orbax(save, restore):
  def saver(state, like, folder):
    with ocp.CheckpointManager(folder) as manager:
      manager.save(1, args=save(state))
      manager.wait_until_finished()
    with ocp.CheckpointManager(folder) as manager:
      return restore(manager.restore(1, args=_RESTORES[save](like)))

  return saver


def _composite(state):
  return ocp.args.Composite(state=ocp.args.StandardSave(state))


_RESTORES = {
  ocp.args.StandardSave: ocp.args.StandardRestore,
  ocp.args.PyTreeSave: lambda like: ocp.args.PyTreeRestore(
    like, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
  ),
  _composite: lambda like: ocp.args.Composite(state=ocp.args.StandardRestore(like)),
}


def _npz(state, like, folder):
  file = io.BytesIO()
  np.savez(file, *jax.tree.leaves(state))
  file.seek(0)
  held = np.load(file)
  leaves = [jnp.asarray(held[f"arr_{place}"]) for place in range(len(held.files))]
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _equinox(state, like, folder):
  file = io.BytesIO()
  eqx.tree_serialise_leaves(file, state)
  file.seek(0)
  return eqx.tree_deserialise_leaves(file, like)


def _state_dict(state, like, folder):
  held = pickle.dumps(jax.device_get(flax.serialization.to_state_dict(state)))
  return flax.serialization.from_state_dict(like, pickle.loads(held))


_SAVERS = {
  "pickle": lambda state, like, folder: pickle.loads(pickle.dumps(state)),
  "npz": _npz,
  "equinox": _equinox,
  "flax bytes": lambda state, like, folder: flax.serialization.from_bytes(
    like, flax.serialization.to_bytes(state)
  ),
  "flax state dict": _state_dict,
  "orbax standard": _orbax(ocp.args.StandardSave, lambda found: found),
  "orbax pytree": _orbax(ocp.args.PyTreeSave, lambda found: found),
  "orbax composite": _orbax(_composite, lambda found: found["state"]),
}


def _check(make, key, saver, folder):
  state, update = make(key)
  state = update(state)
  # Restored into the first state of a new process, made with another key.
  like, _ = make(noise.new_key(release=source.is_release(key)))
  if key is _KEYS["seed"]:
    like, _ = make(jax.random.key(4))
  restored = _SAVERS[saver](state, like, folder / "saved")
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  for one, other in ((state, restored), (update(state), update(restored))):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
      assert not trees.is_key(a)
      assert a.dtype == b.dtype
      np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("saver", _SAVERS)
@pytest.mark.parametrize("key", _KEYS)
def test_a_white_state_goes_through_every_saver(saver, key, tmp_path):
  _check(_STATES["white"], _KEYS[key], saver, tmp_path)


@pytest.mark.cases(slow=["a pass-pickle", "a pass-flax bytes"], long=...)
@pytest.mark.parametrize("saver", _SAVERS)
@pytest.mark.parametrize("name", sorted(_STATES))
def test_every_state_goes_through_every_saver(name, saver, tmp_path):
  _check(_STATES[name], _KEYS["ordinary"], saver, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("key", _KEYS)
@pytest.mark.parametrize("saver", _SAVERS)
def test_a_federated_state_goes_through_every_saver(saver, key, tmp_path):
  plan = dataclasses.replace(test_plan_spent._PLANS["white"], unit="user")
  algorithm = federated.fed_avg(
    lambda params, example: jnp.sum((params["w"] - example.x) ** 2),
    optax.sgd(0.1),
    aggregator=federated.central(plan, _KEYS[key]),
    key=_KEYS[key],
  )
  state = algorithm.init({"w": jnp.zeros(3)})
  like = jax.tree.map(jnp.zeros_like, state)
  restored = _SAVERS[saver](state, like, tmp_path / "saved")
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
    assert not trees.is_key(a)
    np.testing.assert_array_equal(a, b)


@pytest.mark.cases(slow=["scaled coordinates", "correlated", "sparse vector"])
@pytest.mark.parametrize("name", sorted(_STATES))
def test_no_state_holds_a_typed_key(name):
  """Savers of arrays write arrays; a typed key is none."""
  state, _ = _STATES[name](_KEYS["ordinary"])
  assert not any(trees.is_key(leaf) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("kind", _KEYS)
def test_words_are_those_of_the_key(kind):
  key = _KEYS[kind]
  words = source.to_words(key)
  assert bool(source.from_words(words) == key)
  assert bool(source.from_words(key) == key)
  many = jax.random.split(key, 3)
  assert bool((source.from_words(source.to_words(many)) == many).all())


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_that_are_no_cipher_s_are_refused(impl):
  key = jax.random.key(0, impl=impl)
  plan = test_plan_spent._PLANS["white"]
  with pytest.raises(UserError, match="key="):
    plan.transform(key)


@pytest.mark.parametrize("words", [np.zeros(3, np.uint32), np.zeros(4), np.uint32(0)])
def test_words_of_no_key_are_refused(words):
  with pytest.raises(UserError, match="state.key"):
    source.from_words(words, "state.key")
