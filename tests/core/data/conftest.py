"""Where the prepared data is, and a writer of tiny data sets in TFDS's own files."""

import io
import json
import os
import pathlib

import numpy as np
import pytest
from PIL import Image

_SHARED = pathlib.Path(__file__).resolve().parents[4] / "shared" / "data" / "tfds"
_FEATURES = "tensorflow_datasets.core.features."


@pytest.fixture
def tfds_dir():
  """The folder of the prepared MNIST and CIFAR-10; the test is skipped without it."""
  folder = pathlib.Path(os.environ.get("TFDS_DATA_DIR") or _SHARED)
  if not folder.is_dir():
    pytest.skip("no prepared data: set TFDS_DATA_DIR")
  return folder


def png(pixels: np.ndarray) -> bytes:
  stream = io.BytesIO()
  Image.fromarray(pixels.squeeze()).save(stream, "PNG")
  return stream.getvalue()


def _serialize(example: dict) -> bytes:
  from tensorflow_datasets.proto import tf_example_pb2

  proto = tf_example_pb2.Example()
  for key, value in example.items():
    feature = proto.features.feature[key]
    if isinstance(value, bytes):
      feature.bytes_list.value.append(value)
    else:
      feature.int64_list.value.append(int(value))
  return proto.SerializeToString()


def _write_records(path: pathlib.Path, examples: list[dict]) -> None:
  from array_record.python.array_record_module import ArrayRecordWriter

  writer = ArrayRecordWriter(str(path), "group_size:1")
  for example in examples:
    writer.write(_serialize(example))
  writer.close()


def image_feature(shape=(None, None, 1)) -> dict:
  dimensions = [str(-1 if size is None else size) for size in shape]
  return {
    "pythonClassName": _FEATURES + "image_feature.Image",
    "image": {"dtype": "uint8", "shape": {"dimensions": dimensions}},
  }


def text_feature() -> dict:
  return {"pythonClassName": _FEATURES + "text_feature.Text", "text": {}}


def label_feature(num_classes: int) -> dict:
  return {
    "pythonClassName": _FEATURES + "class_label_feature.ClassLabel",
    "classLabel": {"numClasses": str(num_classes)},
  }


def _split_info(name: str, examples: list) -> dict:
  return {
    "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    "name": name,
    "numBytes": "1",
    "shardLengths": [str(len(examples))],
  }


def write_prepared(root, name, features, splits, file_format="array_record"):
  """Writes `name` 1.0.0 under root as TFDS would: two JSON files and the records."""
  folder = pathlib.Path(root) / name / "1.0.0"
  folder.mkdir(parents=True)
  info = {
    "name": name,
    "version": "1.0.0",
    "fileFormat": file_format,
    "moduleName": "test",
    "splits": [_split_info(split, examples) for split, examples in splits.items()],
  }
  top = {
    "pythonClassName": _FEATURES + "features_dict.FeaturesDict",
    "featuresDict": {"features": features},
  }
  (folder / "dataset_info.json").write_text(json.dumps(info))
  (folder / "features.json").write_text(json.dumps(top))
  for split, examples in splits.items():
    _write_records(folder / f"{name}-{split}.array_record-00000-of-00001", examples)
  return folder


class Tfds:
  """What a test needs to write a data set; one object, because fixtures are imported."""

  png = staticmethod(png)
  image_feature = staticmethod(image_feature)
  text_feature = staticmethod(text_feature)
  label_feature = staticmethod(label_feature)
  write = staticmethod(write_prepared)


@pytest.fixture
def tfds_files():
  return Tfds
