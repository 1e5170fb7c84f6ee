"""Rows of bytes in append-only files: client states on disk.

A new version of a row is written at another place, so an earlier index still reads the earlier
version. An index holds the place and a digest of each client's row. So a torn write, an edited
file and a file of another run are reported when they are read.

If a run has several processes, all make the same calls, and process 0 alone touches the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from dpjax.files import KEPT
from dpjax.parallel.exchanges import arrays_from_first, on_first
from dpjax.validate import UserError

# Size in bytes at which a file is closed; later rows go to a new file.
SEGMENT_BYTES = 64 * 2**20
_SUFFIX = ".rows"
# File number of a client without a row; files are numbered from 1.
_NOWHERE = 0


def no_rows(num_clients: int) -> np.ndarray:
  """Returns the index [N, 4] uint32 of clients without rows. Its columns are file number, place
  in the file, and digest in two words."""
  return np.zeros((num_clients, 4), np.uint32)


def with_rows(index: np.ndarray) -> np.ndarray:
  """Returns the ids of the clients that have a row, ascending."""
  return np.flatnonzero(index[:, 0] != _NOWHERE)


def _digest(record: bytes) -> np.ndarray:
  """Returns a digest, [2] uint32. It detects accidents, but is no signature."""
  return np.frombuffer(hashlib.blake2b(record, digest_size=8).digest(), "<u4")


def _segments(index: np.ndarray) -> set[int]:
  return set(np.unique(index[:, 0]).tolist()) - {_NOWHERE}


class Journal:
  """Rows of one length, in numbered files of a folder.

  Args:
    folder: folder of the files, made if it is missing. Rows from an earlier process stay
      readable by the index of that process, and are never overwritten.
    row_bytes: number of bytes of every row.
    segment_bytes: size in bytes at which a file is closed.

  >>> import tempfile
  >>> journal = Journal(pathlib.Path(tempfile.mkdtemp()), row_bytes=2)
  >>> index = no_rows(3)
  >>> index[[0, 2]] = journal.append([b"ab", b"cd"])
  >>> journal.read(index[[2, 0]])
  [b'cd', b'ab']
  """

  def __init__(
    self, folder: pathlib.Path, row_bytes: int, *, segment_bytes: int = SEGMENT_BYTES
  ):
    self.folder = pathlib.Path(folder)
    self.row_bytes = row_bytes
    self._segment_rows = max(1, segment_bytes // max(1, row_bytes))
    self._rows: dict[int, int] = {}  # number of rows in each file, used or not
    self._named: list[set[int]] = []  # files that each of the newest indexes uses
    self._open: int | None = None  # the file that is written to
    self._unsynced: set[int] = set()
    on_first(self._look)

  def _look(self) -> None:
    self.folder.mkdir(parents=True, exist_ok=True)
    for path in self.folder.glob(f"*{_SUFFIX}"):
      if path.stem.isdigit():
        self._rows[int(path.stem)] = path.stat().st_size // max(1, self.row_bytes)

  def path(self, segment: int) -> pathlib.Path:
    """Returns the path of the file with this number."""
    return self.folder / f"{segment:06d}{_SUFFIX}"

  def append(self, records: Sequence[bytes]) -> np.ndarray:
    """Writes rows, and returns their entries [K, 4] for an index.

    Call `sync` to make them survive a loss of power.

    Raises:
      OSError: the disk is full. Rows that were written before stay intact.
    """
    places = no_rows(len(records))
    if records:
      places[:, :2] = on_first(self._append, records)
      places[:, 2:] = [_digest(record) for record in records]
    return places

  def _append(self, records: Sequence[bytes]) -> list[tuple[int, int]]:
    places = []
    for record in records:
      if self._open is None or self._rows[self._open] >= self._segment_rows:
        self._open = max(self._rows, default=0) + 1
        self._rows[self._open] = 0
      slot = self._rows[self._open]
      # Rows are as secret as the data: only the owner may read the file.
      file = os.open(self.path(self._open), os.O_WRONLY | os.O_CREAT, 0o600)
      try:
        # The system may write only a part of the row: a full disk or a signal ends a write early.
        done = 0
        while done < len(record):
          done += os.pwrite(file, record[done:], slot * self.row_bytes + done)
      finally:
        os.close(file)
      # The row is counted after its write: if the disk is full, the next row uses this place.
      self._rows[self._open] += 1
      self._unsynced.add(self._open)
      places.append((self._open, slot))
    return places

  def read(self, places: np.ndarray) -> list[bytes]:
    """Returns the rows at these places [K, 4] of an index.

    Raises:
      UserError: a file is gone, or holds other bytes there.
    """
    records: list[bytes] = []
    on_first(lambda: records.extend(self._read_at(places)))
    if jax.process_count() == 1 or not len(places):
      return records
    rows = [np.frombuffer(record, np.uint8) for record in records]
    empty = np.zeros((len(places), self.row_bytes), np.uint8)
    whole = arrays_from_first(np.stack(rows) if rows else empty)
    return [row.tobytes() for row in whole]

  def _read_at(self, places: np.ndarray) -> list[bytes]:
    records = []
    files = {}
    with contextlib.ExitStack() as held:
      for segment, slot, *digest in places.tolist():
        path = self.path(segment)
        try:
          if segment not in files:
            files[segment] = held.enter_context(open(path, "rb", buffering=0))
          # `pread` reads this row alone, and needs no seek.
          record = os.pread(files[segment].fileno(), self.row_bytes, slot * self.row_bytes)
        except OSError as error:
          raise _unreadable(path, error.strerror or "cannot be opened") from error
        if _digest(record).tolist() != digest:
          raise _unreadable(path, "it does not hold what was written")
        records.append(record)
    return records

  def sync(self) -> None:
    """Makes appended rows survive a loss of power."""
    on_first(self._sync)

  def _sync(self) -> None:
    written = [self.path(segment) for segment in sorted(self._unsynced)]
    # The folder is synced, too: until then a power loss may remove the name of a new file.
    for path in (*written, self.folder):
      file = os.open(path, os.O_RDONLY)
      try:
        os.fsync(file)
      finally:
        os.close(file)
    self._unsynced.clear()

  def compact(self, index: np.ndarray) -> None:
    """Moves rows out of closed files that are mostly unused, so that `keep` can remove the files.

    Changes `index` in place. Afterwards `index` names no row, or at least half of the rows, of each
    file that was closed before.
    """
    for segment, slot, who in on_first(self._move, index):
      index[who, :2] = segment, slot

  def _move(self, index: np.ndarray) -> list[tuple[int, int, int]]:
    moved = []
    closed = set(self._rows) - {self._open}
    for segment in sorted(_segments(index) & closed):
      clients = np.flatnonzero(index[:, 0] == segment)
      # A file is not worth copying if at least half of its rows are in use.
      if 2 * len(clients) >= self._rows[segment]:
        continue
      for who in clients.tolist():
        ((to, slot),) = self._append(self._read_at(index[[who]]))
        moved.append((to, slot, who))
    return moved

  def resume(self, index: np.ndarray) -> None:
    """Continues from this index, whose files the next call of `keep` does not remove."""
    self._named = [_segments(index)]

  def keep(self, index: np.ndarray) -> None:
    """Removes the closed files that neither this index nor the previous one uses."""
    self._named = [*self._named, _segments(index)][-KEPT:]
    on_first(self._prune)

  def _prune(self) -> None:
    needed = set().union(*self._named, {self._open} - {None})
    for segment in set(self._rows) - needed:
      self.path(segment).unlink(missing_ok=True)
      del self._rows[segment]
      self._unsynced.discard(segment)


def _unreadable(path: pathlib.Path, reason: str) -> UserError:
  return UserError(
    f"cannot be read ({reason}); nothing was changed, bring the file back, or "
    "remove the newest step beside it to go on from an earlier one",
    field="checkpoint",
    value=path,
  )
