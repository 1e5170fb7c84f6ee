"""Comparison of the files whose functions a run calls with the files that the search found."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from dpjax.run_code import loaded
from dpjax.run_code.packages import is_users_code
from dpjax.run_code.record import Code
from dpjax.validate import UserError


@contextlib.contextmanager
def watched(code: Code, again: Callable[[], Code]) -> Iterator[None]:
  """Checks, at the end of the block, that the block ran only the code of the run.

  Args:
    code: code of the run, as found before the block.
    again: function that computes the code a second time.

  Raises:
    UserError: the block called a function of a user's file outside `code`, or loaded such a file,
      or the code of a module changed meanwhile. The message names the file or module.
  """
  # Without user code, there are no files to compare.
  if not code.modules:
    yield
    return
  called: set[str] = set()
  with _calls(called):
    yield
  real = {os.path.realpath(file) for file in called if is_users_code(file)}
  unknown = sorted(real - code.files)
  if unknown:
    raise UserError(
      f"{os.path.basename(unknown[0])}: the run calls a function of this file, but no import "
      "in its other files names it, so its noise would not change with it; import it by its "
      "name where it is used"
    )
  check_still(code, again)


def check_still(code: Code, again: Callable[[], Code]) -> None:
  """Raises UserError if a run's code has changed since the search, or has loaded a file that the
  noise does not depend on.

  The noise was chosen before the file was loaded. A result that depends on the file must not be
  released: another content of the file would give another sum with the same noise.

  Args:
    code: code of the run, as found before the noise was chosen.
    again: function that computes the code a second time.
  """
  known = code.files | code.read
  for file in sorted(code.files):
    for load in loaded.by(file):
      name = os.path.basename(load.file)
      # The noise depends on everything that was loaded up to `as_of`.
      if load.number <= code.as_of or not load.sha256():
        continue
      is_known = os.path.realpath(load.file) in known
      # A known file may be loaded again if it has not changed.
      if is_known and load.before in ("", load.sha256()):
        continue
      what = "imports or runs" if load.is_code else "reads"
      raise UserError(
        f"{os.path.basename(file)} {what} this file after the noise of the run "
        "was chosen, which must follow it; load it while modules are imported, at "
        "their top, and start again in another directory",
        field=name,
      )
  now = again().modules
  changed = sorted(name for name in code.modules if now.get(name) != code.modules[name])
  if changed:
    raise UserError(
      f"module {changed[0]!r}: was edited or exchanged while the run was built; run the same "
      "command again"
    )


@contextlib.contextmanager
def _calls(files: set[str]) -> Iterator[None]:
  """Collects the files of all functions that are called by this thread, or by threads that begin in
  the block.

  Earlier threads of the process do not belong to the run. Nothing is collected if another tool
  holds the same tool id or, in Python 3.11, profiles this process. Python 3.11 cannot profile
  threads that a library began without Python.
  """
  monitoring = getattr(sys, "monitoring", None)
  if monitoring is None:
    with _profiled(files):
      yield
    return
  me = threading.get_ident()
  tool = 4
  # If another tool holds this id, the run must not stop that tool.
  if monitoring.get_tool(tool) is not None:
    yield
    return
  others = {thread.ident for thread in threading.enumerate()} - {me}

  def started(code: types.CodeType, offset: int) -> Any:
    if threading.get_ident() in others:
      return None
    files.add(code.co_filename)
    # Each function is reported once, so that later calls cost nothing.
    return monitoring.DISABLE

  monitoring.use_tool_id(tool, "dpjax")
  monitoring.register_callback(tool, monitoring.events.PY_START, started)
  monitoring.set_events(tool, monitoring.events.PY_START)
  # After this call, functions that an earlier watch has disabled are reported again.
  monitoring.restart_events()
  try:
    yield
  finally:
    monitoring.set_events(tool, 0)
    monitoring.register_callback(tool, monitoring.events.PY_START, None)
    monitoring.free_tool_id(tool)


@contextlib.contextmanager
def _profiled(files: set[str]) -> Iterator[None]:
  before = sys.getprofile()
  in_threads = threading.getprofile()
  # If another tool profiles this process, the run must not stop it.
  if before is not None:
    yield
    return

  is_over = False

  def started(frame: Any, event: str, argument: Any) -> None:
    # A thread that outlives the block removes its own profiler.
    if is_over:
      sys.setprofile(None)
    elif event == "call":
      files.add(frame.f_code.co_filename)

  sys.setprofile(started)
  if in_threads is None:
    threading.setprofile(started)
  try:
    yield
  finally:
    is_over = True
    sys.setprofile(before)
    if in_threads is None:
      threading.setprofile(None)  # type: ignore[arg-type]
