"""A run that begins from an earlier one's parameters, and what it says of them."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest

from dpjax import data, names, trees
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack import finished
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  Sgd,
  TrainConfig,
)
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.run import loop, run_keys, saved, workdir
from dpjax.serving.predictor import Predictor
from dpjax.validate import UserError
from tests.refuses import refuses


def _data(num_classes, name):
  rng = np.random.default_rng(num_classes)
  x, y = rng.random((24, 4), np.float32), np.arange(24) % num_classes
  made = data.from_arrays(x, y, num_classes=num_classes, name=name)
  return made, made


def synthetic():
  return _data(3, "synthetic")


def own():
  return _data(2, "own")


_FIRST = "tests.runs.test_saved:synthetic"


def _config(**changes):
  config = TrainConfig(
    data=DataConfig(name="own.npz", num_examples=24),
    model=ModelConfig(name="mlp", options={"features": (3,)}),
    privacy=DpSgd(epsilon=None, noise_multiplier=1.0, sampling_prob=0.25),
    num_steps=2, eval_every=2, checkpoint_every=2,
  )  # fmt: skip
  return fields.replace_all(config, changes)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
  """What a finished run of three classes leaves of its model."""
  folder = tmp_path_factory.mktemp("first")
  layer = lambda *shape: {"kernel": np.ones(shape, np.float32), "bias": np.zeros(shape[1:])}
  params = {"params": {"dense_0": layer(4, 3), "head": layer(3, 3)}}
  workdir.save_params(folder / "params.npz", params)
  result = {"dataset": _FIRST, "params_sha256": trees.sha256(params)}
  (folder / "result.json").write_text(json.dumps(result))
  return folder / "params.npz"


@pytest.mark.long
def test_a_run_begins_from_a_run(tmp_path):
  plain = {
    "data.name": _FIRST,
    "data.num_examples": None,  # read by private runs alone
    "privacy": Sgd(sampling_prob=0.25),
  }
  loop.train(_config(**plain), tmp_path / "first")
  path = str(tmp_path / "first" / "params.npz")
  own = "tests.runs.test_saved:own"
  result = loop.train(_config(**{"data.name": own, "pretrained": path}), tmp_path / "own")
  assert result["pretrained_on"] == [_FIRST]
  held = workdir.recall(tmp_path / "own")
  assert held["weights_sha256"] == {"pretrained": names.weights_sha256(path, "pretrained")}


@pytest.mark.slow
def test_who_rebuilds_a_model_needs_the_weights_that_its_run_began_with(first, tmp_path):
  weights = tmp_path / "first" / "params.npz"
  shutil.copytree(first.parent, weights.parent)
  config = _config(**{"pretrained": str(weights), "trainable": "head"})
  parts = _data(2, "own")
  result = loop.train(config, tmp_path / "own", data=parts)
  workdir.check_weights(config, result)
  with np.load(weights) as held:
    np.savez(weights, **{name: value + 1 for name, value in held.items()})
  with refuses("pretrained"):
    workdir.check_weights(config, result)
  for read in (Predictor.load, finished.attack_on):
    with refuses("run") as caught:
      read(tmp_path / "own")
    assert "pretrained" in str(caught.value)


def _begun(first, num_classes=2, **changes):
  config = _config(**{"pretrained": str(first)} | changes)
  return build.assemble(config, _data(num_classes, "own"))


def test_all_but_another_head_is_taken(first):
  held = dict(np.load(first))
  run, random = _begun(first), build.assemble(_config(), _data(2, "own"))
  layer = run.params["params"]["dense_0"]
  np.testing.assert_array_equal(layer["kernel"], held["params/dense_0/kernel"])
  same = run.params["params"]["head"]["kernel"] == random.params["params"]["head"]["kernel"]
  assert same.all() and run.params["params"]["head"]["kernel"].shape == (3, 2)


def test_the_folder_of_a_run_is_its_parameters(first):
  by_file = _config(pretrained=str(first))
  by_folder = _config(pretrained=str(first.parent))
  digests = [
    names.weights_sha256(config.pretrained, "pretrained") for config in (by_file, by_folder)
  ]
  assert digests[0] == digests[1]
  runs = [build.assemble(config, _data(2, "own")) for config in (by_file, by_folder)]
  jax.tree.map(np.testing.assert_array_equal, runs[0].params, runs[1].params)
  assert runs[1].pretrained_on == [_FIRST] and runs[1].guarantee.kind == "claimed"
  with refuses("pretrained"):
    build.Central(_config(pretrained=str(first.parent.parent))).check()


def test_a_head_of_the_same_shape_is_taken(first):
  head = _begun(first, 3).params["params"]["head"]["kernel"]
  np.testing.assert_array_equal(head, np.load(first)["params/head/kernel"])


def test_the_statement_says_from_what(first):
  run = _begun(first)
  assert list(run.pretrained_on) == [_FIRST] and run.guarantee.kind == "claimed"
  assert _FIRST in run.guarantee.failed_assumptions[0]  # nobody can check what it knows
  text = run.guarantee.statement(2)
  assert "that there are none is assumed" in text and "Privacy statement" in text
  assert "on no record of anybody's" in saved.statement("a", ["random_process"])
  alone = build.assemble(_config(), _data(2, "own")).guarantee
  # All of the text says that it is a claim, also the part about the plan.
  assert alone.words(2, "claimed") in text and alone.statement(2) not in text


def test_the_runs_own_data_are_refused(first):
  with refuses("pretrained"):
    _begun(first, 3, **{"data.name": _FIRST})


def test_versions_and_other_names_of_the_runs_own_data_are_seen(first, tmp_path):
  result = json.loads((first.parent / "result.json").read_text())
  (tmp_path / "params.npz").write_bytes(first.read_bytes())
  path = str(tmp_path / "params.npz")
  for known, asked in (("mnist:3.0.1", "mnist"), ("mnist", "mnist:3.0.1")):
    (tmp_path / "result.json").write_text(json.dumps(result | {"dataset": known}))
    with refuses("pretrained"):
      saved.pretrained_on(path, asked, _data(2, "own")[0])
  digest = data.digest(_data(2, "own")[0])
  memory = run_keys.to_meta(digest, run_keys.draw(0), weights={}, config="")
  workdir.remember(tmp_path, memory)
  with refuses("pretrained"):
    saved.pretrained_on(path, "copy.npz", _data(2, "own")[0])
  assert saved.pretrained_on(path, "copy.npz", _data(3, "other")[0]) == ["mnist"]


def test_a_file_has_one_name_however_it_is_spelt(first, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  result = json.loads((first.parent / "result.json").read_text())
  (tmp_path / "params.npz").write_bytes(first.read_bytes())
  path, other = str(tmp_path / "params.npz"), _data(3, "other")[0]
  (tmp_path / "a").mkdir()
  for known in ("own.npz", "./a/../own.npz", str(tmp_path / "own.npz")):
    (tmp_path / "result.json").write_text(json.dumps(result | {"dataset": known}))
    with refuses("pretrained"):
      saved.pretrained_on(path, "./own.npz", other)
    assert saved.pretrained_on(path, "a/own.npz", other) == [known]


@pytest.mark.parametrize("nothing", [{"dataset": None}, {}, {"pretrained_on": None}])
def test_p42_a_result_that_names_no_data_proves_nothing(first, tmp_path, nothing):
  result = json.loads((first.parent / "result.json").read_text())
  (tmp_path / "params.npz").write_bytes(first.read_bytes())
  stated = {"params_sha256": result["params_sha256"]} | nothing
  (tmp_path / "result.json").write_text(json.dumps(stated))
  known = saved.pretrained_on(str(tmp_path / "params.npz"), "own", _data(3, "other")[0])
  assert len(known) == 1 and saved.assumption("a", known)


def test_our_own_safetensors_know_what_their_run_knew(tmp_path):
  """No result is bound to such a file: what lies beside it counts, and so may other data."""
  path, train = str(tmp_path / "model.safetensors"), _data(3, "other")[0]
  (unnamed,) = saved.pretrained_on(path, "x.npz", train)
  result = {"dataset": "y.npz", saved.PRETRAINED_ON: ["x.npz"]}
  (tmp_path / "result.json").write_text(json.dumps(result))
  with refuses("pretrained"):
    saved.pretrained_on(path, "x.npz", train)
  assert saved.pretrained_on(path, "z", train) == [unnamed, "y.npz", "x.npz"]


def test_so_are_those_that_the_earlier_run_began_from(first, tmp_path):
  result = json.loads((first.parent / "result.json").read_text())
  chain = {saved.PRETRAINED_ON: ["own.npz"], "params_sha256": result["params_sha256"]}
  (tmp_path / "result.json").write_text(json.dumps({"dataset": "other"} | chain))
  (tmp_path / "params.npz").write_bytes(first.read_bytes())
  with refuses("pretrained"):
    _begun(tmp_path / "params.npz")


@pytest.mark.long
def test_p42_public_data_of_a_relevance_run_are_among_what_its_weights_know(tmp_path):
  """They trained model 1 in the clear; a chain through synthetic data would hide them."""
  rng = np.random.default_rng(0)
  x, y = rng.random((50, 8, 8, 1), np.float32), np.arange(50) % 10
  np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y, num_classes=10)
  own = str(tmp_path / "own.npz")
  config = RelevanceConfig(
    data=DataConfig(name="digits", limit=50),
    model=ModelConfig(name="mlp", options={"features": (4,)}),
    method={
      "name": "radp_rigorous", "pool": 1, "shuffle": False,
      "model1": {"name": "public", "public_data": own},
    },
    epsilon=8.0, num_epochs=1, batch_size=25,
  )  # fmt: skip
  result = loop.train(config, tmp_path / "first")
  assert result["epsilon_kind"] == "claimed" and result["pretrained_on"] == [own]
  path = str(tmp_path / "first" / "params.npz")
  with refuses("pretrained"):
    saved.pretrained_on(path, own, _data(2, "own")[0])
  assert saved.pretrained_on(path, "other", _data(2, "own")[0]) == ["digits", own]


def test_unknown_parameters_are_refused(first, tmp_path):
  alone = tmp_path / "params.npz"
  alone.write_bytes(first.read_bytes())
  with refuses("pretrained"):
    _begun(alone)
  arrays = dict(np.load(first)) | {"params/head/bias": np.ones(3, np.float32)}
  np.savez(alone, **arrays)
  (tmp_path / "result.json").write_bytes((first.parent / "result.json").read_bytes())
  with refuses("pretrained"):
    _begun(alone)


def test_another_model_is_refused(first):
  with refuses("pretrained"):
    _begun(first, **{"model.options": {"features": (4,)}})


def test_no_file_and_no_params(tmp_path):
  with pytest.raises(UserError, match="pretrained=.*[Nn]o such file"):
    build.Central(_config(**{"pretrained": str(tmp_path / "none.npz")})).check()
  (tmp_path / "text.npz").write_text("text")
  with refuses("pretrained"):
    _begun(tmp_path / "text.npz")


def _cut(path):
  path.write_bytes(path.read_bytes()[:-30])


def _flipped(path):
  held = bytearray(path.read_bytes())
  held[len(held) // 3] ^= 255
  path.write_bytes(held)


def _bare(path):
  with path.open("wb") as file:
    np.save(file, np.ones(3))


def _entangled(path):
  np.savez(path, **{"a": np.ones(1), "a/b": np.ones(1)})


@pytest.mark.parametrize(
  "damage", [_cut, _flipped, _bare, _entangled, lambda path: path.write_bytes(b"")]
)
def test_a_damaged_file_is_one_line(first, tmp_path, damage):
  path = tmp_path / "params.npz"
  path.write_bytes(first.read_bytes())
  damage(path)
  with refuses("pretrained") as caught:
    _begun(path)
  assert "\n" not in str(caught.value)


_WRONG = {
  "NaN": lambda leaf: leaf * np.nan,
  "infinity": lambda leaf: leaf + np.inf,
  "text": lambda leaf: leaf.astype(str),
  "bytes": lambda leaf: leaf.astype("S3"),
  "integers": lambda leaf: leaf.astype(np.int64),
  "booleans": lambda leaf: leaf > 0,
  "complex": lambda leaf: leaf.astype(np.complex64),
  "another machine's": lambda leaf: leaf.astype(">f4"),
  "dates": lambda leaf: leaf.astype(np.int64).astype("M8[s]"),
  "void": lambda leaf: leaf.astype(np.float32).view("V4"),
  "beyond float32": lambda leaf: np.full_like(leaf, 1e300, np.float64),
}


@pytest.mark.parametrize("wrong", _WRONG)
def test_weights_that_can_be_none_are_one_line_before_the_first_step(
  wrong, first, tmp_path
):
  held = dict(np.load(first))
  np.savez(tmp_path / "params.npz", **{n: _WRONG[wrong](leaf) for n, leaf in held.items()})
  tree = saved._nest(dict(np.load(tmp_path / "params.npz")))
  result = {"dataset": _FIRST, "params_sha256": trees.sha256(tree)}
  (tmp_path / "result.json").write_text(json.dumps(result))
  with refuses("pretrained") as caught:
    _begun(tmp_path / "params.npz")
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_wider_weights_are_cast_and_told(first, capsys):
  run = _begun(first)  # whose biases are float64
  assert {str(leaf.dtype) for leaf in trees.named_leaves(run.params).values()} == {
    "float32"
  }
  assert "is float64, cast to float32" in capsys.readouterr().err
