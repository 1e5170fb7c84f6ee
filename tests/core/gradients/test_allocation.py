"""Clip norms by group: together never above the whole, frozen groups out of the sum."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpjax import gradients, models, trees
from dpjax.gradients.allocation import shares_from_sensitivity
from dpjax.gradients.clipping import clip_and_sum
from dpjax.losses import softmax_cross_entropy
from dpjax.types import Example
from tests.refuses import refuses

_PARAMS = {
  "conv": {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(7)},
  "block": {"dense": {"kernel": jnp.ones((2, 2))}, "norm": {"scale": jnp.ones(5)}},
  "head": jnp.ones(7),
}


def test_the_rules_in_closed_form():
  uniform = gradients.allocate_clip_norms(_PARAMS, 2.0)
  assert jax.tree.leaves(uniform) == [1.0] * 4
  assert set(uniform) == {"conv", "block", "head"} and set(uniform["block"]) == {
    "dense",
    "norm",
  }
  sizes = gradients.allocate_clip_norms(_PARAMS, 1.0, rule="by_size")
  expected = {"block": {"dense": 4, "norm": 5}, "conv": 16, "head": 7}
  jax.tree.map(
    lambda c, size: np.testing.assert_allclose(c, math.sqrt(size / 32)), sizes, expected
  )


@settings(max_examples=200)
@given(
  scores=st.lists(st.just(0.0) | st.floats(1e-6, 1e6), min_size=3, max_size=3).filter(any),
  clip_norm=st.floats(1e-6, 1e6),
)
def test_p10_the_root_sum_square_never_exceeds_the_whole(scores, clip_norm):
  tree = dict(zip(("conv", "block", "head"), scores))
  bounds = gradients.allocate_clip_norms(
    _PARAMS, clip_norm, rule="by_score", scores=tree, scores_are="public"
  )
  assert clip_norm * (1 - 1e-12) <= gradients.Clip(bounds).l2_bound <= clip_norm
  for name, score in tree.items():
    assert (bounds[name] == 0) == (score == 0)
    np.testing.assert_allclose(
      bounds[name], clip_norm * score / math.hypot(*scores), rtol=1e-9, atol=1e-300
    )


@pytest.mark.long
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 1e6))
def test_p10_adversarial_gradients_saturate_the_bound_and_no_more(seed, scale):
  rng = np.random.default_rng(seed)
  grads = jax.tree.map(
    lambda p: jnp.asarray(rng.normal(size=(1, *p.shape)) * scale, jnp.float32), _PARAMS
  )
  for rule in ("uniform", "by_size"):
    bounds = gradients.allocate_clip_norms(_PARAMS, 0.8, rule=rule)
    total = clip_and_sum(grads, jnp.zeros(1), jnp.ones(1, bool), bounds).total
    norm = float(trees.per_example_norms(jax.tree.map(lambda leaf: leaf[None], total))[0])
    assert norm <= 0.8 * (1 + 1e-6)
    if scale > 10:
      assert norm == pytest.approx(0.8, rel=1e-5)


def test_more_sensitive_means_a_smaller_share_and_insensitive_means_frozen():
  shares = shares_from_sensitivity(
    {"conv": 4.0, "block": 1.0, "head": 0.01}, freeze_below=0.1
  )
  assert shares == {"conv": 0.25, "block": 1.0, "head": 0.0}
  with refuses("freeze_below", value=9):
    shares_from_sensitivity({"conv": 4.0}, freeze_below=9)


@pytest.mark.long
@pytest.mark.parametrize("method", ["vmap", "ghost"])
def test_a_frozen_group_gets_exactly_zero_and_does_not_disturb_the_others(method):
  model = models.Mlp(num_classes=3, features=(6,))
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, 2, 2, 1)).astype(np.float32)
  params = model.init(jax.random.key(0), x[:1])
  loss_fn = softmax_cross_entropy(model.apply)
  names = list(params["params"])
  bounds = {"params": {names[0]: 0.0, names[1]: 0.5}}
  batch = Example(x, np.zeros(4, int))
  summed = gradients.clipped_grad(loss_fn, l2_clip_norm=bounds, method=method)(
    params, batch, True
  )
  for leaf in jax.tree.leaves(summed.total["params"][names[0]]):
    np.testing.assert_array_equal(leaf, 0)
  head = lambda p, e: loss_fn({"params": {**params["params"], names[1]: p}}, e)
  alone = gradients.clipped_grad(head, l2_clip_norm=0.5)(
    params["params"][names[1]], batch, True
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    summed.total["params"][names[1]],
    alone.total,
  )
  assert summed.l2_bound == 0.5 and summed.group_bounds == (0.0, 0.5)


@pytest.mark.cases(long=[8])
@pytest.mark.parametrize(
  ("options", "field"),
  [
    ({"rule": "by_score", "scores": {"head": 1.0}}, "scores_are"),
    ({"rule": "by_score", "scores": 1.0, "scores_are": "private"}, "scores_are"),
    (
      {"rule": "by_score", "scores": {"head": 1.0}, "scores_are": "public"},
      "scores",
    ),
    ({"rule": "by_score", "scores": 0.0, "scores_are": "public"}, "scores"),
    ({"rule": "by_score", "scores": -1.0, "scores_are": "public"}, "scores"),
    ({"rule": "by_score", "scores": jnp.ones(()), "scores_are": "public"}, "scores"),
    ({"rule": "uniform", "scores": 1.0}, "rule"),
    ({"rule": "sizes"}, "rule"),
    ({"l2_clip_norm": float("inf")}, "l2_clip_norm"),
  ],
)
def test_scores_of_unknown_origin_and_wrong_arguments_are_refused(options, field):
  options = {"l2_clip_norm": 1.0, **options}
  with refuses(field):
    gradients.allocate_clip_norms(_PARAMS, options.pop("l2_clip_norm"), **options)


def test_only_a_group_among_others_may_have_the_bound_zero():
  for bad in (0.0, {"w": 0.0}, {"w": 0.0, "b": -1.0}, {"w": 0.0, "b": float("nan")}):
    with refuses("l2_clip_norm"):
      gradients.clipped_grad(lambda p, x: p["w"] * x, l2_clip_norm=bad)


def test_a_score_that_would_freeze_its_group_by_rounding_is_refused():
  scores = {"conv": 0.0, "block": 2.0, "head": 5e-324}
  with refuses("scores"):
    gradients.allocate_clip_norms(
      _PARAMS, 1.0, rule="by_score", scores=scores, scores_are="public"
    )
