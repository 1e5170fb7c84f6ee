"""How the processes of one run find each other, and notice that one has died.

JAX's runtime ends a process with a stack trace where a peer does not come, where two have
the same number or where the first one dies. So before it is started the processes meet over
a plain socket at the same address: each says who it is and what it wants to run, process 0
compares, and all go on or all end with the same line. The sockets stay open: a connection
that closes without a farewell is a dead peer, known at once, whatever is being computed.

Nothing here is encrypted or authenticated, and neither is JAX's runtime: for networks that
are trusted.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import validate
from dpjax.federated import processes
from dpjax.validate import UserError

_MOST = 4096  # bytes of one message
_PATIENCE = 5.0  # seconds for one message of a peer that is there
_RETRY = 0.1
_FAREWELL, _LOST = b"bye\n", b"lost"
_HEARTBEAT = 60  # seconds; the runtime's own, far above what keeps the sockets alive


class Address(NamedTuple):
  """Where process 0 is to be found."""

  host: str
  port: int


def address(coordinator: str) -> Address:
  """From "HOST:PORT".

  >>> address("10.0.0.1:9000")
  Address(host='10.0.0.1', port=9000)
  """
  host, _, port = str(coordinator).rpartition(":")
  host = host.strip("[]")
  if not host or not port.isdigit() or not 0 < int(port) < 65536:
    raise UserError(f"coordinator={coordinator!r}: must be HOST:PORT, as 10.0.0.1:9000")
  return Address(host, int(port))


def _is_loopback(host: str) -> bool:
  return host in ("localhost", "::1") or host.startswith("127.")


class Meeting:
  """The open connections of a process: to all peers in process 0, else to process 0."""

  def __init__(self, connections: dict[int, socket.socket]):
    self._connections = connections
    self._leaving = threading.Event()
    self._threads: list[threading.Thread] = []

  def watch(self, lost: Callable[[Meeting, int], None]) -> None:
    """Calls `lost(self, process id)` from another thread when a peer is gone without a
    farewell, or says that one is."""
    for who, connection in self._connections.items():
      arguments = (who, connection, lost)
      thread = threading.Thread(target=self._watch, args=arguments, daemon=True)
      thread.start()
      self._threads.append(thread)

  def _watch(self, who: int, connection: socket.socket, lost: Callable) -> None:
    try:
      with connection:
        said = connection.recv(len(_FAREWELL))
    except OSError:
      said = b""
    if said != _FAREWELL and not self._leaving.is_set():
      lost(self, who)

  def _tell(self, word: bytes) -> None:
    self._leaving.set()
    for connection in self._connections.values():
      with contextlib.suppress(OSError):
        connection.sendall(word)

  def leave(self, seconds: float = 0.0) -> None:
    """Says farewell: this process is about to end as it should.

    Args:
      seconds: wait so long for the others to leave too. JAX ends with a stack trace in a
        process that outlives process 0.
    """
    self._tell(_FAREWELL)
    deadline = time.monotonic() + seconds
    for thread in self._threads:
      thread.join(max(deadline - time.monotonic(), 0.0))

  def close(self) -> None:
    """Closes the connections without a word, as the end of the process does."""
    for connection in self._connections.values():
      connection.close()

  def abandon(self, seconds: float = 1.0) -> None:
    """Says that the run is over because a process died, and gives the others a moment."""
    self._tell(_LOST)
    if 0 not in self._connections:  # this is process 0; see `leave`
      time.sleep(seconds)


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
  connection.sendall(json.dumps(message).encode() + b"\n")


def _hear(connection: socket.socket, seconds: float) -> dict[str, Any]:
  """One message; {} for what is none."""
  connection.settimeout(max(seconds, _RETRY))
  data = b""
  try:
    while not data.endswith(b"\n") and len(data) < _MOST:
      more = connection.recv(_MOST)
      if not more:
        break
      data += more
    message = json.loads(data)
  except (OSError, ValueError):
    return {}
  return message if isinstance(message, dict) else {}


def _listen(at: Address) -> socket.socket:
  try:
    if _is_loopback(at.host):
      family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
      return socket.create_server((at.host, at.port), family=family)
    if socket.has_dualstack_ipv6():
      return socket.create_server(
        ("", at.port), family=socket.AF_INET6, dualstack_ipv6=True
      )
    return socket.create_server(("", at.port))
  except OSError as error:
    raise UserError(
      f"coordinator={at.host}:{at.port}: process 0 cannot listen there ({error.strerror}); "
      "is the port in use?"
    ) from error


def _wrong(mine: dict[str, Any], theirs: dict[str, Any], present: Any) -> str | None:
  """Why this peer cannot take part, or None."""
  who = theirs["process_id"]
  for name, value in mine.items():
    if name != "process_id" and theirs.get(name) != value:
      shown = f" ({value} and {theirs.get(name)})" if name != "config" else ""
      return f"{name}: differs between process 0 and process {who}{shown}; nothing was run"
  if who in (0, *present):
    return f"process_id={who}: two processes have it; nothing was run"
  return None


def _accept(
  server: socket.socket, deadline: float
) -> tuple[socket.socket, dict[str, Any]] | None:
  """The next peer and what it says; None: nobody came in time."""
  while True:
    server.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
      connection, _ = server.accept()
    except TimeoutError:
      return None
    theirs = _hear(connection, _PATIENCE)
    if isinstance(theirs.get("process_id"), int):
      return connection, theirs
    connection.close()  # a stranger


def _host(at: Address, mine: dict[str, Any], timeout: float) -> dict[int, socket.socket]:
  """The connections to all peers; whatever is wrong is said to all that are there."""
  deadline, wanted = time.monotonic() + timeout, {*range(1, mine["num_processes"])}
  present: dict[int, socket.socket] = {}
  heard: list[socket.socket] = []
  wrong = None
  with _listen(at) as server:
    while not wrong and {*present} != wanted:
      came = _accept(server, deadline)
      if came is None:
        missing = ", ".join(map(str, sorted(wanted - {*present})))
        wrong = f"process_id={missing}: did not come in time; see --connect_timeout"
        break
      connection, theirs = came
      heard.append(connection)
      wrong = _wrong(mine, theirs, present)
      present.setdefault(theirs["process_id"], connection)
  for connection in heard:
    with contextlib.suppress(OSError):
      _say(connection, {"wrong": wrong})
    if wrong:
      connection.close()
  if wrong:
    raise UserError(wrong)
  return present


def _reach(at: Address, deadline: float) -> socket.socket:
  while True:
    try:
      return socket.create_connection(at, timeout=_PATIENCE)
    except socket.gaierror as error:
      raise UserError(f"coordinator={at.host}:{at.port}: no such host") from error
    except OSError as error:
      if time.monotonic() > deadline:
        raise UserError(
          f"coordinator={at.host}:{at.port}: process 0 was not there in time "
          f"({error.strerror or 'timed out'}); see --connect_timeout"
        ) from error
    time.sleep(_RETRY)


def _join(at: Address, mine: dict[str, Any], timeout: float) -> dict[int, socket.socket]:
  deadline = time.monotonic() + timeout
  connection = _reach(at, deadline)
  with contextlib.suppress(OSError):
    _say(connection, mine)
  answer = _hear(connection, timeout + _PATIENCE)
  if answer.get("wrong", "no answer"):
    connection.close()
  if "wrong" not in answer:
    raise UserError(
      f"coordinator={at.host}:{at.port}: no answer from a process 0 there; is it another "
      "program's port, or did process 0 end?"
    )
  if answer["wrong"]:
    raise UserError(answer["wrong"])
  return {0: connection}


def _keep_alive(connection: socket.socket) -> None:
  """A peer that vanishes without closing (power, network) is noticed in about 15 s."""
  connection.settimeout(None)
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in (("TCP_KEEPIDLE", 6), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
    if hasattr(socket, name):
      connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def meet(
  coordinator: str, *, num_processes: int, process_id: int, config: str, timeout: float
) -> Meeting:
  """Waits until all processes are there and agree; touches no device.

  Args:
    coordinator: "HOST:PORT" of process 0, where it listens until all have come.
    config: a digest of what this process is going to run.
    timeout: seconds to wait for the others.

  Raises:
    UserError: a bad argument, a port in use, a peer that does not come, that has the same
      number, or that wants another run; the same line in all processes that are there.
  """
  at = address(coordinator)
  validate.integer_at_least(1, num_processes=num_processes)
  validate.integer_at_least(0, process_id=process_id)
  validate.positive(connect_timeout=timeout)
  if process_id >= num_processes:
    raise UserError(f"process_id={process_id}: must be below num_processes={num_processes}")
  mine = {
    "process_id": process_id,
    "num_processes": num_processes,
    "jax": jax.__version__,
    "config": config,
  }
  connections = (_host if process_id == 0 else _join)(at, mine, timeout)
  for connection in connections.values():
    _keep_alive(connection)
  return Meeting(connections)


def start(
  coordinator: str,
  *,
  num_processes: int,
  process_id: int,
  timeout: float,
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
  jax.distributed.initialize(
    coordinator,
    num_processes,
    process_id,
    local_device_ids=local_devices,
    initialization_timeout=max(1, int(timeout)),
    heartbeat_timeout_seconds=_HEARTBEAT,
    coordinator_bind_address=coordinator
    if _is_loopback(address(coordinator).host)
    else None,
  )
  processes.exchange(np.zeros((), np.int32), ())
