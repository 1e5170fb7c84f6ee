"""Files that survive a loss of power: written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import BinaryIO

# Number of newest checkpoints of a run that stay on disk, with all that they refer to.
KEPT = 2


def make_folder(path: pathlib.Path) -> None:
  """Makes a folder and its parents, so that they survive a loss of power."""
  if path.is_dir():
    return
  make_folder(path.parent)
  path.mkdir(exist_ok=True)
  sync(path.parent)


def sync(path: str | os.PathLike, mode: int | None = None) -> None:
  """Makes a file, or the names in a folder, survive a loss of power.

  Syncing a file alone saves its content, and its name may still be lost.
  `mode`: permission bits to set first; None leaves them as they are."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    if mode is not None:
      os.fchmod(descriptor, mode)
    os.fsync(descriptor)
  except OSError as error:
    # Some network file systems sync no folders (EINVAL), and some have no modes (EPERM).
    if error.errno not in (errno.EINVAL, errno.EPERM, errno.ENOTSUP):
      raise
  finally:
    os.close(descriptor)


def replace_file(
  path: str | os.PathLike,
  content: bytes | Callable[[BinaryIO], object],
  *,
  secret: bool = False,
) -> None:
  """Writes a file atomically and durably: a new file beside it, fsync, rename, fsync of the folder.

  Args:
    content: the bytes, or a function that writes them to an open file.
    secret: whether only the owner may read and write the file, whatever the umask.
  """
  path = pathlib.Path(path)
  make_folder(path.parent)
  new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    mode = 0o600 if secret else 0o666
    with open(new, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
      # `mode` above applies to a new file only. A leftover temporary file keeps its old mode.
      if secret:
        os.fchmod(file.fileno(), mode)
      if isinstance(content, bytes):
        file.write(content)
      else:
        content(file)
      file.flush()
      os.fsync(file.fileno())
    # The content is on disk before its name, and the name before the function returns.
    os.replace(new, path)
    sync(path.parent)
  except OSError as error:
    # That a write fails, as on a full disk, comes without a name.
    error.filename = error.filename or str(path)
    raise
  finally:
    # An error here must not hide the error of the write. Without a temporary file there is nothing
    # to remove.
    with contextlib.suppress(OSError):
      new.unlink(missing_ok=True)


def sha256(path: str | os.PathLike) -> str:
  """Returns the SHA-256 of a file, in hexadecimal digits."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def half_written(path: pathlib.Path) -> set[pathlib.Path]:
  """Returns the temporary files that `replace_file` wrote for `path` and did not rename, for
  example because the machine lost power."""
  return set(path.parent.glob(f".{path.name}.*.tmp"))
