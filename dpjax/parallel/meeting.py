"""Start of a run of several processes, and detection of one that died or hangs.

JAX's runtime ends a process with a stack trace where a peer does not come, where two have the
same number or where the first one dies. So the processes meet before it starts, over a plain
socket at the same address. Each says who it is and what it wants to run. Process 0 compares, and
all go on or all end with the same line. A peer that does not know what is to be run is let go,
alone. The sockets stay open. A connection that closes without a farewell is a dead peer, known at
once, whatever is being computed. A peer without a sign of life for `peer_timeout` seconds hangs.

Nothing here is encrypted or authenticated, and neither is JAX's runtime: use trusted networks
only. `lobby` holds the code of the meeting itself.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from dpjax import parallel as processes
from dpjax import validate
from dpjax.parallel import lobby
from dpjax.parallel.exchanges import MOST_PROCESSES
from dpjax.validate import UserError, Verbatim

# Largest number of bytes of one message.
_MOST = 4096
_FAREWELL = b"bye"
_ALIVE = b"alive"
# Number of intervals in the time limit. A peer that is silent for all of them hangs.
_TICKS = 8
# JAX's own heartbeat gets this multiple of the limit, so that it does not fail before ours.
_LATER = 10
# Shortest limit in seconds; a busy process may be silent for a fraction of one.
SHORTEST = 1.0


Lost = Callable[["Meeting", int, str], None]  # (meeting, process id, what happened)


class Meeting:
  """The open connections of a process: process 0 has one to each peer, the others one to
  process 0.

  Args:
    connections: connections by process id.
    peer_timeout: seconds without a sign of life after which a peer counts as hanging.
  """

  def __init__(self, connections: dict[int, socket.socket], peer_timeout: float):
    self._connections = connections
    self._limit = peer_timeout
    self._left = threading.Event()
    self._saying = threading.Lock()
    self._threads: list[threading.Thread] = []

  def watch(self, lost: Lost) -> None:
    """Calls `lost(self, process id, what happened)` from another thread when a peer is
    gone. A peer is gone if it closes without a farewell, gives no sign of life, or reports
    another one as lost."""
    for who, connection in self._connections.items():
      connection.settimeout(self._limit / _TICKS)
      arguments = (who, connection, lost)
      thread = threading.Thread(target=self._watch, args=arguments, daemon=True)
      thread.start()
      self._threads.append(thread)
    threading.Thread(target=self._live, daemon=True).start()

  def _live(self) -> None:
    """Sends signs of life, two in each interval of the listeners."""
    while not self._left.wait(self._limit / _TICKS / 2):
      self._tell(_ALIVE)

  def _watch(self, who: int, connection: socket.socket, lost: Lost) -> None:
    said = self._last_word(connection)
    if said != _FAREWELL and not self._left.is_set():
      lost(self, *_loss(said, who))

  def _last_word(self, connection: socket.socket) -> bytes:
    """Returns the last message that is no sign of life; b"": the peer closed silently.

    Silence is counted in ticks of our own, so a process that was itself suspended does not
    take the others for dead when it wakes up.
    """
    silent = 0
    data = b""
    while silent < _TICKS and len(data) < _MOST:
      try:
        more = connection.recv(_MOST)
      except TimeoutError:
        silent += 1
        continue
      except OSError:
        more = b""
      if not more:
        return b""
      silent = 0
      *lines, data = (data + more).split(b"\n")
      words = [line for line in lines if line != _ALIVE]
      if words:
        return words[0]
    why = f"gave no sign of life for {self._limit:g} seconds; see --peer_timeout"
    return json.dumps({"why": why}).encode()

  def _tell(self, word: bytes) -> None:
    with self._saying:
      for connection in self._connections.values():
        with contextlib.suppress(OSError):
          connection.sendall(word + b"\n")

  def leave(self, seconds: float = 0.0) -> None:
    """Sends a farewell: this process will end normally.

    Args:
      seconds: wait so long for the others to leave too; one that is lost meanwhile is
        reported. JAX ends with a stack trace in a process that outlives process 0.
    """
    self._tell(_FAREWELL)
    deadline = time.monotonic() + seconds
    for thread in self._threads:
      thread.join(max(deadline - time.monotonic(), 0.0))
    self._left.set()

  def close(self) -> None:
    """Closes the connections without a farewell, as the end of the process does."""
    self._left.set()
    for connection in self._connections.values():
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
      connection.close()

  def abandon(
    self, who: int | None = None, why: str = "has ended", seconds: float = 1.0
  ) -> None:
    """Announces that the run is over, and gives the others a moment.

    Args:
      who: the process that was lost; None: this one cannot go on.
      why: what happened to it.
    """
    self._left.set()
    self._tell(json.dumps({"lost": who, "why": why}).encode())
    # This is process 0. In a process that outlives it, JAX ends with a stack trace.
    if 0 not in self._connections:
      time.sleep(seconds)


def _loss(said: bytes, sender: int) -> tuple[int, str]:
  """Returns (who is lost, what happened) from a peer's last message."""
  message = lobby.message(said)
  who = message.get("lost")
  why = message.get("why")
  who = who if type(who) is int and who >= 0 else sender
  why = why if isinstance(why, str) and why.isprintable() else "closed its connection"
  return who, why[:200]


def meet(
  coordinator: str,
  *,
  num_processes: int,
  process_id: int,
  same: Mapping[str, str],
  timeout: float,
  peer_timeout: float = 30.0,
  report: Callable[[str], None] = lambda line: None,
) -> Meeting:
  """Waits until all processes are there and agree; uses no device.

  Args:
    coordinator: "HOST:PORT" of process 0, where it listens until all have come.
    same: {name: text} that all must give alike. `config` is a digest of what this process is
      going to run; it is never shown. Other texts are shown where they differ.
    timeout: seconds to wait for the others.
    peer_timeout: seconds without a sign of life after which a peer counts as hanging; the
      same in all.
    report: called in process 0 with one line about anyone who claimed a number without knowing
      `config`. It is let go, for it may be a stranger; its number stays free until `timeout`.

  Raises:
    UserError: a bad argument, a port in use, a peer that does not come, that has the same
      number, or that wants another run; the same line in all processes that are there.
  """
  at = lobby.address(coordinator)
  validate.integer_in(1, MOST_PROCESSES, num_processes=num_processes)
  validate.integer_at_least(0, process_id=process_id)
  validate.positive(connect_timeout=timeout, peer_timeout=peer_timeout)
  if peer_timeout < SHORTEST:
    raise UserError(
      f"must be >= {SHORTEST:g} seconds",
      field="peer_timeout",
      value=Verbatim(f"{peer_timeout:g}"),
    )
  if process_id >= num_processes:
    raise UserError(
      f"must be below num_processes={num_processes}", field="process_id", value=process_id
    )
  mine = {
    "process_id": process_id,
    "num_processes": num_processes,
    "jax": jax.__version__,
    "peer_timeout": peer_timeout,
    **same,
  }
  if process_id == 0:
    connections = lobby.host(at, mine, timeout, report=report)
  else:
    connections = lobby.join(at, mine, timeout)
  for connection in connections.values():
    # No timeout until `Meeting.watch` sets one.
    connection.settimeout(None)
  return Meeting(connections, peer_timeout)


def start(
  coordinator: str,
  *,
  num_processes: int,
  process_id: int,
  timeout: float,
  peer_timeout: float = 30.0,
  local_devices: Sequence[int] | None = None,
) -> None:
  """Starts JAX's multi-process runtime, after `meet` and before anything touches a device.

  Args:
    local_devices: ids of the accelerators of this process, None for all of this machine; on
      a CPU only their number matters.

  Raises:
    PeerLost: a process died meanwhile.
  """
  if local_devices is not None and len(local_devices) > 1:
    jax.config.update("jax_num_cpu_devices", len(local_devices))
  # SIGTERM is handled by the run's own loop.
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    coordinator,
    num_processes,
    process_id,
    local_device_ids=local_devices,
    initialization_timeout=max(1, int(timeout)),
    heartbeat_timeout_seconds=max(60, int(_LATER * peer_timeout)),
    coordinator_bind_address=coordinator
    if lobby.is_loopback(lobby.address(coordinator).host)
    else None,
  )
  # A first exchange, which fails if a process has died meanwhile.
  processes.exchange(np.zeros((), np.int32), ())
