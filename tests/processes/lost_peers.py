"""What is said, after how long and with which exit code, where a process of two is lost.

  python -m tests.processes.lost_peers > results/lost_peers.csv

Ways to notice it: `jax`, its distributed runtime alone, and `recoverable`, the same with
`jax_enable_recoverability` and a thread that asks `live_devices`, both in a run that adds up
numbers for ever; `train` and `federate`, the launchers. Each is given a limit of 10 seconds. A
network that is lost is a relay between process 1 and process 0 that keeps its connections and
forwards no more; the stranger is one that trickles letters into process 0's port; a process is
absent that never comes; seconds are then those since the other one was started.
"""

import csv
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from dpjax.experiments.run import checkpoint
from tests.federated import programs

LIMIT = 10  # seconds
_LONGEST = 60.0  # seconds until one that says nothing is taken to hang
_JAX = """
import os, sys, threading, time
import jax
at, index, limit, patience, progress, way = sys.argv[1:]
jax.config.update("jax_enable_recoverability", way == "recoverable")
limits = {name + "_timeout_seconds": int(limit) for name in ("heartbeat", "shutdown")}
jax.distributed.initialize(at, 2, int(index), initialization_timeout=int(patience), **limits)
import numpy as np
from dpjax.parallel import exchanges as processes
def end(text):
  print("error:", " ".join(str(text).split()), file=sys.stderr, flush=True)
  os._exit(1)
def watch():
  from jax.experimental import multihost_utils
  while True:
    try:
      with multihost_utils.live_devices(jax.devices()) as devices:
        if len(devices) < 2:
          end(f"lost: alive are {devices}")
    except Exception as error:
      end(error)
    time.sleep(int(limit) / 10)
if way == "recoverable":
  jax.devices()
  threading.Thread(target=watch, daemon=True).start()
try:
  for step in range(10**9):
    processes.exchange(np.ones(3), ())
    os.makedirs(f"{progress}/checkpoints", exist_ok=True)
    open(f"{progress}/checkpoints/{step}.npz", "w").close()
    time.sleep(0.05)
except Exception as error:
  end(error)
"""
_SMALL = {
  "train": ["--config.mesh=data:2", "--config.num_steps=20000"],
  "federate": [
    "--config.partition.num_clients=12",
    "--config.clients_per_round=5",
    "--config.num_rounds=20000",
  ],
}
_SAVED = [
  "--config.checkpoint_every=5",
  "--config.eval_every=20000",
  "--config.privacy.epsilon=None",
  "--config.privacy.noise_multiplier=1",
  "--config.privacy.accountant=rdp",
]
WAYS = ("jax", "recoverable", "train", "federate")
FAULTS = (
  *("absent", "kill 0", "kill 1", "stop 0", "stop 1", "network"),
  *("stranger before", "stranger"),
)


def _command(way, at, index, workdir, patience):
  """Python's arguments."""
  limits = str(LIMIT), str(patience)
  if way not in _SMALL:
    return ["-c", _JAX, at, str(index), *limits, str(workdir), way]
  flags = [f"--coordinator={at}", "--num_processes=2", f"--process_id={index}"]
  flags += [f"--peer_timeout={LIMIT}", f"--connect_timeout={patience}"]
  flags += [f"--workdir={workdir}"]
  return ["-m", f"launch.{way}", *_SMALL[way], *_SAVED, *flags]


class _Relay:
  """A port that leads to another until `cut`, after which nothing passes and none is told."""

  def __init__(self, port):
    self.cut, self._port = threading.Event(), port
    self._server = socket.create_server(("127.0.0.1", 0))
    self.port = self._server.getsockname()[1]
    threading.Thread(target=self._accept, daemon=True).start()

  def _accept(self):
    while True:
      near, _ = self._server.accept()
      try:
        far = socket.create_connection(("127.0.0.1", self._port))
      except OSError:
        near.close()
        continue
      for pair in ((near, far), (far, near)):
        threading.Thread(target=self._pass, args=pair, daemon=True).start()

  def _pass(self, source, sink):
    while data := _received(source):
      if self.cut.is_set():
        time.sleep(10 * _LONGEST)
      sink.sendall(data)
    sink.close()


def _received(connection):
  try:
    return connection.recv(4096)
  except OSError:
    return b""


def _trickle(port):
  """Letters to a port, one at a time, for as long as somebody takes them."""

  def run():
    while True:
      try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
          while True:
            connection.sendall(b"x")
            time.sleep(0.05)
      except OSError:
        time.sleep(0.05)

  threading.Thread(target=run, daemon=True).start()


def _steps(folder):
  """Of the newest checkpoint."""
  return checkpoint.newest(folder / "0") or 0


def _reached(folder, running, steps):
  """Whether so many steps are done."""
  deadline = time.monotonic() + _LONGEST
  while time.monotonic() < deadline:
    if _steps(folder) >= steps:
      return True
    if any(program.process.poll() is not None for program in running):
      return False
    time.sleep(0.02)
  return False


def _happens(fault, running, relay, port):
  """The processes that are expected to say so."""
  what, _, which = fault.partition(" ")
  if fault == "stranger before":
    return []
  if what == "network":
    relay.cut.set()
    return [0, 1]
  if what == "stranger":
    _trickle(port)
    return []
  number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
  running[int(which)].process.send_signal(number)
  return [1 - int(which)]


def _seen(way, fault, folder):
  """Rows of the table."""
  port = programs.free_port()
  relay, running = _Relay(port), []
  if fault == "stranger before":
    _trickle(port)
  try:
    began = time.monotonic()
    for index in range(1 if fault == "absent" else 2):
      at = f"127.0.0.1:{relay.port if fault == 'network' and index else port}"
      patience = LIMIT if fault == "absent" else _LONGEST
      command = _command(way, at, index, folder / str(index), int(patience))
      running.append(programs.start(command, folder, f"{way}{index}"))
    if fault == "absent":
      whom = [0]
    elif not _reached(folder, running, 10):
      yield _row(way, fault, 0, None, running[0], "does not begin")
      return
    else:
      began = time.monotonic()
      whom = _happens(fault, running, relay, port)
    if not whom:
      on = _reached(folder, running, _steps(folder) + 10)
      yield {"way": way, "fault": fault, "said": "goes on" if on else "hangs"}
    for index, seconds in _ends(running, whom, began):
      yield _row(way, fault, index, seconds, running[index], "hangs")
  finally:
    programs.stop(running)


def _ends(running, whom, began):
  """(process, seconds until it ended, or None where it hangs)."""
  found = dict.fromkeys(whom)
  while None in found.values() and time.monotonic() < began + _LONGEST:
    for index in whom:
      if found[index] is None and running[index].process.poll() is not None:
        found[index] = time.monotonic() - began
    time.sleep(0.02)
  return found.items()


def _row(way, fault, index, seconds, program, otherwise):
  lines = program.err.read_text().splitlines()
  lines = [line for line in lines if not line.startswith(("train: ", "rounds: "))]
  return {
    "way": way,
    "fault": fault,
    "process": index,
    "seconds": "" if seconds is None else f"{seconds:.1f}",
    "exit_code": program.process.poll(),
    "lines": len(lines),
    "said": otherwise if seconds is None else (lines or [""])[0][:160],
  }


def main(ways, faults):
  names = ("way", "fault", "process", "seconds", "exit_code", "lines", "said")
  table = csv.DictWriter(sys.stdout, names, lineterminator="\n")
  table.writeheader()
  for fault in faults:
    for way in ways:
      with tempfile.TemporaryDirectory() as folder:
        for row in _seen(way, fault, Path(folder)):
          table.writerow(row | {"said": row["said"].replace(folder, "DIR")})
          sys.stdout.flush()


if __name__ == "__main__":
  main(sys.argv[1:2] or WAYS, sys.argv[2:] or FAULTS)
