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
UNDECLARED = (
  "must be declared, since counting private labels would let one record decide the shape of "
  "the model: give it as num_classes= (--config.data.num_classes)"
)
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


def _declared(arrays: dict[str, np.ndarray], key: str) -> int | None:
  declared = arrays.get(key)
  if declared is None:
    return None
  if declared.ndim or declared.dtype.kind not in "iu":
    raise UserError(f"{key}: must be one integer, got {declared!r}")
  return int(declared)


def _num_classes(arrays: dict[str, np.ndarray], given: int | None) -> int:
  declared = _declared(arrays, "num_classes")
  if declared is None and given is None:
    raise UserError(
      f"num_classes: {UNDECLARED}, or as an integer `num_classes` in the file"
    )
  if None not in (declared, given) and declared != given:
    raise UserError(f"num_classes={given}: the file declares {declared}")
  return given if declared is None else declared  # type: ignore[return-value]


def _split(arrays: dict[str, np.ndarray], split: str, **common: Any) -> Dataset:
  x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
  try:
    if y.size == 0:
      raise UserError("y: is empty")
    return from_arrays(x, y, split=split, **common)
  except UserError as error:
    raise UserError(f"{split} split: {error}") from error


def _both(
  arrays: dict[str, np.ndarray], name: str, given: int | None
) -> tuple[Dataset, Dataset]:
  missing = [key for key in KEYS if key not in arrays]
  if missing:
    have = ", ".join(sorted(arrays)) or "nothing"
    raise UserError(f"has no {', '.join(missing)} (it holds {have})")
  public = {
    "num_classes": _num_classes(arrays, given),
    "vocab_size": _declared(arrays, "vocab_size"),
  }
  train = _split(arrays, "train", name=name, **public)
  test = _split(arrays, "test", name=name, **public)
  if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
    shapes = f"{train.x.dtype} {train.x.shape[1:]} and {test.x.dtype} {test.x.shape[1:]}"
    raise UserError(f"x_train and x_test differ in what one example is: {shapes}")
  return train, test


def load_npz(
  path: str | pathlib.Path, *, num_classes: int | None = None
) -> tuple[Dataset, Dataset]:
  """(train, test) from `x_train`, `y_train`, `x_test`, `y_test`, each as `from_arrays`.

  uint8 images are divided by 255; floats must be finite and are left alone. The number of
  classes is public and must be declared: by an integer `num_classes` in the file or as the
  argument. It is never counted from the labels. So is the vocabulary of integer tokens, by
  an integer `vocab_size` in the file, for models that need it. The shape of one example is
  public, being that of the array.

  Raises:
    UserError: one line, for a missing or unreadable file, a missing key, a pickled
      (object) array, a wrong dtype or shape, NaN, splits that do not match, or a number of
      classes that is not declared, twice differently, or not above every label.
  """
  path = pathlib.Path(path)
  arrays = _read(path)
  try:
    return _both(arrays, path.stem, num_classes)
  except UserError as error:
    raise UserError(f"name='{path}': {error}") from error
