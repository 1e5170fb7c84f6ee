"""Noise by group: its standard deviations, and that one Gaussian event pays for it."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpjax
from dpjax.noise import NoiseShape
from dpjax.transforms.group_noise import group_stds
from tests.refuses import refuses

_BOUNDS = {"a": 3.0, "b": 4.0, "frozen": 0.0}
_SHARES = {"a": 1.0, "b": 3.0, "frozen": 5.0}


def _tx(**changes):
  options = dict(
    l2_clip_norm=_BOUNDS,
    noise_multiplier=2.0,
    normalize_by=1.0,
    key=jax.random.key(0),
    noise_shape=NoiseShape(shares=_SHARES),
  )
  return dpjax.clip_and_noise(**{**options, **changes})


@pytest.mark.slow
def test_each_group_gets_its_own_noise_and_a_frozen_one_none():
  params = {name: jnp.zeros(20_000) for name in _BOUNDS}
  grads = jax.tree.map(lambda leaf: jnp.ones((1, *leaf.shape)), params)
  update, _ = _tx().update(
    dpjax.wrap_grads(grads), _tx().init(params), params, mask=jnp.zeros(1, bool)
  )
  stds = group_stds(_BOUNDS, 2.0, _SHARES)
  assert stds == pytest.approx(
    {"a": 2 * 3 / 0.25**0.5, "b": 2 * 4 / 0.75**0.5, "frozen": 0}
  )
  for name in ("a", "b"):
    assert np.std(update[name]) == pytest.approx(stds[name], rel=0.02)
  np.testing.assert_array_equal(update["frozen"], 0)


@settings(max_examples=100)
@given(
  shares=st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3),
  bounds=st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3),
  z=st.floats(0.1, 10),
)
def test_p10_the_shares_cost_exactly_one_gaussian_mechanism(shares, bounds, z):
  bounds, shares = dict(zip("abc", bounds)), dict(zip("abc", shares))
  stds = group_stds(bounds, z, shares)
  precision = sum((bounds[name] / stds[name]) ** 2 for name in "abc")
  assert precision**-0.5 == pytest.approx(z, rel=1e-9)


def test_p10_a_worst_case_example_moves_the_noisy_sum_by_one_over_z():
  """In units of each group's own noise: 1 / z exactly, for gradients that saturate."""
  grads = {
    "a": jnp.full((1, 2), 1e6),
    "b": jnp.full((1, 3), -1e6),
    "frozen": jnp.ones((1, 2)),
  }
  tx, grads = _tx(), dpjax.wrap_grads(grads)
  moved = [tx.update(grads, tx.init(None), mask=jnp.array([m]))[0] for m in (True, False)]
  stds = group_stds(_BOUNDS, 2.0, _SHARES)
  units = [np.asarray(moved[0][g] - moved[1][g]) / stds[g] for g in ("a", "b")]
  assert math.hypot(*map(np.linalg.norm, units)) == pytest.approx(1 / 2.0, rel=1e-5)


@pytest.mark.slow
def test_equal_stds_without_shares_and_sums_of_other_groups_are_refused():
  assert group_stds({"a": 3.0, "b": 4.0}, 2.0) == {"a": 10.0, "b": 10.0}
  loss = lambda p, x: jnp.sum(p["a"]) * x + jnp.sum(p["b"]) + jnp.sum(p["frozen"])
  params = {name: jnp.zeros(2) for name in _BOUNDS}
  right = dpjax.clipped_grad(loss, l2_clip_norm=_BOUNDS)(params, jnp.ones(2), True)
  _tx().update(right, _tx().init(params), params)
  flat = dpjax.clipped_grad(loss, l2_clip_norm=5.0)(params, jnp.ones(2), True)
  assert flat.l2_bound == right.l2_bound  # the same bound on the whole is not enough
  with refuses("noise_shares"):
    _tx().update(flat, _tx().init(params), params)


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("shares", "field"),
  [
    ({"a": 1.0, "b": 1.0}, "noise_shares"),
    ({"a": 0.0, "b": 1.0, "frozen": 1.0}, "noise_shares"),
    ({"a": -1.0, "b": 1.0, "frozen": 1.0}, "noise_shares"),
    ({"a": float("nan"), "b": 1.0, "frozen": 1.0}, "noise_shares"),
  ],
)
def test_wrong_shares_are_refused(shares, field):
  with refuses(field):
    _tx(noise_shape=NoiseShape(shares=shares))
