"""Your own data in one `.npz` file, with the four keys that Keras uses."""

from __future__ import annotations

import pathlib
import zipfile
import zlib
from typing import Any

import numpy as np

from dpjax.data.dataset import Dataset, first_line, from_arrays
from dpjax.validate import UserError

KEYS = ("x_train", "y_train", "x_test", "y_test")
_UNREADABLE = (
  ValueError,  # a pickle, or a damaged header
  RuntimeError,  # encrypted
  EOFError,
  KeyError,
  zipfile.BadZipFile,
  zlib.error,
)


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
  try:
    # Pickles can run code. NumPy leaks the file that it opens where the archive is bad.
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
      return {key: archive[key] for key in archive.files}
  except FileNotFoundError as error:
    raise UserError(f"name='{path}': there is no such file") from error
  except (AttributeError, TypeError) as error:  # a bare .npy array: no `with`
    raise UserError(f"name='{path}': is not an .npz archive") from error
  except _UNREADABLE as error:
    raise UserError(
      f"name='{path}': is not a readable .npz archive ({first_line(error)})"
    ) from error


def _largest_label(y: np.ndarray) -> int:
  return int(y.max(initial=0)) if y.dtype.kind in "iu" else 0  # from_arrays refuses it


def _num_classes(arrays: dict[str, np.ndarray]) -> int:
  declared = arrays.get("num_classes")
  if declared is None:
    return 1 + max(_largest_label(arrays[key]) for key in ("y_train", "y_test"))
  if declared.ndim or declared.dtype.kind not in "iu":
    raise UserError(f"num_classes: must be one integer, got {declared!r}")
  return int(declared)


def _split(arrays: dict[str, np.ndarray], split: str, **common: Any) -> Dataset:
  x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
  try:
    if y.size == 0:
      raise UserError("y: is empty")
    return from_arrays(x, y, split=split, **common)
  except UserError as error:
    raise UserError(f"{split} split: {error}") from error


def _both(arrays: dict[str, np.ndarray], name: str) -> tuple[Dataset, Dataset]:
  missing = [key for key in KEYS if key not in arrays]
  if missing:
    have = ", ".join(sorted(arrays)) or "nothing"
    raise UserError(f"has no {', '.join(missing)} (it holds {have})")
  num_classes = _num_classes(arrays)
  train = _split(arrays, "train", num_classes=num_classes, name=name)
  test = _split(arrays, "test", num_classes=num_classes, name=name)
  if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
    shapes = f"{train.x.dtype} {train.x.shape[1:]} and {test.x.dtype} {test.x.shape[1:]}"
    raise UserError(f"x_train and x_test differ in what one example is: {shapes}")
  return train, test


def load_npz(path: str | pathlib.Path) -> tuple[Dataset, Dataset]:
  """(train, test) from `x_train`, `y_train`, `x_test`, `y_test`, each as `from_arrays`.

  uint8 images are divided by 255; floats must be finite and are left alone. An optional
  scalar `num_classes` is used where it is there; otherwise it is 1 + the largest label of
  the file, and is from then on public, as the shape of x is.

  Raises:
    UserError: one line, for a missing or unreadable file, a missing key, a pickled
      (object) array, a wrong dtype or shape, NaN, or splits that do not match.
  """
  path = pathlib.Path(path)
  arrays = _read(path)
  try:
    return _both(arrays, name=path.stem)
  except UserError as error:
    raise UserError(f"name='{path}': {error}") from error
