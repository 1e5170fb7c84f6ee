"""Steps are counted where they run: what they cost, and none beyond those that were planned."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import dpjax
from dpjax import sampling, training, transforms
from dpjax.accounting import upper
from dpjax.mechanisms import ChannelStatistics
from dpjax.noise import NoiseShape
from dpjax.noise.correlated import BandedToeplitz
from tests import plans
from tests.refuses import refuses

_PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
_KEY = jax.random.key(1)
_STEPS = 3
_ZERO = "replace_special"


def _loss(params, x):
  return jnp.sum(jnp.tanh(x @ params["w"]) * params["b"])


_BATCH = dpjax.Batch(jax.random.normal(jax.random.key(0), (8, 3)), jnp.arange(8) < 7)


_plan = functools.partial(plans.of, prob=0.1, noise_multiplier=2.0, num_steps=_STEPS)


_PLANS = {
  "white": _plan(),
  "no noise": _plan(noise_multiplier=0.0),
  "adaptive": _plan(l2_clip_norm=dpjax.Clip(1.0, transforms.AdaptiveClipping())),
  "clip schedule": _plan(l2_clip_norm=dpjax.Clip(1.0, schedule=(1.0, 0.5, 0.5))),
  "scaled coordinates": _plan(scaling=transforms.CoordinateScaling()),
  "shares": _plan(
    l2_clip_norm={"w": 1.0, "b": 1.0}, noise_shape=NoiseShape(shares={"w": 1.0, "b": 2.0})
  ),
  "noise schedule": _plan(noise_shape=NoiseShape(schedule=(1.0, 1.0, 2.0))),
  "correlated": _plan(
    sampler=sampling.CyclicSampler(steps_per_pass=3, num_examples=24),
    noise_shape=NoiseShape(correlation=BandedToeplitz((1.0, 0.5))),
  ),
  "slices": _plan(slices=2),
  "release": _plan(),
}


def summed_of(plan):
  """Clipped gradients of the batch; stacked ones for a plan whose transform scales them first."""
  if plan.scaling is None:
    return jax.jit(plan.clipped_grad(_loss))(_PARAMS, _BATCH)
  grads = dpjax.per_example_grads(_loss)(_PARAMS, _BATCH.examples)[1]
  return dpjax.wrap_grads(grads.arrays, mask=_BATCH.mask)


def _started(name):
  """(plan, its chain, one step of it, that takes all its slices)."""
  plan = _PLANS[name]
  key = dpjax.new_key(release=True) if name == "release" else _KEY
  chain = optax.chain(plan.transform(key), optax.sgd(0.1))
  tx = plan.accumulated(chain, rows=8)
  summed = summed_of(plan)

  def step(state):
    for _ in range(plan.slices):
      updates, state = tx.update(summed, state, _PARAMS)
    return updates, state

  return plan, tx, step


@pytest.mark.cases(slow=[3, 6], long=...)
@pytest.mark.parametrize("name", sorted(_PLANS))
def test_what_ran_is_charged_and_a_step_beyond_the_plan_is_refused(name):
  plan, tx, step = _started(name)
  state = tx.init(_PARAMS)
  for done in range(_STEPS + 1):
    spent = plan.spent(state)
    assert (spent.steps, spent.delta) == (done, plan.delta)
    assert spent.epsilon == plan.epsilon(steps=done)
    assert spent.statement == plan.statement(steps=done)
    if done < _STEPS:
      updates, state = step(state)
      assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
  if name != "slices":  # `accumulate` traces its transform, which then gives NaN
    with refuses("step"):
      step(state)
  if name == "no noise":
    return
  updates, beyond = jax.jit(step)(state)
  assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(updates))
  with refuses("opt_state"):
    plan.spent(beyond)


@pytest.mark.slow
def test_dp_sgd_stops_where_the_plan_does():
  """Until 2026-11-25 25 updates on a plan of 20 were taken, and epsilon stayed at 3."""
  plan = _PLANS["white"]
  init, step = training.dp_sgd(_loss_of, plan, optax.sgd(0.1), noise_key=_KEY)
  state, jitted = init(_PARAMS), jax.jit(step)
  batch = dpjax.Batch(dpjax.Example(_BATCH.examples, jnp.zeros(8)), _BATCH.mask)
  for done in range(_STEPS):
    assert plan.spent(state).steps == done
    state, _ = jitted(state, batch)
  assert plan.spent(state).epsilon == plan.epsilon()
  with refuses("step", value=3):
    step(state, batch)
  after, _ = jitted(state, batch)
  assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(after.params))


def _loss_of(params, example):
  return _loss(params, example.x)


@pytest.mark.slow
def test_clip_and_noise_by_itself_has_no_limit_but_one_that_is_given():
  numbers = {"l2_clip_norm": 1.0, "noise_multiplier": 1.0, "normalize_by": 4, "key": _KEY}
  grads = dpjax.wrap_grads(jax.tree.map(lambda p: p[None], _PARAMS), mask=True)
  free = dpjax.clip_and_noise(**numbers)
  state = free.init(_PARAMS)
  for _ in range(5):
    _, state = free.update(grads, state, _PARAMS)
  assert int(state.inner.draws) == 5
  bound = dpjax.clip_and_noise(**numbers, num_steps=5)
  with refuses("step", value=5):
    bound.update(grads, state, _PARAMS)
  with refuses("num_steps", value=0):
    dpjax.clip_and_noise(**numbers, num_steps=0)


_WRAPPED = {
  "chain": lambda p: optax.chain(p, optax.adamw(0.1)),
  "named_chain": lambda p: optax.named_chain(("private", p), ("sgd", optax.sgd(0.1))),
  "inject_hyperparams": lambda p: optax.inject_hyperparams(
    lambda rate: optax.chain(p, optax.sgd(rate))
  )(rate=0.1),
  "schedule_free": lambda p: optax.contrib.schedule_free(
    optax.chain(p, optax.sgd(0.1)), 0.1
  ),
  "MultiSteps after": lambda p: optax.chain(
    p, optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
  ),
}


@pytest.mark.cases(quick=[1, 4], long=...)
@pytest.mark.parametrize("name", sorted(_WRAPPED))
def test_the_count_is_found_in_any_state_of_optax(name):
  plan = _PLANS["white"]
  tx = _WRAPPED[name](plan.transform(_KEY))
  summed = summed_of(plan)
  state, update = tx.init(_PARAMS), jax.jit(tx.update)
  for done in range(2):
    assert plan.spent({"state": [state, None]}).steps == done
    _, state = update(summed, state, _PARAMS)


@pytest.mark.slow
def test_a_state_that_was_saved_goes_on_counting(tmp_path):
  checkpoint = pytest.importorskip("orbax.checkpoint")
  plan, tx, step = _started("white")
  _, state = step(tx.init(_PARAMS))
  with checkpoint.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / "state", tx.init(_PARAMS))
  assert plan.spent(restored).steps == 1
  for _ in range(_STEPS - 1):
    _, restored = step(restored)
  with refuses("step", value=3):
    step(restored)


def test_what_cannot_be_counted_is_one_line():
  plan, tx, _ = _started("white")
  state = tx.init(_PARAMS)
  for wrong, match in (
    (optax.adam(0.1).init(_PARAMS), "opt_state"),
    (None, "opt_state"),
    ((state, state), "opt_state"),
    (jax.tree.map(lambda x: jnp.stack([x, x]), state), "opt_state"),
    (
      jax.tree.map(lambda x: x - 1 if x.dtype == jnp.int32 else x, state),
      "opt_state",
    ),
  ):
    with refuses(match):
      plan.spent(wrong)
  with refuses("opt_state"):
    jax.jit(lambda s: plan.spent(s).epsilon)(state)


def test_another_delta_is_charged_as_the_plan_does():
  plan, tx, step = _started("white")
  _, state = step(tx.init(_PARAMS))
  spent = plan.spent(state, delta=1e-4, num_examples=80)
  assert (spent.epsilon, spent.delta) == (plan.epsilon(1e-4, 1), 1e-4)
  assert "80 examples" in spent.statement and "delta 0.0001" in spent.statement


def test_a_smaller_delta_is_said_with_the_aborts_of_the_capacity_that_ran():
  """`spent` said the words of a plan made for this delta, whose capacity would be larger: at noise
  1, twenty steps and a fifth of delta an epsilon of 4.0884 in place of 4.2647."""
  sampler = sampling.PoissonSampler(sampling_prob=0.1, capacity=999)
  plan = _plan(sampler=sampler, noise_multiplier=1.0, num_steps=1).fitted(1000)
  epsilon = plan.epsilon(2e-6)
  assert epsilon > 1.01 * dataclasses.replace(plan, delta=2e-6).epsilon()
  assert f"Epsilon {upper(epsilon, decimals=4)} (pld)" in plan.statement(delta=2e-6)


_OTHERS = {
  # Epochs of two steps, then of four: half as many would be counted.
  "epochs": [
    {"sampler": sampling.ShuffledSampler(batch_size=size, num_examples=4)}
    for size in (2, 1)
  ],
  # The first step of both costs the same.
  "correlation": [
    {
      "sampler": sampling.CyclicSampler(steps_per_pass=2, num_examples=4),
      "noise_shape": NoiseShape(correlation=BandedToeplitz((1.0, second))),
    }
    for second in (0.9, 0.1)
  ],
  "statistics": [
    {"statistics": ChannelStatistics(9.0, clip_norms=(1, 1), neighboring_relation=_ZERO)},
    {"statistics": None},
  ],
}


@pytest.mark.parametrize("name", _OTHERS)
def test_a_state_is_not_counted_by_a_plan_whose_steps_cost_less(name):
  """It was, at 2.9 in place of 4.4: of such plans the first steps, or their sums, are alike."""
  ran, other = (_plan(neighboring_relation=_ZERO, **each) for each in _OTHERS[name])
  assert other.epsilon() < ran.epsilon()
  state = ran.transform(_KEY).init(_PARAMS)
  assert ran.spent(state).steps == 0
  with refuses("state.draws"):
    other.spent(state)


def test_a_state_of_examples_is_not_counted_as_one_of_users():
  """Both plans have one event: a run that hid single examples was said to hide users."""
  state = _plan().transform(_KEY).init(_PARAMS)
  with refuses("state.draws"):
    _plan(unit="user").spent(state)


@pytest.mark.slow
def test_several_models_under_vmap_need_as_many_keys():
  """Under one key they would have one noise, and the difference of their sums no noise."""
  plan, tx, _ = _started("white")
  several = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), _PARAMS)
  for mapped in (jax.vmap(tx.init), jax.jit(jax.vmap(tx.init)), jax.vmap(jax.jit(tx.init))):
    with refuses("key"):
      mapped(several)
  begin = lambda key, params: plan.transform(key).init(params)
  keys = jax.random.split(jax.random.key(0), 2)
  states = jax.vmap(begin)(keys, several)
  assert not np.array_equal(*states.inner.key)
