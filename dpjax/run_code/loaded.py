"""Record of the files that the user's files load, in every thread: code to run and data to read.

A source shows what may be loaded; Python reports what was loaded. Python raises an audit event for
each file that it opens and for each piece of code that it runs: by an import, a finder,
`exec_module`, `runpy`, `exec` or `ctypes`. A hook records the file under the user's file that asked
for it: the file of the nearest frame of user code on the stack. A thread may have no such frame.
Then the load is recorded under the user's file that started the thread. If the start was not seen,
it is recorded under the user's file that the main thread runs.

So a load by a test, a notebook or a plugin is recorded under the file of the test, the notebook or
the plugin. A run that does not reach this file does not depend on the load.

An audit hook cannot be removed. An event that it does not record costs less than a microsecond.
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

# Folders of the system, and folders in which programs keep caches and settings. Data files in these
# folders are not recorded.
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/run/")
_KEPT_BY_PROGRAMS = {".cache", ".config", ".local", ".git", ".ipython", ".jupyter"}
# Modules of Python that read sources only to display them, as in a traceback or a warning.
_READERS_OF_SOURCES = ("linecache.py", "tokenize.py", "inspect.py", "traceback.py")
_LARGEST_BESIDE_DATA = 2**26  # bytes
_CODE = (".py", ".pyc", *EXTENSIONS)


class LoadedFile:
  """A loaded file, with its size and modification time when the load was recorded."""

  def __init__(self, file: str, *, is_code: bool, number: int):
    self.file = file
    self.number = number
    self.is_code = is_code
    # Digest of a data file at an earlier load; "": there was none, or it was not computed.
    self.before = ""
    # Whether an import loaded the file, so that a module in memory holds its values.
    self.is_imported = False
    self.state = _state(file)
    self._sha256 = ""

  def sha256(self) -> str:
    """Returns the digest of the file; "" if the file no longer exists.

    Raises:
      UserError: the file was edited after it was loaded, so the loaded content is unknown.
    """
    if self._sha256:
      return self._sha256
    now = _state(self.file)
    if now is None:
      return ""
    # Files that this process has written may change: a program may read its own output, such as a
    # cache.
    if now != self.state and self.file not in _WRITTEN:
      raise UserError(
        f"file {os.path.basename(self.file)!r}: was edited after the run's code had loaded it; "
        "start Python again (a notebook: its kernel), so that what runs is what it says"
      )
    with open(self.file, "rb") as content:
      self._sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return self._sha256


# All recorded loads: {real path of the loading file: {path of the loaded file: `LoadedFile`}}.
# For a function that reads a data set, the outer key is `key_of` the function.
_LOADS: dict[str, dict[str, LoadedFile]] = {}
_WRITTEN: set[str] = set()
_STARTED_BY: weakref.WeakKeyDictionary[threading.Thread, str] = weakref.WeakKeyDictionary()
_CONFIG_FILES: list[str] = []
_changes = 0
# Key (`key_of`) of the function that is reading a data set now; "": there is none.
_reading = ""


def number_of_changes() -> int:
  """Returns a number that grows whenever a user's file loads a new file, or loads a file again that
  has changed."""
  return _changes


def by(file: str) -> list[LoadedFile]:
  """Returns the files that a user's file has loaded, ordered by path."""
  return [load for _, load in sorted(_LOADS.get(file, {}).items())]


def begin_at(config_file: str) -> None:
  """Sets the config file of this process. If that file modifies its imports, its source is part of
  the code of every run of the process."""
  _CONFIG_FILES[:] = [os.path.realpath(config_file)]


def config_files() -> list[str]:
  return [*_CONFIG_FILES]


def key_of(path: str) -> str:
  """Returns a key of the function at an import path, `module:name`.

  The key contains the file of the module, since another module of the same name may have existed
  earlier in the process.
  """
  home, _, name = path.partition(":")
  file = getattr(sys.modules.get(home), "__file__", None) or home
  return f"{os.path.realpath(file)}:{name}"


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
  """Records the loads in the block under the function that reads a data set, not under its file.

  Another function of the same file may read another data set, in another run of this process. Large
  data files are not recorded, because the digest of the data set covers their content.

  Args:
    path: import path of the function, `module:name`.
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


# --- the file behind a load


_kinds: dict[str, str] = {}  # file of a frame -> its owner


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
  """Returns the user's file that caused the current load, or None if there is no such file."""
  is_over, file = _nearest(_frame_of_event(), data=data)
  me = threading.get_ident()
  if is_over or me == threading.main_thread().ident:
    return file
  # A thread of library code belongs to the file that started it. If the start was not seen, the
  # frames of the main thread decide, since they usually include the code that waits for the load.
  thread = threading.current_thread()
  if thread in _STARTED_BY:
    return _STARTED_BY[thread]
  waiting = sys._current_frames().get(threading.main_thread().ident or 0)
  return _nearest(waiting, data=False)[1]


def _nearest(frame: Any, *, data: bool) -> tuple[bool, str | None]:
  """Returns (whether a frame shows what caused the load, the user's file if it is the cause, else
  None)."""
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
  """Returns whether a frame loads data files for a library, not for the user.

  Examples are the import of a library, JAX's compilation cache, and a traceback.
  """
  file = code.co_filename
  if kind == "standard":
    return file.endswith(_READERS_OF_SOURCES)
  in_jax = "/jax/" in file or "/jaxlib/" in file
  return code.co_name == "<module>" or (in_jax and "/jax/_src/numpy/" not in file)


# --- loads


def _keep(target: Any, *, is_code: bool) -> None:
  global _changes
  file = os.path.abspath(os.fsdecode(target))
  kept_by_program = _KEPT_BY_PROGRAMS.intersection(pathlib.PurePath(file).parts)
  is_of_system = file.startswith(_SYSTEM) or bool(kept_by_program)
  if owner(file) != "user" or (not is_code and is_of_system):
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
    # A file that this process has written, such as a cache, may change between two reads. So its
    # earlier digest is not kept.
    if file in held and not is_code and file not in _WRITTEN:
      load.before = held[file]._sha256
    held[file] = load
  if is_code and _frame_of_event().f_code.co_filename == "<frozen importlib._bootstrap>":
    held[file].is_imported = True


def _archive(file: str) -> str:
  """Returns the file that holds code: the file itself, or an archive that contains it."""
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
  # If a file is only written, or is emptied first, nothing is read from it.
  if access == os.O_WRONLY or flags & os.O_TRUNC:
    return
  name = os.fsdecode(path)
  # A compiled file is left out, because the event "exec" reports its source when it runs.
  if "__pycache__" in name:
    return
  is_code = name.endswith(_CODE)
  if is_code and _is_shown():
    return
  _keep(name, is_code=is_code)


def _is_shown() -> bool:
  """Returns whether a source is only read to be displayed, as in a traceback."""
  frame = _frame_of_event()
  for _ in range(8):
    if frame is None:
      return False
    if frame.f_code.co_filename.endswith(_READERS_OF_SOURCES):
      return True
    frame = frame.f_back
  return False


def _imported(name: str, file: Any, *more: Any) -> None:
  # Python gives a file only for extension modules, whose code raises no event "exec".
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


# `_events` is a default argument, since globals may be gone when the process ends.
def _heard(event: str, args: tuple[Any, ...], _events: dict[str, Any] = _EVENTS) -> None:
  act = _events.get(event)
  if act is None:
    return
  # An error here would break the user's load.
  with contextlib.suppress(Exception):
    act(*args)


sys.addaudithook(_heard)
