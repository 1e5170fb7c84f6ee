"""Start of a run of several processes, and detection of a process that died or hangs.

JAX's runtime ends a process with a stack trace if a peer does not come, if two processes have the
same id, or if process 0 dies. So the processes meet before JAX's runtime starts, over a plain
socket at the address that the runtime uses later. Each says who it is and what it wants to run.
Process 0 compares, and all go on, or all end with the same error message. A peer that does not
know what is to be run is disconnected, and the others wait on. The sockets stay open, even during
a computation. If one of them closes without a farewell, its peer is dead. A peer that gives no
sign of life for `peer_timeout` seconds hangs.

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

from dpjax import validate
from dpjax.parallel import exchanges, lobby
from dpjax.parallel.exchanges import MOST_PROCESSES
from dpjax.validate import UserError, Verbatim

# Largest number of bytes of one message.
_MOST = 4096
_FAREWELL = b"bye"
_ALIVE = b"alive"
# Number of equal parts of `peer_timeout`. A peer that is silent in all of them counts as hanging.
_TICKS = 8
# JAX's heartbeat waits at least this multiple of `peer_timeout`: `Meeting` reports a loss first.
_LATER = 10
# Shortest `peer_timeout` in seconds: a busy process may be silent for part of a second.
SHORTEST = 1.0


Lost = Callable[["Meeting", int, str], None]  # (meeting, process id, what happened)


class Meeting:
  """Open connections of a process: from process 0 to each peer, or from a peer to process 0.

  Args:
    connections: sockets by process id.
    peer_timeout: seconds without a sign of life after which a peer counts as hanging.
  """

  def __init__(self, connections: dict[int, socket.socket], peer_timeout: float):
    self._connections = connections
    self._limit = peer_timeout
    self._left = threading.Event()
    self._saying = threading.Lock()
    self._threads: list[threading.Thread] = []

  def watch(self, lost: Lost) -> None:
    """Calls `lost(self, process id, what happened)` from another thread when a process is lost.

    A peer is lost if it closes without a farewell or gives no sign of life. Any peer may also
    report another process as lost.
    """
    for who, connection in self._connections.items():
      connection.settimeout(self._limit / _TICKS)
      arguments = (who, connection, lost)
      thread = threading.Thread(target=self._watch, args=arguments, daemon=True)
      thread.start()
      self._threads.append(thread)
    threading.Thread(target=self._live, daemon=True).start()

  def _live(self) -> None:
    """Sends two signs of life in each interval in which peers expect one."""
    while not self._left.wait(self._limit / _TICKS / 2):
      self._tell(_ALIVE)

  def _watch(self, who: int, connection: socket.socket, lost: Lost) -> None:
    said = self._last_word(connection)
    if said != _FAREWELL and not self._left.is_set():
      lost(self, *_loss(said, who))

  def _last_word(self, connection: socket.socket) -> bytes:
    """Waits for a peer's end, and returns its first message that is no sign of life.

    Returns b"" if the peer closes without a farewell. After `peer_timeout` seconds of silence, or
    after too long a line, returns a report of the loss.

    Silence is counted in receive timeouts of this process. So a process that was itself suspended
    does not take the others for dead when it wakes up.
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
    if len(data) >= _MOST:
      why = f"sent {_MOST} bytes that end no line"
    return json.dumps({"why": why}).encode()

  def _tell(self, word: bytes) -> None:
    with self._saying:
      for connection in self._connections.values():
        with contextlib.suppress(OSError):
          connection.sendall(word + b"\n")

  def leave(self, seconds: float = 0.0) -> None:
    """Sends a farewell: this process will end normally.

    Args:
      seconds: longest wait for the others to leave, too. A process lost meanwhile is reported.
        JAX ends with a stack trace in a process that outlives process 0.
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
    """Tells the others that the run is over. Process 0 then waits, so that they end first.

    Args:
      who: id of the lost process; None: this process cannot go on.
      why: what happened to that process.
      seconds: time that process 0 waits.
    """
    self._left.set()
    self._tell(json.dumps({"lost": who, "why": why}).encode())
    # Only process 0 has no connection to process 0. JAX ends with a stack trace in a process that
    # outlives process 0, so process 0 waits.
    if 0 not in self._connections:
      time.sleep(seconds)


def _loss(said: bytes, sender: int) -> tuple[int, str]:
  """Returns (id of the lost process, what happened) from a peer's last message.

  A message that names no process reports the loss of its sender.
  """
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
  """Waits until all processes are there and agree, and returns their meeting. Uses no device.

  Args:
    coordinator: "HOST:PORT" of process 0, where it listens until all have come.
    same: texts by name, which must be equal in all processes. `config` is a digest of what this
      process is going to run; it is never shown. Other texts are shown where they differ.
    timeout: seconds to wait for the others.
    peer_timeout: seconds without a sign of life after which a peer counts as hanging. It must be
      equal in all processes.
    report: function that process 0 calls with one line for each id that a peer claimed without
      `config`. The peer may be a stranger, so it is disconnected, and the id stays free.

  Raises:
    UserError: a bad argument; a port in use; a peer that does not come, has the same id, or
      differs in `same`. If a peer is the cause, all processes that are there raise the same
      message. A peer with another `config` raises at once, the others when it has not come.
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
    # `Meeting.watch` sets a timeout. Before that a call may wait for any time.
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
  """Starts JAX's multi-process runtime. Call it after `meet`, and before any device is used.

  Args:
    local_devices: ids of this process's accelerators; None: all of this machine. On a CPU only
      the number of ids matters.

  Raises:
    PeerLost: a process died since `meet`.
  """
  if local_devices is not None and len(local_devices) > 1:
    jax.config.update("jax_num_cpu_devices", len(local_devices))
  # JAX's preemption service would catch SIGTERM, which the run's own loop handles.
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
  # The first exchange raises PeerLost if a process has died meanwhile.
  exchanges.exchange(np.zeros((), np.int32), ())
