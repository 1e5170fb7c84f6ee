"""Features on disk, in a file without a name (`unnamed_rows`) or in a folder that the user names.

From that folder the next run on the same data reads them, and need not compute them again. A file
there holds the features themselves, so the folder is AS PRIVATE AS THE DATA: only its owner may
read it (0700, files 0600). A file also holds its key, a digest of data and settings. The key is as
secret as the data, so file names are random. Nothing is ever evicted: the user must empty the
folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import math
import os
import pathlib
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from dpjax import validate
from dpjax.data.rows import CHUNK_BYTES, File, Rows
from dpjax.validate import UserError

VARIABLE = "DPJAX_CACHE_DIR"
_SUFFIX = ".features"
_PARTIAL = ".partial"
_LOCK = "lock"
_HEAD = 4096
_MAGIC = "dpjax features 1"


def folder() -> pathlib.Path | None:
  """Returns the path in $DPJAX_CACHE_DIR, or None (no cache) if the variable is unset or empty."""
  named = os.environ.get(VARIABLE)
  return pathlib.Path(os.path.expanduser(named)) if named else None


def key(data: bytes, *settings: object) -> bytes:
  """Returns the key of features: a SHA-256 over `data` (the digest of the data) and the settings
  that determine the features.

  >>> key(b"", "J", 2) == key(b"", "J", 2), key(b"", "J", 2) == key(b"", "J", 3)
  (True, False)
  """
  return hashlib.sha256(f"dpjax cache {settings!r} ".encode() + data).digest()


def rows(
  where: pathlib.Path,
  wanted: bytes,
  shape: tuple[int, ...],
  make: Callable[[], Iterable[np.ndarray]],
  tell: Callable[[str], None] = lambda line: None,
) -> Rows:
  """Returns float32 rows [n, *features] from a folder. If the folder lacks them, they are first
  computed and stored.

  Args:
    where: path of the folder.
    wanted: `key` of the features.
    shape: shape of all rows, (n, *features).
    make: function that yields the rows as arrays, which together have `shape`. It is called if the
      rows are missing, cut short or damaged.
    tell: function that is called with a line about what was found or done.

  A file appears only when it is complete: it is written under another name, then renamed. Its
  content is compared with a digest when it is opened. Only one process at a time computes features.

  Raises:
    UserError: a path that cannot be a folder, a folder that other users may access, or a full disk.
  """
  check_folder(where)
  stored = _look(where, wanted, shape, tell)
  if stored is not None:
    return stored
  with _alone(where, tell):
    # The folder is read again under the lock: another process may have stored the features.
    stored = _look(where, wanted, shape, tell)
    if stored is not None:
      return stored
    # No other process writes now, so partial files are from processes that were stopped.
    for path in where.glob(f"*{_PARTIAL}"):
      path.unlink()
      tell(f"removed {path}, which a process left that was stopped")
    return _open(_write_rows(where, wanted, shape, make), shape)


def unnamed_rows(shape: tuple[int, ...], make: Callable[[], Iterable[np.ndarray]]) -> Rows:
  """Returns float32 rows [n, *features], computed and stored in a file without a name.

  The file stands in no folder, and the system removes it when this process ends, however it ends.
  Its bytes lie on the disk of the folder of temporary files. They are neither encrypted nor
  overwritten.

  Args:
    shape: shape of all rows, (n, *features).
    make: function that yields the rows as arrays, which together have `shape`.

  Raises:
    UserError: a folder of temporary files that cannot be written, or a full disk.
  """
  # Not /tmp, which lies in memory on many systems.
  where = pathlib.Path(os.environ.get("TMPDIR") or "/var/tmp")
  refused = functools.partial(
    _refusal, where, "TMPDIR", "; features go there, unless resident=True"
  )
  with contextlib.ExitStack() as stack:
    with refused():
      file = stack.enter_context(tempfile.TemporaryFile(buffering=0, dir=where))
    for _ in _write_parts(file, shape, make(), refused):
      pass
    return Rows(File(where, 0, shape, np.float32, os.dup(file.fileno())), shape[1:])


def check_folder(where: pathlib.Path) -> None:
  """Makes the folder `where`, which only its owner may enter (mode 0700), if it is missing.

  Raises:
    UserError: `where` cannot be a folder, or other users may access it.
  """
  validate.folder(**{VARIABLE: where})
  with _refusal(where):
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = where.stat().st_mode & 0o777
  if mode & 0o077:
    raise UserError(
      f"is open to others (mode {mode:o}); what lies there is as private as the "
      "data: chmod 700 it, or choose another",
      field=VARIABLE,
      value=where,
    )


@contextlib.contextmanager
def _refusal(where: pathlib.Path, field: str = VARIABLE, hint: str = "") -> Iterator[None]:
  try:
    yield
  except OSError as error:
    reason = os.strerror(error.errno) if error.errno else str(error)
    raise UserError(
      f"cannot be written ({reason}){hint}", field=field, value=where
    ) from error


@contextlib.contextmanager
def _alone(where: pathlib.Path, tell: Callable[[str], None]) -> Iterator[None]:
  with _refusal(where):
    lock = os.open(where / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
  try:
    # On a file system without locks, `flock` raises OSError.
    with _refusal(where):
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        tell(f"waiting for another process, which computes features in {where}")
        fcntl.flock(lock, fcntl.LOCK_EX)
    yield
  finally:
    os.close(lock)


def _head(path: pathlib.Path) -> dict[str, Any]:
  """Returns the head of a file, or {} if the file is unreadable or not in the current format."""
  try:
    with path.open("rb") as file:
      head = json.loads(file.read(_HEAD))
  except (OSError, ValueError, RecursionError):
    return {}
  return head if isinstance(head, dict) and head.get("magic") == _MAGIC else {}


def _look(
  where: pathlib.Path,
  wanted: bytes,
  shape: tuple[int, ...],
  tell: Callable[[str], None],
) -> Rows | None:
  for path in sorted(where.glob(f"*{_SUFFIX}")):
    head = _head(path)
    if head.get("key") != wanted.hex() or head.get("shape") != list(shape):
      continue
    # A truncated file raises UserError here, and is removed below.
    with contextlib.suppress(UserError):
      opened = _open(path, shape)
      if _digest(opened.chunks()) == head.get("sha256"):
        tell(f"features are read from {path}")
        return opened
    path.unlink(missing_ok=True)
    tell(f"{path} was damaged and is removed; its features are computed again")
  return None


def _open(path: pathlib.Path, shape: tuple[int, ...]) -> Rows:
  return Rows(File(path, _HEAD, shape, np.float32), shape[1:])


def _digest(chunks: Iterable[np.ndarray]) -> str:
  sha256 = hashlib.sha256()
  for chunk in chunks:
    sha256.update(np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data)
  return sha256.hexdigest()


def _write_rows(
  where: pathlib.Path,
  wanted: bytes,
  shape: tuple[int, ...],
  make: Callable[[], Iterable[np.ndarray]],
) -> pathlib.Path:
  # The name is random: a name made of the key would show a digest of private data.
  name = secrets.token_hex(8)
  partial = where / f"{name}{_PARTIAL}"
  with _refusal(where):
    # The mode lets only the owner read the file, from its first byte on.
    raw = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
  refused = functools.partial(_refusal, where)
  try:
    with os.fdopen(raw, "wb", buffering=0) as file:
      file.seek(_HEAD)
      sha256 = _digest(_write_parts(file, shape, make(), refused))
      head = {"magic": _MAGIC, "key": wanted.hex(), "shape": list(shape), "sha256": sha256}
      # The head holds the digest, so it is written last. A file that was not finished has no head.
      file.seek(0)
      with refused():
        _write(file, np.frombuffer(json.dumps(head).ljust(_HEAD).encode(), np.uint8))
        # The file is flushed to disk before it is renamed, so a file with the final name is
        # complete.
        os.fsync(file.fileno())
    done = partial.rename(where / f"{name}{_SUFFIX}")
  except BaseException:
    partial.unlink(missing_ok=True)
    raise
  return done


def _write_parts(
  file: Any,
  shape: tuple[int, ...],
  chunks: Iterable[np.ndarray],
  refused: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[np.ndarray]:
  """Writes all chunks, part by part, and yields each part after it is written."""
  count = 0
  for chunk in chunks:
    whole = np.ascontiguousarray(chunk, np.float32)
    count += whole.size
    for part in np.array_split(whole, max(1, whole.nbytes // CHUNK_BYTES)):
      with refused():
        _write(file, part)
      yield part
  if count != math.prod(shape):
    raise AssertionError(f"features of {shape} were {count} numbers")


def _write(file: Any, array: np.ndarray) -> None:
  left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
  while left:
    left = left[file.write(left) :]
