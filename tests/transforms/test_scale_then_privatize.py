"""Scaling before the clip: its formula, the noise it leaves, and the route it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import gradients, transforms
from dpjax.transforms.scale_then_privatize import _scales
from dpjax.types import ClippedSum
from dpjax.validate import UserError

_NUMBERS = {"l2_clip_norm": 1.0, "normalize_by": 2.0}
_MASK = jnp.array([True, True])


def _tx(noise_multiplier=0.0, seed=0, **options):
  inner = transforms.clip_and_noise(
    **_NUMBERS, noise_multiplier=noise_multiplier, key=jax.random.key(seed)
  )
  return transforms.scale_then_privatize(inner, **options)


def _grads(scale=1.0):
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(2, 3)) * np.array([5.0, 0.5, 0.01]) * scale
  return {"a": rows[:, :1], "b": rows[:, 1:]}


def _stacked(tree):
  return gradients.stacked(jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), tree))


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


def test_noise_is_that_of_the_inner_transform_times_the_scale():
  """No record: the output is noise, whose size by coordinate follows the state alone."""
  state = _tx(2.0).init(jnp.zeros(3))._replace(nu=jnp.array([4.0, 1.0, 0.0]))

  @jax.jit
  @jax.vmap
  def drawn(seed):
    inner = transforms.clip_and_noise(
      **_NUMBERS, noise_multiplier=2.0, key=jax.random.key(seed)
    )
    tx = transforms.scale_then_privatize(inner)
    begun = tx.init(jnp.zeros(3))._replace(nu=state.nu)
    rows = gradients.stacked(jnp.zeros((2, 3)))
    return tx.update(rows, begun, mask=jnp.array([False, False]))[0]

  found = np.asarray(drawn(jnp.arange(4000))).std(axis=0)
  relative = np.array([np.sqrt(4 / (5 / 3)), np.sqrt(1 / (5 / 3)), 0.1])
  wanted = relative / np.sqrt(np.mean(relative**2)) * 2.0 / 2.0
  np.testing.assert_allclose(found, wanted, rtol=0.05)
  # The whole variance is that of noise without scaling.
  assert np.sum(found**2) == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize("far", [1e-30, 1e30, np.inf, np.nan])
def test_no_example_moves_a_step_beyond_the_clip_norm_in_its_units(far):
  """Scales from a hostile past, gradients of any size: what the inner transform sees is clipped."""
  tx = _tx()
  for past in ([1e-38, 1e30, 1.0], [0.0, 0.0, 0.0], [np.inf, 1.0, 1.0]):
    state = tx.init(jnp.zeros(3))._replace(nu=jnp.array(past, jnp.float32))
    scales = _scales(state.nu, 0.1)
    assert (scales > 0).all() and np.isfinite(scales).all()
    rows = gradients.stacked(jnp.array([[far, 1.0, -far], [0.1, 0.2, 0.3]], jnp.float32))
    sums = [
      tx.update(rows, state, mask=jnp.array([here, True]))[0] / scales
      for here in (False, True)
    ]
    assert np.linalg.norm(np.asarray(sums[1] - sums[0])) * 2 <= 1 + 1e-5


def test_what_is_refused():
  tx = _tx()
  state = tx.init(jnp.zeros(2))
  total = ClippedSum.__new__(ClippedSum)
  with pytest.raises(UserError, match="a ClippedSum was clipped before"):
    tx.update(total, state, mask=_MASK)
  for floor in (0.0, 1.5, float("nan")):
    with pytest.raises(UserError, match="floor"):
      _tx(floor=floor)
  with pytest.raises(UserError, match="b2"):
    _tx(b2=1.0)


def test_the_first_step_is_that_of_the_inner_transform():
  plain = transforms.clip_and_noise(**_NUMBERS, noise_multiplier=1.0, key=jax.random.key(3))
  start = {"a": jnp.zeros(1), "b": jnp.zeros(2)}
  one, two = (
    tx.update(_stacked(_grads()), tx.init(start), mask=_MASK)[0]
    for tx in (plain, _tx(1.0, seed=3))
  )
  assert np.abs(np.asarray(one["b"])).min() > 0
  np.testing.assert_array_equal(one["b"], two["b"])
