"""Property inference by the target's own pipeline: found where planted, at chance where not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import attacks, training
from dpjax.attacks import property_inference
from dpjax.attacks.roc import curve_of
from dpjax.data import from_arrays
from dpjax.validate import UserError
from tests import plans

_N, _SIZE = 600, 80


@functools.cache
def _records():
  """Two classes in three dimensions, and a mark that no number of a record tells."""
  rng = np.random.default_rng(0)
  y = rng.integers(0, 2, _N)
  x = rng.standard_normal((_N, 3)) + 0.7 * (2 * y[:, None] - 1)
  return from_arrays(x, y, num_classes=2), rng.random(_N) < 0.5


_MODEL = dpjax.models.Mlp(num_classes=2, features=(4,))
_PROBES = from_arrays(np.eye(3)[[0, 1, 2, 0]], [0, 1, 0, 1], num_classes=2)


@functools.cache
def _features(kind, planted):
  """(features of 24 shadows and 16 targets, their truth), of disjoint records."""
  records, hidden = _records()
  marked = records.y == 1 if planted else hidden
  theirs = np.arange(_N) >= _N // 2
  draw = lambda count, among, seed: property_inference.populations(
    marked, num_models=count, size=_SIZE, shares=(0.3, 0.7), seed=seed, among=among
  )
  known, targets = draw(24, ~theirs, 1), draw(16, theirs, 2)
  plan = plans.of(72, prob=0.4, noise_multiplier=0.0, normalize_by=32, num_steps=25)
  loss_fn = dpjax.losses.softmax_cross_entropy(_MODEL.apply)
  signal, size = {
    "answers": (property_inference.answers_on(_MODEL.apply, _PROBES), 4),
    "weights": (lambda params, _: property_inference.sorted_weights(params), 26),
  }[kind]
  features = attacks.train_shadows(
    records,
    np.concatenate([known.included, targets.included]),
    algorithm=lambda key: training.dp_sgd(loss_fn, plan, optax.sgd(0.5), noise_key=key),
    batches=plan.batches,
    init_params=lambda key: _MODEL.init(key, jnp.zeros((1, 3))),
    signal=signal,
    num_scores=size,
    seed=0,
    side_by_side=40,
  )
  return features, known.truth, targets.truth


def _auc(*kind):
  features, truth, true = _features(*kind)
  scores = property_inference.infer_property(features[:24], truth, features[24:])
  return attacks.measure(scores, true)


@pytest.mark.long
def test_a_share_of_a_class_is_read_from_answers():
  assert _auc("answers", True).auc > 0.9


@pytest.mark.long
def test_a_property_that_training_does_not_see_is_inferred_by_chance():
  """The mark is independent of all that a record holds; and labels of models that are drawn."""
  assert 0.2 < _auc("answers", False).auc < 0.8
  features, _, _ = _features("answers", True)
  rng, aucs = np.random.default_rng(0), []
  for _ in range(20):
    labels = rng.permutation(np.arange(40) % 2 == 1)
    scores = property_inference.infer_property(features[:24], labels[:24], features[24:])
    aucs.append(curve_of(scores, labels[24:]).auc)
  assert abs(np.mean(aucs) - 0.5) < 0.1


@pytest.mark.long
def test_a_share_of_a_class_is_read_from_sorted_weights():
  assert _auc("weights", True).auc > 0.8


@pytest.mark.slow
def test_sorted_weights_are_those_of_the_function_and_not_of_its_order():
  params = _MODEL.init(jax.random.key(0), jnp.zeros((1, 3)))
  order = np.array([2, 0, 3, 1])
  inner, head = params["params"]["dense_0"], params["params"]["head"]
  moved = {
    "dense_0": {"kernel": inner["kernel"][:, order], "bias": inner["bias"][order]},
    "head": {"kernel": head["kernel"][order], "bias": head["bias"]},
  }
  x = jnp.ones((1, 3))
  np.testing.assert_allclose(
    _MODEL.apply(params, x), _MODEL.apply({"params": moved}, x), rtol=1e-5
  )
  np.testing.assert_allclose(
    property_inference.sorted_weights(params),
    property_inference.sorted_weights({"params": moved}),
  )


def test_bad_properties_are_one_line():
  refused = lambda words: pytest.raises(UserError, match=words)
  marked = np.arange(40) < 10
  draw = lambda **changes: property_inference.populations(
    **{**dict(marked=marked, num_models=2, size=10, shares=(0.2, 0.8), seed=0), **changes}
  )
  with refused("need 16 records with the mark, there are 10"):
    draw(size=20)
  with refused("must be two, which differ among 10 records"):
    draw(shares=(0.5, 0.51))
  with refused("must be of 40 records"):
    draw(among=np.ones(3, bool))
  with refused("must be bool"):
    draw(marked=np.arange(40))
  with refused("there are"):
    draw(shares=(0.2, 1.2))
  infer = property_inference.infer_property
  two = np.array([False, True])
  with refused("must be at least 2 of each"):
    infer(np.zeros((2, 3)), two, np.zeros((1, 3)))
  with refused(r"must be \[T, 3\].*trained elsewhere"):
    infer(np.zeros((4, 3)), np.tile(two, 2), np.zeros((1, 2)))
  with refused("shadows: 1 of 12 are NaN"):
    broken = np.zeros((4, 3))
    broken[0, 0] = np.nan
    infer(broken, np.tile(two, 2), np.zeros((1, 3)))
  with refused("must be those of models.Mlp"):
    property_inference.sorted_weights({"params": {"conv": {}}})
  with refused("probes: must hold"):
    property_inference.answers_on(_MODEL.apply, _PROBES.subset(slice(0, 0)))
