"""A loss of power, simulated: what a run had not told the disk to keep may be gone.

`Disk` notes what is durable: a file as it was when it was last synced, a folder's names as they
were when the folder was. `Disk.lost` writes what could be left: a file that was never synced is
empty, cut short or whole; a name that its folder was not synced with is there or not; each by
chance.

A file that native code writes counts as not synced until Python syncs it, and a kernel keeps more
order than this: it is the worst case.
"""

import contextlib
import os
import pathlib
import random
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from unittest import mock

_CHANGING = ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "remove")


class Disk:
  """What is durable under a folder while a program writes there.

  Args:
    root: the folder; it need not be there yet.
    before: called before each operation that may change what is durable.
  """

  def __init__(self, root: pathlib.Path, before: Callable[[], None] = lambda: None):
    self.root = root
    self._before = before
    self._folders: set[int] = set()  # of all that was ever seen, those that are gone, too
    self._held: dict[int, int] = {}  # file or folder -> a descriptor
    self._lock = threading.RLock()  # other threads may write
    self._asking = False
    self._bytes: dict[int, bytes] = {}  # file -> what is durable of it
    self._names: dict[int, dict[str, int]] = {}  # folder -> name -> file or folder
    self._keep(root.parent)

  @contextlib.contextmanager
  def watched(self) -> Iterator[None]:
    """Notes what the block syncs."""
    with contextlib.ExitStack() as held:
      for name in _CHANGING:
        held.enter_context(mock.patch.object(os, name, self._noting(name)))
      yield

  def _noting(self, name: str) -> Callable:
    honest = getattr(os, name)

    def act(*args, **options):
      with self._lock:
        if not self._asking:  # `before` may write files itself
          self._asking = True
          self._before()
          self._asking = False
      done = honest(*args, **options)
      if name == "fsync":
        self._keep(f"/proc/self/fd/{args[0]}")
      return done

    return act

  def _hold(self, path: str | pathlib.Path) -> None:
    """Keeps the number of a file or folder its own when it is gone."""
    # A kernel gives the number of what was deleted to the next file that is made.
    with contextlib.suppress(FileNotFoundError):
      descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
      inode = os.fstat(descriptor).st_ino
      if inode in self._held:
        os.close(descriptor)
      else:
        self._held[inode] = descriptor
        weakref.finalize(self, os.close, descriptor)

  def _keep(self, path: str | pathlib.Path) -> None:
    path = os.path.realpath(path)  # of a descriptor: `_hold` follows no link
    self._hold(path)
    held = os.stat(path)
    if stat.S_ISDIR(held.st_mode):
      with os.scandir(path) as entries:
        found = list(entries)
      for entry in found:
        self._hold(entry.path)
      self._names[held.st_ino] = {entry.name: entry.inode() for entry in found}
      self._folders |= {entry.inode() for entry in found if entry.is_dir()}
    elif stat.S_ISREG(held.st_mode):
      self._bytes[held.st_ino] = pathlib.Path(path).read_bytes()

  def lost(self, into: pathlib.Path, chance: random.Random) -> None:
    """Writes into a folder what a loss of power now could leave of `root`."""
    there: dict[int, pathlib.Path] = {}
    for folder, folders, files in os.walk(self.root):
      for name in (*folders, *files):
        path = pathlib.Path(folder) / name
        with contextlib.suppress(FileNotFoundError):  # another thread has just renamed it
          there[os.lstat(path).st_ino] = path
    durable = self._names[os.stat(self.root.parent).st_ino]
    if self.root.exists() and (self.root.name in durable or chance.random() < 0.5):
      self._folder(self.root, os.stat(self.root).st_ino, into, there, chance)

  def _folder(self, path, inode, into, there, chance) -> None:
    into.mkdir(parents=True)
    now = {}
    if path is not None and path.is_dir():
      with os.scandir(path) as entries:
        now = {entry.name: entry.inode() for entry in entries}
    kept = self._names.get(inode, {})
    for name in sorted({*now, *kept}):
      # Of a name that changed since its folder was synced, the old or the new one is left.
      which = kept.get(name) if now.get(name) == kept.get(name) else None
      which = which or chance.choice([now.get(name), kept.get(name)])
      if which is not None:
        self._entry(which, into / name, there, chance)

  def _entry(self, inode, into, there, chance) -> None:
    path = there.get(inode)
    if inode in self._folders or (path is not None and path.is_dir()):
      self._folder(path, inode, into, there, chance)
      return
    whole = b""
    with contextlib.suppress(OSError):
      whole = path.read_bytes() if path is not None else b""
    durable = self._bytes.get(inode)
    if durable is None:
      durable = whole[: chance.choice([0, len(whole) // 2, len(whole)])]
    elif whole.startswith(durable):  # appended to since
      durable = whole[: chance.choice([len(durable), len(whole)])]
    into.write_bytes(durable)
