"""Tasks in several processes: each once, a fault said as in one, nobody left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import jax
import pytest

from dpjax.experiments.run import writers
from dpjax.experiments.sweeps import side_by_side
from dpjax.validate import UserError
from launch import app
from tests import commands
from tests.refuses import refuses


def _work(task):
  """A task says what is to happen."""
  word, value = task
  if word == "refuse":
    raise UserError(f"x={value}: must be something else")
  if word == "fail":
    raise ZeroDivisionError(value)
  if word == "die":
    os.kill(os.getpid(), signal.SIGKILL)
  if word == "wait":
    value.write_text(str(os.getpid()))
    time.sleep(600)
  if word == "stop":
    raise KeyboardInterrupt
  if word == "tell":
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    is_daemon = multiprocessing.current_process().daemon
    return jax.config.jax_default_prng_impl, signal.SIGINT in blocked, is_daemon
  return value**2, os.getpid()


def _gone(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return True
  return False


def _until(happened, seconds=60):
  end = time.monotonic() + seconds
  while not happened() and time.monotonic() < end:
    time.sleep(0.05)
  return happened()


@pytest.mark.slow
def test_each_task_is_done_once_by_one_of_the_processes():
  tasks = [("square", value) for value in range(20)]
  found = list(side_by_side.outcomes(_work, tasks, 2))
  assert sorted(task for task, _ in found) == tasks
  assert all(square == value**2 for (_, value), (square, _) in found)
  pids = {pid for _, (_, pid) in found}
  assert os.getpid() not in pids and 1 <= len(pids) <= 2
  assert all(map(_gone, pids))


@pytest.mark.long
def test_no_more_processes_than_tasks_and_none_for_nothing():
  assert [*side_by_side.outcomes(_work, [], 2)] == []
  ((_, (nine, _)),) = side_by_side.outcomes(_work, [("square", 3)], 5)
  assert nine == 9


@pytest.mark.long
@pytest.mark.parametrize(
  "word, kind, said",
  [
    ("refuse", UserError, "x=1: must be something else"),
    ("fail", ZeroDivisionError, "1"),
    ("die", UserError, r"exit code -9"),
    ("stop", KeyboardInterrupt, "in a process of its own"),
  ],
)
def test_a_fault_in_a_process_is_raised_here_and_the_others_end(tmp_path, word, kind, said):
  file = tmp_path / "pid"
  found = side_by_side.outcomes(_work, [("wait", file), ("square", 2), (word, 1)], 2)
  assert next(found)[1][0] == 4
  with pytest.raises(kind, match=said) as raised:
    next(found)
  assert word != "fail" or "_work" in raised.value.__notes__[0]  # where it happened
  assert not file.exists() or _until(lambda: _gone(int(file.read_text())))


@pytest.mark.long
def test_who_stops_reading_ends_the_processes(tmp_path):
  file = tmp_path / "pid"
  found = side_by_side.outcomes(_work, [("wait", file), ("square", 2)], 2)
  next(found)
  assert _until(lambda: file.exists() and file.read_text())
  found.close()
  assert _gone(int(file.read_text()))


@pytest.mark.long
def test_processes_are_set_up_as_this_one():
  """What JAX is configured to do decides the noise. Ctrl-C in a terminal reaches all processes, of
  which the first tells the others; and they may have processes of their own."""
  before = jax.config.jax_default_prng_impl
  jax.config.update("jax_default_prng_impl", "rbg")
  try:
    ((_, outcome),) = side_by_side.outcomes(_work, [("tell", None)], 1)
  finally:
    jax.config.update("jax_default_prng_impl", before)
  assert outcome == ("rbg", True, False)


def test_what_cannot_be_sent_is_one_line():
  with refuses("processes"):
    next(side_by_side.outcomes(lambda task: task, [1], 1))


def test_a_task_for_a_process_that_is_gone_does_not_end_this_one():
  ours, theirs = multiprocessing.get_context("spawn").Pipe()
  theirs.close()
  before = signal.signal(signal.SIGPIPE, app._end_unread)  # as launchers have it
  try:
    side_by_side._send(ours, "a task")
  finally:
    signal.signal(signal.SIGPIPE, before)
  assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


_FIRST = """
import pathlib, sys
from dpjax.experiments.run import writers
from dpjax.experiments.sweeps import side_by_side
from tests.sweeps.test_side_by_side import _work
if __name__ == "__main__":
  folder = pathlib.Path(sys.argv[1])
  tasks = [("wait", folder / str(number)) for number in range(2)]
  with writers.alone_in(folder) as lock:
    list(side_by_side.outcomes(_work, tasks, 2, lock=lock))
"""


@pytest.mark.long
def test_processes_whose_first_is_killed_end_by_themselves_and_keep_its_lock_until_then(
  tmp_path,
):
  (tmp_path / "first.py").write_text(_FIRST)
  command = [sys.executable, str(tmp_path / "first.py"), str(tmp_path)]
  environment = {**os.environ, "PYTHONPATH": str(commands.ROOT)}
  first = subprocess.Popen(command, env=environment)
  files = [tmp_path / "0", tmp_path / "1"]
  try:
    assert _until(lambda: all(file.exists() and file.read_text() for file in files))
    pids = [int(file.read_text()) for file in files]
    os.kill(pids[0], signal.SIGSTOP)  # as one that is deaf while it compiles
  finally:
    first.kill()
    first.wait()
  assert _until(lambda: _gone(pids[1]))
  with refuses("workdir"), writers.alone_in(tmp_path):
    pass
  os.kill(pids[0], signal.SIGCONT)
  assert _until(lambda: _gone(pids[0]))
  with writers.alone_in(tmp_path):
    pass


def test_a_number_of_processes_is_refused_where_they_would_not_help(monkeypatch):
  for count in (0, -1, 1.5, True, "2"):
    with refuses("processes"):
      side_by_side.check(count)
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
  side_by_side.check(2)
  with refuses("processes", value=3):
    side_by_side.check(3)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  side_by_side.check(1)
  with refuses("processes", value=2):
    side_by_side.check(2)
