"""Examples that stay in files, and are read on request by place.

`Rows` can replace a NumPy array [n, ...] in a `Dataset`: it has a shape and a dtype,
and `rows[indices]` is an array. Code that needs all rows at once gets an error (`__array__`), so
that nothing reads a whole data set into memory by accident. Files are read, not mapped: a mapped
file counts as memory of the process, and kills it with a bus error if the file is cut short.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from dpjax.parallel import allocator
from dpjax.validate import UserError, Verbatim

# Approximate number of bytes that are in memory at a time in a pass over all rows.
CHUNK_BYTES = 2**24
# Bytes of which the address of an array must be a multiple, so that JAX takes it without a copy.
_ALIGNED = 64


class RowSource(Protocol):
  """A source of rows, which is called from one thread at a time."""

  def __len__(self) -> int: ...
  def read(self, places: np.ndarray, /) -> np.ndarray:
    """Returns rows [k, ...] at ascending, distinct places [k]."""
    ...


def aligned_empty(
  shape: tuple[int, ...], dtype: np.typing.DTypeLike = np.float32
) -> np.ndarray:
  """Returns an empty array, which a CPU device takes as it is, where it would copy another.

  >>> aligned_empty((2, 3)).shape
  (2, 3)
  """
  size = math.prod(shape) * np.dtype(dtype).itemsize
  whole = np.empty(size + _ALIGNED, np.uint8)
  start = -whole.ctypes.data % _ALIGNED
  return whole[start : start + size].view(dtype).reshape(shape)


def _as_they_are(raw: np.ndarray) -> np.ndarray:
  return raw


def _indices(which: Any) -> np.ndarray:
  """Returns places of rows (integers or a mask) as an array. For other indices, raises IndexError,
  as NumPy does."""
  places = np.asarray(which)
  if isinstance(which, tuple) or (places.size and places.dtype.kind not in "iub"):
    raise IndexError(f"rows are read by integers, a slice or a mask, not by {which!r:.60}")
  return places if places.dtype.kind in "iub" else places.astype(np.int64)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Rows:
  """Rows [n, *features] in a source, read by `rows[indices]`, `rows[a:b]` and `rows[mask]`.

  Args:
    source: source of all rows, before they are decoded.
    features: shape of one decoded row.
    dtype: type of decoded rows: float32, or int32 for tokens, as in a `Dataset`.
    decode: function from raw rows [k, ...] to rows [k, *features]. A decoded row must not depend on
      the other raw rows. The function raises UserError for invalid rows.
    places: places of the rows in the source, in their order; None: all rows of the source.

  >>> class Squares:
  ...   def __len__(self): return 1000
  ...   def read(self, places): return np.float32(places[:, None] ** 2)
  >>> rows = Rows(Squares(), (1,))
  >>> rows.shape, rows[np.array([3, 0, 3])].tolist(), rows.subset(slice(2, 5))[:2].tolist()
  ((1000, 1), [[9.0], [0.0], [9.0]], [[4.0], [9.0]])
  >>> np.asarray(rows)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: resident=False: this needs all examples in memory at once, ...
  """

  source: RowSource
  features: tuple[int, ...]
  dtype: np.dtype = dataclasses.field(default=np.dtype(np.float32))
  decode: Callable[[np.ndarray], np.ndarray] = _as_they_are
  places: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self.source) if self.places is None else len(self.places)

  @property
  def shape(self) -> tuple[int, ...]:
    return (len(self), *self.features)

  @property
  def ndim(self) -> int:
    return 1 + len(self.features)

  @property
  def nbytes(self) -> int:
    """Number of bytes that all rows would take in memory."""
    return math.prod(self.shape) * self.dtype.itemsize

  @property
  def as_stored(self) -> bool:
    """Whether rows are those of a file of dpjax's, without a change when they are read."""
    return isinstance(self.source, File) and self.decode is _as_they_are

  def __array__(self, *_: Any, **__: Any) -> np.ndarray:
    raise self._too_many()

  # np.stack iterates over its argument, and would read all rows one by one.
  def __iter__(self) -> Iterator[np.ndarray]:
    raise self._too_many()

  def _too_many(self) -> UserError:
    return UserError(
      "this needs all examples in memory at once, and they are read from files as they are "
      "drawn; use resident=True",
      field="resident",
      value=False,
    )

  def __getitem__(self, which: Any) -> np.ndarray:
    which = which if isinstance(which, slice) else _indices(which)
    wanted = np.asarray(self._of_source(which))
    # A single number, or an array of several axes, is read as flat indices; the rows are reshaped.
    if wanted.ndim != 1:
      return self[np.ravel(which)].reshape(*np.shape(which), *self.features)
    # A file reads stored rows into their places in any order: padding repeats a row, and a copy of
    # the batch would take as long as the read.
    if self.as_stored or wanted.size < 2 or (np.diff(wanted) > 0).all():
      return self._read(wanted)
    # Each row is read once, in ascending order, so that files are read sequentially.
    places, back = np.unique(wanted, return_inverse=True)
    return self._read(places)[back]

  def _of_source(self, which: Any) -> np.ndarray:
    """Returns the places in the source that an index selects, by NumPy's rules for arrays."""
    if self.places is not None:
      return self.places[which]
    if isinstance(which, slice):
      return np.arange(*which.indices(len(self)))
    places = np.asarray(which)
    if places.dtype == bool:
      if places.shape != (len(self),):
        raise IndexError("a mask must have one entry for each row")
      return np.flatnonzero(places)
    if places.size and not -len(self) <= places.min() <= places.max() < len(self):
      raise IndexError(f"rows {places.min()} to {places.max()} go beyond the data")
    places = places.astype(np.int64)  # a narrow type may not hold the number of rows
    return np.where(places < 0, places + len(self), places)

  def _read(self, places: np.ndarray) -> np.ndarray:
    if not places.size:
      return np.zeros((0, *self.features), self.dtype)
    raw = self.source.read(places)
    decoded = self.decode(raw)
    is_ours = type(self.source).__module__.partition(".")[0] == "dpjax"
    if not is_ours and np.may_share_memory(decoded, raw):
      # A user's class may reuse its buffer for the next rows.
      decoded = decoded.copy()
    if decoded.shape != (len(places), *self.features) or decoded.dtype != self.dtype:
      raise UserError(
        f"rows of shape {decoded.shape[1:]} and dtype {decoded.dtype} stand where "
        f"all others have {self.features} and {self.dtype}",
        field="x",
      )
    return decoded

  def subset(self, which: Any) -> Rows:
    """Returns the rows that `which` selects, in the order of `which`, without reading them."""
    return dataclasses.replace(self, places=self._of_source(which))

  def then(
    self,
    change: Callable[[np.ndarray], np.ndarray],
    features: tuple[int, ...] | None = None,
  ) -> Rows:
    """Returns the rows with `change` applied to each row when it is read.

    Args:
      change: function of rows [k, *features], which converts each row independently.
      features: shape of one row after the change; None: the shape stays.
    """
    before = self.decode
    shape = self.features if features is None else features
    return dataclasses.replace(self, decode=lambda raw: change(before(raw)), features=shape)

  def replace_rows(self, which: np.ndarray, rows: np.ndarray) -> Rows:
    """Returns the rows with `rows` [k, *features] at distinct places `which` [k]. The new rows stay
    in memory."""
    order = np.argsort(which)
    over = _Over(self, np.asarray(which)[order], np.asarray(rows)[order])
    return Rows(over, self.features, self.dtype)

  def chunks(self) -> Iterator[np.ndarray]:
    """Yields all rows, in order, in arrays of about 16 MiB."""
    size = max(1, CHUNK_BYTES // max(1, self.nbytes // max(1, len(self))))
    for start in range(0, len(self), size):
      yield self[start : start + size]


@dataclasses.dataclass(frozen=True)
class _Over:
  """A source in which rows in memory replace some of the stored rows."""

  below: Rows
  which: np.ndarray  # [k] ascending
  rows: np.ndarray  # [k, *features]

  def __len__(self) -> int:
    return len(self.below)

  def read(self, places: np.ndarray) -> np.ndarray:
    rows = self.below[places]
    _, here, there = np.intersect1d(places, self.which, return_indices=True)
    rows[here] = self.rows[there]
    return rows


def stay_in_files(nbytes: int, resident: bool | None) -> bool:
  """Returns whether examples of `nbytes` bytes stay in their files until they are drawn.

  With resident=True they do not, with False they do. With None they do if they would take more than
  a quarter of the machine's memory.

  >>> stay_in_files(8, None), stay_in_files(2**60, None), stay_in_files(8, False)
  (False, True, True)
  """
  if resident is not None:
    return not resident
  return 4 * nbytes > allocator.machine_memory()


class File:
  """Rows of one shape and dtype, stored contiguously in a file from `offset` on.

  Args:
    path: path of the file; of a file without a name, that of its folder.
    descriptor: number of the open file, which this object closes; None: the file is opened.

  Raises:
    UserError: the file is missing or cut short, or has changed between its opening and a read.

  >>> import tempfile
  >>> with tempfile.NamedTemporaryFile() as file:
  ...   _ = file.write(np.arange(12, dtype=np.uint8).tobytes()); file.flush()
  ...   File(file.name, 0, (6, 2), np.uint8).read(np.array([1, 2, 5])).tolist()
  [[2, 3], [4, 5], [10, 11]]
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    offset: int,
    shape: tuple[int, ...],
    dtype: np.typing.DTypeLike,
    descriptor: int | None = None,
  ):
    self.path = pathlib.Path(path)
    self.offset = offset
    self.shape = tuple(shape)
    self.dtype = np.dtype(dtype)
    self._row = math.prod(self.shape[1:]) * self.dtype.itemsize
    try:
      if descriptor is None:
        descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
      raise self._wrong(f"cannot be opened ({error.strerror})") from error
    self._file = descriptor
    # Closing is registered before anything below can fail, or the file would stay open.
    weakref.finalize(self, os.close, self._file)
    self._known = self._identity()
    needed = offset + self.shape[0] * self._row
    if self._known[0] < needed:
      sizes = f"holds {self._known[0]} bytes of {needed}"
      raise self._wrong(f"is cut short: it {sizes}")

  def _wrong(self, what: str) -> UserError:
    return UserError(what, field="file", value=Verbatim(f"'{self.path}'"))

  def _identity(self) -> tuple[int, int]:
    stat = os.fstat(self._file)
    return stat.st_size, stat.st_mtime_ns

  def __len__(self) -> int:
    return self.shape[0]

  def read(self, places: np.ndarray) -> np.ndarray:
    """Returns the rows at `places`, in any order, as an array that a CPU device need not copy."""
    out = aligned_empty((len(places), *self.shape[1:]), self.dtype)
    bytes_of = out.reshape(-1).view(np.uint8).data
    # Starts of the stretches of consecutive rows; one read serves a stretch.
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    # Python's numbers, since indexing by NumPy's took a tenth of the time.
    firsts = [*starts.tolist(), len(places)]
    try:
      for first, last, place in zip(firsts, firsts[1:], places[starts].tolist()):
        part = bytes_of[first * self._row : last * self._row]
        self._fill(part, self.offset + place * self._row)
      # The file is checked after the read, so that data from a changed file are not used.
      self.check()
    except OSError as error:
      reason = os.strerror(error.errno or errno.EIO)
      raise self._wrong(f"cannot be read any more ({reason})") from error
    return out

  def _fill(self, part: memoryview, start: int) -> None:
    while part:
      # One call may read fewer bytes than requested.
      count = os.preadv(self._file, [part], start)
      if not count:
        raise self._wrong("was cut short while it was being read")
      part = part[count:]
      start = start + count

  def check(self) -> None:
    """Raises UserError if the file has changed since it was opened. The noise of a run is bound to
    the data that the run read first."""
    if self._identity() != self._known:
      raise self._wrong(
        "has changed since it was opened; a run is bound to its data, bring them back"
      )
