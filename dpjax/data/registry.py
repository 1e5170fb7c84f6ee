"""`load`: from the name of a data set to its two splits."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from dpjax import names, validate
from dpjax.data import digits, npz, prepared, shakespeare
from dpjax.data.dataset import Dataset
from dpjax.validate import UserError


def load(
  name: str | os.PathLike[str],
  data_dir: str | os.PathLike[str] | None = None,
  *,
  max_length: int = 256,
  num_classes: int | None = None,
) -> tuple[Dataset, Dataset]:
  """(train, test) of a data set: x float32 [n, H, W, C] in [0, 1], or int32 tokens [n, T].

  Args:
    name: "digits" (embedded: works offline on a fresh machine); "shakespeare" (one line
      says how to get it; `shakespeare_federation` keeps the roles apart); "mnist",
      "fashion_mnist", "cifar10" or any tensorflow-datasets name with an image or a text
      and a label, prepared beforehand; a path ending in ".npz" (see `npz.load_npz`); or
      `package.module:name`, a user's own function of no arguments that returns the two.
    data_dir: where prepared data lies; by default $TFDS_DATA_DIR, then
      ~/tensorflow_datasets. A relative .npz path is looked up in it too.
    max_length: for text, the number of bytes kept of each example (padded with 0).
    num_classes: how many classes there are, for data that do not declare it; data that do
      must declare the same. Public: it is never counted from the labels.

  The order of the records is that of the prepared files: public, and fixed. Nothing is
  ever downloaded here.

  Raises:
    UserError: one line: an unknown name (with the nearest one), data that is not there
      (with where it was looked for and the command that prepares it), or a number of classes
      that nobody declares.

  >>> train, test = load("digits")
  >>> train, test
  (Dataset(digits/train: 1437 x (8, 8, 1) float32, 10 classes),
   Dataset(digits/test: 360 x (8, 8, 1) float32, 10 classes))
  """
  name = os.fspath(name)
  validate.integer_at_least(1, max_length=max_length)
  if num_classes is not None:
    validate.integer_at_least(1, num_classes=num_classes)
  train, test = _load(name, data_dir, max_length, num_classes)
  if num_classes not in (None, train.num_classes):
    raise UserError(f"num_classes={num_classes}: {name!r} declares {train.num_classes}")
  return train, test


def _load(
  name: str, data_dir: Any, max_length: int, num_classes: int | None
) -> tuple[Dataset, Dataset]:
  if name.endswith(".npz"):
    path = pathlib.Path(data_dir or ".") / pathlib.Path(os.path.expanduser(name))
    return npz.load_npz(path, num_classes=num_classes)
  if names.is_path(name):
    return _of_user(names.call(name, "data.name"), name)
  if name == "digits":
    return digits.load_digits()
  if name == "shakespeare":
    return shakespeare.load_shakespeare(data_dir)
  root = prepared.data_root(data_dir)
  if not prepared.is_prepared(name, root):
    prepared.check_known(name)
    raise UserError(
      f"name={name!r}: not found in {root} (data_dir=, else $TFDS_DATA_DIR, else "
      f"~/tensorflow_datasets); prepare it with: {prepared.prepare_command(name, root)}"
    )
  return prepared.load_prepared(name, root, max_length=max_length, num_classes=num_classes)


def _of_user(made: Any, name: str) -> tuple[Dataset, Dataset]:
  pair = isinstance(made, tuple) and len(made) == 2
  if not pair or not all(isinstance(part, Dataset) for part in made):
    raise UserError(
      f"data.name={name!r}: must return (train, test), two dpjax.data.Dataset, not {made!r:.60}"
    )
  shapes = [(part.x.shape[1:], part.num_classes) for part in made]
  if shapes[0] != shapes[1] or not all(map(len, made)):
    raise UserError(
      f"data.name={name!r}: train and test must hold examples of one shape and as many classes"
    )
  return made
