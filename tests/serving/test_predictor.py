"""A predictor computes what the run's evaluation computed, and says when it cannot."""

import dataclasses
import importlib.util
import json
import shutil

import jax
import numpy as np
import pytest

import dpjax
from dpjax import data, metrics
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central import config as configs
from dpjax.experiments.run import loop
from dpjax.serving import Predictor, predictor
from dpjax.validate import UserError
from tests.serving.conftest import CONFIG


@pytest.fixture(scope="module")
def raw():
  return data.load("digits")[1].x


def _of_evaluation(config, params):
  """Logits as evaluation computes them, taken out of its own compiled program."""
  run = build.assemble(config)
  seen = []

  def apply(params, x):
    logits = run.apply(params, x)
    jax.debug.callback(lambda held: seen.append(np.asarray(held)), logits, ordered=True)
    return logits

  scores = metrics.evaluate(apply, params, run.test)
  jax.effects_barrier()
  return np.concatenate(seen)[: len(run.test)], scores


def test_logits_are_those_of_the_evaluation_in_training_bit_by_bit(runs, raw):
  run = runs[0]
  wanted, scores = _of_evaluation(CONFIG, run._model.params)
  assert scores["accuracy"] == run.result["test_accuracy"]
  assert scores["loss"] == run.result["test_loss"]
  assert dpjax.serving.Predictor is Predictor and run.row_exact and run.differences == []
  np.testing.assert_array_equal(run(raw), wanted)
  # One row, few and many, each in another batch size and at another place.
  for start, stop in ((0, 1), (3, 8), (40, 61), (100, 360)):
    np.testing.assert_array_equal(run(raw[start:stop]), wanted[start:stop])


@pytest.mark.parametrize("step", ["center", "parameters", "activation"])
def test_a_changed_step_is_seen(step, runs, raw):
  """The equality above can fail: each step of the way from input to logit counts."""
  model = runs[0]._model
  changes = {
    "center": {"config": dataclasses.replace(CONFIG, data=configs.DataConfig("digits"))},
    "parameters": {"params": jax.tree.map(lambda leaf: leaf * 1.001, model.params)},
    "activation": {"apply": lambda params, x: jax.nn.relu(model.apply(params, x))},
  }
  broken = dataclasses.replace(model, **changes[step])
  assert not np.array_equal(broken.logits(raw), model.logits(raw))


def _without_products(params, x):
  """Logits whose bits no machine's choice of a product's kernel can change."""
  return x.reshape(len(x), -1)[:, :10]


def test_sizes_with_other_bits_are_left_out(runs):
  """A model whose bits depend on the number of rows, as XLA's products do."""
  model = runs[0]._model
  inexact = dataclasses.replace(
    model, apply=lambda params, x: _without_products(params, x) + 1e-6 * (len(x) == 32)
  )
  run = Predictor(inexact, runs[0].result, runs[0]._folder, sizes=(8, 32, 128))
  assert run.sizes == [8, 128, 500] and run.row_exact
  # Which sizes of a real model have the same bits is XLA's choice: none has on some machines.
  assert set(runs[0].sizes) <= {8, 32, 128, 500} and 500 in runs[0].sizes
  # A row that depends on its neighbours can never be exact, and says so.
  mixing = dataclasses.replace(
    model, apply=lambda params, x: model.apply(params, x) + x.mean(axis=(1, 2, 3))[0] * 1e-6
  )
  assert not Predictor(mixing, runs[0].result, runs[0]._folder, sizes=(8,)).row_exact


@pytest.mark.slow
def test_a_run_of_scattering_features_is_served_without_its_data(tmp_path, monkeypatch):
  config = dataclasses.replace(
    CONFIG, model=configs.ModelConfig("scatter_linear"), num_steps=1, eval_every=1
  )
  loop.train(config, tmp_path / "run")
  wanted, _ = _of_evaluation(config, Predictor.load(tmp_path / "run")._model.params)
  x = data.load("digits")[1].x

  def refuse(*args, **kwargs):
    raise AssertionError("a server has no training data")

  monkeypatch.setattr(build, "load_data", refuse)
  run = Predictor.load(tmp_path / "run")
  assert run.inputs.shape == (8, 8, 1)
  np.testing.assert_array_equal(run(x), wanted)
  np.testing.assert_allclose(run(x[5:6]), wanted[5:6], atol=1e-5)


_TABLE = {
  "columns": {
    "age": {"lower": 0, "upper": 120, "missing": 60},
    "sex": {"values": ["f", "m"]},
  },
  "target": {"column": "ill", "values": ["no", "yes"]},
  "split": {"test_share": 0.5, "salt": 3},
}


@pytest.fixture(scope="module")
def of_table(tmp_path_factory):
  folder = tmp_path_factory.mktemp("table")
  rng = np.random.default_rng(0)
  lines = ["age,sex,ill"]
  for _ in range(60):
    lines.append(
      f"{rng.integers(20, 100)},{'fm'[rng.integers(2)]},{['no', 'yes'][rng.integers(2)]}"
    )
  (folder / "people.csv").write_text("\n".join(lines) + "\n")
  (folder / "people.json").write_text(json.dumps(_TABLE | {"num_examples": 30}))
  config = dataclasses.replace(
    CONFIG,
    data=configs.DataConfig(name=str(folder / "people.csv")),
    model=configs.ModelConfig("linear"),
    num_steps=1,
    eval_every=1,
  )
  loop.train(config, folder / "run")
  # What the declaration says must come from the run's folder.
  (folder / "people.csv").unlink()
  (folder / "people.json").unlink()
  return Predictor.load(folder / "run")


@pytest.mark.slow
def test_rows_of_a_table_are_read_as_training_rows_were(of_table):
  by_rows = of_table([{"age": 30, "sex": "m"}, {"age": None, "sex": "f"}])
  inputs = np.array([[0.25, 0.0, 1.0], [0.5, 1.0, 0.0]], np.float32)
  np.testing.assert_array_equal(by_rows, of_table(inputs))
  np.testing.assert_array_equal(by_rows, of_table({"sex": ["m", "f"], "age": [30, None]}))
  assert of_table.inputs.labels == ("no", "yes")


class _Frame(dict):
  """What frames of pandas and polars have."""

  columns = property(lambda self: list(self.keys()))


@pytest.mark.slow
def test_a_table_of_every_kind_is_taken_and_its_other_columns_are_not_read(of_table):
  wanted = of_table([{"age": 30, "sex": "m"}, {"age": None, "sex": "f"}])
  columns = {"ill": ["no", "?"], "sex": ["m", "f"], "age": [30, None], "id": [1, "x"]}
  held = dataclasses.replace(of_table.inputs, declaration=_TABLE | {"ignore": ["id"]})
  model = dataclasses.replace(of_table._model, inputs=held)
  predictor = Predictor(model, of_table.result, of_table._folder)
  rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
  doors = [columns, _Frame(columns), rows, {**columns, "age": np.array([30, np.nan])}]
  for library in ("pandas", "polars"):
    if importlib.util.find_spec(library) is not None:
      frame = importlib.import_module(library).DataFrame(columns | {"id": ["1", "x"]})
      doors += [frame, frame[["sex", "age"]]]
  if importlib.util.find_spec("pyarrow") is not None:
    doors.append(importlib.import_module("pyarrow").table(columns | {"id": [1, 2]}))
  for door in doors:
    np.testing.assert_array_equal(predictor(door), wanted)
  with pytest.raises(UserError) as raised:
    of_table(columns)
  assert "'id' is no input" in str(raised.value)


@pytest.mark.cases(slow=["rows0-has no column 'sex'"])
@pytest.mark.parametrize(
  ("rows", "words"),
  [
    ([{"age": 30}], "has no column 'sex'"),
    ([{"age": 30, "sex": "x"}], "column 'sex': is none of the declared values"),
    ([{"age": "old", "sex": "f"}], "column 'age': is no finite number"),
    ([{"age": 30, "sex": "f", "ilk": "no"}], "column 'ilk' is no input"),
    ([{"age": 30, "sex": 2.5}], "of the kind decimal numbers"),
    ([{"age": 30, "sex": None}], "column 'sex': holds no value"),
    ([{"age": 30, "sex": "f"}, {"age": 30}], "row 2 has other columns"),
    ([{"age": [30], "sex": "f"}], "must be text, a number"),
    ([{"age": 10**400, "sex": "f"}], "must be text, a number"),
  ],
)
def test_wrong_rows_of_a_table_are_one_line(of_table, rows, words):
  with pytest.raises(UserError) as raised:
    of_table(rows)
  assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({}, "must be the folder of a finished run"),
    ({"config.json": None}, "has no config.json"),
    ({"config.json": "{"}, "is not valid JSON"),
    ({"result.json": None}, "is not finished"),
    ({"result.json": "seed"}, "is not the result of this run"),
    ({"params.npz": b"x"}, "its params.npz is not what the run wrote"),
    ({"params.npz": None}, "its params.npz is gone"),
    ({"inputs.json": "shape"}, "its inputs.json is not what the run wrote"),
    ({"inputs.json": None}, "its inputs.json is gone"),
  ],
)
def test_a_folder_that_is_no_finished_run_is_one_line(folders, tmp_path, change, words):
  folder = tmp_path / "run"
  if change:
    shutil.copytree(folders[0], folder)
  for name, content in change.items():
    path = folder / name
    if content is None:
      path.unlink()
    elif content in ("seed", "shape"):
      held = json.loads(path.read_text())
      path.write_text(json.dumps(held | {content: 7}))
    else:
      path.write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(UserError) as raised:
    Predictor.load(folder)
  assert words in str(raised.value) and "\n" not in str(raised.value)
  assert raised.value.field == "run" and str(raised.value).count("run=") == 1


def test_a_folder_without_its_secrets_is_enough(folders, tmp_path, runs, raw):
  for name in json.loads((folders[0] / "result.json").read_text())["files_sha256"]:
    shutil.copy(folders[0] / name, tmp_path / name)
  for name in ("config.json", "result.json"):
    shutil.copy(folders[0] / name, tmp_path / name)
  np.testing.assert_array_equal(Predictor.load(tmp_path)(raw[:3]), runs[0](raw[:3]))


def test_another_version_or_device_is_named(folders, runs):
  result = runs[0].result | {"versions": {"jax": "0.1"}, "device": "1 x tpu"}
  run = Predictor(runs[0]._model, result, runs[0]._folder, sizes=(8,))
  assert any(line.startswith("jax 0.1 there") for line in run.differences)
  assert run.differences[-1].startswith("1 x tpu there")


def test_bytes_of_images_are_divided_as_in_training(runs):
  held = np.full((2, 8, 8, 1), 255, np.uint8)
  np.testing.assert_array_equal(runs[0].raw(held), np.ones((2, 8, 8, 1), np.float32))
  assert runs[0](held[:0]).shape == (0, 10)


def test_only_bounded_sizes_are_compiled(runs, raw):
  """Of a model of its own, so that no other test has compiled for it."""
  model = runs[0]._model
  fresh = dataclasses.replace(model, apply=lambda params, x: _without_products(params, x))
  run = Predictor(fresh, runs[0].result, runs[0]._folder, sizes=(8, 32))
  jitted = predictor._jit(fresh.apply)
  assert run.sizes == [8, 32, 500] and jitted._cache_size() == 3
  for size in (1, 2, 3, 5, 9, 17, 33, 65, 129, 300, 360):
    run(raw[:size])
  assert jitted._cache_size() == 3
