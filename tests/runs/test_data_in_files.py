"""Data that are read from files as they are drawn: the same run, bit by bit."""

import inspect
import os
import shutil
import threading

import jax
import numpy as np
import pytest

from dpjax import data
from dpjax.data import cache
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build, features
from dpjax.experiments.kinds.central.config import ModelConfig, TrainConfig
from dpjax.experiments.kinds.central.features import add_features
from dpjax.experiments.run import dry_run, loop
from dpjax.experiments.run.kind import experiment_of
from tests.refuses import refuses
from tests.runs import stops

_N = 90


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
  monkeypatch.delenv(cache.VARIABLE, raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """An unpacked .npz of small grey images."""
  path, rng = tmp_path_factory.mktemp("arrays"), np.random.default_rng(0)
  for split, count in (("train", _N), ("test", 20)):
    y = rng.integers(0, 2, count)
    x = rng.integers(0, 120, (count, 8, 8)) + 100 * y[:, None, None]
    np.save(path / f"x_{split}.npy", x.astype(np.uint8))
    np.save(path / f"y_{split}.npy", y)
  np.save(path / "num_classes.npy", 2)
  return path


def _config(folder, **overrides):
  small = {
    "data.name": f"{folder}/",
    "data.num_examples": _N,
    "model.name": "linear",
    "num_steps": 6,
    "eval_every": 3,
    "checkpoint_every": 2,
    "privacy.epsilon": None,
    "privacy.noise_multiplier": 1.0,
    "privacy.sampling_prob": 0.2,
    "resident": False,
    "noise_seed": 0,
  }
  return fields.replace_all(fields.replace_all(TrainConfig(), small), overrides)


def _threads():
  return {thread.name for thread in threading.enumerate()}


@pytest.mark.long
def test_a_run_may_go_on_where_the_data_lie_elsewhere(folder, tmp_path, monkeypatch):
  """From memory to files, and from files to memory: were a batch another one, or read twice or
  not at all, the two would differ."""
  before, results = _threads(), []
  for first in (True, False):
    stops.stop_after(monkeypatch, 3)  # by SIGTERM: in the middle of a reader's work
    with pytest.raises(loop.Interrupted, match="stopped at step 3"):
      loop.train(_config(folder, resident=first), tmp_path / f"{first}")
    assert _threads() == before
    results.append(loop.train(_config(folder, resident=not first), tmp_path / f"{first}"))
    assert _threads() == before
  for name in ("params_sha256", "test_accuracy", "epsilon"):
    assert results[0][name] == results[1][name]


@pytest.mark.cases(slow=["canaries"], long=...)
@pytest.mark.parametrize(
  "overrides",
  [
    {"data.center": True, "data.limit": 70, "slices": 2},
    {"privacy.normalization": {"name": "private_statistics", "clip_norms": (1.0, 1.0)}},
    {"augmentation": "shift", "audit": "canaries", "audit.num_canaries": 30},
    {
      "audit": "canaries",
      "audit.num_canaries": 30,
      "privacy.neighboring_relation": "replace_special",
      "privacy.sampler": "truncated_poisson",
    },
  ],
  ids=["preprocessed", "statistics", "canaries", "empty"],
)
def test_whatever_is_made_of_the_data_is_the_same(folder, overrides):
  def made(resident):
    run = build.assemble(_config(folder, resident=resident, **overrides))
    canaries = (
      () if run.canaries is None else (run.canaries.examples.x, run.canaries.included)
    )
    seen = (run.train.x[:], run.train.y, run.train.present, run.test.x[:], run.params)
    return run, (*seen, run.statistics, *canaries, run.random.sampler)

  (held, wanted), (read, found) = made(True), made(False)
  assert held.train.in_memory and not read.train.in_memory and not read.test.in_memory
  jax.tree.map(np.testing.assert_array_equal, found, wanted)
  assert jax.tree.structure(found) == jax.tree.structure(wanted)


def test_features_are_read_from_disk(folder, tmp_path, monkeypatch, capsys):
  overrides = {"model.name": "scatter_linear", "data.limit": 20}
  load = lambda resident: build.load_data(_config(folder, resident=resident, **overrides))
  wanted = load(True)
  for kept in (None, str(tmp_path / "kept")):
    if kept is not None:
      monkeypatch.setenv(cache.VARIABLE, kept)
    for resident in (False, True, None):
      for part, whole in zip(load(resident), wanted):
        assert part.in_memory == (resident is not False)
        np.testing.assert_array_equal(part.x[:], whole.x)
        assert data.digest(part) == data.digest(whole)
  assert len(list((tmp_path / "kept").glob("*.features"))) == 2  # train and test
  assert capsys.readouterr().err.count("features are read from") == 4


def test_large_features_are_in_a_file_on_a_cpu_alone(monkeypatch):
  shape = 60000, 7, 7, 81
  assert [features.stay_in_file(shape, where) for where in (None, True, False)] == [1, 0, 1]
  assert not features.stay_in_file((1000, 7, 7, 81), None)
  monkeypatch.setattr(features.made_for, "platform", lambda: "gpu")
  assert not features.stay_in_file(shape, None)  # in the accelerator's own memory


@pytest.mark.cases(slow=["plain"], long=...)
@pytest.mark.parametrize(
  "overrides",
  [{}, {"privacy.normalization": {"name": "private_whitening"}}],
  ids=["plain", "statistics"],
)
def test_features_in_a_file_give_the_same_parameters(
  folder, tmp_path, monkeypatch, overrides
):
  monkeypatch.setenv("TMPDIR", str(tmp_path / "features"))
  (tmp_path / "features").mkdir()
  config = {"model.name": "scatter_linear", "num_steps": 2, **overrides}
  results = []
  for resident, most in ((True, 2**26), (None, 0)):
    monkeypatch.setattr(features, "_MOST_IN_MEMORY", most)
    run = _config(folder, resident=resident, **config)
    results.append(loop.train(run, tmp_path / f"{resident}"))
  for name in ("params_sha256", "test_accuracy", "epsilon"):
    assert results[0][name] == results[1][name]
  assert not list((tmp_path / "features").iterdir())


@pytest.mark.slow
def test_a_disk_without_space_for_features_claims_no_folder(folder, tmp_path, monkeypatch):
  config = _config(folder, **{"model.name": "scatter_linear"})
  monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
  with refuses("TMPDIR"):
    loop.train(config, tmp_path / "run")
  assert not (tmp_path / "run").exists()
  stops.stop_after(monkeypatch, 3)
  (tmp_path / "missing").mkdir()
  with pytest.raises(loop.Interrupted):
    loop.train(config, tmp_path / "run")
  # A run that has begun is refused in the same way, and goes on where there is space.
  (tmp_path / "missing").rmdir()
  with refuses("TMPDIR"):
    loop.train(config, tmp_path / "run")
  monkeypatch.delenv("TMPDIR")
  assert loop.train(config, tmp_path / "run")["num_steps"] == 6


def test_a_folder_of_features_that_others_may_read_is_refused(tmp_path, monkeypatch):
  kept = tmp_path / "kept"
  kept.mkdir(mode=0o755)
  monkeypatch.setenv(cache.VARIABLE, str(kept))
  options = {"data.name": "digits", "model.name": "scatter_linear"}
  with refuses("DPJAX_CACHE_DIR"):
    build.load_data(fields.replace_all(TrainConfig(), options))


def test_features_in_units_of_their_typical_size_are_others(folder, tmp_path, monkeypatch):
  monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
  tmp_path.chmod(0o700)
  source = data.load(f"{folder}/")[1]
  model = ModelConfig("scatter_linear")
  ways = [add_features(model, source, own, tmp_path) for own in (True, False)]
  again = [add_features(model, source, own) for own in (True, False)]
  for kept, computed in zip(ways, again):
    np.testing.assert_array_equal(kept.x, computed.x)
  assert abs(ways[0].x - ways[1].x).max() > 0.1


@pytest.mark.parametrize("name", ["scattering", "scatter_heads", "random_images"])
def test_kept_features_are_those_of_this_code(name, folder, tmp_path, monkeypatch):
  """Of typical sizes too, which come from random images."""
  monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
  tmp_path.chmod(0o700)
  source, model = data.load(f"{folder}/")[1], ModelConfig("scatter_linear")
  add_features(model, source, False, tmp_path)
  read, edited = inspect.getsource, lambda module: module.__name__.endswith(f".{name}")
  code = lambda module: f"{read(module)}{'# edited' * edited(module)}"
  monkeypatch.setattr(features.inspect, "getsource", code)
  add_features(model, source, False, tmp_path)
  assert len(list(tmp_path.glob("*.features"))) == 2


# --- what can go wrong while it runs


def _cut(path):
  os.truncate(path, 1000)


def _edit(path):
  with path.open("r+b") as file:
    file.seek(-1, 2)
    file.write(b"x")


@pytest.mark.cases(long=[0])
@pytest.mark.parametrize(("harm", "field"), [(_cut, "file"), (_edit, "file")])
def test_a_file_that_changes_under_a_run_ends_it_in_one_line(folder, tmp_path, harm, field):
  copy, before = tmp_path / "copy", _threads()
  shutil.copytree(folder, copy)
  batches = build.batches(build.assemble(_config(copy)))
  next(batches)
  harm(copy / "x_train.npy")
  with refuses(field) as refused:
    for _ in range(3):  # one was read before
      next(batches)
  assert "x_train.npy" in str(refused.value) and "\n" not in str(refused.value)
  assert _threads() == before


def test_a_folder_that_is_taken_away_ends_no_run_and_no_other_data_do(folder, tmp_path):
  """Who opened a file keeps it; another one in its place is not read."""
  copy = tmp_path / "copy"
  shutil.copytree(folder, copy)
  run = build.assemble(_config(copy))
  wanted = run.train.x[:]
  shutil.rmtree(copy)
  np.testing.assert_array_equal(run.train.x[:], wanted)


@pytest.mark.slow
def test_changed_data_do_not_go_on(folder, tmp_path, monkeypatch):
  copy = tmp_path / "copy"
  shutil.copytree(folder, copy)
  stops.stop_after(monkeypatch, 1)
  with pytest.raises(loop.Interrupted):
    loop.train(_config(copy), tmp_path / "run")
  _edit(copy / "x_train.npy")
  with refuses("data.name"):
    loop.train(_config(copy), tmp_path / "run")


@pytest.mark.parametrize("name", ["digits", "shakespeare", "some.npz", "tests.mine:load"])
def test_data_that_come_whole_are_not_streamed(name):
  with refuses("resident") as refused:
    data.load(name, resident=False)
  assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_plan_of_a_run_reads_no_batch(folder, tmp_path):
  """Its steps are on zeros, which are not held either."""
  report = dry_run.report(experiment_of(_config(folder, num_steps=2)), tmp_path / "run")
  assert "in files" in report
