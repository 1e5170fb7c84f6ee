"""Loads of the user's files: code that is run and data that are read, in every thread.

A source says what may be loaded; Python says what was. It raises an audit event for each file
that it opens and each piece of code that it runs, whichever way led there: an import, a finder,
`exec_module`, `runpy`, `exec`, `ctypes`. A hook keeps each such file under the file of the user
that asked for it. That is the nearest frame of a file of the user below the event; in a thread
without one, the frame that started the thread, or that the main thread is at.

So what a test, a notebook or a plugin loads stands under its own file, and is no part of a run
that does not reach that file.

An audit hook cannot be removed. It costs less than a microsecond where nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from dpjax.run_code.packages import EXTENSIONS, owner
from dpjax.validate import UserError

# Files of the system, and what programs keep of their own accord: caches, settings.
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/run/")
_KEPT_BY_PROGRAMS = {".cache", ".config", ".local", ".git", ".ipython", ".jupyter"}
# They read sources to show them: of a traceback, a warning.
_READERS_OF_SOURCES = ("linecache.py", "tokenize.py", "inspect.py", "traceback.py")
_LARGEST_BESIDE_DATA = 2**26  # bytes
_CODE = (".py", ".pyc", *EXTENSIONS)


class LoadedFile:
  """A file that was loaded. It counts as it was at the first look after that."""

  def __init__(self, file: str, *, is_code: bool, number: int):
    self.file = file
    self.number = number
    self.is_code = is_code
    # Digest of an earlier state of a file of data, where that was looked at.
    self.before = ""
    # By an import, so that its module holds what it computed.
    self.is_imported = False
    self.state = _state(file)
    self._sha256 = ""

  def sha256(self) -> str:
    """Returns the digest of the file; "" where it is gone.

    Raises:
      UserError: it was edited after it was loaded, so nobody knows what was loaded.
    """
    if self._sha256:
      return self._sha256
    now = _state(self.file)
    if now is None:
      return ""
    # A program may also read what it has written before, such as a cache.
    if now != self.state and self.file not in _WRITTEN:
      raise UserError(
        f"file {os.path.basename(self.file)!r}: was edited after the run's code had loaded it; "
        "start Python again (a notebook: its kernel), so that what runs is what it says"
      )
    with open(self.file, "rb") as content:
      self._sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return self._sha256


# Real path of the asking file, or `key_of` -> file -> its load.
_LOADS: dict[str, dict[str, LoadedFile]] = {}
_WRITTEN: set[str] = set()
_STARTED_BY: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
_CONFIG_FILES: list[str] = []
_changes = 0
# Import path of the function that reads a data set now.
_reading = ""


def number_of_changes() -> int:
  """A number that grows whenever a file of the user loads another file, or another state of it."""
  return _changes


def by(file: str) -> list[LoadedFile]:
  """Returns what a file of the user has loaded, in the order of the names."""
  return [load for _, load in sorted(_LOADS.get(file, {}).items())]


def begin_at(config_file: str) -> None:
  """Names the file that made the config of this process: what it changes is code of its runs."""
  _CONFIG_FILES[:] = [os.path.realpath(config_file)]


def config_files() -> list[str]:
  return [*_CONFIG_FILES]


def key_of(path: str) -> str:
  """Names a function at an import path, by the file of its module: another module of that name
  may have been there before."""
  home, _, name = path.partition(":")
  file = getattr(sys.modules.get(home), "__file__", None) or home
  return f"{os.path.realpath(file)}:{name}"


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
  """Keeps what the block loads under the import path of a function that reads a data set.

  Another function of its file may read another data set, in another run of this process. Large
  files are not kept: those of the data set are known by its digest.
  """
  global _reading
  before = _reading
  _reading = key_of(path)
  try:
    yield
  finally:
    _reading = before


def _state(file: str) -> tuple[int, int] | None:
  try:
    held = os.stat(file)
  except OSError:
    return None
  return held.st_size, held.st_mtime_ns


# --- who asks


_kinds: dict[str, str] = {}  # file of a frame -> whose it is


def _kind(file: str) -> str:
  if file not in _kinds:
    _kinds[file] = "standard" if file.startswith("<") else owner(file)
  return _kinds[file]


def _frame_of_event() -> Any:
  frame: Any = sys._getframe()
  while frame is not None and frame.f_code.co_filename == __file__:
    frame = frame.f_back
  return frame


def _asks(*, data: bool) -> str | None:
  """The file of the user that asks for what is loaded now, if one does."""
  is_over, file = _nearest(_frame_of_event(), data=data)
  me = threading.get_ident()
  if is_over or me == threading.main_thread().ident:
    return file
  # A thread that runs a library's function. Not every Python tells when it was started; whoever
  # needs what it loads waits for it.
  thread = threading.current_thread()
  if thread in _STARTED_BY:
    return _STARTED_BY[thread]
  waiting = sys._current_frames().get(threading.main_thread().ident or 0)
  return _nearest(waiting, data=False)[1]


def _nearest(frame: Any, *, data: bool) -> tuple[bool, str | None]:
  """(whether frames tell who asks, the file of the user that does)."""
  while frame is not None:
    code = frame.f_code
    kind = _kind(code.co_filename)
    if kind == "user":
      return True, os.path.realpath(code.co_filename)
    if kind == "dpjax" or (data and _is_own_doing(code, kind)):
      return True, None
    frame = frame.f_back
  return False, None


def _is_own_doing(code: Any, kind: str) -> bool:
  """Whether a frame reads files that nobody named to it: a library that is imported, JAX's
  compilation cache, a traceback."""
  file = code.co_filename
  if kind == "standard":
    return file.endswith(_READERS_OF_SOURCES)
  in_jax = "/jax/" in file or "/jaxlib/" in file
  return code.co_name == "<module>" or (in_jax and "/jax/_src/numpy/" not in file)


# --- what is loaded


def _keep(target: Any, *, is_code: bool) -> None:
  global _changes
  file = os.path.abspath(os.fsdecode(target))
  if owner(file) != "user" or (not is_code and _is_of_system(file)):
    return
  asking = _asks(data=not is_code)
  if asking is None:
    return
  file = _archive(file) if is_code else file
  if not os.path.isfile(file) or os.path.realpath(file) == asking:
    return
  if _reading and not is_code and os.path.getsize(file) > _LARGEST_BESIDE_DATA:
    return
  held = _LOADS.setdefault(_reading or asking, {})
  if file not in held or held[file].state != _state(file):
    _changes += 1
    load = LoadedFile(file, is_code=is_code, number=_changes)
    # A program may read again what it has written itself, such as a cache.
    if file in held and not is_code and file not in _WRITTEN:
      load.before = held[file]._sha256
    held[file] = load
  if is_code and _frame_of_event().f_code.co_filename == "<frozen importlib._bootstrap>":
    held[file].is_imported = True


def _is_of_system(file: str) -> bool:
  kept = _KEPT_BY_PROGRAMS.intersection(pathlib.PurePath(file).parts)
  return file.startswith(_SYSTEM) or bool(kept)


def _archive(file: str) -> str:
  """The file that holds code: itself, or an archive, within which the name of the code goes on."""
  while not os.path.isfile(file) and file != os.path.dirname(file):
    file = os.path.dirname(file)
  return file


def _ran(code: Any) -> None:
  if not code.co_filename.startswith("<"):
    _keep(code.co_filename, is_code=True)


def _opened(path: Any, mode: Any, flags: int) -> None:
  if isinstance(path, int) or path is None:
    return
  access = flags & (os.O_RDONLY | os.O_WRONLY | os.O_RDWR)
  if access != os.O_RDONLY:
    _WRITTEN.add(os.path.abspath(os.fsdecode(path)))
  # Only written, or emptied first: nothing was read of it.
  if access == os.O_WRONLY or flags & os.O_TRUNC:
    return
  name = os.fsdecode(path)
  # Its source is told of when it runs.
  if "__pycache__" in name:
    return
  is_code = name.endswith(_CODE)
  if is_code and _is_shown():
    return
  _keep(name, is_code=is_code)


def _is_shown() -> bool:
  """Whether a source is read in order to be shown."""
  frame = _frame_of_event()
  for _ in range(8):
    if frame is None:
      return False
    if frame.f_code.co_filename.endswith(_READERS_OF_SOURCES):
      return True
    frame = frame.f_back
  return False


def _imported(name: str, file: Any, *more: Any) -> None:
  # Python names the file of an extension alone.
  if file is not None:
    _keep(file, is_code=True)


def _library(name: Any) -> None:
  if isinstance(name, (str, bytes, os.PathLike)) and os.path.isfile(name):
    _keep(name, is_code=True)


def _database(name: Any) -> None:
  if isinstance(name, (str, bytes, os.PathLike)):
    _keep(name, is_code=False)


def _thread_begins(function: Any, *more: Any) -> None:
  thread = getattr(function, "__self__", None)
  asking = _asks(data=False)
  if asking is not None and isinstance(thread, threading.Thread):
    _STARTED_BY[thread] = asking


_EVENTS: dict[str, Callable[..., None]] = {
  "exec": _ran,
  "open": _opened,
  "import": _imported,
  "ctypes.dlopen": _library,
  "sqlite3.connect": _database,
  "_thread.start_new_thread": _thread_begins,
  "_thread.start_joinable_thread": _thread_begins,
}


# `_events` is bound early: at the end of a process globals are gone.
def _heard(event: str, args: tuple[Any, ...], _events: dict[str, Any] = _EVENTS) -> None:
  act = _events.get(event)
  if act is None:
    return
  # An error here would fail whatever is loaded.
  with contextlib.suppress(Exception):
    act(*args)


sys.addaudithook(_heard)
