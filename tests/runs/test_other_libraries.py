"""Runs of nnx and Equinox models: resume bit for bit, first parameters, clients, attacks."""

import jax
import numpy as np
import pytest

from configs import quickstart
from configs.fed import quickstart as fed_quickstart
from dpjax import data
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.run import loop, run_keys
from tests.refuses import refuses
from tests.runs import stops

pytest.importorskip("equinox")
_MODULE = "tests.core.models.other_libraries"


def _config(name, **changes):
  small = {
    "grad_method": "vmap", "num_steps": 4, "eval_every": 2, "checkpoint_every": 2,
    "data.limit": 200, "privacy.epsilon": None, "privacy.noise_multiplier": 1.0,
    "privacy.sampling_prob": 0.2, "model.name": f"{_MODULE}:{name}",
    "model.options": {"rate": 0.3}, "noise_seed": 0,
  }  # fmt: skip
  return fields.replace_all(fields.replace_all(quickstart.get_config(), small), changes)


def _params(folder):
  with np.load(folder / "params.npz") as held:
    return dict(held)


@pytest.mark.cases(long=["Equinox"], slow=...)
@pytest.mark.parametrize("name", ["Nnx", pytest.param("Equinox", marks=pytest.mark.long)])
def test_a_run_goes_on_bit_for_bit_and_starts_another(name, tmp_path, monkeypatch):
  whole = loop.train(_config(name), tmp_path / "whole")
  stops.stop_after(monkeypatch, 3, stops.die)
  with pytest.raises(KeyboardInterrupt):
    loop.train(_config(name), tmp_path / "stopped")
  resumed = loop.train(_config(name), tmp_path / "stopped")
  first = _params(tmp_path / "whole")
  second = _params(tmp_path / "stopped")
  assert list(first) == list(second) and "params/head/bias" in first
  for leaf, values in first.items():
    np.testing.assert_array_equal(second[leaf], values)
  assert whole["params_sha256"] == resumed["params_sha256"]
  assert _MODULE in whole["starts"][0]["modules"]
  # Another data set starts from these weights, and trains the last layer alone.
  other = _config(name, pretrained=str(tmp_path / "whole" / "params.npz"), trainable="head")
  train, test = data.load("digits")
  renamed = tuple(
    data.from_arrays(1.0 - part.x, part.y, num_classes=10, name="negatives")
    for part in (train.subset(slice(200, 400)), test)
  )
  other = fields.replace_all(other, {
    "data.name": f"{__name__}:negatives", "data.limit": None, "data.num_examples": 200,
  })  # fmt: skip
  loop.train(other, tmp_path / "other", data=renamed)
  assert sorted(_params(tmp_path / "other")) == [
    leaf for leaf in sorted(first) if "/head/" in leaf
  ]


def negatives():
  """Stands for the data of the second run, which the test hands over itself."""
  raise AssertionError("is never loaded")


def _fed_config(name, **changes):
  small = {
    "num_rounds": 1, "data.limit": 100, "partition.num_clients": 10,
    "clients_per_round": 4.0, "local.epochs": 1, "privacy.epsilon": None,
    "privacy.noise_multiplier": 1.0, "model.name": f"{_MODULE}:{name}", "model.options": {},
  }  # fmt: skip
  return fields.replace_all(fields.replace_all(fed_quickstart.get_config(), small), changes)


@pytest.mark.slow
def test_clients_train_a_module_of_nnx(tmp_path):
  result = loop.train(_fed_config("Nnx"), tmp_path)
  assert result["num_parameters"] == 64 * 8 + 8 + 8 * 10 + 10
  assert "params/body/kernel" in _params(tmp_path)


@pytest.mark.parametrize(
  "model", [{"name": f"{_MODULE}:Nnx", "options": {"rate": 0.5}},
            {"name": "mlp", "options": {"features": (8,), "dropout": 0.5}}]
)  # fmt: skip
def test_clients_have_no_keys_for_dropout(model):
  config = _fed_config("Nnx", **{f"model.{field}": value for field, value in model.items()})
  with refuses("model.name"):
    federated.assemble(config)


def test_first_parameters_of_many_models_are_drawn_in_one_trace():
  # Attacks train models side by side: each starts from `start` inside a traced function.
  config = _config("NnxConstant", **{"model.options": {}})
  train, _ = data.load("digits")
  random = run_keys.draw(0, noise_seed=0)
  draw = jax.jit(
    jax.vmap(lambda key: build.start(config, train, random._replace(init=key))[2])
  )
  drawn = draw(jax.random.split(jax.random.key(0), 3))
  kernels = drawn["params"]["head"]["kernel"]
  assert kernels.shape == (3, 64, 10) and np.std(np.asarray(kernels), axis=0).min() > 0
