"""clip_and_noise: an Optax transformation like any other, whose noise is what it says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import dpjax
from dpjax import transforms
from dpjax.noise import NoiseShape
from dpjax.noise.correlated import BandedToeplitz
from tests.refuses import refuses

_PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
_MASK = jnp.array([True, True, False, True])


_NUMBERS = dict(
  l2_clip_norm=1.0, noise_multiplier=0.0, normalize_by=3.0, key=jax.random.key(0)
)


def _tx(**changes):
  return dpjax.clip_and_noise(**{**_NUMBERS, **changes})


def _grads(seed=0, size=4):
  rng = np.random.default_rng(seed)
  w = jnp.asarray(rng.normal(size=(size, 3, 2)), jnp.float32)
  return dpjax.wrap_grads(
    {"w": w, "b": jnp.asarray(rng.normal(size=(size, 2)), jnp.float32)}
  )


def _loss(params, example):
  return jnp.sum((example @ params["w"] + params["b"]) ** 2)


_BATCH = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)


@pytest.mark.slow
def test_no_noise_and_no_clipping_is_sgd():
  tx = optax.chain(_tx(l2_clip_norm=float("inf"), normalize_by=4), optax.sgd(0.1))
  _, grads = dpjax.per_example_grads(_loss)(_PARAMS, _BATCH)
  updates, _ = tx.update(grads, tx.init(_PARAMS), _PARAMS, mask=jnp.ones(4, bool))
  mean_loss = lambda p: jnp.mean(jax.vmap(_loss, (None, 0))(p, _BATCH))
  expected = jax.tree.map(lambda g: -0.1 * g, jax.grad(mean_loss)(_PARAMS))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), updates, expected)


_SHAPE = NoiseShape(correlation=BandedToeplitz((1.0, 0.5)))
_EVERY = {
  "white": lambda: _tx(noise_multiplier=1.3),
  "slices": lambda: transforms.accumulate(_tx(), every=1, l2_clip_norm=1.0),
  "clip schedule": lambda: transforms.with_clip_schedule(_tx(), [1.0]),
  "adaptive": lambda: transforms.adaptive_clip_and_noise(**_NUMBERS),
  "correlated": lambda: transforms.clip_and_correlated_noise(
    noise_shape=_SHAPE, num_steps=9, **_NUMBERS
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _EVERY)
def test_stacked_gradients_and_clipped_sum_are_one_route(name):
  tx = _EVERY[name]()
  state = tx.init(_PARAMS)
  _, grads = dpjax.per_example_grads(_loss)(_PARAMS, _BATCH)
  summed = dpjax.clipped_grad(_loss, l2_clip_norm=1.0)(_PARAMS, _BATCH, _MASK)
  stacked, state_a = tx.update(grads, state, _PARAMS, mask=_MASK)
  fast, state_b = tx.update(summed, state, _PARAMS)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
  jax.tree.map(close, stacked, fast)
  if name == "white":
    assert int(state_a.inner.draws) == int(state_b.inner.draws) == 1


@pytest.mark.parametrize("name", _EVERY)
def test_a_forgotten_mask_is_an_error(name):
  tx = _EVERY[name]()
  with refuses("mask"):
    tx.update(_grads(), tx.init(_PARAMS), _PARAMS)


def test_a_forgotten_mask_is_an_error_also_inside_a_chain():
  chain = optax.chain(_tx(), optax.sgd(0.1))
  with refuses("mask"):
    chain.update(_grads(), chain.init(_PARAMS), _PARAMS)


def test_gradients_without_a_batch_axis_are_refused():
  mean = dpjax.wrap_grads(jax.tree.map(lambda leaf: leaf.mean(0), _grads().arrays))
  with refuses("updates"):
    _tx().update(mean, _tx().init(_PARAMS), _PARAMS, mask=_MASK)
  square = {"w": jnp.ones((4, 4))}  # a mean whose first axis happens to be the batch size
  with refuses("updates"):
    _tx().update(dpjax.wrap_grads(square), _tx().init(square), square, mask=_MASK)


def test_a_sum_clipped_to_a_larger_bound_is_refused():
  summed = dpjax.clipped_grad(_loss, l2_clip_norm=2.0)(_PARAMS, _BATCH, _MASK)
  with refuses("l2_clip_norm"):
    _tx().update(summed, _tx().init(_PARAMS), _PARAMS)
  tighter = dpjax.clipped_grad(_loss, l2_clip_norm=0.5)(_PARAMS, _BATCH, _MASK)
  _tx().update(tighter, _tx().init(_PARAMS), _PARAMS)  # more noise than needed is sound


def _noise_sample(**changes):
  tx = _tx(**changes)
  params = jnp.zeros(30_000)
  grads = dpjax.wrap_grads(jnp.zeros((2, 30_000)))
  update, _ = tx.update(grads, tx.init(params), params, mask=jnp.ones(2, bool))
  return np.asarray(update)


def test_p5_sum_and_noise_are_divided_by_the_same_public_number():
  """The same key draws the same noise: 3 * 0.5 times a normal draw, then one division."""
  rows = np.array([[0.1, -0.2], [0.0, 0.3]], np.float32)

  def update(noise_multiplier, normalize_by, rows=rows):
    tx = _tx(l2_clip_norm=0.5, noise_multiplier=noise_multiplier, normalize_by=normalize_by)
    grads, mask = dpjax.wrap_grads(jnp.asarray(rows)), jnp.ones(2, bool)
    return np.asarray(tx.update(grads, tx.init(jnp.zeros(2)), mask=mask)[0], np.float64)

  noise = update(3.0, 1.0, 0 * rows)
  np.testing.assert_allclose(update(6.0, 1.0, 0 * rows), 2 * noise, rtol=1e-5)
  expected = (rows.sum(0) + noise) / 20.0
  np.testing.assert_allclose(update(3.0, 20.0), expected, rtol=1e-5)
  assert (np.abs(noise) > 0).all()


@pytest.mark.slow
def test_p5_the_noise_is_added_to_the_sum_and_divided_with_it():
  sample = _noise_sample(l2_clip_norm=0.5, noise_multiplier=3.0, normalize_by=20.0)
  std = 3.0 * 0.5 / 20.0
  assert stats.kstest(sample / std, "norm").pvalue > 1e-3
  assert stats.kstest(sample / (std * 0.93), "norm").pvalue < 1e-6


@pytest.mark.slow
def test_p10_noise_for_per_layer_bounds_covers_the_whole_gradient():
  tx = _tx(l2_clip_norm={"w": 3.0, "b": 4.0}, noise_multiplier=2.0, normalize_by=1.0)
  params = {"w": jnp.zeros(20_000), "b": jnp.zeros(20_000)}
  grads = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape)), params)
  update, _ = tx.update(
    dpjax.wrap_grads(grads), tx.init(params), params, mask=jnp.ones(1, bool)
  )
  for leaf in update.values():
    assert np.std(leaf) == pytest.approx(2.0 * 5.0, rel=0.02)  # not 2*3 and 2*4


def test_p6_the_divisor_is_public_not_the_realised_batch_size():
  grads, tx = _grads(), _tx(l2_clip_norm=100.0)
  state = tx.init(_PARAMS)
  both, _ = tx.update(grads, state, _PARAMS, mask=jnp.array([True, True, False, False]))
  one, _ = tx.update(grads, state, _PARAMS, mask=jnp.array([True, False, False, False]))
  other, _ = tx.update(grads, state, _PARAMS, mask=jnp.array([False, True, False, False]))
  jax.tree.map(
    lambda a, b, c: np.testing.assert_allclose(a, b + c, atol=1e-6), both, one, other
  )


def test_p8_an_empty_batch_still_gets_noise_and_is_counted():
  tx = _tx(noise_multiplier=1.0)
  update, state = tx.update(_grads(), tx.init(_PARAMS), _PARAMS, mask=jnp.zeros(4, bool))
  assert float(jnp.abs(update["w"]).max()) > 0 and int(state.inner.draws) == 1


@pytest.mark.cases(quick=["adaptive-sgd", "correlated-sgd"], slow=["white-adam"], long=...)
@pytest.mark.parametrize(
  ("name", "optimizer"),
  [
    *((name, "sgd") for name in ("white", "adaptive", "correlated")),
    *(("white", optimizer) for optimizer in ("adam", "adamw", "lamb")),
  ],
)
def test_it_chains_with_any_optimizer_under_jit_with_donated_state(name, optimizer):
  momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
  tx = optax.chain(_EVERY[name](), getattr(optax, optimizer)(1e-2, **momentum))
  traces = []

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, grads, mask):
    traces.append(None)
    updates, state = tx.update(grads, state, params, mask=mask)
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(jnp.copy, _PARAMS)
  state, seen = tx.init(params), []
  for i in range(4):
    params, state = step(params, state, _grads(i), _MASK)
    seen.append(np.asarray(params["w"]))
  assert len(traces) == 1
  assert all(np.isfinite(leaf).all() for leaf in seen)


def test_p35_donation_never_repeats_the_noise():
  tx = _tx(noise_multiplier=1.0)
  step = jax.jit(lambda g, s: tx.update(g, s, mask=jnp.ones(1, bool)), donate_argnums=1)
  state, draws = tx.init(None), []
  nothing = dpjax.wrap_grads({"w": jnp.zeros((1, 100))})
  for _ in range(3):
    update, state = step(nothing, state)
    draws.append(np.asarray(update["w"]))
  assert np.abs(np.corrcoef(draws)[np.triu_indices(3, 1)]).max() < 0.5
  fresh, _ = step(nothing, tx.init(None))
  np.testing.assert_array_equal(fresh["w"], draws[0])


def test_half_precision_parameters_get_float32_noise():
  params = {"w": jnp.ones(4, jnp.bfloat16)}
  tx = _tx(noise_multiplier=1.0)
  grads = dpjax.wrap_grads({"w": jnp.ones((1, 4), jnp.bfloat16)})
  update, _ = tx.update(grads, tx.init(params), params, mask=jnp.ones(1, bool))
  assert update["w"].dtype == jnp.float32
  assert optax.apply_updates(params, update)["w"].dtype == jnp.bfloat16


@pytest.mark.cases(quick=[0, 1, 2], long=...)
@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"l2_clip_norm": 0.0}, "l2_clip_norm"),
    ({"noise_multiplier": -1.0}, "noise_multiplier"),
    ({"noise_multiplier": float("nan")}, "noise_multiplier"),
    ({"normalize_by": 0}, "normalize_by"),
    ({"key": 0}, "key"),
    ({"key": jax.random.PRNGKey(0)}, "key"),
    ({"l2_clip_norm": float("inf"), "noise_multiplier": 1.0}, "l2_clip_norm"),
  ],
)
def test_p18_wrong_arguments_are_named_and_no_key_is_assumed(changes, field):
  with refuses(field):
    _tx(**changes)
  with pytest.raises(TypeError):
    dpjax.clip_and_noise(l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=1.0)  # no key
