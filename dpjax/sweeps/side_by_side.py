"""Tasks in several processes of this machine, which take the next one as they get free.

For runs that leave cores idle, as those of small convolutional networks do. Each process loads
data and compiles for itself.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

import jax

from dpjax import allocator, names, validate
from dpjax.runs import loop, writers
from dpjax.validate import UserError

T = TypeVar("T")
_LOOK_SECONDS = 1.0  # between two updates of the progress bar


def check(num_processes: int) -> None:
  """Raises UserError unless there is a core for each process, and no accelerator: its memory
  would be the first one's."""
  validate.integer_at_least(1, processes=num_processes)
  affinity = getattr(os, "sched_getaffinity", None)
  cores = len(affinity(0)) if affinity else os.cpu_count() or 1
  if num_processes > cores:
    raise UserError(
      f"processes={num_processes}: must be at most {cores}, the cores that this process may use"
    )
  if num_processes > 1 and jax.default_backend() != "cpu":
    raise UserError(
      f"processes={num_processes}: must be 1 on {jax.default_backend()}, whose memory one "
      "process takes whole; JAX_PLATFORMS=cpu runs them on cores"
    )


def outcomes(
  work: Callable[[T], Any], tasks: Sequence[T], num_processes: int
) -> Generator[tuple[T, Any]]:
  """Yields (task, its outcome) as they end; tasks begin in their order.

  Left early, by an exception or by who reads, it sends SIGTERM to the processes and waits for
  them: a run ends its step and saves. So they do by themselves when this process is gone.

  Args:
    work: done once for each task, in whichever process is free. It and the tasks are pickled for
      processes that import this program anew: a script that calls this must guard its main part
      by `if __name__ == "__main__"`.

  Raises:
    UserError: a process was ended from outside, or a user's own code failed in it.
    Exception: what else a task raised.
  """
  waiting, doing = iter(tasks), {}  # doing: the pipe to a process -> its task

  def give(pipe: Any) -> None:
    for task in itertools.islice(waiting, 1):
      doing[pipe] = task
      with contextlib.suppress(BrokenPipeError):  # who reads its answer will notice
        pipe.send(task)

  bar = writers.progress(len(tasks), 0, "runs")
  with bar, _crew(work, min(num_processes, len(tasks))) as processes:
    for pipe in processes:
      give(pipe)
    while doing:
      for pipe in wait(list(doing), _LOOK_SECONDS):
        yield doing.pop(pipe), _heard(pipe, processes[pipe])
        bar.update(1)
        give(pipe)
      bar.update(0)  # the time goes on


@contextlib.contextmanager
def _crew(work: Callable[[Any], Any], count: int) -> Iterator[dict[Any, Any]]:
  """Processes by the pipes to them."""
  context = multiprocessing.get_context("spawn")  # a forked JAX may hang
  processes = {}
  try:
    for _ in range(count):
      ours, theirs = context.Pipe()
      arguments = (theirs, work, allocator.keeps_freed_memory())
      processes[ours] = context.Process(target=_main, args=arguments, daemon=True)
      processes[ours].start()
      theirs.close()  # or its end would not be noticed
    yield processes
  except BaseException:
    for process in processes.values():
      process.terminate()
    raise
  finally:
    for pipe, process in processes.items():
      pipe.close()
      process.join()


def _heard(pipe: Any, process: Any) -> Any:  # a Connection; Windows has another class
  try:
    fault, outcome = pipe.recv()
  except (EOFError, ConnectionError):
    process.join()
    raise UserError(
      f"processes: one was ended from outside (exit code {process.exitcode}; -9 most often for "
      "want of memory, which fewer processes take less of); finished runs are kept, run the same "
      "command to go on"
    ) from None
  if fault is not None:
    raise fault
  return outcome


# --- within a process


def _main(pipe: Any, work: Callable[[Any], Any], keep_freed: bool) -> None:
  signal.signal(
    signal.SIGINT, signal.SIG_IGN
  )  # Ctrl-C reaches all: the first tells the others
  threading.Thread(target=_end_with_first, daemon=True).start()
  if keep_freed:
    allocator.keep_freed_memory()
  with writers.silent(), contextlib.suppress(EOFError, ConnectionError):
    while True:
      pipe.send(_done(work, pipe.recv()))


def _end_with_first() -> None:
  parent = multiprocessing.parent_process()
  wait([parent.sentinel] if parent else [])
  os.kill(os.getpid(), signal.SIGTERM)


def _done(work: Callable[[Any], Any], task: Any) -> tuple[BaseException | None, Any]:
  """(what it raised, its outcome)."""
  try:
    return None, work(task)
  except loop.Interrupted as stopped:
    sys.exit(128 + stopped.signum)
  except (Exception, SystemExit) as error:  # an own part may call sys.exit
    blamed = names.blame(error)  # by its traceback, which does not travel
    if blamed is not None:
      return UserError(blamed), None
    error.add_note(f"in a process of its own:\n{traceback.format_exc()}")
    return error, None
