"""The HDF5 files of pfl-research's benchmarks: FLAIR's photographs and StackOverflow's sentences.

Scripts of github.com/apple/pfl-research (Granqvist et al. 2024, arXiv:2404.06430) write them:

  python -m dataset.flair.download_preprocess --output_file flair_federated.hdf5
  python -m dataset.stackoverflow.download_preprocess --output_dir DIR  # stackoverflow.hdf5

In both files a user is a group `SPLIT/USER`:

- FLAIR (Song et al. 2022) holds `images` [n, H, W, 3] bytes. Image `labels_row[i]` has the label
  `labels_col[i]`, a number of `metadata/label_mapping`. The fine labels lie in
  `fine_grained_labels_row` and so on.
- StackOverflow holds `inputs` and `targets` [n, T]: words, and the words that follow them.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpjax.data.dataset import from_arrays
from dpjax.data.federation import Federation, by_client, check_pair
from dpjax.data.npz import in_data, undeclared_classes
from dpjax.data.target_kinds import Labels
from dpjax.data.text import PADDING_ID
from dpjax.validate import UserError, first_line, integer_at_least, one_of
from dpjax.zoo.datasets import foreign_files
from dpjax.zoo.datasets.registry import user_path

_SUFFIX = ".hdf5"
_SPLITS = ("val", "test")
# Number of colour channels of FLAIR's images.
_COLOURS = 3


def pfl_federation(
  name: str | os.PathLike[str],
  data_dir: str | os.PathLike[str] | None = None,
  *,
  num_classes: int | None = None,
  image_size: int | None = None,
  fine_grained: bool = False,
  test_split: str = "val",
  max_examples: int | None = None,
) -> tuple[Federation, Federation]:
  """Loads (train, test) from a file of pfl-research.

  Images are float32 [image_size, image_size, 3] in [0, 1], with several labels each
  (`data.Labels`). Sentences are int32 [T + 1], padded with 0, for `losses.next_token`; y is 0.

  StackOverflow's vocabulary holds the most frequent words of its users, and FLAIR's labels are
  those that occur in its images. No epsilon covers these choices, which were made from the users'
  data.

  Args:
    name: path that ends in .hdf5. Reading the file needs the `h5` extra.
    data_dir: folder in which a relative `name` begins. None: the current folder.
    num_classes: number of FLAIR's labels, public: 17 coarse ones, or 1,628 fine ones. It must
      equal the number of labels in the file. None for sentences.
    image_size: side of an image in pixels. It must divide the side in the file; each pixel is then
      the mean of a square of pixels. None: the side in the file. If that is 256 pixels, the 345,879
      training images take 272 GB.
    fine_grained: whether the labels are FLAIR's fine ones.
    test_split: split of the test data: "val", which pfl-research reports results for, or "test".
    max_examples: as in `data.by_client`, for each client in train and in test.

  Raises:
    UserError: one line: no such file, a damaged file, or an option that does not fit the file.
  """
  name = os.fspath(name)
  one_of(_SPLITS, test_split=test_split)
  for field, value in (("max_examples", max_examples), ("image_size", image_size)):
    if value is not None:
      integer_at_least(1, **{field: value})
  path = user_path(name, data_dir)
  with (
    in_data(name),
    foreign_files.read_as("a file of pfl-research"),
    _open(path) as file,
  ):
    if "label_mapping" in file["metadata"]:
      reader: _Photographs | _Sentences = _Photographs(
        file, num_classes=num_classes, side=image_size, fine_grained=fine_grained
      )
    else:
      for field, value in (("num_classes", num_classes), ("image_size", image_size)):
        if value is not None:
          raise UserError("must be null for sentences", field=field, value=value)
      reader = _Sentences(file)
    train, test = (
      _federation(file[split], reader, path.stem, split, max_examples)
      for split in ("train", test_split)
    )
  return check_pair(train, test, name)


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[Any]:
  if not path.name.endswith(_SUFFIX):
    raise UserError(f"must end in {_SUFFIX}, the files of pfl-research")
  if not path.is_file():
    raise UserError(
      f"no file {path}; the scripts of github.com/apple/pfl-research write it"
    )
  with foreign_files.h5py().File(path, "r") as file:
    yield file


def _federation(
  users: Mapping[str, Any],
  reader: _Photographs | _Sentences,
  name: str,
  split: str,
  most: int | None,
) -> Federation:
  ids = sorted(users)
  sizes = [min(reader.size(users[who]), most or np.iinfo(np.int64).max) for who in ids]
  x = np.empty((sum(sizes), *reader.shape), reader.dtype)
  y = np.zeros((len(x), *reader.label_shape), np.int64)
  start = 0
  for who, size in zip(ids, sizes, strict=True):
    with _of_user(who, split):
      reader.fill(users[who], x[start : start + size], y[start : start + size])
    start += size
  dataset = from_arrays(x, y, name=name, split=split, **reader.declared)
  return by_client(dataset, ids, sizes=sizes, max_examples=most)


@contextlib.contextmanager
def _of_user(who: str, split: str) -> Iterator[None]:
  """Turns an error in the `with` block into a UserError that names the user and the split."""
  try:
    yield
  except (KeyError, IndexError, TypeError, ValueError) as error:
    raise UserError(f"user {who!r:.40} of {split}: {first_line(error)}") from error


class _Photographs:
  """Reads a user's images from FLAIR's file, with 0 or 1 for each label of an image."""

  dtype = np.float32

  def __init__(
    self, file: Any, *, num_classes: int | None, side: int | None, fine_grained: bool
  ):
    prefix = "fine_grained_label" if fine_grained else "label"
    self._prefix = f"{prefix}s"
    mapping = json.loads(file[f"metadata/{prefix}_mapping"][()])
    names = sorted(mapping, key=mapping.__getitem__)
    if [mapping[label] for label in names] != list(range(len(names))):
      raise UserError(f"{prefix}_mapping must number the labels from 0")
    if num_classes is None:
      raise undeclared_classes(f"the file has {len(names)} labels")
    if num_classes != len(names):
      raise UserError(
        f"must be {len(names)}, the labels of the file",
        field="num_classes",
        value=num_classes,
      )
    self.declared: dict[str, Any] = {"target": Labels(tuple(names))}
    self.label_shape = (len(names),)
    first = next(iter(file["train"].values()))["images"]
    self._file_side = int(first.shape[1])
    side = side or self._file_side
    if self._file_side % side:
      raise UserError(
        f"must divide the {self._file_side} pixels of the file",
        field="image_size",
        value=side,
      )
    self.shape = (side, side, _COLOURS)

  def size(self, group: Any) -> int:
    """Returns the number of images of a user."""
    return int(group["images"].shape[0])

  def fill(self, group: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Reads the first images of a user.

    Args:
      group: the user's group in the file.
      x: array [k, side, side, 3], filled with the first k images.
      y: array [k, labels], filled with 0 and 1: the labels of these images.
    """
    images = group["images"]
    expected = (self._file_side, self._file_side, _COLOURS)
    if images.dtype != np.uint8 or images.shape[1:] != expected:
      raise ValueError(
        f"images must be bytes of {expected}, are {images.dtype} {images.shape[1:]}"
      )
    factor = self._file_side // self.shape[0]
    for place in range(len(x)):
      # Images are read one at a time: a user may have thousands of images of 200 KB.
      squares = images[place].reshape(
        self.shape[0], factor, self.shape[1], factor, _COLOURS
      )
      x[place] = squares.mean(axis=(1, 3), dtype=np.float64) / 255
    rows = np.asarray(group[f"{self._prefix}_row"], np.int64)
    columns = np.asarray(group[f"{self._prefix}_col"], np.int64)
    # A place that is too large raises IndexError below. A negative place would count from the end.
    # An array of one place would be paired with every place of the other array.
    if rows.shape != columns.shape or min(rows.min(initial=0), columns.min(initial=0)) < 0:
      raise ValueError("rows and columns of labels must be pairs of places")
    pairs = np.zeros((images.shape[0], *self.label_shape), np.int64)
    pairs[rows, columns] = 1
    y[:] = pairs[: len(y)]


class _Sentences:
  """Reads a user's sentences from StackOverflow's file: all inputs of each, and its last target."""

  dtype = np.int32
  label_shape = ()

  def __init__(self, file: Any):
    metadata = file["metadata"]
    padding = int(metadata["pad_symbol"][()])
    if padding != PADDING_ID:
      raise UserError(f"pad_symbol must be {PADDING_ID}, is {padding}")
    self.declared: dict[str, Any] = {
      "num_classes": 1,
      "vocab_size": int(metadata["vocabulary_size"][()]),
    }
    self.shape = (int(metadata["max_sequence_length"][()]) + 1,)

  def size(self, group: Any) -> int:
    """Returns the number of sentences of a user."""
    return int(group["inputs"].shape[0])

  def fill(self, group: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Reads the first sentences of a user.

    Args:
      group: the user's group in the file.
      x: array [k, T + 1], filled with the first k sentences.
      y: array [k], which is not changed.
    """
    del y
    count = len(x)
    inputs = np.asarray(group["inputs"][:count])
    targets = np.asarray(group["targets"][:count])
    expected = (count, self.shape[0] - 1)
    if inputs.shape != expected or targets.shape != expected:
      raise ValueError(
        f"inputs and targets must be {expected}, are {inputs.shape} and {targets.shape}"
      )
    if inputs.dtype.kind not in "iu" or targets.dtype.kind not in "iu":
      raise ValueError("inputs and targets must be integers")
    if not np.array_equal(inputs[:, 1:], targets[:, :-1]):
      raise ValueError("targets must be the inputs, one word later")
    x[:, :-1] = inputs
    x[:, -1] = targets[:, -1]
