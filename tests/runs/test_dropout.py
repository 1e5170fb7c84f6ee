"""Dropout in `launch.train`: a key for each example in training, none in evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import quickstart
from dpjax.checks import charges, influence
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from tests.refuses import refuses

_OWN = "tests.runs.own_dropout:"
_MODELS = {
  "Dropped": {"model.name": f"{_OWN}Dropped", "model.options": {}},
  "Deterministic": {"model.name": f"{_OWN}Deterministic", "model.options": {}},
  "Nnx": {
    "model.name": "tests.core.models.other_libraries:Nnx",
    "model.options": {"rate": 0.3},
  },
  "Equinox": {
    "model.name": "tests.core.models.other_libraries:Equinox",
    "model.options": {"rate": 0.3},
    "trainable": "head",
  },
  "mlp": {"model.options": {"features": (16,), "dropout": 0.3}},
  "head": {"model.name": f"{_OWN}Dropped", "model.options": {}, "trainable": "head"},
}


def _config(**overrides):
  small = {"data.limit": 200, "num_steps": 6, "privacy.sampling_prob": 0.2}
  return fields.replace_all(fields.replace_all(quickstart.get_config(), small), overrides)


def _stepped(run):
  """Parameters after one step on all, with noise and batches that every run here shares."""
  algorithm = run.with_keys(jax.random.key(1), jax.random.key(2))
  size = run.plan.sampler.padded_batch_size
  batch = next(iter(run.plan.batches(run.train, rng=1)))
  assert jax.tree.leaves(batch.examples)[0].shape[0] == size
  state, _ = jax.jit(algorithm.step)(algorithm.init(run.params), batch)
  return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)])


@pytest.mark.cases(slow=["head"], long=...)
@pytest.mark.parametrize("name", _MODELS)
def test_training_draws_and_evaluation_does_not(name):
  run = build.assemble(_config(**_MODELS[name]))
  assert run.keyed
  x = jnp.asarray(run.test.x[:8])
  np.testing.assert_array_equal(run.apply(run.params, x), run.apply(run.params, x))
  scores = run.task.evaluate(run.apply, run.params, run.test)
  assert scores == run.task.evaluate(run.apply, run.params, run.test)
  two = run.train[np.zeros(2, int)]
  two = two._replace(key=jax.random.split(jax.random.key(0), 2))
  first, second = jax.vmap(run.loss_fn, in_axes=(None, 0))(run.params, two)
  assert first != second, "two examples with one mask"
  assert np.isfinite(run.loss_fn(run.params, run.train[0]))  # without a key: as evaluated


@pytest.mark.cases(slow=["Equinox"], long=...)
@pytest.mark.parametrize("name", [*_MODELS][:5])
def test_masks_follow_the_stream_of_examples_and_not_the_noise(name):
  run = build.assemble(_config(**_MODELS[name]))
  moved = _stepped(run)
  np.testing.assert_array_equal(moved, _stepped(run))
  other = run._replace(
    with_keys=lambda noise, local: run.with_keys(noise, jax.random.key(9))
  )
  assert not np.array_equal(moved, _stepped(other))


def test_a_model_without_dropout_has_no_keys():
  assert not build.assemble(_config()).keyed


@pytest.mark.slow
def test_dropout_and_augmentation_draw_apart():
  run = build.assemble(_config(**_MODELS["mlp"], augmentation="shift", augmult=2))
  assert run.keyed and np.isfinite(_stepped(run)).all()


@pytest.mark.long
def test_checks_hold_with_keys():
  subject = of_config.subject(_config(**_MODELS["Dropped"]))
  for row in (*influence.CHECKS.values(), charges.own_sum, of_config.key_reuse):
    assert row(subject).passed is True, row(subject)


@pytest.mark.parametrize(
  ("name", "field"),
  [
    ("Always", "model.name"),
    ("BatchNormalised", "model.name"),
  ],
)
def test_what_cannot_be_trained_so_is_one_line(name, field):
  with refuses(field) as caught:
    build.assemble(_config(**{"model.name": f"{_OWN}{name}", "model.options": {}}))
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
