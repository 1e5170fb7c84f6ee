"""Identity of data: a digest of everything that training reads.

The digest is a fixed function of the data, without noise. Whoever sees the digest, or a value that
follows from it without noise, can confirm a guess of the whole data set. So the digest is as secret
as the data. Checkpoints hold it, so that a run goes on with its own data only.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax.columns import Columns
from dpjax.data.dataset import Dataset
from dpjax.data.rows import Rows
from dpjax.types import Labelled

if TYPE_CHECKING:
  from dpjax.data.federation import Federation

# Name of the attribute that holds the digest of the data set given to `with_inputs`.
_ORIGIN = "_origin"


def digest(data: Labelled | Federation) -> bytes:
  """Returns the digest of a training set: 32 bytes, as SECRET as the data.

  Digests of different training sets differ, except as `with_inputs` says. The digest covers
  inputs and labels (dtype, shape, every byte, in order), which rows are present, and the kind of
  an example
  (classes, vocabulary, target). For a `Federation` it also covers which client, by name and place,
  holds which rows. It covers neither names of data sets nor test data: neither training nor
  sampling depends on these.
  The function reads all data once, in about one second for each gigabyte.

  Args:
    data: a `Dataset` (anything with `x` and `y`), or a `Federation`.

  >>> from dpjax.data.dataset import from_arrays
  >>> first = from_arrays(np.zeros((3, 1)), [0, 1, 1], num_classes=2)
  >>> same = from_arrays(np.zeros((3, 1)), [0, 1, 1], num_classes=2, name="copy")
  >>> other = from_arrays(np.zeros((3, 1)), [0, 1, 0], num_classes=2)
  >>> digest(first) == digest(same), digest(first) == digest(other), len(digest(first))
  (True, False, 32)
  """
  held: Any = data
  if hasattr(held, "indices"):
    # The digest covers the name and the rows of each client, in the order of the clients.
    hashed = hashlib.sha256(b"dpjax federation " + digest(held.dataset))
    for name, rows in zip(held.client_ids, held.indices, strict=True):
      hashed.update(f"{name!r} ".encode())
      _add(hashed, np.asarray(rows, np.int64))
    return hashed.digest()
  origin = getattr(data, _ORIGIN, None)
  if origin:
    return origin
  kind = [getattr(data, name, None) for name in ("num_classes", "vocab_size")]
  target = getattr(data, "target", None)
  kind += [] if target is None else [repr(target)]
  hashed = hashlib.sha256(f"dpjax data {kind}".encode())
  arrays = [held.x, held.y]
  if isinstance(held.x, Columns):
    # The digest covers the names of the arrays, too: data with swapped inputs are other data.
    hashed.update(f"dict {[place for place, _ in held.x.named_arrays()]}".encode())
    arrays = [*(leaf for _, leaf in held.x.named_arrays()), held.y]
  present = getattr(data, "present", None)
  # Empty records change what is trained on, so they change the digest.
  arrays += [] if present is None or np.all(present) else [np.asarray(present)]
  for array in arrays:
    _add(hashed, array if isinstance(array, Rows) else np.asarray(array))
  return hashed.digest()


def _add(sha256: Any, array: np.ndarray | Rows) -> None:
  sha256.update(f"{array.dtype.str} {array.shape} ".encode())
  for chunk in array.chunks() if isinstance(array, Rows) else [array]:
    # An empty array has no bytes to view.
    if chunk.size:
      sha256.update(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)


def with_inputs(source: Dataset, x: np.ndarray | Rows) -> Dataset:
  """Returns `source` with inputs `x`, which a public rule computed from the inputs of `source`.

  The digest stays that of `source`. So it does not depend on the last bits of `x`, which may differ
  between devices or numbers of threads. It does not cover the rule, which callers must know by
  themselves (a run's folder holds its whole config).

  >>> from dpjax.data.dataset import from_arrays
  >>> source = from_arrays(np.ones((2, 1)), [0, 1], num_classes=2)
  >>> doubled = with_inputs(source, 2 * source.x)
  >>> digest(doubled) == digest(source), digest(doubled.subset([0])) == digest(source)
  (True, False)
  """
  result = dataclasses.replace(source, x=x, source_shape=tuple(source.x.shape[1:]))
  # This attribute is no field: `replace` makes other data, and must drop it.
  object.__setattr__(result, _ORIGIN, digest(source))
  return result
