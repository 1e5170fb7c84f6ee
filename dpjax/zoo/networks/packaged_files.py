"""Files that an installed package carries: never imported, and no pickle in them runs code."""

from __future__ import annotations

import codecs
import hashlib
import importlib.util
import pathlib
import pickle
from typing import Any

import numpy as np

from dpjax.validate import UserError

# What a pickle of arrays names. Modules are known by their last part: NumPy 1 wrote numpy.core,
# NumPy 2 writes numpy._core, and pickles of protocol 5 name `_frombuffer`.
_OF_ARRAYS: dict[tuple[str, str], Any] = {
  ("numpy", "ndarray"): np.ndarray,
  ("numpy", "dtype"): np.dtype,
  ("multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
  ("multiarray", "scalar"): np.float64(0).__reduce__()[0],
  ("numeric", "_frombuffer"): np.zeros(1).__reduce_ex__(5)[0],
  ("_codecs", "encode"): codecs.encode,
}


class Arrays(pickle.Unpickler):
  """Reads a pickle of arrays, numbers, texts, lists and dicts.

  Any other object is refused before it is made, since a pickle may name any function to call.
  """

  def find_class(self, module: str, name: str) -> Any:
    try:
      return _OF_ARRAYS[module.rpartition(".")[2], name]
    except KeyError:
      raise pickle.UnpicklingError(f"names {module}.{name}, which is no array") from None


def read(
  package: str,
  place: str,
  sha256: str,
  *,
  network: str,
  absent: str,
  what: str,
  remedy: str,
) -> bytes:
  """Returns the bytes of a file of an installed package, without running the package's code.

  Args:
    package: name by which the package is imported.
    place: path of the file in the package's folder.
    sha256: hexadecimal SHA-256 of the known file.
    network: name of the network whose file it is, for messages.
    absent: message if the package is not installed.
    what: the file in words, such as "the known weights".
    remedy: advice if the file has another SHA-256.

  Raises:
    UserError: the package or the file is missing, or the file has another SHA-256.
  """
  # Finding the package runs none of its code.
  spec = importlib.util.find_spec(package)
  if spec is None or spec.origin is None:
    raise UserError(absent, field="features", value=network)
  path = pathlib.Path(spec.origin).parent / place
  try:
    content = path.read_bytes()
  except OSError as error:
    raise UserError(
      f"cannot be read ({error.strerror})", field="features", value=str(path)
    ) from error
  # The hash is that of the returned bytes, so a later change of the file has no effect.
  seen = hashlib.sha256(content).hexdigest()
  if seen != sha256:
    raise UserError(
      f"must be {what}, of SHA-256 {sha256[:16]}..., not {seen[:16]}...; {remedy}",
      field="features",
      value=str(path),
    )
  return content
