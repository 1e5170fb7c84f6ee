"""One logical batch in slices: one sum, one noise, one optimizer step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import transforms
from dpjax.noise import NoiseShape
from tests.refuses import refuses

_PARAMS = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}


def _private(**changes):
  options = dict(
    l2_clip_norm=0.7, noise_multiplier=1.2, normalize_by=6.0, key=jax.random.key(1)
  )
  return dpjax.clip_and_noise(**{**options, **changes})


def _grads(seed, size=6):
  rng = np.random.default_rng(seed)
  draw = lambda p: jnp.asarray(rng.normal(size=(size, *p.shape)), jnp.float32)
  return dpjax.wrap_grads(jax.tree.map(draw, _PARAMS))


def _rows(tree, start, stop):
  return jax.tree.map(lambda leaf: leaf[start:stop], tree)


def _plan(slices, **changes):
  numbers = dict(noise_multiplier=0.0, l2_clip_norm=1.0, normalize_by=1, num_steps=6)
  numbers |= dict(sampler=dpjax.PoissonSampler(sampling_prob=0.5, capacity=12), delta=1e-5)
  return dpjax.Plan(slices=slices, **(numbers | changes))


def _loss(params, x):
  return jnp.sum((x @ params["w"] + params["b"]) ** 2)


@pytest.mark.cases(long=[1], slow=...)
@pytest.mark.parametrize("optimizer", [optax.sgd(0.5, momentum=0.9), optax.adam(0.1)])
def test_p15_slices_give_the_update_of_the_whole_batch_with_one_draw_of_noise(optimizer):
  chain = optax.chain(_private(), optimizer)
  tx = transforms.accumulate(chain, every=3, l2_clip_norm=0.7)
  update = jax.jit(lambda g, s, m: tx.update(g, s, _PARAMS, mask=m))
  whole, state = chain.init(_PARAMS), tx.init(_PARAMS)
  mask = jnp.array([True, True, False, True, False, False])  # the last slice is empty
  for step in range(3):
    grads = _grads(step)
    expected, whole = chain.update(grads, whole, _PARAMS, mask=mask)
    for part in range(3):
      assert int(state.inner.slices) == part
      cut = slice(2 * part, 2 * part + 2)
      got, state = update(_rows(grads, cut.start, cut.stop), state, mask[cut])
      if part < 2:
        assert all(not leaf.any() for leaf in jax.tree.leaves(got))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, expected)
    assert int(state.inner.inner[0].inner.draws) == int(whole[0].inner.draws) == step + 1
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.inner.inner[1], whole[1]
  )
  assert not any(leaf.any() for leaf in jax.tree.leaves(state.inner.total))


@pytest.mark.slow
def test_wrong_uses_are_refused():
  tx = transforms.accumulate(_private(), every=2, l2_clip_norm=0.7, padded_batch_size=2)
  state = tx.init(_PARAMS)
  with refuses("updates"):
    tx.update(_grads(0), state, _PARAMS, mask=jnp.ones(6, bool))  # a batch of its own
  loss = lambda p, x: jnp.sum(p["w"]) * x
  wide = dpjax.clipped_grad(loss, l2_clip_norm=2.0)(_PARAMS, jnp.ones(2), True)
  with refuses("l2_clip_norm"):
    tx.update(wide, state, _PARAMS)
  with refuses("every", value=0):
    transforms.accumulate(_private(), every=0, l2_clip_norm=0.7)
  bounds = {"w": 0.6, "b": 0.8}
  shares = _private(
    l2_clip_norm=bounds, noise_shape=NoiseShape(shares={"w": 1.0, "b": 1.0})
  )
  grouped = transforms.accumulate(shares, every=2, l2_clip_norm=bounds)
  flat = dpjax.clipped_grad(loss, l2_clip_norm=1.0)(_PARAMS, jnp.ones(2), True)
  with refuses("noise_shares"):
    grouped.update(flat, grouped.init(_PARAMS), _PARAMS)


@pytest.mark.slow
def test_p15_a_plan_of_slices_refuses_one_slice_as_a_step():
  """One added row moves others across the cut: 2 slices of noise 1 measured epsilon 6.14
  where one step is 4.39."""
  sampler = dpjax.PoissonSampler(sampling_prob=1.0, capacity=6)
  plan = _plan(2, sampler=sampler, noise_multiplier=1.0, l2_clip_norm=0.7, num_steps=1)
  private = plan.transform(jax.random.key(0))
  state, mask = private.init(_PARAMS), jnp.ones(3, bool)
  with refuses("slices", value=2):
    private.update(_grads(0, 3), state, _PARAMS, mask=mask)
  summed = plan.clipped_grad(_loss)(_PARAMS, jnp.ones((3, 2)), mask)
  with refuses("slices", value=2):
    jax.jit(lambda s: private.update(summed, s, _PARAMS))(state)
  tx = plan.accumulated(optax.chain(private, optax.sgd(1.0)))
  state = tx.init(_PARAMS)
  for _ in range(2):
    update, state = tx.update(_grads(0, 3), state, _PARAMS, mask=mask)
  assert all(leaf.any() for leaf in jax.tree.leaves(update))


@pytest.mark.cases(slow=["<lambda>-4_0", "<lambda>-4_1"])
@pytest.mark.parametrize(
  ("made", "planned"),
  [
    (lambda tx: transforms.accumulate(tx, every=2, l2_clip_norm=1.0), 4),
    (lambda tx: transforms.accumulate(tx, every=1, l2_clip_norm=1.0), 4),
    (lambda tx: transforms.accumulate(tx, every=4, l2_clip_norm=1.0), 1),
    (lambda tx: _plan(2).accumulated(tx, rows=3), 4),
    (
      lambda tx: transforms.accumulate(
        transforms.accumulate(tx, every=4, l2_clip_norm=1.0), every=1, l2_clip_norm=1.0
      ),
      2,
    ),
  ],
)
def test_p15_noise_falls_on_the_slices_of_the_plan_and_on_no_others(made, planned):
  """Less than a step gets its noise too often, more than one holds an example twice."""
  tx = made(optax.chain(_plan(planned).transform(jax.random.key(0)), optax.sgd(1.0)))
  with refuses("slices"):
    tx.update(_grads(0, 3), tx.init(_PARAMS), _PARAMS, mask=jnp.ones(3, bool))


@pytest.mark.cases(slow=[32, "<lambda>-1-before4"], long=[0, 19, 20, 21, 26, 27])
@pytest.mark.parametrize(
  "before",
  [
    optax.scale(100.0),
    optax.scale_by_schedule(lambda step: 100.0),
    optax.clip(0.1),
    optax.clip_by_global_norm(1.0),
    optax.scale_by_sign(),
    optax.trace(0.9),
    optax.scale_by_adam(),
    optax.normalize_by_update_norm(),
    optax.adaptive_grad_clip(0.1),
  ],
)
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("wrapped", [jax.jit, lambda fn: fn])
def test_nothing_stands_before_the_private_transform(before, slices, wrapped):
  """On a sum that has been clipped: a factor of 100 would be 100 times its sensitivity."""
  plan, mask = _plan(slices), jnp.ones(3, bool)
  chain = optax.chain(before, plan.transform(jax.random.key(0)))
  tx, updates = plan.accumulated(chain, rows=3), _grads(0, 3)
  if slices == 1:
    updates = jax.jit(plan.clipped_grad(_loss))(_PARAMS, jnp.ones((3, 2)), mask)
  state = tx.init(_PARAMS)
  with pytest.raises((TypeError, ValueError, NotImplementedError)):
    wrapped(lambda u, s: tx.update(u, s, _PARAMS, mask=mask))(updates, state)


@pytest.mark.long
def test_a_sum_goes_through_programs_branches_and_chains_as_it_is():
  plan, mask = _plan(1), jnp.ones(3, bool)
  summed = plan.clipped_grad(_loss)(_PARAMS, jnp.ones((3, 2)), mask)
  same = jax.jit(lambda s: jax.lax.cond(True, lambda a: a, lambda a: a, s))(summed)
  tx = optax.chain(optax.identity(), plan.transform(jax.random.key(0)), optax.sgd(1.0))
  found = [tx.update(s, tx.init(_PARAMS), _PARAMS)[0] for s in (summed, same)]
  assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), *found))
  many = jax.vmap(
    lambda scale: plan.clipped_grad(_loss)(_PARAMS, scale * jnp.ones((3, 2)), mask)
  )
  assert many(jnp.arange(4.0)).seal.shape == (4,)


@pytest.mark.slow
def test_p20_a_sum_in_half_precision_is_refused():
  """Its rounding may move it by more than one example: 129.499 and 129.501 are 1 apart."""
  plan, mask = _plan(1), jnp.ones(3, bool)
  summed = plan.clipped_grad(_loss)(_PARAMS, jnp.ones((3, 2)), mask)
  half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), summed.total)
  private = plan.transform(jax.random.key(0))
  with refuses("updates"):
    private.update(dataclasses.replace(summed, total=half), private.init(_PARAMS), _PARAMS)
