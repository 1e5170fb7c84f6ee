"""Alignment and uniformity: closed forms, a loop in float64, and the steps that follow them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from dpjax import training
from dpjax.training.augment import AUGMENTATIONS
from dpjax.types import Batch, Example
from dpjax.zoo import recipes
from dpjax.zoo.recipes.contrastive import (
  alignment,
  alignment_and_uniformity,
  contrastive_loss,
  on_sphere,
  two_views,
  uniformity,
)
from tests.refuses import refuses


def test_a_step_without_its_mask_is_one_line():
  init, step = recipes.contrastive(
    _linear, _noisy, optax.sgd(0.1), view_key=jax.random.key(0)
  )
  with refuses("batch"):
    step(init(jnp.eye(2)), Example(jnp.ones((2, 1, 1, 2)), None))


def _points(seed, count=9, dimension=4):
  z = np.random.default_rng(seed).normal(size=(count, dimension))
  return z / np.linalg.norm(z, axis=1, keepdims=True)


def _loop(u, v, mask):
  """The published loss, pair by pair."""
  there = [i for i, present in enumerate(mask) if present]
  align = np.mean([np.sum((u[i] - v[i]) ** 2) for i in there])
  spread = [
    np.log(
      np.mean(
        [np.exp(-2 * np.sum((w[i] - w[j]) ** 2)) for i in there for j in there if i < j]
      )
    )
    for w in (u, v)
  ]
  return align + np.mean(spread)


@pytest.mark.cases(slow=[1], long=...)
@pytest.mark.parametrize("absent", [(), (0, 4, 8)])
def test_the_loss_is_that_of_a_loop_over_pairs(absent, x64):
  u, v, mask = _points(0), _points(1), np.ones(9, bool)
  mask[list(absent)] = False
  found = alignment_and_uniformity(jnp.array(u), jnp.array(v), jnp.array(mask))
  assert found.dtype == jnp.float64
  np.testing.assert_allclose(found, _loop(u, v, mask), rtol=1e-12)


def test_equal_views_are_aligned_and_opposite_ones_are_not():
  u, mask = jnp.array(_points(0), jnp.float32), jnp.ones(9, bool)
  assert float(alignment(u, u, mask)) == 0
  assert float(alignment(u, -u, mask)) == pytest.approx(4)


@pytest.mark.slow
def test_three_points_by_hand():
  """Squared distances 2, 2, 4 of the pairs; rows of padding are in no pair."""
  u = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [9.0, 9.0]])
  v, mask = jnp.array([[0.0, 1.0], [0.0, 1.0], [-1.0, 0.0], [0.0, 0.0]]), jnp.arange(4) < 3
  spread_u = np.log((2 * np.exp(-4) + np.exp(-8)) / 3)
  assert float(uniformity(u, mask)) == pytest.approx(spread_u, rel=1e-5)
  # Of v the first two coincide.
  spread_v = np.log((1 + 2 * np.exp(-4)) / 3)
  assert float(alignment(u, v, mask)) == pytest.approx(2 / 3, rel=1e-5)
  both = float(alignment_and_uniformity(u, v, mask))
  assert both == pytest.approx(2 / 3 + (spread_u + spread_v) / 2, rel=1e-5)


@pytest.mark.slow
def test_points_all_around_a_circle_are_as_uniform_as_its_uniform_law(x64):
  """E exp(-2 |u - v|^2) = exp(-4) I_0(4), of which the n pairs i = i are left out."""
  n = 64
  turns = 2 * np.pi * np.arange(n) / n
  u = jnp.stack([jnp.cos(turns), jnp.sin(turns)], axis=1)
  expected = np.log((n * special.i0e(4.0) - 1) / (n - 1))
  found = uniformity(u, jnp.ones(n, bool))
  np.testing.assert_allclose(found, expected, rtol=1e-12)
  assert float(uniformity(jnp.ones((n, 2)) / np.sqrt(2), jnp.ones(n, bool))) == 0


@pytest.mark.slow
def test_a_uniform_law_is_the_most_uniform():
  rng, mask = np.random.default_rng(0), jnp.ones(500, bool)
  z = rng.normal(size=(500, 8))
  spread, crowded = (on_sphere(jnp.array(z + shift)) for shift in (0.0, 1.0))
  assert uniformity(spread, mask) < uniformity(crowded, mask) - 0.5


@pytest.mark.cases(slow=["1"], long=...)
@pytest.mark.parametrize("present", [0, 1])
def test_of_fewer_than_two_examples_value_and_gradient_are_finite(present):
  mask = jnp.arange(3) < present
  loss = lambda z: alignment_and_uniformity(*[on_sphere(z)] * 2, mask)
  for z in (jnp.zeros((3, 2)), jnp.ones((3, 2))):
    value, grad = jax.value_and_grad(loss)(z)
    assert float(value) == 0 and not np.any(grad)


@pytest.mark.long
def test_padding_moves_neither_the_loss_nor_its_gradient():
  u, padded = jnp.array(_points(0), jnp.float32), jnp.ones((3, 4)) / 2
  both, mask = jnp.concatenate([u, padded]), jnp.arange(12) < 9
  value, grad = jax.value_and_grad(uniformity)(both, mask)
  np.testing.assert_allclose(value, uniformity(u, jnp.ones(9, bool)), rtol=1e-6)
  assert not np.any(grad[9:]) and np.any(grad[:9])


@pytest.mark.slow
def test_two_views_are_drawn_apart_and_from_their_own_key():
  x, keys = jnp.zeros((3, 2, 2, 1)), jax.random.split(jax.random.key(0), 3)
  draw = lambda key, x: x + jax.random.normal(key)
  first, second = two_views(draw, keys, x)
  values = {float(value) for view in (first, second) for value in view[:, 0, 0, 0]}
  assert len(values) == 6
  again = two_views(draw, keys[1:2], x[1:2])
  np.testing.assert_array_equal(again[0][0], first[1])


# --- its steps


def _linear(params, x):
  return x.reshape(len(x), -1) @ params["w"]


_X = jnp.asarray(np.random.default_rng(2).normal(size=(6, 2, 2, 1)), jnp.float32)
_PARAMS = {"w": jnp.asarray(np.random.default_rng(3).normal(size=(4, 3)), jnp.float32)}


def _noisy(key, x):
  return x + 0.3 * jax.random.normal(key, x.shape)


def _made(**options):
  key = jax.random.key(7)
  return recipes.contrastive(_linear, _noisy, optax.sgd(0.1), view_key=key, **options)


def _batch(present=6):
  return Batch(Example(_X, None), jnp.arange(6) < present)


@pytest.mark.long
def test_a_step_is_that_of_gradient_descent_on_the_loss():
  init, step = _made()
  state, info = step(init(_PARAMS), _batch())
  keys = jax.random.split(jax.random.fold_in(jax.random.key(7), 0), 6)
  loss = lambda p: contrastive_loss(_linear, _noisy, p, _batch(), keys)
  value, grad = jax.value_and_grad(loss)(_PARAMS)
  np.testing.assert_allclose(state.params["w"], _PARAMS["w"] - 0.1 * grad["w"], rtol=1e-6)
  assert float(info.train_loss) == pytest.approx(float(value))
  norm = float(jnp.linalg.norm(grad["w"]))
  assert float(info.mean_norm) == pytest.approx(norm, rel=1e-5) and info.batch_size == 6


@pytest.mark.long
def test_every_step_draws_other_views_and_is_decided_by_key_and_number():
  init, step = _made(ema_decay=0.9)
  first, info = step(init(_PARAMS), _batch())
  second, other = step(first, _batch())
  assert float(info.train_loss) != float(other.train_loss)
  again, _ = step(first, _batch())
  jax.tree.map(np.testing.assert_array_equal, again, second)
  assert training.eval_params(second) is second.ema and int(second.step) == 2


@pytest.mark.slow
def test_steps_lower_the_loss_and_an_empty_batch_changes_nothing():
  init, step = _made()
  step, losses, state = jax.jit(step), [], init(_PARAMS)
  for _ in range(60):
    state, info = step(state, _batch())
    losses.append(float(info.train_loss))
  assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.2
  same, _ = step(state, _batch(0))
  np.testing.assert_array_equal(same.params["w"], state.params["w"])


# --- its views


@pytest.mark.slow
def test_sides_of_crops_have_the_documented_ratio_and_area():
  """Two ramps: a side of the part, as a share of the image's, is the slope that is left of them."""
  down, along = np.meshgrid(np.arange(16.0), np.arange(16.0), indexing="ij")
  ramps = jnp.asarray(np.stack([down, along], axis=2), jnp.float32)
  crop = lambda key: AUGMENTATIONS["crop_color"](key, ramps, strength=0.0)
  found = np.asarray(jax.jit(jax.vmap(crop))(jax.random.split(jax.random.key(0), 200)))
  high = found[:, 8, 8, 0] - found[:, 7, 8, 0]
  wide = np.abs(found[:, 8, 8, 1] - found[:, 8, 7, 1])
  ratio, area = high / wide, high * wide
  assert 0.74 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.34
  assert 0.19 < area.min() < 0.25 and 0.9 < area.max() < 1.001


@pytest.mark.long
def test_a_crop_is_a_part_of_the_image_and_a_whole_one_is_the_image():
  ramp = jnp.broadcast_to(jnp.arange(16.0)[:, None, None], (16, 16, 1))
  key = jax.random.key(0)
  whole = AUGMENTATIONS["crop_color"](key, ramp, least_area=1.0, strength=0.0)
  assert float(whole.min()) >= 0 and float(whole.max()) <= 15
  for seed in range(5):
    key = jax.random.key(seed)
    part = AUGMENTATIONS["crop_color"](key, ramp, strength=0.0)
    rows = np.asarray(part[:, 0, 0])
    np.testing.assert_allclose(
      part, np.broadcast_to(rows[:, None, None], part.shape), atol=1e-4
    )
    inner = np.diff(rows)[1:-1]  # enlarged by one factor, but for what lies beyond the edge
    assert 0.3 < inner.mean() <= 1.001 and inner.min() >= 0
