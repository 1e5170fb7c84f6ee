"""A user's data in one `.npz` file, or in a folder of its arrays, with the four keys of Keras."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import tokenize
import zipfile
import zlib
from typing import Any

import numpy as np

from dpjax.data.dataset import Dataset, from_arrays, in_files
from dpjax.data.rows import File, stay_in_files
from dpjax.validate import UserError, Verbatim, about, first_line, join_words, no_pipe

KEYS = ("x_train", "y_train", "x_test", "y_test")
# The same arrays in the files of MedMNIST (Yang et al. 2023), which also hold a validation set.
_MEDMNIST = ("train_images", "train_labels", "test_images", "test_labels")
# Largest number of characters of the list of names in an error.
_MOST_NAMES = 80
_NO_HEADER = (
  MemoryError,  # the header promises more than memory holds
  OverflowError,
  TypeError,
  RecursionError,
  SyntaxError,  # NumPy reads the header as a literal of Python
  tokenize.TokenError,
)
_UNREADABLE = (
  *_NO_HEADER,
  OSError,  # a folder, or no right to read it
  ValueError,  # a pickle, or a damaged header
  RuntimeError,  # an encrypted archive
  EOFError,
  KeyError,
  zipfile.BadZipFile,
  zlib.error,
)


def in_data(name: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which each UserError names `name`, a file or a data set.

  A UserError about `num_classes` or `image_size` is not changed: the caller's argument is wrong or
  missing.
  """
  return about("name", name, but=("num_classes", "image_size"))


def undeclared_classes(where: str) -> UserError:
  """Returns the error for data whose number of classes nobody declares.

  >>> undeclared_classes("'a.json' declares none").field
  'num_classes'
  """
  return UserError(
    "must be declared, since counting private labels would let one record decide the shape of "
    f"the model; {where}",
    field="num_classes",
  )


def arrays_of(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns {name: array} of an .npz archive. Raises UserError if it cannot be read."""
  no_pipe(path)
  try:
    # Pickles can run code, so they are refused. NumPy does not close the file of a bad archive, so
    # the file is opened and closed here.
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
      arrays = {key: archive[key] for key in archive.files}
  except FileNotFoundError as error:
    raise UserError("there is no such file") from error
  # `np.load` reads a .npy file as a bare array, which `with` refuses.
  except (AttributeError, TypeError) as error:
    raise UserError("is not an .npz archive") from error
  except _UNREADABLE as error:
    # NumPy takes a file that is no archive for a pickle, and advises to load it unsafely.
    reason = "no zip file" if "unsafely" in str(error) else first_line(error)
    raise UserError(f"is not a readable .npz archive ({reason})") from error
  # For a member that is no array, NumPy returns bytes.
  odd = [key for key, value in arrays.items() if not isinstance(value, np.ndarray)]
  if odd:
    raise UserError(f"its member {odd[0]!r:.60} is no .npy array")
  return arrays


def _declaration(arrays: dict[str, np.ndarray], key: str) -> int | None:
  declared = arrays.get(key)
  if declared is None:
    return None
  if declared.ndim or declared.dtype.kind not in "iu":
    raise UserError(f"its {key!r} must be one integer, got {declared!r}")
  return int(declared)


def _num_classes(
  arrays: dict[str, np.ndarray], asked_classes: int | None, name: str
) -> int:
  declared = _declaration(arrays, "num_classes")
  if declared is None and asked_classes is None:
    raise undeclared_classes(
      f"give it, or write an integer `num_classes` into {name!r:.80}"
    )
  if None not in (declared, asked_classes) and declared != asked_classes:
    raise UserError(
      f"the file declares {declared}", field="num_classes", value=asked_classes
    )
  return asked_classes if declared is None else declared  # type: ignore[return-value]


def _split(arrays: dict[str, Any], split: str, **common: Any) -> Dataset:
  x = arrays[f"x_{split}"]
  y = arrays[f"y_{split}"]
  with about(f"{split} split"):
    if y.size == 0:
      raise UserError("is empty", field="y")
    if isinstance(x, File):
      return in_files(x, y, split=split, **common)
    return from_arrays(x, y, split=split, **common)


def _both(
  arrays: dict[str, np.ndarray], name: str, asked_classes: int | None
) -> tuple[Dataset, Dataset]:
  missing = [key for key in KEYS if key not in arrays]
  if missing:
    have = join_words(sorted(arrays), _MOST_NAMES) or "nothing"
    raise UserError(f"has no {', '.join(missing)} (it holds {have})")
  public = {
    "num_classes": _num_classes(arrays, asked_classes, name),
    "vocab_size": _declaration(arrays, "vocab_size"),
  }
  size = _declaration(arrays, "num_examples")
  train = _split(arrays, "train", name=name, nominal_size=size, **public)
  test = _split(arrays, "test", name=name, **public)
  if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
    shapes = f"{train.x.dtype} {train.x.shape[1:]} and {test.x.dtype} {test.x.shape[1:]}"
    raise UserError(f"x_train and x_test differ in what one example is: {shapes}")
  return train, test


def load_npz(
  path: str | pathlib.Path, *, num_classes: int | None = None
) -> tuple[Dataset, Dataset]:
  """Loads (train, test) from the arrays `x_train`, `y_train`, `x_test` and `y_test` of a file.

  A file of MedMNIST is read, too: its `train_images`, `train_labels`, `test_images`, `test_labels`.
  Inputs and labels may be of all kinds that `from_arrays` takes. The number of
  classes is public and must be declared: by an integer `num_classes` in the file or as the
  argument. It is never counted from the labels. The file may also declare two more integers:
  `vocab_size`, for models of tokens, and `num_examples`, the number of training examples that
  mechanisms use. The shape of one example is taken from the array, and is public.

  Raises:
    UserError: one line: a missing or unreadable file; a missing key; a pickled (object) array; a
      wrong dtype or shape; NaN; splits that do not match; a number of classes that is not
      declared, has two different declarations, or is not above every label.
  """
  return _load(path, num_classes)[0]


def _load(
  path: str | pathlib.Path, num_classes: int | None, *fields: str
) -> tuple[tuple[Dataset, Dataset], dict[str, np.ndarray]]:
  """Returns (train, test), and every array of the file by name. Raises UserError if the file lacks
  one of `fields`."""
  path = pathlib.Path(path)
  with in_data(Verbatim(f"'{path}'")):
    arrays = arrays_of(path)
    missing = [key for key in fields if key not in arrays]
    if missing:
      raise UserError(
        f"has no {', '.join(missing)} (it holds {join_words(sorted(arrays), _MOST_NAMES)})"
      )
    return _both(_keras(arrays), path.stem, num_classes), arrays


def _keras(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the arrays under Keras' names, if they have those of MedMNIST. There a label is an
  array of one number."""
  if any(key in arrays for key in KEYS) or any(key not in arrays for key in _MEDMNIST):
    return arrays
  held = dict(zip(KEYS, (arrays[key] for key in _MEDMNIST)))
  for key in ("y_train", "y_test"):
    if held[key].ndim == 2 and held[key].shape[1] == 1:
      held[key] = held[key][:, 0]
  return arrays | held


def load_npz_fields(
  path: str | pathlib.Path, field: str, num_classes: int | None = None
) -> tuple[tuple[Dataset, np.ndarray], tuple[Dataset, np.ndarray]]:
  """Returns ((train, column), (test, column)), where the columns are the arrays FIELD_train and
  FIELD_test, one entry for each row. The splits are those of `load_npz`."""
  keys = (f"{field}_train", f"{field}_test")
  (train, test), arrays = _load(path, num_classes, *keys)
  return (train, arrays[keys[0]]), (test, arrays[keys[1]])


def load_folder(
  path: str | pathlib.Path, *, num_classes: int | None = None, resident: bool | None = True
) -> tuple[Dataset, Dataset]:
  """Loads (train, test) like `load_npz`, from a folder of x_train.npy, y_train.npy and so on.

  Args:
    resident: place of x_train and x_test. True: in memory. False: in their files, which are read
      on request. None: an array stays in its file if it takes more than a quarter of the memory.

  `np.lib.format.open_memmap` can write an x_train.npy that does not fit in memory.

  Raises:
    UserError: as in `load_npz`; also an array in Fortran order.
  """
  path = pathlib.Path(path)
  with in_data(Verbatim(f"'{path}/'")):
    if not os.path.isdir(path):
      raise UserError("there is no such folder")
    arrays = {
      file.stem: _array_or_file(*_file(file), file.stem, resident)
      for file in sorted(path.glob("*.npy"))
    }
    return _both(arrays, path.name, num_classes)


def _file(path: pathlib.Path) -> tuple[File, tuple[int, ...]]:
  """Returns an opened .npy file, and the shape of its array."""
  no_pipe(path, path.name)
  try:
    with path.open("rb") as stream:
      version = np.lib.format.read_magic(stream)
      header = np.lib.format.read_array_header_2_0
      if version == (1, 0):
        header = np.lib.format.read_array_header_1_0
      shape, by_column, dtype = header(stream)
      offset = stream.tell()
    size = path.stat().st_size - offset
  except (OSError, ValueError, EOFError, *_NO_HEADER) as error:
    raise UserError(
      f"is not a readable .npy array ({first_line(error)})", field=path.name
    ) from error
  if dtype.hasobject or (by_column and len(shape) > 1):
    reason = "holds pickled objects" if dtype.hasobject else "is in Fortran order"
    raise UserError(f"{reason}, so its rows cannot be read by place", field=path.name)
  # The size is checked before any allocation: a header can claim any number of bytes.
  promised = math.prod(shape) * dtype.itemsize
  if min(shape, default=0) < 0 or promised > size:
    raise UserError(
      f"holds {size} bytes, and its header says shape={str(shape)[:60]} of {dtype}",
      field=path.name,
    )
  return File(path, offset, shape or (1,), dtype), shape


def _array_or_file(
  file: File, shape: tuple[int, ...], name: str, resident: bool | None
) -> Any:
  """Returns the array of a file, or the file itself if it holds inputs that stay on disk."""
  # A number counts as 4 bytes, since `Dataset` holds float32 or int32.
  if name.startswith("x_") and stay_in_files(4 * math.prod(shape), resident):
    return file
  return file.read(np.arange(len(file))).reshape(shape)
