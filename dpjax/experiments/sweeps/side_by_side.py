"""Tasks in several processes of this machine. A free process takes the next task.

This suits runs that leave cores idle, such as runs of small convolutional networks. Each process
loads its data and compiles its programs.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import Any, TypeVar

import jax

from dpjax import names, validate
from dpjax.experiments.run import loop, writers
from dpjax.parallel import allocator
from dpjax.validate import UserError

T = TypeVar("T")
# Seconds between two updates of the progress bar.
_LOOK_SECONDS = 1.0


def check(num_processes: int) -> None:
  """Raises UserError if there are more processes than cores, or if several processes would use an
  accelerator, since the first process would take all memory of the accelerator."""
  validate.integer_at_least(1, processes=num_processes)
  affinity = getattr(os, "sched_getaffinity", None)
  cores = len(affinity(0)) if affinity else os.cpu_count() or 1
  if num_processes > cores:
    raise UserError(
      f"must be at most {cores}, the cores that this process may use",
      field="processes",
      value=num_processes,
    )
  if num_processes > 1 and jax.default_backend() != "cpu":
    raise UserError(
      f"must be 1 on {jax.default_backend()}, whose memory one process takes "
      "whole; JAX_PLATFORMS=cpu runs them on cores",
      field="processes",
      value=num_processes,
    )


def outcomes(
  work: Callable[[T], Any],
  tasks: Sequence[T],
  num_processes: int,
  *,
  lock: int | None = None,
) -> Generator[tuple[T, Any]]:
  """Yields (task, outcome) when a task ends. Tasks begin in their order.

  If an exception or the caller ends the iteration early, the processes get SIGTERM and are awaited:
  a run finishes its step and saves. The processes also end in this way when this process is gone.

  Args:
    work: function of a task, called once for each task in any free process. The function and the
      tasks are pickled. The processes import the main program anew: they get the environment and
      the JAX configuration of this process, but no other state. A script that calls this function
      must guard its main part by `if __name__ == "__main__"`.
    lock: descriptor of a locked file, which stays locked while any of the processes lives.

  Raises:
    UserError: `work` or a task cannot be pickled; a process was ended from outside; or a user's
      code failed in a process.
    BaseException: any other error that a task raised.
  """
  _check_picklable(work, tasks)
  waiting = iter(tasks)
  doing = {}  # the pipe to a process -> its task

  def give(pipe: Any) -> None:
    # A process gets one task at a time, so that no task waits behind a slow task.
    for task in itertools.islice(waiting, 1):
      doing[pipe] = task
      _send(pipe, task)

  bar = writers.progress(len(tasks), 0, "runs")
  held = None if lock is None else _Held(lock)
  with bar, _crew(work, min(num_processes, len(tasks)), held) as processes:
    for pipe in processes:
      give(pipe)
    while doing:
      for pipe in wait(list(doing), _LOOK_SECONDS):
        yield doing.pop(pipe), _heard(pipe, processes[pipe])
        bar.update(1)
        give(pipe)
      bar.update(0)  # updates the time that the bar shows


def _check_picklable(work: Callable[[Any], Any], tasks: Sequence[Any]) -> None:
  try:
    pickle.dumps((work, tasks))
  # pickle raises errors of many types for arbitrary objects.
  except Exception as error:
    raise UserError(
      f"what runs in several must be picklable: {error}", field="processes"
    ) from error


class _Held:
  """An open, locked file that processes inherit. The lock ends when all of them have closed it."""

  def __init__(self, number: int):
    self.number = number

  def __reduce__(self) -> Any:
    return _inherited, (reduction.DupFd(self.number),)


def _inherited(connection: Any) -> _Held:
  return _Held(connection.detach())


@contextlib.contextmanager
def _crew(
  work: Callable[[Any], Any], count: int, lock: _Held | None
) -> Iterator[dict[Any, Any]]:
  """Starts processes and yields {pipe: process}. The processes end with the block."""
  # Processes are spawned, because a fork may hang: it lacks the threads of JAX, but has the locks
  # that these threads hold.
  context = multiprocessing.get_context("spawn")
  arguments = (work, allocator.keeps_freed_memory(), dict(jax.config.values), lock)
  processes = {}
  try:
    for _ in range(count):
      ours, theirs = context.Pipe()
      process = context.Process(target=_main, args=(theirs, *arguments))
      # The child inherits the blocked SIGINT for its whole life, so only the parent handles Ctrl-C.
      before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
      try:
        process.start()
      finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
      processes[ours] = process
      # The child's end of the pipe is closed in this process. Otherwise the death of the child
      # would go unnoticed.
      theirs.close()
    yield processes
  except BaseException:
    for process in processes.values():
      process.terminate()
    raise
  finally:
    for pipe, process in processes.items():
      pipe.close()
      process.join()


def _send(pipe: Any, task: Any) -> None:
  """Sends a task to a process. If the process has ended, `_heard` raises the error later."""
  with contextlib.suppress(BrokenPipeError):
    pipe.send(task)


def _heard(pipe: Any, process: Any) -> Any:  # a Connection; Windows has another class
  try:
    fault, outcome = pipe.recv()
  except (EOFError, ConnectionError):
    process.join()
    raise UserError(
      f"one was ended from outside (exit code {process.exitcode}; -9: most "
      "often for want of memory, fewer processes take less; 1: a script whose "
      "main part is not guarded by `if __name__ == '__main__'`, or what it says "
      "above); finished runs are kept, run the same command to go on",
      field="processes",
    ) from None
  if fault is not None:
    raise fault
  return outcome


# --- inside a process


def _main(
  pipe: Any,
  work: Callable[[Any], Any],
  keep_freed: bool,
  jax_config: Mapping[str, Any],
  lock: _Held | None,
) -> None:
  # The open descriptor holds the lock, so the object is not needed.
  del lock
  if keep_freed:
    # This call comes before any thread, since an existing thread already has its own heap.
    allocator.keep_freed_memory()
  threading.Thread(target=_end_with_first, daemon=True).start()
  for name, value in jax_config.items():
    if jax.config.values.get(name) != value:
      jax.config.update(name, value)
  with writers.silent(), contextlib.suppress(EOFError, ConnectionError):
    while True:
      pipe.send(_done(work, pipe.recv()))


def _end_with_first() -> None:
  parent = multiprocessing.parent_process()
  wait([parent.sentinel] if parent else [])
  # A run that gets SIGTERM finishes its step and saves.
  os.kill(os.getpid(), signal.SIGTERM)


def _done(work: Callable[[Any], Any], task: Any) -> tuple[BaseException | None, Any]:
  """Returns (the error or None, the outcome of the task or None)."""
  try:
    return None, work(task)
  except loop.Interrupted as stopped:
    sys.exit(128 + stopped.signum)
  # BaseException is caught, since a user's code may call sys.exit.
  except BaseException as error:
    # `blame` finds here whose code failed, because it needs the traceback, which cannot be sent.
    blamed = names.blame(error)
    if blamed is not None and not isinstance(error, KeyboardInterrupt):
      return UserError(blamed), None
    error.add_note(f"in a process of its own:\n{traceback.format_exc()}")
    return error, None
