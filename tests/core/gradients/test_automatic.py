"""Automatic clipping: the bound for every input, the formula, and one sum on all routes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import gradients, models, trees
from dpjax.gradients import Automatic, Clip
from dpjax.gradients.clipping import clip_and_sum
from dpjax.losses import softmax_cross_entropy
from dpjax.types import Example
from tests.refuses import refuses

_ENTRY = st.one_of(
  st.floats(width=32, allow_nan=True, allow_infinity=True),
  st.floats(-3, 3, width=32),
  st.sampled_from([0.0, 1e-30, -1e-22, 3e38, 1e-45]),
)


def _sum(grads, clip_norm=1.0, gamma=0.01):
  size = jax.tree.leaves(grads)[0].shape[0]
  mask = jnp.ones(size, bool)
  clip = Clip(clip_norm, Automatic(gamma))
  return clip_and_sum(grads, jnp.zeros(size), mask, clip)


def _norm(tree):
  flat = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
  return float(np.linalg.norm(np.concatenate(flat)))


@pytest.mark.slow
def test_the_formula_of_bu_et_al():
  grads = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5]])}
  total = _sum(grads, clip_norm=2.0, gamma=0.25).total["w"]
  expected = np.array([3.0, 4.0]) * 2 / 5.25 + np.array([0.0, 0.5]) * 2 / 0.75
  np.testing.assert_allclose(total, expected, rtol=1e-6)


@pytest.mark.slow
def test_p1_p3_zero_nan_and_infinite_gradients_contribute_nothing():
  rows = [[0.0, 0.0], [jnp.nan, 1.0], [jnp.inf, 1.0]]
  np.testing.assert_array_equal(_sum({"w": jnp.array(rows)}).total["w"], 0)


@pytest.mark.slow
@settings(max_examples=80)
@given(
  row=st.lists(_ENTRY, min_size=6, max_size=6),
  clip_norm=st.floats(1e-3, 1e3),
  gamma=st.floats(1e-7, 1e3),
  dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_p4_one_example_never_exceeds_the_bound(row, clip_norm, gamma, dtype):
  with np.errstate(over="ignore"):
    grads = {"a": jnp.asarray([row[:4]], dtype), "b": jnp.asarray([row[4:]], dtype)}
  summed = _sum(grads, clip_norm, gamma)
  assert _norm(summed.total) <= clip_norm * (1 + 1e-6)
  per_group = {"a": clip_norm, "b": 2 * clip_norm}
  summed = _sum(grads, per_group, gamma)
  assert _norm(summed.total) <= summed.l2_bound * (1 + 1e-6)
  assert summed.l2_bound == pytest.approx(5**0.5 * clip_norm)


@functools.cache
def _setup():
  model = models.Cnn(num_classes=3)
  rng = np.random.default_rng(0)
  x = rng.random((5, 28, 28, 1))
  x[3] = np.nan
  params = model.init(jax.random.key(0), jnp.asarray(x[:1], jnp.float32))
  batch = Example(x.astype(np.float32), rng.integers(0, 3, 5))
  return softmax_cross_entropy(model.apply), params, batch


def _both_routes(clip_norm, microbatch_size=None, dtype="float32"):
  loss_fn, params, batch = _setup()
  mask = np.array([True, True, False, True, True])
  wide = lambda x: jnp.asarray(x, dtype)
  return [
    gradients.clipped_grad(
      loss_fn,
      l2_clip_norm=Clip(clip_norm, Automatic(0.3)),
      method=method,
      microbatch_size=microbatch_size,
    )(jax.tree.map(wide, params), Example(wide(batch.x), batch.y), mask)
    for method in ("vmap", "ghost")
  ]


def _difference(sums):
  return _norm(trees.add(sums[0].total, trees.scale(sums[1].total, -1.0)))


def _clip_norms():
  return (0.7, gradients.allocate_clip_norms(_setup()[1], 0.7, rule="by_size"))


@functools.cache
def _wide_differences():
  """Returns how far the routes are apart in float64, for each of `_clip_norms`."""
  with jax.enable_x64(True):
    return [_difference(_both_routes(norm, dtype="float64")) for norm in _clip_norms()]


@pytest.mark.long
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_all_routes_give_the_same_automatic_sum(microbatch_size):
  for clip_norm, wide in zip(_clip_norms(), _wide_differences()):
    sums = _both_routes(clip_norm, microbatch_size)
    assert sums[0].l2_bound == sums[1].l2_bound == pytest.approx(0.7)
    assert sums[0].group_bounds == sums[1].group_bounds
    # The ghost route adds to each norm what rounding may take from it, so its terms are a little
    # shorter. That charge is a multiple of eps, so float64 tells how large it is in float32.
    charged = wide * 2.0**29
    assert wide < 1e-13 and _norm(sums[0].total) > 0.1
    assert _difference(sums) < charged + 1e-6


@pytest.mark.long
def test_it_is_neither_flat_clipping_nor_independent_of_gamma():
  loss_fn, params, batch = _setup()
  clips = (0.7, *(Clip(0.7, Automatic(gamma)) for gamma in (1.0, 10.0)))
  totals = [
    gradients.clipped_grad(loss_fn, l2_clip_norm=clip)(
      params, batch, np.arange(5) < 3
    ).total
    for clip in clips
  ]
  for a, b in ((0, 1), (1, 2)):
    assert _norm(trees.add(totals[a], trees.scale(totals[b], -1.0))) > 1e-3


@pytest.mark.cases(quick=[0, 2, 3], long=...)
@pytest.mark.parametrize(
  ("options", "field"),
  [
    ((1.0, "auto"), "rule"),
    ((1.0, 0.01), "rule"),
    ((1.0, Automatic(0.0)), "gamma"),
    ((1.0, Automatic(1e-12)), "gamma"),
    ((1.0, Automatic(float("nan"))), "gamma"),
    ((float("inf"), "automatic"), "norms"),
    ((1e30, "automatic"), "gamma"),
  ],
)
def test_wrong_arguments_are_named(options, field):
  with refuses(field):
    Clip(*options)
