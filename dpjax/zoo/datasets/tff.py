"""The files of TensorFlow Federated: SQLite databases, and its older HDF5 files.

EMNIST by writer (FEMNIST), StackOverflow by user, Shakespeare by role, CIFAR-100 by topic,
read without TensorFlow. A database holds the tables `examples` (split_name, client_id,
serialized_example_proto: a tf.train.Example) and `client_metadata` (client_id, split_name,
num_examples). An HDF5 file holds `examples/<client_id>/<feature>`.

  python -m launch.prepare --dataset=femnist --data_dir=DIR        # DIR/emnist_all.sqlite
  python -m launch.prepare --dataset=stackoverflow --data_dir=DIR  # DIR/stackoverflow.sqlite
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import sqlite3
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dpjax.data import text
from dpjax.data.dataset import from_arrays
from dpjax.data.federation import Federation, by_client, check_pair
from dpjax.data.npz import in_data, undeclared_classes
from dpjax.validate import UserError, integer_at_least, join_words
from dpjax.zoo.datasets import foreign_files
from dpjax.zoo.datasets.prepared import stored_features, stored_values
from dpjax.zoo.datasets.registry import user_path

URL = "https://storage.googleapis.com/tff-datasets-public/"
# Files of databases, by name for `launch.prepare`. The address of a file is URL + file + ".lzma".
DATABASES = {"femnist": "emnist_all.sqlite", "stackoverflow": "stackoverflow.sqlite"}
# Split names of EMNIST, then the split names of all other data sets.
_SPLITS = (("all_train", "all_test"), ("train", "test"))
_TRAIN = "_train.h5"
_TEST = "_test.h5"
_IMAGES = {"pixels": ((28, 28, 1), np.float32), "image": ((32, 32, 3), np.uint8)}
# Text features of StackOverflow and Shakespeare, which have no labels.
_TEXTS = ("tokens", "snippets")
_LABEL = "label"
# Number of records decoded at once.
_BLOCK = 1_000


class _Kind(NamedTuple):
  """Type of the examples in a file."""

  key: str  # name of the feature that is the input
  shape: tuple[int, ...]
  dtype: Any
  labelled: bool

  @property
  def is_text(self) -> bool:
    return self.key in _TEXTS


class _Stretches(NamedTuple):
  """Examples of a split, in consecutive stretches that belong to one client each."""

  ids: list[Any]  # [stretches] client of each stretch
  sizes: list[int]  # [stretches] number of examples
  x: np.ndarray  # [n, *shape]
  y: np.ndarray  # [n] integers


def tff_federation(
  name: str | os.PathLike[str],
  data_dir: str | os.PathLike[str] | None = None,
  *,
  num_classes: int | None = None,
  max_length: int = 256,
  max_examples: int | None = None,
) -> tuple[Federation, Federation]:
  """Loads (train, test) from a file of TensorFlow Federated.

  Images are float32: [28, 28, 1] as stored (EMNIST: 1 is paper, 0 is ink), or [32, 32, 3] / 255.
  Text without labels is UTF-8 bytes, int32 [max_length], padded with 0, for `losses.next_token`;
  y is 0. An example of StackOverflow is one sentence. 342,477 users have 135,818,730 training
  sentences. `max_examples` limits how many sentences of each user are kept in memory.

  Args:
    name: path that ends in .sqlite, or in _train.h5 (which needs the `h5` extra, and the file that
      ends in _test.h5 beside it).
    data_dir: folder in which a relative `name` begins; None: the current folder.
    num_classes: number of classes, public and never counted: 62 for FEMNIST; None for text.
    max_length: number of bytes kept of a text.
    max_examples: as in `data.by_client`, for each client in train and in test.

  Raises:
    UserError: a missing file (with the command that gets it), a damaged file, or a file in which a
      client has more or fewer examples than the file says.
  """
  name = os.fspath(name)
  integer_at_least(1, max_length=max_length)
  if max_examples is not None:
    integer_at_least(1, max_examples=max_examples)
  path = user_path(name, data_dir)
  most = max_examples
  with in_data(name):
    with foreign_files.read_as("a file of TensorFlow Federated"):
      read = _h5_pair if name.endswith(_TRAIN) else _sqlite_pair
      train, test, kind = read(_file_of(path), max_length, most)
    declared = num_classes if kind.labelled else 1
    if declared is None:
      raise undeclared_classes(f"{path.name!r:.80} declares none")
    if num_classes not in (None, declared):
      raise UserError(
        "text without labels has no classes", field="num_classes", value=num_classes
      )
    make = lambda part, split: _federation(part, kind, declared, path.stem, split, most)
    clients = make(train, "train"), make(test, "test")
  return check_pair(clients[0], clients[1], name)


def _federation(
  part: _Stretches, kind: _Kind, classes: int, name: str, split: str, most: int | None
) -> Federation:
  dataset = from_arrays(
    part.x,
    part.y,
    num_classes=classes,
    vocab_size=text.VOCAB_SIZE if kind.is_text else None,
    name=name,
    split=split,
  )
  return by_client(dataset, part.ids, sizes=part.sizes, max_examples=most)


def _file_of(path: pathlib.Path) -> pathlib.Path:
  if not path.name.endswith((".sqlite", _TRAIN)):
    raise UserError(f"must end in .sqlite or {_TRAIN}, the files of TensorFlow Federated")
  if os.path.isfile(path):
    return path
  known = {file: word for word, file in DATABASES.items()}.get(path.name)
  command = f"--dataset={known or '|'.join(DATABASES)} --data_dir={path.parent}"
  raise UserError(f"no file {path}; get one by: python -m launch.prepare {command}")


def _kind(features: Mapping[str, Any], max_length: int) -> _Kind:
  key = next((key for key in (*_IMAGES, *_TEXTS) if key in features), None)
  if key is None:
    known = ", ".join((*_IMAGES, *_TEXTS))
    raise UserError(f"must hold one of {known}, has {join_words(sorted(features), 80)}")
  if key in _TEXTS:
    return _Kind(key, (max_length,), np.int32, False)
  shape, dtype = _IMAGES[key]
  return _Kind(key, shape, dtype, True)


# --- SQLite


def _sqlite_pair(
  path: pathlib.Path, max_length: int, most: int | None
) -> tuple[_Stretches, _Stretches, _Kind]:
  uri = f"file:{urllib.parse.quote(str(path.absolute()))}?mode=ro"
  with contextlib.closing(sqlite3.connect(uri, uri=True)) as base:
    # With this setting, views in the file cannot call unsafe functions.
    base.execute("PRAGMA trusted_schema=OFF")
    held = {
      row[0] for row in base.execute("SELECT DISTINCT split_name FROM client_metadata")
    }
    splits = next((pair for pair in _SPLITS if held.issuperset(pair)), None)
    if splits is None:
      raise UserError(f"must hold the splits train and test, has {sorted(map(str, held))}")
    first = base.execute("SELECT serialized_example_proto FROM examples LIMIT 1").fetchone()
    kind = _kind(next(stored_features(first or ()), {}), max_length)
    train, test = (_sqlite(base, split, kind, most) for split in splits)
  return train, test, kind


def _sqlite(
  base: sqlite3.Connection, split: str, kind: _Kind, most: int | None
) -> _Stretches:
  """Reads a split in the order of the file. At most `most` examples of a client take memory;
  None: all."""
  query = "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?"
  counts: dict[Any, int] = dict(base.execute(query, [split]))
  # The counts are checked before they size arrays: a damaged count could exhaust memory.
  most_rows = base.execute("SELECT MAX(rowid) FROM examples").fetchone()[0] or 0
  kept = sum(min(n, n if most is None else most) for n in counts.values())
  if kept > most_rows or min(counts.values(), default=0) < 0:
    raise UserError(f"client_metadata tells of {kept} examples, there are {most_rows}")
  x = np.empty((kept, *kind.shape), kind.dtype)
  y = np.zeros(kept, np.int64)
  rows = []
  seen = dict.fromkeys(counts, 0)
  block = []
  query = (
    "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? "
    "ORDER BY rowid"
  )
  for client, record in base.execute(query, [split]):
    seen[client] = seen.get(client, 0) + 1
    if seen[client] <= min(counts.get(client, 0), most or seen[client]):
      rows.append(client)
      block.append(record)
    if len(block) == _BLOCK:
      _decode(block, kind, x[: len(rows)], y[: len(rows)])
      block.clear()
  _decode(block, kind, x[: len(rows)], y[: len(rows)])
  for client, count in seen.items():
    if count != counts.get(client):
      raise UserError(
        f"client {client!r} has {count} examples in {split}, client_metadata says "
        f"{counts.get(client, 0)}"
      )
  # Every client is listed once more with 0 examples, so that clients without examples count, too.
  return _Stretches([*rows, *counts], [1] * len(rows) + [0] * len(counts), x, y)


def _decode(records: list[bytes], kind: _Kind, x: np.ndarray, y: np.ndarray) -> None:
  """Decodes records into the last rows of x and y."""
  feature_maps = list(stored_features(records))
  size = int(np.prod(kind.shape))
  for key in (kind.key, *[_LABEL] * kind.labelled):
    if not all(key in features for features in feature_maps):
      raise UserError(f"an example has no {key}")
  values = [stored_values(features[kind.key]) for features in feature_maps]
  first = len(x) - len(records)
  if kind.is_text:
    x[first:] = text.encode_text([value[0] for value in values], max_length=size)
    return
  wrong = next((value for value in values if len(value) != size), None)
  if wrong is not None:
    raise UserError(f"must be {kind.shape} numbers, got {len(wrong)}", field=kind.key)
  x[first:] = _image(np.asarray(values), kind, len(records))
  y[first:] = [features[_LABEL].int64_list.value[0] for features in feature_maps]


def _image(values: np.ndarray, kind: _Kind, count: int) -> np.ndarray:
  """Converts pixels to images [count, *shape]. Raises UserError if the number of pixels does not
  fit, or if pixels for uint8 are not integers in 0 .. 255."""
  if values.size != count * int(np.prod(kind.shape)):
    raise UserError(f"must be {kind.shape} numbers, got {values.shape[1:]}", field=kind.key)
  as_is = values.astype(kind.dtype)
  if kind.dtype == np.uint8 and not np.array_equal(as_is, values):
    raise UserError("must be bytes, from 0 to 255", field=kind.key)
  return as_is.reshape(count, *kind.shape)


# --- HDF5


def _h5_pair(
  path: pathlib.Path, max_length: int, most: int | None
) -> tuple[_Stretches, _Stretches, _Kind]:
  h5py = foreign_files.h5py()
  test = path.with_name(path.name.removesuffix(_TRAIN) + _TEST)
  if not test.is_file():
    raise UserError(f"there is no file {test} beside it")
  with h5py.File(path, "r") as train_file, h5py.File(test, "r") as test_file:
    held = train_file["examples"]
    first = next(iter(held.values()), {})
    kind = _kind(first, max_length)
    train, test = (_h5(part["examples"], kind, most) for part in (train_file, test_file))
  return train, test, kind


def _h5(held: Mapping[str, Any], kind: _Kind, most: int | None) -> _Stretches:
  ids = sorted(held)
  parts = [_client(held[client], kind, most) for client in ids]
  x = np.concatenate([np.empty((0, *kind.shape), kind.dtype), *(x for x, _ in parts)])
  y = np.concatenate([np.empty(0, np.int64), *(y for _, y in parts)])
  return _Stretches(ids, [len(y) for _, y in parts], x, y)


def _client(group: Mapping[str, Any], kind: _Kind, most: int | None) -> tuple[Any, Any]:
  values = np.asarray(group[kind.key][:most])
  if kind.is_text:
    return text.encode_text(values.tolist(), max_length=kind.shape[0]), np.zeros(
      len(values), np.int64
    )
  labels = np.asarray(group[_LABEL][:most])
  if labels.shape != (len(values),):
    raise UserError("must be one for each example", field="label")
  return _image(values, kind, len(values)), labels
