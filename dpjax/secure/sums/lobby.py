"""Meeting of the programs of a sum: process 0 listens, and all others identify themselves.

A connection has a few seconds and 4 KiB to identify itself, and is closed otherwise, so none keeps
the others waiting. If too many wait, the oldest from the most frequent address is closed first. A
peer that was closed tries again until its time is over. Process 0 sends each peer a random word
that the peer's hello must repeat, so an overheard hello is of no use later. Every wait ends at a
known time.

A process id is given only to a peer that knows `config`, the digest of the terms. A peer that does
not know it, or differs in anything else, is told what differs, and is disconnected. The others wait
on, so neither a stranger nor a client that was started wrongly ends a meeting.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from dpjax.validate import UserError, Verbatim

# Largest number of bytes of one message.
_MOST = 4096
# Largest number of connections that have not identified themselves. With more than 32 processes
# it is twice the number of processes.
_CROWD = 64
# Seconds for one message of a connected peer.
_PATIENCE = 5.0
_RETRY = 0.1
_NOTHING = "; nothing was run"


class Address(NamedTuple):
  """Host and port at which process 0 listens."""

  host: str
  port: int


def address(coordinator: str) -> Address:
  """Parses "HOST:PORT"; an IPv6 host may stand in brackets.

  Raises:
    UserError: another form, or a port that is not in [1, 65535].

  >>> address("10.0.0.1:9000")
  Address(host='10.0.0.1', port=9000)
  """
  host, _, port = str(coordinator).rpartition(":")
  host = host.strip("[]")
  # At most six digits are converted, as a port may be given with thousands of digits.
  if not host or not port.isdecimal() or not 0 < int(port[:6]) < 65536 or len(port) > 6:
    raise UserError(
      "must be HOST:PORT, as 10.0.0.1:9000", field="coordinator", value=coordinator
    )
  return Address(host, int(port))


def is_loopback(host: str) -> bool:
  return host in ("localhost", "::1") or host.startswith("127.")


def message(data: bytes) -> dict[str, Any]:
  """Returns the parsed JSON object, or {} for anything else."""
  try:
    message = json.loads(data)
  except (ValueError, RecursionError):
    return {}
  return message if isinstance(message, dict) else {}


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
  connection.sendall(json.dumps(message).encode() + b"\n")


def _hear(connection: socket.socket, deadline: float) -> dict[str, Any]:
  """Returns the message that arrives by the deadline; {} if it is late, missing or malformed."""
  data = b""
  try:
    # The length is limited, since an unknown peer may send without end.
    while not data.endswith(b"\n") and len(data) < _MOST:
      connection.settimeout(max(deadline - time.monotonic(), 0.001))
      more = connection.recv(_MOST)
      if not more:
        break
      data += more
  except OSError:
    return {}
  return message(data)


def _listen(at: Address) -> socket.socket:
  host = at.host if is_loopback(at.host) else ""
  both = not host and socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
  try:
    return socket.create_server((host, at.port), family=family, dualstack_ipv6=both)
  except OSError as error:
    raise UserError(
      f"process 0 cannot listen there ({error.strerror}); is the port in use?",
      field="coordinator",
      value=Verbatim(f"{at.host}:{at.port}"),
    ) from error


def _wrong(mine: dict[str, Any], theirs: dict[str, Any], present: Any) -> str | None:
  """Returns why this peer cannot take part, or None."""
  who = theirs["process_id"]
  # The id that a peer claims may have any length, so it is cut to fit a line.
  shown = str(who)[:20]
  # What differs is named without its value: the peer may be a stranger, which does not know
  # `config` either.
  for name in sorted(mine, key=lambda name: name != "config"):
    if name != "process_id" and theirs.get(name) != mine[name]:
      return f"{name}: differs between process 0 and process {shown}{_NOTHING}"
  if not 0 <= who < mine["num_processes"]:
    return (
      f"process_id={shown}: must be below num_processes={mine['num_processes']}{_NOTHING}"
    )
  if who in (0, *present):
    return f"process_id={shown}: two processes have it{_NOTHING}"
  return None


class _Guest:
  """A connected peer that has not identified itself yet."""

  def __init__(self, connection: socket.socket, address: Any = ("",)):
    self.connection = connection
    self.data = b""
    self.host = address[0] if address else ""
    self.until = time.monotonic() + _PATIENCE
    self.word = secrets.token_hex(16)
    connection.setblocking(False)
    with contextlib.suppress(OSError):
      _say(connection, {"word": self.word})

  def read(self) -> dict[str, Any] | None:
    """Returns the peer's hello: {} if it is invalid or the peer left, None while incomplete."""
    try:
      more = self.connection.recv(_MOST)
    except BlockingIOError:
      return None
    except OSError:
      return {}
    self.data += more
    if more and not self.data.endswith(b"\n") and len(self.data) < _MOST:
      return None
    # JSON's true is read as True, which Python takes for an int, but it is no process id.
    theirs = message(self.data)
    mine = type(theirs.get("process_id")) is int and theirs.pop("word", "") == self.word
    return theirs if mine else {}


class _Lobby:
  """Connections of process 0 while it waits for the others. No peer can block it."""

  def __init__(
    self,
    server: socket.socket,
    mine: dict[str, Any],
    fewest: int,
    report: Callable[[str], None],
  ):
    self._server = server
    self._mine = mine
    self._fewest = fewest
    self._report = report
    # On a blocking socket `accept` would wait if the peer has left again.
    server.setblocking(False)
    self._most = max(_CROWD, 2 * mine["num_processes"])
    self._waiting: list[_Guest] = []
    self.present: dict[int, socket.socket] = {}
    self._refused: dict[int, str] = {}  # id -> why the first who claimed it was refused

  def gather(self, deadline: float) -> str | None:
    """Waits until all peers are there; after the deadline, `fewest` of them are enough.

    Returns None, or who is missing.
    """
    wanted = {*range(1, self._mine["num_processes"])}
    while {*self.present} != wanted:
      if time.monotonic() > deadline:
        return self._missing(wanted) if len(self.present) < self._fewest else None
      self._turn(min(deadline, time.monotonic() + _RETRY))
    return None

  def _missing(self, wanted: set[int]) -> str:
    absent = sorted(wanted - {*self.present})
    # An absent process may have claimed its id with other terms. The message then says so.
    claims = [f" ({self._refused[who]})" for who in absent if who in self._refused]
    names = ", ".join(map(str, absent[:10])) + ", ..." * (len(absent) > 10)
    late = f"process_id={names}: did not come in time; see --connect_timeout"
    return late + (*claims, "")[0]

  def _turn(self, until: float) -> None:
    """Reads from every peer that has sent something."""
    self._let_go()
    with selectors.DefaultSelector() as ready:
      ready.register(self._server, selectors.EVENT_READ)
      for guest in self._waiting:
        ready.register(guest.connection, selectors.EVENT_READ, guest)
      for who, connection in self.present.items():
        ready.register(connection, selectors.EVENT_READ, who)
      events = ready.select(max(until - time.monotonic(), 0.001))
    for key, _ in events:
      self._serve(key.data)

  def _let_go(self) -> None:
    """Disconnects guests whose time is over. If too many are left, disconnects the oldest guests
    of the address with the most guests."""
    now = time.monotonic()
    for guest in [guest for guest in self._waiting if guest.until <= now]:
      self._dismiss(guest)
    while len(self._waiting) > self._most:
      (crowded, _), *_ = Counter(guest.host for guest in self._waiting).most_common(1)
      self._dismiss(next(guest for guest in self._waiting if guest.host == crowded))

  def _dismiss(self, guest: _Guest) -> None:
    self._waiting.remove(guest)
    guest.connection.close()

  def _serve(self, guest: _Guest | int | None) -> None:
    if guest is None:
      with contextlib.suppress(OSError):
        self._waiting.append(_Guest(*self._server.accept()))
    # An admitted peer sends nothing more, so its socket is readable only once it has left.
    elif isinstance(guest, int):
      self.present.pop(guest).close()
    else:
      self._admit(guest)

  def _admit(self, guest: _Guest) -> None:
    theirs = guest.read()
    if theirs is None:
      return
    wrong = _wrong(self._mine, theirs, self.present) if theirs else ""
    if wrong is None:
      self._waiting.remove(guest)
      self.present[theirs["process_id"]] = guest.connection
      return
    if wrong:
      # If the peer reads nothing, this raises rather than waits, since the socket does not block.
      with contextlib.suppress(OSError):
        _say(guest.connection, {"wrong": wrong})
      who = theirs["process_id"]
      if 0 < who < self._mine["num_processes"] and who not in self._refused:
        self._refused[who] = wrong
        self._report(f"{wrong.removesuffix(_NOTHING)}; it was let go")
    self._dismiss(guest)

  def close(self) -> None:
    """Disconnects the peers that have not identified themselves."""
    for guest in self._waiting:
      guest.connection.close()


def host(
  at: Address,
  mine: dict[str, Any],
  timeout: float,
  *,
  fewest: int,
  report: Callable[[str], None] = lambda line: None,
) -> dict[int, socket.socket]:
  """Returns the connections to the peers, by process id. An error is also sent to all of them.

  Args:
    mine: what process 0 says of itself; others must say the same, but for `process_id`.
    fewest: number of peers that are enough when the time is over.
    report: function that gets one line for each id whose peer was refused.

  Raises:
    UserError: too few peers came in time, or the port is in use.
  """
  deadline = time.monotonic() + timeout
  with (
    _listen(at) as server,
    contextlib.closing(_Lobby(server, mine, fewest, report)) as lobby,
  ):
    wrong = lobby.gather(deadline)
  # Every peer is told the outcome; otherwise it would wait until its own time is over.
  for connection in lobby.present.values():
    _tell(connection, wrong)
    if wrong:
      connection.close()
  if wrong:
    raise UserError(wrong)
  return lobby.present


def _tell(connection: socket.socket, wrong: str | None) -> None:
  with contextlib.suppress(OSError):
    connection.settimeout(_PATIENCE)
    _say(connection, {"wrong": wrong})


def _reach(at: Address, deadline: float) -> socket.socket:
  while True:
    # At least one attempt is made, even after the deadline.
    left = max(deadline - time.monotonic(), _RETRY)
    try:
      return socket.create_connection(at, timeout=min(left, _PATIENCE))
    # A part of the host's name that is empty or above 63 letters raises UnicodeError.
    except (socket.gaierror, UnicodeError) as error:
      raise UserError(
        "no such host", field="coordinator", value=Verbatim(f"{at.host}:{at.port}")
      ) from error
    except OSError as error:
      if time.monotonic() > deadline:
        raise UserError(
          f"process 0 was not there in time ({error.strerror or 'timed out'}); see "
          "--connect_timeout",
          field="coordinator",
          value=Verbatim(f"{at.host}:{at.port}"),
        ) from error
    # Process 0 may start to listen later, so the attempt is repeated.
    time.sleep(_RETRY)


def _ask(
  at: Address, mine: dict[str, Any], deadline: float, timeout: float
) -> tuple[socket.socket, dict[str, Any]]:
  """Returns (connection, answer of process 0). The answer is {} if none arrives.

  The connection is closed unless process 0 admits this process.
  """
  connection = _reach(at, deadline)
  greeting = _hear(connection, deadline)
  with contextlib.suppress(OSError):
    _say(connection, mine | {"word": greeting.get("word")})
  # Process 0 may have started later and waits `timeout` seconds from then, so its answer may
  # come after the deadline.
  answer = _hear(connection, deadline + timeout + _PATIENCE) if greeting else {}
  if answer.get("wrong", "no answer"):
    connection.close()
  return connection, answer


def join(at: Address, mine: dict[str, Any], timeout: float) -> dict[int, socket.socket]:
  deadline = time.monotonic() + timeout
  connection, answer = _ask(at, mine, deadline, timeout)
  # Process 0 may drop a peer in a crowd, so the peer tries again.
  while "wrong" not in answer and time.monotonic() < deadline:
    time.sleep(_RETRY)
    connection, answer = _ask(at, mine, deadline, timeout)
  if "wrong" not in answer:
    raise UserError(
      f"no answer from a process 0 there within {timeout:g} seconds "
      "(--connect_timeout); is it another program's port, or did process 0 end "
      "or hang?",
      field="coordinator",
      value=Verbatim(f"{at.host}:{at.port}"),
    )
  if answer["wrong"]:
    raise UserError(str(answer["wrong"]))
  return {0: connection}
