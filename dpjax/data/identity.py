"""Identity of data: a digest of everything in them that training reads.

The digest is a fixed function of the data, without noise. Whoever sees it can confirm a guess of
the whole data set, and so can whoever sees anything that follows from it without noise. So it is as
secret as the data. `experiments.run.run_keys` derives keys from it; checkpoints hold it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from dpjax.columns import Columns
from dpjax.data.dataset import Dataset
from dpjax.data.federation import Federation
from dpjax.data.rows import Rows
from dpjax.types import Labelled

# Attribute: digest of the source from which `computed` made these data.
_ORIGIN = "_origin"
# Attribute: the shape of an example before the rule of `computed`.
_SOURCE_SHAPE = "_source_shape"


def digest(data: Labelled | Federation) -> bytes:
  """Returns 32 bytes that differ if two training sets differ. As SECRET as the data.

  It covers inputs and labels (dtype, shape, every byte, in order), which rows are present, and what
  one example is (classes, vocabulary, target). For a `Federation` it also covers which client, by
  name and place, holds which rows. It covers neither names of data sets nor test data: nothing
  that is trained or drawn depends on these. It reads everything once, at about a second for a
  gigabyte.

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
    # The owners of rows belong to the identity: names and rows in the clients' order.
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
  # Data of classes keep the digest from before other targets existed.
  kind += [] if target is None else [repr(target)]
  hashed = hashlib.sha256(f"dpjax data {kind}".encode())
  arrays = [held.x, held.y]
  if isinstance(held.x, Columns):
    # Names, too: which array is which input belongs to the data.
    hashed.update(f"dict {[place for place, _ in held.x.named()]}".encode())
    arrays = [*(leaf for _, leaf in held.x.named()), held.y]
  present = getattr(data, "present", None)
  # Empty records change the digest, and so the noise: with equal noise, two runs would differ by
  # the record alone. Without empty records, the digest is the one from before they were covered.
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


def computed(source: Dataset, x: np.ndarray | Rows) -> Dataset:
  """Returns `source` with other inputs, computed from its own by a public rule.

  The digest stays that of `source`, so that it does not depend on the last bits of the features,
  which may differ between devices or numbers of threads. Callers must bind the rule to their keys
  themselves (a run's keys depend on its whole config).

  >>> from dpjax.data.dataset import from_arrays
  >>> source = from_arrays(np.ones((2, 1)), [0, 1], num_classes=2)
  >>> doubled = computed(source, 2 * source.x)
  >>> digest(doubled) == digest(source), digest(doubled.subset([0])) == digest(source)
  (True, False)
  """
  result = dataclasses.replace(source, x=x)
  # Not a field: `replace` makes other data, and must drop it.
  object.__setattr__(result, _ORIGIN, digest(source))
  object.__setattr__(result, _SOURCE_SHAPE, tuple(source.x.shape[1:]))
  return result


def source_shape(dataset: Dataset) -> tuple[int, ...] | None:
  """Returns the shape of an example before `computed` changed it; None for other data sets.

  >>> from dpjax.data.dataset import from_arrays
  >>> source = from_arrays(np.ones((2, 1)), [0, 1], num_classes=2)
  >>> source_shape(computed(source, np.ones((2, 3), np.float32))), source_shape(source)
  ((1,), None)
  """
  return getattr(dataset, _SOURCE_SHAPE, None)
