"""Processes of a run on JAX's runtime: mistakes are one line, and so is the end after a loss."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from dpjax.parallel import runtime
from tests.federated import programs
from tests.refuses import refuses


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"coordinator": "host"}, "coordinator"),
    ({"coordinator": ":1"}, "coordinator"),
    ({"coordinator": "h:99999"}, "coordinator"),
    ({"coordinator": "h:" + "9" * 5000}, "coordinator"),
    ({"process_id": 2}, "process_id"),
    ({"process_id": -1}, "process_id"),
    ({"num_processes": 0}, "num_processes"),
    ({"timeout": 0.0}, "connect_timeout"),
    ({"peer_timeout": 0.5}, "peer_timeout"),
    ({"peer_timeout": float("nan")}, "peer_timeout"),
    ({"peer_timeout": 1e12}, "peer_timeout"),
  ],
)
def test_mistakes_are_one_line(changes, field):
  options = dict(coordinator="127.0.0.1:1", num_processes=2, process_id=0) | changes
  with refuses(field) as caught:
    runtime.start(**options)
  assert "\n" not in str(caught.value)


# --- real processes


_ENDS = """
import os
from launch import peers
peers._LastWords(lambda: {line})
print("once", flush=True)
os._exit(3)
"""


@pytest.mark.parametrize(("line", "said"), [("'gone'", "error: gone\n"), ("1 / 0", "")])
def test_the_child_that_waits_never_goes_on_as_the_run(line, said):
  ran = subprocess.run(
    [sys.executable, "-c", _ENDS.format(line=line)], capture_output=True, text=True
  )
  assert (ran.returncode, ran.stdout, ran.stderr) == (3, "once\n", said)


_ENDLESS = """
import sys
sys.path.insert(0, ".")
import numpy as np
from absl import flags
from dpjax.parallel import exchanges
from launch import app, peers
from launch.main import define_processes
define_processes()
flags.DEFINE_string("progress", None, "")
flags.DEFINE_string("same", "same", "")
def main():
  same = {"config": flags.FLAGS.same}
  with peers.join(peers.options(), same=same, saved=lambda: "round 7 is saved"):
    for step in range(10**9):
      exchanges.exchange(np.ones(3), ())
      with open(flags.FLAGS.progress, "w") as file:
        file.write(f"{step + 1:09d}")
app.run(main)
"""
_THEN = "round 7 is saved; the same command on all machines goes on from there"


def _endless(folder, port, index, *more):
  where = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", "--connect_timeout=120"]
  who = [f"--process_id={index}", "--peer_timeout=4", f"--progress={folder / str(index)}"]
  return programs.start(["-c", _ENDLESS, *where, *who, *more], folder, f"endless{index}")


def _steps(folder):
  path = pathlib.Path(folder) / "0"
  text = path.read_text() if path.exists() else ""
  return int(text or 0)


def _wait_for_steps(folder, more, running):
  start, deadline = _steps(folder), time.monotonic() + programs.PATIENCE
  while _steps(folder) < start + more:
    assert all(one.process.poll() is None for one in running), [
      one.err.read_text() for one in running
    ]
    assert time.monotonic() < deadline
    time.sleep(0.02)


def _last_line(program):
  """JAX's own words may stand above it. A child writes it after the process has ended."""
  deadline = time.monotonic() + programs.PATIENCE
  while "error: process" not in program.err.read_text() and time.monotonic() < deadline:
    time.sleep(0.02)
  return program.err.read_text().splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_lost_process_ends_the_run_with_a_line(tmp_path, lost, how):
  """In mid-round; and a suspended one ends, too, when it wakes up."""
  port = programs.free_port()
  running = [_endless(tmp_path, port, index) for index in (0, 1)]
  try:
    _wait_for_steps(tmp_path, 5, running)
    running[lost].process.send_signal(getattr(signal, how))
    other = running[1 - lost]
    assert other.code() in (1, -signal.SIGABRT)
    line = _last_line(other)
    assert line.startswith(f"error: process {1 - lost} of 2: lost another process")
    assert _THEN in line
    running[lost].process.send_signal(signal.SIGCONT)
    assert running[lost].code() in (1, -signal.SIGABRT, -signal.SIGKILL)
    assert _last_line(running[lost]).startswith(f"error: process {lost} of 2: ")
  finally:
    programs.stop(running)


@pytest.mark.long
def test_another_config_is_one_line_each(tmp_path):
  port = programs.free_port()
  running = [_endless(tmp_path, port, index, f"--same={index}") for index in (0, 1)]
  try:
    assert [program.code() for program in running] == [2, 2]
  finally:
    programs.stop(running)
  for program in running:
    (line,) = program.err.read_text().splitlines()
    assert "config: differs between process 0 and process 1" in line


@pytest.mark.long
def test_one_that_never_comes_ends_the_other_with_a_line(tmp_path):
  program = _endless(tmp_path, programs.free_port(), 0, "--connect_timeout=2")
  try:
    assert program.code() in (2, -signal.SIGABRT)
    assert _last_line(program).startswith("error: process 0 of 2: ")
  finally:
    programs.stop([program])
