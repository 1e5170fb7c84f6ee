"""Features of patches: against loops of float64, and that no image moves another's features."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

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
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.federated.config import FedConfig, FedDataConfig
from dpjax.experiments.run import model_inputs
from dpjax.validate import UserError
from dpjax.zoo import networks
from dpjax.zoo.networks import patches
from tests.refuses import refuses


def _random_images(shape, seed=1):
  """Blocks of one brightness each, beside noise, so that some patches are alike."""
  rng = np.random.default_rng(seed)
  coarse = rng.random((shape[0], 3, 3, shape[3]))
  large = coarse.repeat(4, axis=1).repeat(4, axis=2)[:, : shape[1], : shape[2]]
  return (0.7 * large + 0.3 * rng.random(shape)).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def _few_patches():
  """Learns a small first dictionary, from a twentieth of the patches."""
  small = {"_PATCHES": 5000, "_FIRST_WORDS": 6, "_AXES": 30}
  with mock.patch.multiple(patches, **small):
    yield


@functools.cache
def _network(height=9, width=11, colours=3):
  return networks.learned_patches(_random_images((60, height, width, colours)), words=7)


def _bins(size, count):
  """Bins of an axis; neighbours share an entry where they do not divide it."""
  return [slice(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def _codes(image, layer, side, grid):
  """Averages of one layer by their definition, in loops of float64: [grid, grid, 2 k]."""
  down = image.shape[0] - side + 1
  right = image.shape[1] - side + 1
  alike = np.empty((down, right, layer.words.shape[1]))
  for i in range(down):
    for j in range(right):
      patch = image[i : i + side, j : j + side].ravel()
      normal = (patch - patch.mean()) / np.sqrt(patch.var() + 10 / 255**2)
      alike[i, j] = (normal - layer.mean) @ layer.axes @ layer.words
  both = np.concatenate([np.maximum(sign * alike - 0.5, 0) for sign in (1, -1)], axis=2)
  cells = [
    [both[rows, columns].mean(axis=(0, 1)) for columns in _bins(right, grid)]
    for rows in _bins(down, grid)
  ]
  return np.array(cells)


def _standard(averages):
  roots = np.sqrt(averages)
  return (roots - roots.mean()) / np.sqrt(roots.var() + 1e-5)


def _oracle(image, network):
  """Features of one image by their definition."""
  padded = np.pad(image.astype(np.float64), ((1, 1), (1, 1), (0, 0)), mode="reflect")
  height, width, _ = image.shape
  moved = [padded[i : i + height, j : j + width] for i in (0, 2) for j in (0, 2)]
  firsts = [_standard(_codes(each, network.first, patches.SIDE, 9)) for each in moved]
  second = np.mean([_codes(each, network.second, 3, 2) for each in firsts], axis=0)
  values = (_standard(second).ravel() - network.centre) @ network.directions
  return values / np.sqrt(np.square(values).mean() + 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 9, 11, 3), (3, 8, 8, 1)])
def test_features_are_those_of_the_definition(shape):
  network = _network(*shape[1:])
  x = _random_images(shape, seed=2)
  # A picture of one colour has no patch of size.
  x[0] = 0.25
  seen = networks.patch_features(x, network)
  wanted = np.stack([_oracle(image, network) for image in x])
  assert seen.shape == (shape[0], network.directions.shape[1])
  np.testing.assert_allclose(seen, wanted, rtol=2e-3, atol=2e-3)
  # A definition with another threshold is told from this one.
  assert np.abs(seen[1] - wanted[2]).max() > 0.1


@pytest.mark.slow
def test_a_record_moves_its_own_features_alone_wherever_it_stands():
  """Bit for bit: one record less moves the others to another place of another chunk."""
  network = _network()
  x = _random_images((2 * patches._CHUNK + 3, 9, 11, 3), seed=3)
  whole = networks.patch_features(x, network)
  for gone in (0, patches._CHUNK - 1, len(x) - 1):
    left = networks.patch_features(np.delete(x, gone, axis=0), network)
    np.testing.assert_array_equal(left, np.delete(whole, gone, axis=0))
  other = x.copy()
  other[1] = 1 - other[1]
  changed = networks.patch_features(other, network)
  np.testing.assert_array_equal(np.delete(changed, 1, 0), np.delete(whole, 1, 0))
  assert np.abs(changed[1] - whole[1]).max() > 0.1
  alone = networks.patch_features(x[5:6], network)
  np.testing.assert_array_equal(alone[0], whole[5])


def test_mirror_images_have_the_same_mirrored_features():
  network = _network()
  x = _random_images((4, 9, 11, 3), seed=4)
  seen = [
    networks.patch_features(each, network, mirrored=True) for each in (x, x[:, :, ::-1])
  ]
  np.testing.assert_array_equal(*seen)
  assert np.abs(seen[0] - networks.patch_features(x, network)).max() > 0.01


@pytest.mark.slow
def test_what_is_learnt_evens_out_random_images_and_repeats():
  images = _random_images((60, 9, 11, 3))
  network = _network()
  again = networks.learned_patches(images, words=7)
  jax.tree.map(np.testing.assert_array_equal, network, again)
  layers = (network.first, network.second)
  for values in (*(part for layer in layers for part in layer[1:]), network.directions):
    # Rounded, so that the last digits of a decomposition do not matter.
    np.testing.assert_array_equal(values, values.astype(np.float16).astype(np.float32))
  for layer in layers:
    np.testing.assert_allclose(np.linalg.norm(layer.words, axis=0), 1, atol=2e-3)
  assert network.directions.shape == (56, 56)
  raw = np.asarray(patches._averages(*layers, images, mirrored=True))
  along = (raw - network.centre) @ network.directions
  covariance = along.T @ along / len(along)
  variances = np.linalg.eigvalsh(np.cov(raw.T, bias=True))[::-1]
  # Larger directions stay a little larger.
  wanted = variances / (variances + 1e-5) ** 0.7
  np.testing.assert_allclose(np.diag(covariance)[:40], wanted[:40], rtol=0.02)
  # Without directions the largest is many times the others.
  assert variances[0] > 20 * variances[30]


@pytest.mark.parametrize("value", [-0.1, 1.5, np.nan, np.inf])
def test_values_that_are_no_image_are_refused(value):
  x = np.zeros((2, 9, 11, 3), np.float32)
  x[1, 2, 3, 0] = value
  with refuses("x") as error:
    networks.patch_features(x, _network())
  assert "\n" not in str(error.value)
  with refuses("images"):
    networks.learned_patches(x)


@pytest.mark.parametrize(
  ("shape", "field"),
  [
    ((2, 9, 11, 1), "x"),
    ((2, 6, 11, 3), "x"),
    ((2, 9, 97, 3), "x"),
    ((9, 11, 3), "x"),
    ((2, 9, 11, 17), "x"),
    ((2, 9, 11, 0), "x"),
  ],
)
def test_images_of_another_kind_are_refused(shape, field):
  with refuses(field) as error:
    networks.patch_features(np.zeros(shape, np.float32), _network())
  assert "\n" not in str(error.value)
  with pytest.raises(UserError):
    patches.patch_shape(shape if shape[-1] != 1 else (1, 9))


def test_an_error_does_not_tell_the_number_of_records():
  with refuses("x") as error:
    networks.patch_features(np.zeros((4321, 5, 9, 3), np.float32), _network())
  assert "4321" not in str(error.value)


@pytest.mark.cases(slow=["<lambda>-images2"])
@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda x: networks.learned_patches(x, words=0), "words"),
    (lambda x: networks.learned_patches(x, words=2.5), "words"),
    (lambda x: networks.learned_patches(x[:0]), "images"),
    (lambda x: networks.learned_patches(x[:1]), "images"),
    (lambda x: networks.learned_patches(0 * x + 0.5), "images"),
    (lambda x: networks.learned_patches(list(x)), "images"),
    (lambda x: networks.learned_patches(255 * x), "images"),
    (lambda x: networks.patch_features(x + 0j, _network()), "x"),
    (lambda x: networks.patch_features(x.astype(str), _network()), "x"),
    (lambda x: networks.patch_features(x, None), "network"),
    (lambda x: networks.patch_features(x, tuple(_network())), "network"),
    (lambda x: networks.patch_features(x, _network(), mirrored="no"), "mirrored"),
  ],
)
def test_a_wrong_argument_is_one_line(call, field):
  with refuses(field) as error:
    call(_random_images((3, 9, 11, 3)))
  assert "\n" not in str(error.value)


@pytest.mark.slow
def test_double_precision_and_other_types_change_nothing():
  network = _network()
  x = (_random_images((3, 9, 11, 3)) * 4).round().clip(0, 4) / 4
  seen = networks.patch_features(x, network)
  with jax.enable_x64(True):
    again = networks.learned_patches(_random_images((60, 9, 11, 3)), words=7)
    np.testing.assert_array_equal(again.second.words, network.second.words)
    doubled = networks.patch_features(x.astype(np.float64), network)
  np.testing.assert_allclose(doubled, seen, atol=1e-5)
  for dtype in (np.float64, np.float16, ">f4"):
    np.testing.assert_array_equal(networks.patch_features(x.astype(dtype), network), seen)


def test_no_images_have_no_features():
  assert networks.patch_features(np.zeros((0, 9, 11, 3)), _network()).shape == (0, 56)


# --- in a run


@pytest.fixture
def small(monkeypatch):
  """Features of few words, from few random images."""
  features.learned_network.cache_clear()
  monkeypatch.setattr(patches, "WORDS", 8)
  monkeypatch.setattr(patches, "DIRECTIONS", 30)
  monkeypatch.setattr(features, "_PROCESSES", 4)
  monkeypatch.setattr(features, "_IMAGES", 20)
  yield
  features.learned_network.cache_clear()


def _dataset(split, count=12, shape=(8, 8, 3)):
  rng = np.random.default_rng(3)
  x = rng.random((count, *shape), np.float32)
  return Dataset(x, np.arange(count, dtype=np.int32) % 2, "pictures", 2, split)


def test_a_runs_features_are_of_no_data_and_its_epsilon_is_proved(small):
  config = TrainConfig(
    data=DataConfig(name="pictures.npz", num_examples=12),
    model=ModelConfig("patches_linear", mirrored=True),
    privacy=DpSgd(epsilon=None, noise_multiplier=1.0, sampling_prob=0.5),
    num_steps=2,
  )
  loaded = build.Central(config).with_features((_dataset("train"), _dataset("test")))
  assert loaded[0].x.shape == (12, 30)
  np.testing.assert_allclose(np.square(loaded[0].x).mean(axis=1), 1, atol=1e-3)
  # Nothing of what is learnt follows from the run's images.
  network = features.learned_network((8, 8, 3))
  others = build.Central(config).with_features((_dataset("train", 5), _dataset("test")))
  assert features.learned_network((8, 8, 3)) is network
  np.testing.assert_array_equal(others[0].x[0], loaded[0].x[0])
  run = build.assemble(config, loaded)
  assert run.guarantee.kind == "proved" and not run.pretrained_on
  assert jax.tree.leaves(run.params)[-1].shape == (30, 2)


def test_kept_features_are_those_of_these_settings(small, tmp_path):
  kept = tmp_path / "kept"
  images = _dataset("train")
  plain = features.add_features(ModelConfig("patches_linear"), images, kept=kept)
  again = features.add_features(ModelConfig("patches_linear"), images, kept=kept)
  np.testing.assert_array_equal(plain.x, again.x)
  assert len(list(kept.glob("*.features"))) == 1
  features.add_features(ModelConfig("patches_linear", mirrored=True), images, kept=kept)
  assert len(list(kept.glob("*.features"))) == 2


def test_what_is_no_image_is_one_line(small):
  table = Dataset(np.zeros((4, 6), np.float32), np.zeros(4, np.int32), "rows", 2, "train")
  for dataset, words in (
    (table, "model.name"),
    (_dataset("train", 4, (5, 9, 3)), "x"),
  ):
    with refuses(words) as error:
      features.add_features(ModelConfig("patches_linear"), dataset)
    assert "\n" not in str(error.value)


def test_centred_images_are_refused_before_any_data_are_read():
  config = TrainConfig(
    data=DataConfig(name="digits", center=True), model=ModelConfig("patches_linear")
  )
  with refuses("data.center", value=True) as error:
    build.Central(config).check()
  assert "\n" not in str(error.value)
  over_clients = FedConfig(
    data=FedDataConfig(name="digits", center=True), model=config.model
  )
  with refuses("data.center", value=True):
    federated.check(over_clients)
  # Features of scattering are of any numbers.
  build.Central(dataclasses.replace(config, model=ModelConfig("scatter_linear"))).check()


def test_images_outside_the_range_are_refused_before_anything_is_learnt(monkeypatch):
  monkeypatch.setattr(features, "learned_network", lambda shape: pytest.fail("learnt"))
  dataset = _dataset("train")
  x = np.array(dataset.x)
  x[3, 2, 1, 0] = 1.5
  dataset = dataclasses.replace(dataset, x=x)
  with refuses("x"):
    features.add_features(ModelConfig("patches_linear"), dataset)


def test_a_service_refuses_such_a_row_by_itself(small):
  """One that failed in a batch would fail for all that wait in it."""
  dataset = _dataset("test")
  config = DataConfig(name="pictures.npz")
  facts = model_inputs.of(config, dataset, unit_range=True)
  assert facts.unit_range and not model_inputs.of(config, dataset).unit_range
  read = features.add_features(ModelConfig("patches_linear"), dataset)
  written = {}
  with mock.patch.object(
    model_inputs, "write", lambda folder, facts: written.update(f=facts)
  ):
    build.inputs_writer(config, ModelConfig("patches_linear"), read)(None)
  assert written["f"].unit_range
