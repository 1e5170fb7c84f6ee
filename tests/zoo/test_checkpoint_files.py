"""Checkpoints of Flax and Orbax: what a file holds is what the model gets, or one line.

The oracle is the tree that Flax and Orbax were given to save.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import shutil

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training import train_state

from dpjax import data, names
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  TrainConfig,
)
from dpjax.experiments.run import loop
from dpjax.experiments.run import workdir as owner
from dpjax.validate import UserError
from dpjax.zoo import networks
from tests.refuses import refuses
from tests.runs.stops import on_save

# Orbax reads arrays at once: where one is damaged, others end after its loop is closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def _tree(seed=0, classes=3, width=4):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return {
    "params": {
      "dense_0": {"kernel": draw(5, width), "bias": draw(width)},
      "head": {"kernel": draw(width, classes), "bias": draw(classes)},
    }
  }


_LIKE = jax.tree.map(np.zeros_like, _tree())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """(folder of checkpoints by every way to write them, the newest tree)"""
  folder = tmp_path_factory.mktemp("checkpoints")
  tree = _tree(7)
  writer = ocp.PyTreeCheckpointer()
  writer.save(folder / "tree", tree)
  writer.save(
    folder / "state", {"step": 3, "params": tree, "opt_state": {"count": np.ones(2)}}
  )
  nnx = jax.tree.map(lambda leaf: {"value": leaf}, tree["params"])
  writer.save(folder / "nnx", nnx)
  with ocp.CheckpointManager(folder / "steps") as manager:
    for step, held in ((9, _tree(1)), (10, tree)):
      manager.save(step, args=ocp.args.StandardSave(held))
  flax = folder / "flax"
  flax.mkdir()
  (flax / "checkpoint_9").write_bytes(serialization.to_bytes(_tree(1)))
  (flax / "checkpoint_10").write_bytes(serialization.to_bytes(tree))
  state = train_state.TrainState(3, lambda: 0, tree["params"], None, {"mu": tree["params"]})
  (folder / "state.msgpack").write_bytes(serialization.to_bytes(state))
  return folder, tree


_NAMES = ("tree", "state", "nnx", "steps", "flax", "state.msgpack", "flax/checkpoint_10")


def _equal(got, wanted):
  jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.slow
def test_every_way_to_save_gives_the_newest_parameters(saved):
  folder, tree = saved
  for name in _NAMES:
    _equal(networks.load_checkpoint(folder / name, _LIKE), tree)
  assert names.weights_file(str(folder / "steps")) == str(folder / "steps/10/default")
  assert names.weights_file(str(folder / "flax")) == str(folder / "flax/checkpoint_10")


def test_flax_writes_large_arrays_in_chunks_that_are_joined(tmp_path, monkeypatch):
  tree = _tree(2)
  monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 24)
  content = serialization.to_bytes(tree)
  assert content.count(b"__msgpack_chunked_array__") == 2
  (tmp_path / "a.msgpack").write_bytes(content)
  _equal(networks.load_checkpoint(tmp_path / "a.msgpack", _LIKE), tree)


def test_types_are_cast_and_a_head_of_other_classes_begins_afresh(tmp_path):
  tree = _tree(3, classes=7)
  for dtype in (np.float16, jnp.bfloat16, np.float64):
    held = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), tree)
    (tmp_path / "a.msgpack").write_bytes(serialization.to_bytes(held))
    got = networks.load_checkpoint(tmp_path / "a.msgpack", _LIKE)["params"]
    wanted = held["params"]["dense_0"]["kernel"].astype(np.float32)
    np.testing.assert_array_equal(got["dense_0"]["kernel"], wanted)
    assert got["dense_0"]["kernel"].dtype == np.float32
    assert got["head"]["kernel"].shape == (4, 3) and not got["head"]["kernel"].any()


def _refused(path, like=_LIKE):
  with pytest.raises(UserError) as error:
    networks.load_checkpoint(path, like)
  (line,) = str(error.value).splitlines()
  assert len(line) < 500
  return line


def _of(tree):
  return serialization.to_bytes(tree)


def _array(shape, dtype, content):
  return msgpack.ExtType(1, msgpack.packb((shape, dtype, content), use_bin_type=True))


def _with(name, value):
  tree = _tree()
  tree["params"]["dense_0"][name] = value
  return tree


def _packed(leaf):
  """A file whose kernel is what msgpack makes of `leaf`."""
  arrays = lambda value: _array(value.shape, value.dtype.name, value.tobytes())
  tree = jax.tree.map(arrays, _tree())
  tree["params"]["dense_0"]["kernel"] = leaf
  return msgpack.packb(tree, strict_types=True)


_nan = np.full((5, 4), np.nan, np.float32)
_HOSTILE = {
  "is a pickle, which may run code": pickle.dumps(_tree()),
  "is no checkpoint of Flax (": b"\xc1 no msgpack",
  "it holds no table of arrays": msgpack.packb([1, 2]),
  "is no checkpoint of Flax (it holds no": msgpack.packb(3),
  "lacks params/dense_0/bias": _of({"params": {"dense_0": {"kernel": np.ones((5, 4))}}}),
  "lacks params/dense_0/bias, params/dense_0/kernel": _of({}),
  "has unknown params/dense_1/kernel": _of(
    {"params": {**_tree()["params"], "dense_1": {"kernel": np.ones(1)}}}
  ),
  "is of shape (5, 9), the model wants (5, 4)": _of(_tree(width=9)),
  "params/dense_0/kernel holds values that are not finite": _of(_with("kernel", _nan)),
  "params/dense_0/bias is int32, must be": _of(_with("bias", np.ones(4, np.int32))),
  "params/dense_0/bias is no array": _of(_with("bias", "text")),
  "holds batch_stats, and models": _of({**_tree(), "batch_stats": {"a": np.ones(1)}}),
  "params/dense_0/kernel is no array": _packed(msgpack.ExtType(5, b"os.system")),
  "of Flax (cannot create an OBJECT": _packed(_array((5, 4), "object", b"\0" * 160)),
  "of Flax (": _packed(_array((2**40, 2**40), "float32", b"\0" * 8)),
  "of Flax (can": _packed(_array((-5, -4), "float32", b"\0" * 80)),
  "lacks params/dense_0/kernel": _packed({"a": _array((), "float32", b"\0" * 4)}),
  "is no checkpoint of Flax (need": _packed(
    {"__msgpack_chunked_array__": True, "shape": {}, "chunks": {}}
  ),
}  # fmt: skip


@pytest.mark.parametrize("says", _HOSTILE)
def test_a_wrong_file_of_flax_is_one_line(says, tmp_path):
  path = tmp_path / "a.msgpack"
  path.write_bytes(_HOSTILE[says])
  assert says in _refused(path)


def test_files_that_are_cut_deep_huge_or_no_files(tmp_path):
  path = tmp_path / "a.msgpack"
  whole = _of(_tree())
  for length in (0, 1, 7, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole[:length])
    assert "is no checkpoint of Flax" in _refused(path)
  path.write_bytes(whole + b"\0")
  assert "is no checkpoint of Flax" in _refused(path)
  path.write_bytes(b"\x81\xa1a" * 5000)
  assert "is no checkpoint of Flax" in _refused(path)
  # A file with holes that says it is larger than any memory.
  with path.open("wb") as file:
    file.truncate(2**43)
  assert "more than the memory" in _refused(path)
  os.remove(path)
  os.mkfifo(path)
  assert "must be a file, not a folder, a pipe" in _refused(path)
  os.remove(path)
  path.symlink_to(tmp_path / "absent")
  assert "No such file" in _refused(path)


def test_numbers_beyond_the_type_of_the_model_are_refused(tmp_path):
  path = tmp_path / "a.msgpack"
  path.write_bytes(_of(_with("bias", np.full(4, 1e300))))
  assert "params/dense_0/bias holds values that are not finite" in _refused(path)


def _changed_folder(saved, tmp_path, name="tree"):
  shutil.copytree(saved[0] / name, tmp_path / "copy")
  return tmp_path / "copy"


def test_a_wrong_folder_of_orbax_is_one_line(saved, tmp_path):
  folder = _changed_folder(saved, tmp_path)
  other = {"params": {**_LIKE["params"], "extra": {"bias": np.zeros(2, np.float32)}}}
  assert "lacks params/extra/bias" in _refused(folder, other)
  wide = jax.tree.map(np.zeros_like, _tree(width=6))
  assert "is of shape (4,), the model wants (6,)" in _refused(folder, wide)
  (folder / "link").symlink_to("/etc/hostname")
  assert "link must be a file, not a link" in _refused(folder)
  os.remove(folder / "link")
  os.mkfifo(folder / "pipe")
  assert "pipe must be a file, not a link" in _refused(folder)
  os.remove(folder / "pipe")
  _equal(networks.load_checkpoint(folder, _LIKE), saved[1])
  described = (folder / "_METADATA").read_text()
  for content in (
    "",
    "{",
    "[]",
    "{}",
    "[" * 100_000,
    described.replace("kernel", "kernal"),
  ):
    (folder / "_METADATA").write_text(content)
    assert "is no checkpoint of Orbax" in _refused(folder) or "lacks" in _refused(folder)
  (folder / "_METADATA").write_text(described)
  for place in folder.rglob("d/*"):
    place.write_bytes(place.read_bytes()[: len(place.read_bytes()) // 2])
  assert "of Orbax (" in _refused(folder)
  for place in folder.rglob("d/*"):
    os.remove(place)
  assert "of Orbax (" in _refused(folder)
  # What it left is seen here, not in the test of another module.
  gc.collect()


def test_values_of_orbax_that_are_not_finite_or_no_floats(saved, tmp_path):
  held = {"params": _with("kernel", _nan)["params"]}
  ocp.PyTreeCheckpointer().save(tmp_path / "nan", held)
  assert "kernel holds values that are not finite" in _refused(tmp_path / "nan")
  held = {"params": _with("bias", np.ones(4, np.int32))["params"]}
  ocp.PyTreeCheckpointer().save(tmp_path / "ints", held)
  assert "params/dense_0/bias is int32, must be" in _refused(tmp_path / "ints")


def _config(path):
  return TrainConfig(
    data=DataConfig(name="own.npz", num_examples=12),
    model=ModelConfig("mlp", {"features": (4,)}),
    pretrained=str(path),
    trainable={"name": "head"},
    privacy=DpSgd(epsilon=None, noise_multiplier=1.0, sampling_prob=0.5),
    num_steps=1,
  )


@pytest.mark.slow
def test_a_run_begins_from_a_checkpoint_and_says_that_its_data_are_unknown(saved, tmp_path):
  folder = _changed_folder(saved, tmp_path, "steps")
  config = fields.replace_all(_config(folder), {})
  x = np.random.default_rng(0).random((12, 5)).astype(np.float32)
  labels = np.arange(12, dtype=np.int32) % 3
  pair = tuple(data.Dataset(x, labels, "own", 3, split) for split in ("train", "test"))
  run = build.assemble(config, pair)
  whole = np.asarray(jax.jit(run.apply)(run.params, x))
  # The model of the file computes these, in float64.
  layers = saved[1]["params"]
  hidden = x.astype(np.float64) @ layers["dense_0"]["kernel"] + layers["dense_0"]["bias"]
  wanted = np.tanh(hidden) @ layers["head"]["kernel"] + layers["head"]["bias"]
  np.testing.assert_allclose(whole, wanted, rtol=1e-4, atol=1e-5)
  named = names.weights_sha256(config.pretrained, "pretrained")
  assert run.guarantee.kind == "claimed"
  assert list(run.pretrained_on) == ["data that nothing beside it names"]
  # Any other byte in the folder is another run.
  place = folder / "10/default/_METADATA"
  held = json.loads(place.read_text())
  place.write_text(json.dumps(held, indent=1))
  assert names.weights_sha256(config.pretrained, "pretrained") != named
  shutil.rmtree(folder)
  with refuses("pretrained"):
    build.Central(config).check()


@pytest.mark.slow
def test_newer_weights_are_never_taken_for_those_that_name_the_run(tmp_path):
  def save(step):
    content = serialization.to_bytes({"params": _tree(step)["params"]})
    (tmp_path / f"checkpoint_{step}").write_bytes(content)
    return hashlib.sha256(content).hexdigest()

  x = np.zeros((12, 5), np.float32)
  pair = tuple(
    data.Dataset(x, np.zeros(12, np.int32), "own", 3, split) for split in ("train", "test")
  )
  save(1)
  # Whoever writes these checkpoints goes on: before the run, and during it.
  digest = save(2)
  with on_save(lambda step: save(step + 3)):
    loop.train(_config(tmp_path), tmp_path / "run", data=pair)
  assert owner.recall(tmp_path / "run")["weights_sha256"] == {"pretrained": digest}
