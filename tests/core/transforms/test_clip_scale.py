"""A clip norm that changes by a public schedule: a hand loop, float limits, composition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpjax
from dpjax import transforms
from dpjax.noise import source
from dpjax.transforms.clip_scale import CLIP_SCHEDULES, clip_scale, scheduled_scales
from tests.refuses import refuses

_SCALES = (1.0, 0.5, 2.0)


def _inner(**changes):
  options = dict(
    l2_clip_norm=0.8, noise_multiplier=1.5, normalize_by=4.0, key=jax.random.key(7)
  )
  return transforms.clip_and_noise(**{**options, **changes})


def _clip(grads, bound):
  norms = np.linalg.norm(grads, axis=1, keepdims=True)
  return grads * np.minimum(1.0, bound / norms)


def test_p22_a_schedule_equals_a_hand_loop_with_clip_norm_and_noise_of_each_step():
  tx = transforms.with_clip_schedule(_inner(), _SCALES)
  state = tx.init(jnp.zeros(3))
  rng = np.random.default_rng(0)
  for t, factor in enumerate((*_SCALES, _SCALES[-1])):
    grads = rng.normal(size=(5, 3)) * [[0.1], [1.0], [3.0], [1e3], [1.0]]
    assert float(clip_scale(state)) == factor
    offered = dpjax.wrap_grads(jnp.asarray(grads, jnp.float32))
    update, state = tx.update(offered, state, mask=jnp.arange(5) < 4)
    drawn = source.gaussian(jax.random.fold_in(jax.random.key(7), t), jnp.zeros(3), 1.0)
    total = _clip(grads[:4], 0.8 * factor).sum(0)
    expected = (total + 1.5 * 0.8 * factor * np.asarray(drawn)) / 4.0
    np.testing.assert_allclose(update, expected, rtol=2e-5, atol=1e-6)
    wrong = (total + 1.5 * 0.8 * np.asarray(drawn)) / 4.0  # noise of another clip norm
    assert factor == 1.0 or not np.allclose(update, wrong, rtol=1e-3)


def test_a_constant_schedule_changes_nothing():
  grads, mask = dpjax.wrap_grads(jnp.ones((2, 3))), jnp.ones(2, bool)
  tx = transforms.with_clip_schedule(_inner(), [1.0])
  update, state = tx.update(grads, tx.init(None), mask=mask)
  expected, inner = _inner().update(grads, _inner().init(None), mask=mask)
  np.testing.assert_array_equal(update, expected)
  assert int(state.inner.inner.inner.draws) == int(inner.inner.draws) == 1


@pytest.mark.slow
@settings(max_examples=25)
@given(
  row=st.lists(st.floats(width=32, allow_nan=True), min_size=3, max_size=3),
  scale=st.floats(1e-6, 1e6),
)
def test_p4_no_gradient_exceeds_the_scaled_bound_at_any_scale(row, scale):
  tx = transforms.with_clip_schedule(_inner(noise_multiplier=0.0, normalize_by=1), [scale])
  grads = dpjax.wrap_grads(jnp.asarray([row], jnp.float32))
  update, _ = tx.update(grads, tx.init(None), mask=jnp.ones(1, bool))
  norm = np.linalg.norm(np.asarray(update, np.float64))
  assert norm <= 0.8 * scale * (1 + 2e-6)


def test_named_schedules_go_from_one_to_the_final_factor():
  for name in CLIP_SCHEDULES:
    scales = scheduled_scales(name, 11, 0.2)
    assert scales[0] == 1.0 and len(scales) == 11
    assert scales[-1] == pytest.approx(1.0 if name == "constant" else 0.2)
    assert (np.diff(scales) <= 0).all()


@pytest.mark.cases(quick=[0, 1], long=...)
@pytest.mark.parametrize(
  ("scales", "place"),
  [
    ((), ""),
    ((0.0,), "[0]"),
    ((1.0, -1.0), "[1]"),
    ((float("nan"),), "[0]"),
    ((1e7,), "[0]"),
  ],
)
def test_wrong_schedules_are_refused(scales, place):
  with refuses(f"clip_schedule{place}"):
    transforms.with_clip_schedule(_inner(), scales)
