"""Files of pfl-research's benchmarks: read as its own readers do, and refused in one line."""

import json

import numpy as np
import pytest

from dpjax import data
from dpjax.data.text import PADDING_ID
from dpjax.zoo import datasets
from tests.refuses import refuses
from tests.zoo import client_files

h5py = pytest.importorskip("h5py", reason="needs the extra 'h5'")

_USERS = {
  "train": {
    "ann": [(0, ["cat"]), (255, ["cat", "dog"]), (51, [])],
    "10@N": [(102, ["sky", "red car"])],
  },
  "val": {"eve": [(204, ["dog"])]},
  "test": {"joe": [(0, ["sky"]), (255, ["sky"])]},
}
_LABELS = ("sky", "cat", "dog")


def _flair(folder, **options):
  path = folder / "flair_federated.hdf5"
  return client_files.flair(path, _USERS, _LABELS, fine=("red car", "cat"), **options)


def _as_pfl_reads(path, split, user, num_labels, prefix="labels"):
  """The targets as pfl-research's `get_multi_hot_targets` builds them."""
  with h5py.File(path) as file:
    group = file[f"/{split}/{user}"]
    targets = np.zeros((len(group["images"]), num_labels), np.float32)
    targets[np.array(group[f"{prefix}_row"]), np.array(group[f"{prefix}_col"])] = 1
    return np.array(group["images"]) / 255, targets


def test_photographs_have_their_users_and_labels(tmp_path):
  path = _flair(tmp_path)
  train, test = datasets.pfl_federation(path.name, tmp_path, num_classes=3)
  assert train.client_ids == ("10@N", "ann") and test.client_ids == ("eve",)
  assert train.dataset.target == data.Labels(("cat", "dog", "sky"))
  for split, federation in (("train", train), ("val", test)):
    for user in federation.client_ids:
      images, targets = _as_pfl_reads(path, split, user, 3)
      client = federation.client(user)
      np.testing.assert_allclose(client.x, images, atol=1e-6)
      np.testing.assert_array_equal(client.y, targets)


def test_fine_labels_other_splits_and_fewer_examples(tmp_path):
  path = _flair(tmp_path)
  train, test = datasets.pfl_federation(
    path, num_classes=2, fine_grained=True, test_split="test", max_examples=2
  )
  assert train.dataset.target == data.Labels(("cat", "red car"))
  assert train.sizes.tolist() == [1, 2] and test.client_ids == ("joe",)
  _, targets = _as_pfl_reads(path, "train", "ann", 2, "fine_grained_labels")
  np.testing.assert_array_equal(train.client("ann").y, targets[:2])


def test_an_image_shrinks_to_means_of_squares(tmp_path):
  path = _flair(tmp_path)
  noise = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
  with h5py.File(path, "r+") as file:
    file["train/ann/images"][...] = noise
  train, _ = datasets.pfl_federation(path, num_classes=3, image_size=4)
  means = noise.reshape(3, 4, 2, 4, 2, 3).mean(axis=(2, 4)) / 255
  np.testing.assert_allclose(train.client("ann").x, means, atol=1e-6)
  assert train.dataset.x.dtype == np.float32


def test_sentences_carry_the_word_after_their_last(tmp_path):
  users = {
    "train": {"7": [[18, 4, 5, 19], [18, 3, 19]], "12": [[18, *range(1, 10)]]},
    "val": {"8": [[18, 2, 19]]},
  }
  path = client_files.pfl_sentences(tmp_path / "stackoverflow.hdf5", users)
  train, test = datasets.pfl_federation(path)
  assert train.client_ids == ("12", "7") and train.dataset.vocab_size == 20
  assert train.client("7").x.tolist() == [[18, 4, 5, 19, 0, 0, 0], [18, 3, 19, 0, 0, 0, 0]]
  # Cut as pfl-research cuts it: six words, and the seventh as the last target.
  assert train.client("12").x.tolist() == [[18, 1, 2, 3, 4, 5, 6]]
  assert test.dataset.x.dtype == np.int32 and PADDING_ID == 0
  fewer, _ = datasets.pfl_federation(path, max_examples=1)
  assert fewer.client("7").x.tolist() == [[18, 4, 5, 19, 0, 0, 0]]


@pytest.mark.parametrize(
  ("options", "field"),
  [
    ({"num_classes": None}, "num_classes"),
    ({"num_classes": 17}, "num_classes"),
    ({"image_size": 3}, "image_size"),
    ({"image_size": 0}, "image_size"),
    ({"image_size": 16}, "image_size"),
    ({"max_examples": 0}, "max_examples"),
    ({"test_split": "train"}, "test_split"),
    ({"name": "none.hdf5"}, "name"),
    ({"name": "a.sqlite"}, "name"),
  ],
)
def test_an_option_that_does_not_fit_is_one_line(tmp_path, options, field):
  path = _flair(tmp_path)
  with refuses(field) as error:
    datasets.pfl_federation(**{"name": str(path), "num_classes": 3, **options})
  assert "\n" not in str(error.value)


def _without(name):
  def change(file):
    del file[name]

  return change


def _set(name, value):
  def change(file):
    if name in file:
      del file[name]
    file[name] = value

  return change


@pytest.mark.parametrize(
  ("change", "says"),
  [
    (_without("val"), "cannot be read"),
    (_without("metadata"), "cannot be read"),
    (_without("train/ann"), ""),
    (_without("train/ann/images"), "cannot be read"),
    (_without("train/ann/labels_row"), "user 'ann' of train: "),
    (_set("train/ann/labels_row", np.array([9], np.uint16)), "user 'ann' of train: "),
    (_set("train/ann/labels_col", np.array([0, 1, 3], np.uint8)), "user 'ann' of train: "),
    (_set("train/ann/labels_row", np.array([1], np.uint16)), "must be pairs of places"),
    (_set("train/ann/labels_col", np.array([0, -1, 1])), "must be pairs of places"),
    (_set("train/ann/images", np.zeros((3, 8, 8, 3), np.float32)), "images must be bytes"),
    (_set("train/ann/images", np.zeros((3, 8, 9, 3), np.uint8)), "images must be bytes"),
    (_set("train/ann/images", np.zeros((3,), np.uint8)), "images must be bytes"),
    (_set("metadata/label_mapping", "["), "cannot be read"),
    (_set("metadata/label_mapping", json.dumps({"a": 0, "b": 2, "c": 3})), "from 0"),
    (_set("metadata/label_mapping", json.dumps({"a": -1, "b": 0, "c": 1})), "from 0"),
    (_set("metadata/label_mapping", "[1, 2, 3]"), "cannot be read"),
  ],
)
def test_a_damaged_file_of_photographs_is_one_line(tmp_path, change, says):
  path = _flair(tmp_path)
  with h5py.File(path, "r+") as file:
    change(file)
  if not says:
    # One user fewer is a sound file.
    assert datasets.pfl_federation(path, num_classes=3)[0].client_ids == ("10@N",)
    return
  with refuses("name") as error:
    datasets.pfl_federation(path, num_classes=3)
  assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize(
  ("change", "field"),
  [
    (_set("train/7/targets", np.zeros((2, 6), np.int32)), "name"),
    (_set("train/7/inputs", np.zeros((2, 1), np.int32)), "name"),
    (_set("train/7/targets", np.zeros((1, 6), np.int32)), "name"),
    (_set("train/7/inputs", np.zeros((2, 6))), "name"),
    (_set("metadata/pad_symbol", 3), "name"),
    (
      _set("metadata/vocabulary_size", 4),
      "name",
    ),
    (_set("metadata/max_sequence_length", 9), "name"),
    (_without("metadata/vocabulary_size"), "name"),
  ],
)
def test_a_damaged_file_of_sentences_is_one_line(tmp_path, change, field):
  users = {"train": {"7": [[18, 4, 5, 19], [18, 3, 19]]}, "val": {"8": [[18, 2, 19]]}}
  path = client_files.pfl_sentences(tmp_path / "stackoverflow.hdf5", users)
  with h5py.File(path, "r+") as file:
    change(file)
  with refuses(field) as error:
    datasets.pfl_federation(path)
  assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_options_of_photographs_are_refused_for_sentences(tmp_path):
  users = {"train": {"7": [[18, 4, 19]]}, "val": {"8": [[18, 2, 19]]}}
  path = client_files.pfl_sentences(tmp_path / "stackoverflow.hdf5", users)
  for field, value in {"num_classes": 3, "image_size": 4}.items():
    with refuses(field, value=value):
      datasets.pfl_federation(path, **{field: value})
  path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(500))
  with refuses("name"):
    datasets.pfl_federation(path)
