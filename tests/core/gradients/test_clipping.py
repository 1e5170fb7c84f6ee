"""Clipping: the bound holds for any input; edge cases as the module's table says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import gradients, trees
from dpjax.gradients import clip, clipping
from dpjax.gradients.weighted_sums import weighted_sum
from tests.refuses import refuses


def _sum(grads, clip_norm=1.0, mask=None, **options):
  size = jax.tree.leaves(grads)[0].shape[0]
  mask = jnp.ones(size, bool) if mask is None else mask
  return clipping.clip_and_sum(grads, jnp.zeros(size), mask, clip_norm, **options)


def _random_grads(seed, size=5, scale=1.0):
  rng = np.random.default_rng(seed)
  return {
    "w": jnp.asarray(rng.normal(size=(size, 3, 2)) * scale, jnp.float32),
    "b": jnp.asarray(rng.normal(size=(size, 2)) * scale, jnp.float32),
  }


@pytest.mark.slow
def test_p1_a_non_finite_example_contributes_nothing_and_spoils_nothing():
  grads = _random_grads(0)
  for bad in (jnp.nan, jnp.inf, -jnp.inf):
    poisoned = {**grads, "w": grads["w"].at[2, 0, 1].set(bad)}
    rest = jnp.array([True, True, False, True, True])
    expected = _sum(grads, mask=rest).total
    got = _sum(poisoned).total
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.cases(long=["float32"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_p2_a_norm_whose_square_overflows_is_still_clipped_to_the_bound(dtype):
  grads = {"w": jnp.array([[3e30, 4e30], [0.0, 0.5]], dtype)}
  total = _sum(grads).total["w"]
  np.testing.assert_allclose(total, [0.6, 0.8 + 0.5], rtol=1e-2)
  assert float(jnp.linalg.norm(total - jnp.array([0.0, 0.5]))) <= 1 + 1e-6


@pytest.mark.slow
def test_p2_float16_norms_are_computed_in_float32():
  grads = {"w": jnp.full((1, 4), 300.0, jnp.float16)}  # the square overflows float16
  assert float(_sum(grads).norms[0]) == pytest.approx(600.0)


def test_p3_edge_cases():
  zero = {"w": jnp.zeros((2, 3))}
  np.testing.assert_array_equal(_sum(zero).total["w"], 0)
  np.testing.assert_array_equal(_sum(zero, rescale_to_unit_norm=True).total["w"], 0)
  grads = _random_grads(1, scale=1e3)
  unclipped = _sum(grads, float("inf")).total
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b.sum(0), rtol=1e-5), unclipped, grads
  )
  for bad in (0, 0.0, -1.0, float("nan"), "1", True):
    with refuses("l2_clip_norm"):
      gradients.clipped_grad(lambda w, x: w * x, l2_clip_norm=bad)
  with refuses("l2_clip_norm"):
    gradients.clipped_grad(
      lambda w, x: w * x, l2_clip_norm=float("inf"), rescale_to_unit_norm=True
    )


_ENTRY = st.one_of(
  st.floats(width=32, allow_nan=True, allow_infinity=True),
  st.floats(-3, 3, width=32),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(
  rows=st.lists(st.lists(_ENTRY, min_size=6, max_size=6), min_size=1, max_size=1),
  clip_norm=st.floats(1e-3, 1e3),
  dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_p4_one_example_never_exceeds_the_bound(rows, clip_norm, dtype):
  with np.errstate(over="ignore"):
    grads = {"a": jnp.asarray(rows, dtype)[:, :4], "b": jnp.asarray(rows, dtype)[:, 4:]}
  total = _sum(grads, clip_norm).total
  flat = np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in total.values()])
  assert np.linalg.norm(flat) <= clip_norm * (1 + 1e-6)


def test_p4_the_bound_holds_for_millions_of_parameters():
  grads = {"w": jnp.full((1, 3_000_001), 0.7345, jnp.float32)}
  total = np.asarray(_sum(grads, 1.0).total["w"], np.float64)
  assert np.linalg.norm(total) <= 1 + 1e-6


def test_p9_sensitivity_by_relation():
  assert clip.sensitivity(1.5, "add_or_remove_one") == 1.5
  assert clip.sensitivity(1.5, "replace_special") == 1.5
  assert clip.sensitivity(1.5, "replace_one") == 3.0
  with refuses("neighboring_relation"):
    clip.sensitivity(1.5, "replace-one")


@pytest.mark.slow
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-2, 1e4))
def test_p9_changing_one_example_moves_the_sum_by_at_most_the_sensitivity(seed, scale):
  grads = _random_grads(seed, scale=scale)
  other = jax.tree.map(lambda leaf: leaf.at[1].multiply(-17.0), grads)
  moved = trees.add(_sum(grads).total, trees.scale(_sum(other).total, -1.0))
  norm = float(trees.per_example_norms(jax.tree.map(lambda leaf: leaf[None], moved))[0])
  assert norm <= clip.sensitivity(1.0, "replace_one") * (1 + 1e-5)


@pytest.mark.slow
def test_p10_per_layer_bounds_saturate_exactly_the_stated_sensitivity():
  bounds = {"w": 0.3, "b": 0.4}
  grads = _random_grads(3, size=1, scale=1e6)  # every layer saturates
  for unit, expected in ((False, 0.5), (True, 2**0.5)):
    summed = _sum(grads, bounds, rescale_to_unit_norm=unit)
    flat = np.concatenate([np.ravel(leaf) for leaf in summed.total.values()])
    assert np.linalg.norm(flat) == pytest.approx(expected, rel=1e-5)
    assert summed.l2_bound == pytest.approx(expected)


def test_per_layer_bounds_may_cover_subtrees():
  grads = {
    "conv": {"k": jnp.full((1, 2), 3.0), "b": jnp.full((1, 1), 3.0)},
    "head": jnp.ones((1, 1)),
  }
  total = _sum(grads, {"conv": 1.0, "head": 5.0}).total
  conv = np.concatenate([total["conv"]["k"], total["conv"]["b"]])
  assert np.linalg.norm(conv) == pytest.approx(1.0, rel=1e-6)
  assert float(total["head"][0]) == 1.0


@pytest.mark.slow
def test_p20_sums_are_accumulated_in_float32():
  grads = {"w": jnp.full((10_000, 1), 1e-3, jnp.bfloat16)}
  total = _sum(grads).total["w"]
  assert total.dtype == jnp.float32
  expected = 10_000 * float(jnp.bfloat16(1e-3))
  assert float(total[0]) == pytest.approx(expected, rel=1e-5)  # bfloat16 would stall at 4


def test_weighted_sum_drops_by_weight_not_by_value():
  leaf = jnp.array([[1.0], [jnp.inf]])
  assert float(weighted_sum(leaf, jnp.array([2.0, 0.0]))[0]) == 2.0
  assert not np.isfinite(weighted_sum(leaf, jnp.array([2.0, 1.0]))[0])
