"""Class weights: public constants on the loss of one example, which no accounting sees."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dpjax import gradients, losses
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.types import Example
from tests.refuses import refuses
from tests.runs import small_configs

_FACTORS = (0.5, 3.0, 1.0)
_GIVEN = {"class_weights": "given"}
_SHARES = {"class_weights": "balanced", "class_weights.shares": (0.8, 0.1, 0.1)}


def linear(params, x):
  return x @ params


def test_a_weight_multiplies_the_loss_and_is_clipped_afterwards():
  rng = np.random.default_rng(0)
  params = rng.normal(size=(4, 3)).astype(np.float32)
  rows = Example(rng.normal(size=(6, 4)).astype(np.float32), np.arange(6) % 3)
  weighted = losses.softmax_cross_entropy(linear, class_weights=_FACTORS)
  total = np.zeros((4, 3))
  for x, y in zip(rows.x, rows.y):
    grad = jax.grad(losses.softmax_cross_entropy(linear))(params, Example(x, y))
    grad = _FACTORS[y] * np.asarray(grad, np.float64)
    total += grad / max(1, np.linalg.norm(grad) / 0.7)
  # The fast route takes the loss, too.
  clipped = gradients.clipped_grad(weighted, l2_clip_norm=0.7, method="ghost")
  found = clipped(params, rows, mask=True)
  np.testing.assert_allclose(found.total, total, rtol=1e-4, atol=1e-6)


def _config(**changes):
  return small_configs.short(**{"data.name": "wine", "data.limit": None, **changes})


@pytest.mark.slow
def test_weights_cost_nothing_and_change_the_gradient():
  plain, weighted = (build.assemble(_config(**more)) for more in ({}, _SHARES))
  assert weighted.plan == plain.plan
  example = Example(plain.train.x[0], plain.train.y[0])
  before, after = (run.loss_fn(plain.params, example) for run in (plain, weighted))
  factor = 0.1 / _SHARES["class_weights.shares"][int(example.y)]
  np.testing.assert_allclose(after, factor * before, rtol=1e-5)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"class_weights": "balanced"}, "class_weights.shares"),  # never counted from the labels
    ({**_SHARES, "class_weights.shares": (0.5, 0.1, 0.1)}, "class_weights.shares"),
    ({**_SHARES, "class_weights.shares": (0.5, 0.5)}, "class_weights.shares"),
    ({**_SHARES, "class_weights.shares": (1.0, 0.0, 0.0)}, "class_weights.shares[1]"),
    (_GIVEN, "class_weights.factors"),
    ({**_GIVEN, "class_weights.factors": (1.0, -1.0, 1.0)}, "class_weights.factors[1]"),
    ({**_GIVEN, "class_weights.factors": (1.0, 9.0, 1.0)}, "class_weights.factors[1]"),
    ({**_SHARES, "loss": "dpjax.losses:softmax_cross_entropy"}, "class_weights"),
    ({**_SHARES, "data.name": "diabetes"}, "class_weights"),
  ],
)  # fmt: skip
def test_weights_that_are_no_public_constants_of_the_classes_are_refused(changes, field):
  with refuses(field):
    build.assemble(_config(**changes))


def test_balanced_weights_are_those_of_scikit_learn_up_to_a_factor():
  from sklearn.utils.class_weight import compute_class_weight

  labels = np.repeat([0, 1, 2], [80, 10, 10])
  wanted = compute_class_weight("balanced", classes=np.arange(3), y=labels)
  config = fields.replace_all(_config(), _SHARES)
  np.testing.assert_allclose(config.class_weights.weights(), wanted / max(wanted))


def test_a_weight_acts_where_gradients_reach_the_clip_norm():
  """scikit-learn's own has a largest factor above 1. The clip cut it: no customer of `insurance`
  was called a buyer, with or without it."""
  weights = fields.replace_all(_config(), _SHARES).class_weights.weights()
  params = np.zeros((4, 3), np.float32)

  def length(label, **options):
    loss = losses.softmax_cross_entropy(linear, **options)
    row = Example(np.ones((1, 4), np.float32), np.array([label]))
    clipped = gradients.clipped_grad(loss, l2_clip_norm=1.0)(params, row, mask=True)
    return float(np.linalg.norm(clipped.total))

  common, rare = 0, 1
  assert [length(common), length(rare)] == pytest.approx([1, 1], rel=1e-5)
  assert length(rare, class_weights=weights) == pytest.approx(1, rel=1e-5)
  assert length(common, class_weights=weights) < 0.3
