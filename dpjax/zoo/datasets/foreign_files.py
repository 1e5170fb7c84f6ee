"""Helpers of the readers of other libraries' federations: errors of one line, and h5py."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from dpjax.validate import UserError, first_line


@contextlib.contextmanager
def read_as(kind: str) -> Iterator[None]:
  """Turns an error in the `with` block that is no UserError into a UserError of one line.

  Args:
    kind: words for the files, such as "a file of TensorFlow Federated".

  >>> with read_as("a file of LEAF"):
  ...   raise ValueError("no users")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: cannot be read as a file of LEAF (ValueError: no users)
  """
  try:
    yield
  except UserError:
    raise
  # SQLite, protobuf and HDF5 raise many types of errors, often with long messages.
  except Exception as error:
    raise UserError(
      f"cannot be read as {kind} ({type(error).__name__}: {first_line(error)})"
    ) from error


def h5py() -> Any:
  """Returns the module h5py.

  Raises:
    UserError: h5py is not installed; the message names the extra that installs it.
  """
  try:
    return importlib.import_module("h5py")
  except ModuleNotFoundError as error:
    raise UserError(
      "h5py is needed to read it: pip install -e '.[h5]' in dpjax's clone"
    ) from error
