"""Scaling before the clip: its formula, the noise it leaves, and the route it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import federated, gradients, noise, sampling, training, transforms
from dpjax.gradients import per_example
from dpjax.noise.correlated import BandedToeplitz
from dpjax.training.dp_sgd import noise_state
from dpjax.transforms import guard
from dpjax.transforms.scale_then_privatize import ScaledLoss, _scales, coordinate_scales
from dpjax.types import Batch, ClippedSum
from tests import plans
from tests.refuses import refuses

_NUMBERS = {"l2_clip_norm": 1.0, "normalize_by": 2.0}
_MASK = jnp.array([True, True])


def _tx(noise_multiplier=0.0, seed=0, **options):
  inner = transforms.clip_and_noise(
    **_NUMBERS, noise_multiplier=noise_multiplier, key=jax.random.key(seed)
  )
  return transforms.scale_then_privatize(inner, **options)


def _after_outputs(state, mean_squares):
  """The state as if earlier outputs had these mean squares: its checksum is right."""
  past = jnp.asarray(mean_squares)
  return guard.exchange(state, lambda inner: inner._replace(mean_squares=past))


def _grads(scale=1.0):
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(2, 3)) * np.array([5.0, 0.5, 0.01]) * scale
  return {"a": rows[:, :1], "b": rows[:, 1:]}


def _stacked(tree):
  return gradients.wrap_grads(jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), tree))


def test_one_step_by_hand():
  """One row of length 0.25 in its units is not clipped, so the output is half of it."""
  tx = _tx(b2=0.6, floor=0.2)
  before = np.array([4.0, 1.0, 0.0])
  begun = _after_outputs(tx.init(jnp.zeros(3)), before)
  row = np.array([0.2, -0.1, 0.02])
  rows = gradients.wrap_grads(jnp.asarray([row, row], jnp.float32))
  found, after = tx.update(rows, begun, mask=jnp.array([True, False]))
  np.testing.assert_allclose(found, row / 2, rtol=1e-5)
  np.testing.assert_allclose(
    after.inner.mean_squares, 0.6 * before + 0.4 * (row / 2) ** 2, rtol=1e-5
  )
  relative = np.array([np.sqrt(4 / (5 / 3)), np.sqrt(1 / (5 / 3)), 0.2])
  scales = relative / np.sqrt(np.mean(relative**2))
  np.testing.assert_allclose(coordinate_scales(begun), scales, rtol=1e-5)


@pytest.mark.slow
def test_steps_are_those_of_a_loop_in_float64():
  tx = _tx(b2=0.6, floor=0.2)
  state = tx.init({"a": jnp.zeros(1), "b": jnp.zeros(2)})
  nu = np.zeros(3)
  update = jax.jit(lambda rows, state: tx.update(rows, state, mask=_MASK))
  for step in range(4):
    tree = _grads(1 + step)
    found, state = update(_stacked(tree), state)
    rows = np.concatenate([tree["a"], tree["b"]], axis=1)
    relative = np.sqrt(nu / nu.mean()) if step else np.ones(3)
    scales = np.maximum(relative, 0.2)
    scales = scales / np.sqrt(np.mean(scales**2))
    scaled = rows / scales
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    wanted = (scaled * np.minimum(1, 1 / norms)).sum(axis=0) / 2 * scales
    nu = 0.6 * nu + 0.4 * wanted**2
    np.testing.assert_allclose(np.r_[found["a"], found["b"]], wanted, rtol=2e-5)
  assert scales.max() / scales.min() > 4


@pytest.mark.slow
def test_noise_is_that_of_the_inner_transform_times_the_scale():
  """No record: the output is noise, whose size by coordinate follows the state alone."""
  past = jnp.array([4.0, 1.0, 0.0])

  @jax.jit
  @jax.vmap
  def drawn(seed):
    inner = transforms.clip_and_noise(
      **_NUMBERS, noise_multiplier=2.0, key=jax.random.key(seed)
    )
    tx = transforms.scale_then_privatize(inner)
    begun = _after_outputs(tx.init(jnp.zeros(3)), past)
    rows = gradients.wrap_grads(jnp.zeros((2, 3)))
    return tx.update(rows, begun, mask=jnp.array([False, False]))[0]

  found = np.asarray(drawn(jnp.arange(4000))).std(axis=0)
  relative = np.array([np.sqrt(4 / (5 / 3)), np.sqrt(1 / (5 / 3)), 0.1])
  wanted = relative / np.sqrt(np.mean(relative**2)) * 2.0 / 2.0
  np.testing.assert_allclose(found, wanted, rtol=0.05)
  # The whole variance is that of noise without scaling.
  assert np.sum(found**2) == pytest.approx(3.0, rel=0.05)


@pytest.mark.cases(long=["1e-30"])
@pytest.mark.parametrize("far", [1e-30, 1e30, np.inf, np.nan])
def test_no_example_moves_a_step_beyond_the_clip_norm_in_its_units(far):
  """Scales from a hostile past, gradients of any size: what the inner transform sees is clipped."""
  tx = _tx()
  for past in ([1e-38, 1e30, 1.0], [0.0, 0.0, 0.0], [np.inf, 1.0, 1.0]):
    state = _after_outputs(tx.init(jnp.zeros(3)), jnp.array(past, jnp.float32))
    scales = _scales(state.inner.mean_squares, 0.1)
    assert (scales > 0).all() and np.isfinite(scales).all()
    rows = gradients.wrap_grads(jnp.array([[far, 1.0, -far], [0.1, 0.2, 0.3]], jnp.float32))
    sums = [
      tx.update(rows, state, mask=jnp.array([here, True]))[0] / scales
      for here in (False, True)
    ]
    assert np.linalg.norm(np.asarray(sums[1] - sums[0])) * 2 <= 1 + 1e-5


def test_what_is_refused():
  tx = _tx()
  state = tx.init(jnp.zeros(2))
  total = ClippedSum.__new__(ClippedSum)
  with refuses("updates"):
    tx.update(total, state, mask=_MASK)
  # Below float32's normal numbers a scale is 0, and a quotient by it infinite.
  for floor in (0.0, 1e-320, 1e-40, 1e-30, 1.5, float("nan")):
    with refuses("floor"):
      _tx(floor=floor)
  # 1 - 1e-9 is 1 in float32: an average that forgets nothing and learns nothing.
  for b2 in (0.0, 1e-320, 1 - 1e-9, 1.0):
    with refuses("b2"):
      _tx(b2=b2)


@pytest.mark.slow
def test_the_first_step_is_that_of_the_inner_transform():
  plain = transforms.clip_and_noise(**_NUMBERS, noise_multiplier=1.0, key=jax.random.key(3))
  start = {"a": jnp.zeros(1), "b": jnp.zeros(2)}
  one, two = (
    tx.update(_stacked(_grads()), tx.init(start), mask=_MASK)[0]
    for tx in (plain, _tx(1.0, seed=3))
  )
  assert np.abs(np.asarray(one["b"])).min() > 0
  np.testing.assert_array_equal(one["b"], two["b"])


# --- a plan with scaling, and training with it

_PLAN = plans.of(
  16, l2_clip_norm=0.5, num_steps=6, scaling=transforms.CoordinateScaling(b2=0.5, floor=0.2)
)


def _network():
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.normal(size=(9, 4)) * [3.0, 1.0, 0.1, 1.0], jnp.float32)
  leaves = {"in": rng.normal(size=(4, 5)), "bias": np.zeros(5), "out": rng.normal(size=5)}
  return {name: jnp.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}, x


def _loss(params, x):
  return jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"]


def _masks():
  rng = np.random.default_rng(2)
  return [jnp.asarray(rng.random(9) < 0.6) for _ in range(_PLAN.num_steps)]


@pytest.mark.cases(slow=["3-vmap"], long=...)
@pytest.mark.parametrize("method", per_example.METHODS)
@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_dp_sgd_scales_before_it_clips_by_every_route(method, microbatch_size):
  """Against stacked gradients, each divided by its scales, which the transform does itself."""
  params, x = _network()
  init, step = training.dp_sgd(
    _loss,
    _PLAN,
    optax.sgd(0.5),
    noise_key=jax.random.key(1),
    method=method,
    microbatch_size=microbatch_size,
  )
  tx = optax.chain(_PLAN.transform(jax.random.key(1)), optax.sgd(0.5))
  state = init(params)
  step = jax.jit(step)
  opt_state = tx.init(params)
  for mask in _masks():
    state, _ = step(state, dpjax.Batch(x, mask))
    _, rows = dpjax.per_example_grads(_loss)(params, x)
    updates, opt_state = tx.update(rows, opt_state, params, mask=mask)
    params = optax.apply_updates(params, updates)
  for name, leaf in params.items():
    np.testing.assert_allclose(state.params[name], leaf, rtol=1e-5, atol=1e-6)
  scales = coordinate_scales(state.opt_state[0])
  spread = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(scales)])
  # Scales that are all alike would show nothing.
  assert spread.max() / spread.min() > 2
  assert _PLAN.spent(state).steps == _PLAN.num_steps
  assert noise_state(state).draws == _PLAN.num_steps


@pytest.mark.cases(
  slow=["past0-inf", "past0-nan", "past1-10000.0"], long=["past0-10000.0", "past0-1e+30"]
)
@pytest.mark.parametrize("far", [1e4, 1e30, np.inf, np.nan])
@pytest.mark.parametrize("past", [[1e-30, 1e30], [0.0, 0.0], [np.inf, 1.0], [1.0, 1e-12]])
def test_no_example_moves_a_step_of_dp_sgd_beyond_the_clip_norm_in_its_units(far, past):
  """Any scales, any record: without noise the step moves by C in these units at most."""
  quiet = dataclasses.replace(_PLAN, noise_multiplier=0.0)
  init, step = training.dp_sgd(
    lambda w, x: jnp.sum(w * x), quiet, optax.sgd(1.0), noise_key=jax.random.key(0)
  )
  state = init(jnp.zeros(2))
  private = _after_outputs(state.opt_state[0], jnp.array(past, jnp.float32))
  state = state._replace(opt_state=(private, *state.opt_state[1:]))
  scales = coordinate_scales(private)
  x = jnp.array([[far, -far], [1.0, 0.5]], jnp.float32)
  sums = [
    step(state, dpjax.Batch(x, jnp.array([here, True])))[0].params / scales
    for here in (False, True)
  ]
  moved = np.linalg.norm(np.asarray(sums[1] - sums[0])) * quiet.normalize_by
  assert moved <= quiet.l2_bound * (1 + 1e-5)


def test_scaling_costs_nothing_and_is_stated():
  plain = dataclasses.replace(_PLAN, scaling=None)
  assert _PLAN.epsilon() == plain.epsilon()
  assert "Scaled coordinates" in _PLAN.statement()
  assert "Scaled coordinates" not in plain.statement()
  # A state of one is not one of the other, nor of other scales.
  other = dataclasses.replace(_PLAN, scaling=transforms.CoordinateScaling())
  state = _PLAN.transform(jax.random.key(0)).init(jnp.zeros(2))
  for wrong in (plain, other):
    with refuses("state.draws"):
      wrong.spent(state)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"slices": 2}, "slices"),
    ({"l2_clip_norm": gradients.Clip(1.0, "automatic")}, "clipping"),
    ({"l2_clip_norm": gradients.Clip(1.0, transforms.AdaptiveClipping())}, "clipping"),
    ({"l2_clip_norm": gradients.Clip(1.0, schedule=(1.0,) * 6)}, "clip_schedule"),
    ({"l2_clip_norm": {"a": 1.0, "b": 2.0}}, "l2_clip_norm"),
    ({"noise_shape": noise.NoiseShape(shares={"a": 1.0})}, "noise_shares"),
    (
      {
        "noise_shape": noise.NoiseShape(correlation=BandedToeplitz((1.0, 0.5))),
        "sampler": sampling.CyclicSampler(2, 8),
      },
      "correlation",
    ),
    ({"sampler": sampling.CyclicSampler(2, 8)}, "sampler"),
    ({"scaling": 0.1}, "scaling"),
    ({"scaling": True}, "scaling"),
  ],
)
def test_what_is_not_proved_beside_scaling_is_refused(changes, field):
  with refuses(field) as caught:
    dataclasses.replace(_PLAN, **changes)
  assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_gradients_in_other_units_than_those_of_the_scales_are_refused():
  params, _ = _network()
  with refuses("loss_fn"):
    _PLAN.clipped_grad(_loss)
  with refuses("scaling"):
    _ = _PLAN.mean_noise_std
  with refuses("scaling"):
    federated.central(_PLAN, jax.random.key(0))
  aggregator = federated.dp_mean(_PLAN.transform(jax.random.key(0)), l2_clip_norm=0.5)
  with refuses("l2_clip_norm", value=0.5):
    aggregator.init(params)


def test_the_loss_at_the_start_is_the_loss_also_in_half_precision():
  """w + 0 / s is w exactly, and the quotient of a small scale does not overflow float16."""
  params = jnp.array([0.1, 3.0], jnp.float16)
  scales = jnp.array([1e-3, 1.0])
  loss = lambda w, x: jnp.sum(w.astype(jnp.float32) * x)
  scaled = ScaledLoss(loss, params, scales)
  x = jnp.array([5e2, 1.0])
  assert scaled(scaled.start, x) == loss(params, x)
  found = jax.grad(scaled)(scaled.start, x)
  np.testing.assert_allclose(found, x / scales, rtol=2e-3)


def test_a_state_of_a_plan_without_scaling_is_one_line():
  plain = plans.of(40, num_steps=3, delta=1e-3)
  scaled = dataclasses.replace(plain, scaling=transforms.CoordinateScaling())
  make = lambda plan: training.dp_sgd(
    lambda w, x: jnp.sum(w * x), plan, optax.sgd(0.1), noise_key=jax.random.key(0)
  )
  state = make(plain).init(jnp.ones(3))
  rows = jnp.ones((40, 3))
  with refuses("state"):
    make(scaled).step(state, Batch(rows, jnp.ones(40, bool)))


# --- beside what else a plan may have


def _of_adapters():
  params, x = _network()
  adapted = training.lora(params, "in", rank=2, alpha=3.0, key=jax.random.key(0))
  rng = np.random.default_rng(4)
  # As after some steps: adapters that are 0 have gradients of 0.
  some = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)
  loss = adapted.apply(lambda params, row: 1e3 * _loss(params, row))
  return loss, jax.tree.map(some, adapted.trainable), x


def _of_last_layer():
  params, x = _network()
  loss = lambda params, row: 1e3 * _loss(params, row)
  return training.of_part(loss, optax.sgd(1.0), "out".__eq__)[0], params, x


def _of_whitened_inputs():
  """Statistics are a release of their own: given it, they are a fixed map of one example."""
  params, x = _network()
  rng = np.random.default_rng(5)
  whiten = jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)
  return lambda params, row: 1e3 * _loss(params, (row - 0.3) @ whiten), params, x


def _of_users():
  """One row is the block of a user."""
  params, x = _network()
  blocks = jnp.stack([x, x[::-1], 2 * x], axis=1)
  loss = lambda params, block: (
    1e3 * jnp.sum(jax.vmap(lambda row: _loss(params, row))(block))
  )
  return loss, params, blocks


_BESIDE = {
  "lora": (_of_adapters, 1),
  "head_first": (_of_last_layer, 1),
  "whitening": (_of_whitened_inputs, 1),
  "users": (_of_users, 1),
  # A user owns two of the rows, each clipped by itself.
  "bounded contribution": (_of_users, 2),
}


@pytest.mark.cases(quick=[13], slow=[4, 5], long=...)
@pytest.mark.parametrize("method", per_example.METHODS)
@pytest.mark.parametrize("name", sorted(_BESIDE))
def test_a_record_moves_the_scaled_sum_by_its_bound_beside_other_features(name, method):
  make, rows_of_record = _BESIDE[name]
  loss, params, x = make()
  rng = np.random.default_rng(6)
  past = jax.tree.map(
    lambda leaf: jnp.asarray(np.exp(rng.normal(size=leaf.shape) * 3), jnp.float32), params
  )
  scales = _scales(past, 0.01)
  spread = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(scales)])
  assert spread.max() / spread.min() > 30
  scaled = ScaledLoss(loss, params, scales)
  grad_fn = jax.jit(_PLAN.clipped_grad(scaled, method=method))
  here = np.ones(len(x), bool)
  gone = here.copy()
  gone[:rows_of_record] = False
  sums = [grad_fn(scaled.start, x, jnp.asarray(mask)).total for mask in (here, gone)]
  difference = jax.tree.map(jnp.subtract, *sums)
  moved = float(optax.global_norm(difference))
  assert moved <= rows_of_record * _PLAN.l2_bound * (1 + 1e-4)
  # The record does count: a sum of zeros would show nothing.
  assert moved > 0.3 * _PLAN.l2_bound
  # Clipped in the units of the parameters and scaled after that, it would move by more.
  plain = dataclasses.replace(_PLAN, scaling=None).clipped_grad(loss, method=method)
  plain = jax.jit(plain)
  sums = [plain(params, x, jnp.asarray(mask)).total for mask in (here, gone)]
  late = jax.tree.map(lambda one, two, s: (one - two) / s, *sums, scales)
  assert float(optax.global_norm(late)) > rows_of_record * _PLAN.l2_bound


@pytest.mark.cases(slow=["sampler1"])
@pytest.mark.parametrize(
  "sampler",
  [
    sampling.PoissonSampler(sampling_prob=0.5, capacity=16),
    sampling.BoundedContributionSampler(sampling_prob=0.5, capacity=16, max_contribution=2),
  ],
)
def test_scaling_costs_users_nothing_either(sampler):
  scaled = dataclasses.replace(_PLAN, sampler=sampler, neighboring_relation="", unit="user")
  plain = dataclasses.replace(scaled, scaling=None)
  assert scaled.unit == "user" and scaled.epsilon() == plain.epsilon()
  assert "Scaled coordinates" in scaled.statement()
