"""Data sets on disk: the real ones where they are, and tiny ones written as TFDS writes."""

import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from dpjax import data
from dpjax.validate import UserError
from dpjax.zoo.datasets import prepared
from tests.refuses import refuses


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, request):
  """Only tests that ask for the real data may see the machine's own folder."""
  if "tfds_dir" not in request.fixturenames:
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)


@pytest.fixture
def text_dir(tmp_path, tfds_files):
  examples = [{"text": b"good", "label": 1}, {"text": "bád".encode(), "label": 0}]
  features = {"text": tfds_files.text_feature(), "label": tfds_files.label_feature(2)}
  splits = {"train": examples, "test": examples[:1]}
  tfds_files.write(tmp_path, "tiny_text", features, splits)
  return tmp_path


def image_examples(tfds_files, n, shape=(4, 5)):
  images = [np.full(shape, 10 * i, np.uint8) for i in range(n)]
  return [{"image": tfds_files.png(image), "label": i} for i, image in enumerate(images)]


def image_features(tfds_files):
  return {"image": tfds_files.image_feature(), "label": tfds_files.label_feature(4)}


@pytest.fixture
def image_folder(tmp_path, tfds_files):
  examples = image_examples(tfds_files, 3)
  splits = {"train": examples, "validation": examples[1:]}
  return tfds_files.write(tmp_path, "tiny_image", image_features(tfds_files), splits)


def one_line(call, *args, **kwargs) -> str:
  with pytest.raises(UserError) as caught:
    call(*args, **kwargs)
  message = str(caught.value)
  assert "\n" not in message
  return message


# --- the real data ------------------------------------------------------------------


def check_real(part, size, shape):
  assert len(part) == size and part.x.shape[1:] == shape and part.x.dtype == np.float32
  assert part.x.min() == 0 and part.x.max() == 1 and part.num_classes == 10


@pytest.mark.long
def test_real_mnist(tfds_dir):
  import tensorflow_datasets as tfds

  train, test = data.load("mnist", data_dir=tfds_dir)
  check_real(train, 60_000, (28, 28, 1))
  check_real(test, 10_000, (28, 28, 1))
  # As published: the counts of each digit, and the mean pixel of the train split.
  counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
  assert np.bincount(test.y).tolist() == counts
  counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
  assert np.bincount(train.y).tolist() == counts
  assert abs(float(train.x.mean(dtype=np.float64)) - 0.1307) < 5e-5
  # And record by record what TFDS reads, on both sides of a chunk's border.
  source = tfds.data_source("mnist", split="test", data_dir=tfds_dir, download=False)
  for i in (0, 999, 1_000, 9_999):
    np.testing.assert_array_equal(test.x[i] * np.float32(255), source[i]["image"])
    assert test.y[i] == source[i]["label"]


@pytest.mark.long
def test_real_cifar10(tfds_dir):
  train, test = data.load("cifar10", data_dir=tfds_dir)
  check_real(train, 50_000, (32, 32, 3))
  check_real(test, 10_000, (32, 32, 3))
  assert np.bincount(train.y).tolist() == [5_000] * 10
  assert np.bincount(test.y).tolist() == [1_000] * 10
  mean = train.x.mean(axis=(0, 1, 2), dtype=np.float64)
  np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=5e-5)


# --- tiny data sets -----------------------------------------------------------------


def test_text_becomes_bytes(text_dir):
  train, test = data.load("tiny_text", text_dir, max_length=5)
  assert train.x.tolist() == [[*b"good", 0], [*"bád".encode(), 0]]
  assert train.y.tolist() == [1, 0] and train.num_classes == 2
  assert train.vocab_size == 256 and len(test) == 1


def test_labels_without_a_declared_number_of_classes_are_not_counted(tmp_path, tfds_files):
  number = "tensorflow_datasets.core.features.tensor_feature.Tensor"
  plain = {"pythonClassName": number,
           "tensor": {"shape": {}, "dtype": "int64", "encoding": "none"}}  # fmt: skip
  features = {"text": tfds_files.text_feature(), "label": plain}
  examples = [{"text": b"good", "label": 1}, {"text": b"bad", "label": 0}]
  tfds_files.write(tmp_path, "counted", features, {"train": examples, "test": examples[:1]})
  with refuses("num_classes"):
    data.load("counted", tmp_path)
  assert data.load("counted", tmp_path, num_classes=2)[0].num_classes == 2
  with refuses("name"):
    data.load("counted", tmp_path, num_classes=1)


def test_images_and_a_validation_split_for_the_test(image_folder):
  train, test = data.load("tiny_image", image_folder.parents[1])
  np.testing.assert_array_equal(train.x[:, 0, 0, 0] * 255, [0, 10, 20])
  assert train.x.shape == (3, 4, 5, 1) and train.num_classes == 4
  assert (test.split, test.y.tolist()) == ("test", [1, 2])


def test_records_that_stay_in_their_files_are_the_same(image_folder, text_dir):
  for name in ("tiny_image", "tiny_text"):
    wanted = data.load(name, text_dir, max_length=5)
    found = data.load(name, text_dir, max_length=5, resident=False)
    for part, whole in zip(found, wanted):
      assert not part.in_memory and part.vocab_size == whole.vocab_size
      assert data.digest(part) == data.digest(whole)
      np.testing.assert_array_equal(part[np.array([0, 0])].x, whole.x[[0, 0]])


def test_a_record_that_spoils_while_it_is_in_use_is_one_line(image_folder):
  path = image_folder / "tiny_image-train.array_record-00000-of-00001"
  train = data.load("tiny_image", image_folder.parents[1], resident=False)[0]
  content, times = path.read_bytes(), path.stat().st_mtime_ns
  at = content.index(b"PNG")
  spoilt = content[: at - 8] + bytes(60) + content[at + 52 :]
  path.write_bytes(spoilt)  # in place
  assert "cannot be read" in one_line(train.x.__getitem__, np.array([0, 1, 2]))
  os.utime(path, ns=(times, times))
  assert "cannot be read" in one_line(train.x.__getitem__, np.array([0, 1, 2]))
  path.write_bytes(content)
  assert "changed since they were opened" in one_line(train.x.__getitem__, np.array([2]))


def test_chunks_do_not_show(image_folder, monkeypatch):
  whole = data.load("tiny_image", image_folder.parents[1])[0]
  monkeypatch.setattr(prepared, "_CHUNK", 2)
  parts = data.load("tiny_image", image_folder.parents[1])[0]
  np.testing.assert_array_equal(whole.x, parts.x)
  np.testing.assert_array_equal(whole.y, parts.y)


def test_environment_variable_is_the_default_folder(image_folder, monkeypatch):
  monkeypatch.setenv("TFDS_DATA_DIR", str(image_folder.parents[1]))
  assert len(data.load("tiny_image")[0]) == 3


def test_a_version_and_a_config_may_be_named(text_dir):
  assert len(data.load("tiny_text:1.0.0", text_dir)[0]) == 2


def test_opencv_advice_is_dropped_and_other_warnings_are_not(
  image_folder, caplog, monkeypatch
):
  from absl import logging as absl_logging

  logger = absl_logging.get_absl_logger()
  caplog.set_level(logging.WARNING, logger=logger.name)  # whatever ran before
  monkeypatch.setattr(logger, "propagate", True)
  before = list(logger.filters)
  data.load("tiny_image", image_folder.parents[1])
  assert logger.filters == before  # nothing stays behind
  with prepared._quiet():
    logger.warning("OpenCV is not installed. We recommend it")
    logger.warning("the disk is on fire")
  assert [record.getMessage() for record in caplog.records] == ["the disk is on fire"]
  assert logger.isEnabledFor(logging.WARNING)


# --- what can be wrong ---------------------------------------------------------------


def test_missing_data_says_where_and_how(tmp_path):
  message = one_line(data.load, "mnist", tmp_path)
  assert f"not found in {tmp_path}" in message
  assert f"python -m launch.prepare --dataset=mnist --data_dir={tmp_path}" in message


def test_missing_data_names_the_environments_folder(tmp_path, monkeypatch):
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nowhere"))
  assert f"not found in {tmp_path / 'nowhere'}" in one_line(data.load, "cifar10")


@pytest.mark.parametrize(
  ("name", "near"),
  [("mnst", "mnist"), ("MNIST", "mnist"), ("fashion-mnist", "fashion_mnist")],
)
def test_unknown_name_gets_the_nearest(tmp_path, name, near):
  message = one_line(data.load, name, tmp_path)
  assert f"(did you mean '{near}'?)" in message and name in message


@pytest.mark.parametrize("name", [None, 3, ("digits",)])
def test_a_name_is_text_or_a_path(name):
  with refuses("name", value=name):
    data.load(name)


@pytest.mark.parametrize(
  "name", ["", "../mnist", "/etc", "mnist;ls", "qqqqqqqq", "a/b/c/d"]
)
def test_names_that_are_none(tmp_path, name):
  message = one_line(data.load, name, tmp_path)
  # With "error: " before it.
  assert "unknown data set" in message and len(message) < 293


def test_a_killed_download_is_not_data(image_folder):
  image_folder.rename(image_folder.parent / "incomplete.ABC_1.0.0")
  assert not prepared.is_prepared("tiny_image", image_folder.parents[1])


@pytest.mark.parametrize("keep", [0, 1_000, 66_000])
def test_truncated_records(image_folder, keep):
  path = image_folder / "tiny_image-train.array_record-00000-of-00001"
  path.write_bytes(path.read_bytes()[:keep])
  message = one_line(data.load, "tiny_image", image_folder.parents[1])
  assert "cannot be read" in message and "launch.prepare --dataset=tiny_image" in message


def test_missing_records(image_folder):
  (image_folder / "tiny_image-train.array_record-00000-of-00001").unlink()
  assert "cannot be read" in one_line(data.load, "tiny_image", image_folder.parents[1])


def test_another_file_format(tmp_path, tfds_files):
  splits = {"train": image_examples(tfds_files, 1), "test": image_examples(tfds_files, 1)}
  tfds_files.write(tmp_path, "old", image_features(tfds_files), splits, "tfrecord")
  message = one_line(data.load, "old", tmp_path)
  assert "TFRECORD is not supported" in message and "empty DIR" in message


def test_images_of_different_shapes(tmp_path, tfds_files):
  mixed = image_examples(tfds_files, 2) + image_examples(tfds_files, 1, (6, 6))
  splits = {"train": mixed, "test": mixed}
  tfds_files.write(tmp_path, "mixed", image_features(tfds_files), splits)
  assert "images differ in shape ((4, 5, 1), (6, 6, 1))" in one_line(
    data.load, "mixed", tmp_path
  )


def test_no_held_out_split(tmp_path, tfds_files):
  splits = {"train": image_examples(tfds_files, 2)}
  tfds_files.write(tmp_path, "single", image_features(tfds_files), splits)
  assert "must have a train and a test" in one_line(data.load, "single", tmp_path)


def test_no_label(tmp_path, tfds_files):
  examples = [{"image": tfds_files.png(np.zeros((2, 2), np.uint8))}]
  splits = {"train": examples, "test": examples}
  tfds_files.write(tmp_path, "nolabel", {"image": tfds_files.image_feature()}, splits)
  assert "must have an image or a text and a label as features, has image" in one_line(
    data.load, "nolabel", tmp_path
  )


def test_hidden_labels(tmp_path, tfds_files):
  """Some public test splits carry -1 for every label."""
  examples = [{"text": b"a", "label": -1}]
  features = {"text": tfds_files.text_feature(), "label": tfds_files.label_feature(2)}
  splits = {"train": [{"text": b"a", "label": 1}], "test": examples}
  tfds_files.write(tmp_path, "hidden", features, splits)
  message = one_line(data.load, "hidden", tmp_path)
  assert message.startswith("name='hidden': y: holds values from -1 to -1")


def test_input_that_is_neither_text_nor_image(tmp_path, tfds_files):
  features = {"text": tfds_files.label_feature(9), "label": tfds_files.label_feature(2)}
  splits = {"train": [{"text": 3, "label": 1}], "test": [{"text": 3, "label": 1}]}
  tfds_files.write(tmp_path, "number", features, splits)
  assert "the input must be text or a uint8 image" in one_line(
    data.load, "number", tmp_path
  )


def test_import_is_light():
  """Reading digits or arrays must not pay for TFDS, scikit-learn or TensorFlow."""
  code = (
    "import sys, dpjax.data; heavy = {'tensorflow_datasets', 'sklearn', 'tensorflow'};"
    "print(sorted(heavy & set(sys.modules)))"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == "[]"


# --- a prepared data set from somebody else

_EVIL = "payload_of_a_stranger.Feature"
_CLASS = "tensorflow_datasets.core.features.features_dict.FeaturesDict"


def _inner(**named):
  return {"featuresDict": {"features": {"image": named}}}


@pytest.mark.cases(long=[9, 10])
@pytest.mark.parametrize(
  "features",
  [
    {"pythonClassName": _EVIL},
    {"python_class_name": _EVIL},
    {"pythonClassName": _CLASS, **_inner(pythonClassName=_EVIL)},
    {"pythonClassName": _CLASS, **_inner(python_class_name=_EVIL)},
    {"pythonClassName": f"x.{_CLASS}"},
    {"pythonClassName": "tensorflow_datasets.core.features_of.mine.Feature"},
    {"pythonClassName": "os.path.Feature"},
    {"pythonClassName": ["os"]},
    {"type": _EVIL, "content": {}},
    {"type": _CLASS, "content": {"image": {"type": _EVIL, "content": {}}}},
    {
      "type": _CLASS,
      "content": json.dumps({"features": {"a": {"pythonClassName": _EVIL}}}),
    },
  ],
)
def test_features_that_name_code_are_refused_before_anything_is_imported(
  features, image_folder, tmp_path, monkeypatch
):
  (path,) = tmp_path.rglob("features.json")
  path.write_text(json.dumps(features))
  (tmp_path / "payload_of_a_stranger.py").write_text(
    f"open({str(tmp_path / 'ran')!r}, 'w')"
  )
  monkeypatch.syspath_prepend(tmp_path)
  message = one_line(data.load, "tiny_image", data_dir=tmp_path)
  assert "names the class" in message and len(message) < 300 + len(str(tmp_path))
  assert not (tmp_path / "ran").exists()
