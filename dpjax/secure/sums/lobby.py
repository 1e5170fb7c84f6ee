"""Meeting of the programs of a sum: the server listens, and the clients identify themselves.

A connection has a few seconds and 4 KiB to identify itself, and is closed otherwise, so none keeps
the others waiting. If too many wait, the oldest from the most frequent address is closed first. A
client that was closed tries again until its time is over. Every wait ends at a known time.

The server sends each connection a random word. A client answers with its id, and with a digest of
word and id under a secret of the sum. So what was overheard at one meeting is of no use at another.
Who does not know the secret, or claims an id that is taken, is told so, and is disconnected. The
others wait on, so neither a stranger nor a client that was started wrongly ends a meeting.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from dpjax.validate import UserError, Verbatim

# Largest number of bytes of one message.
_MOST = 4096
# Largest number of connections that have not identified themselves. With more than 32 clients it is
# twice the number of clients.
_CROWD = 64
# Seconds for one message of a connected peer.
_PATIENCE = 5.0
_RETRY = 0.1


class Address(NamedTuple):
  """Host and port at which the server listens."""

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
      f"the server cannot listen there ({error.strerror}); is the port in use?",
      field="coordinator",
      value=Verbatim(f"{at.host}:{at.port}"),
    ) from error


def _proof(secret: bytes, word: str, who: int) -> str:
  """Returns what a client that knows the sum's secret answers to a word."""
  return hmac.new(secret, f"{word} {who}".encode(), "sha256").hexdigest()


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
    theirs = message(self.data)
    # JSON's true is read as True, which Python takes for an int, but it is no id.
    return theirs if type(theirs.get("client")) is int else {}


class _Lobby:
  """Connections of the server while it waits for the clients. No peer can block it."""

  def __init__(self, server: socket.socket, clients: Collection[int], secret: bytes):
    self._server = server
    self._clients = clients
    self._secret = secret
    # On a blocking socket `accept` would wait if the peer has left again.
    server.setblocking(False)
    self._most = max(_CROWD, 2 * len(clients))
    self._waiting: list[_Guest] = []
    self.present: dict[int, socket.socket] = {}
    self._refused: dict[
      int, UserError
    ] = {}  # id -> why the first who claimed it was refused

  def gather(self, deadline: float, fewest: int) -> UserError | None:
    """Waits until all clients are there; after the deadline, `fewest` of them are enough.

    Returns None, or the error that says who is missing.
    """
    while absent := sorted({*self._clients} - {*self.present}):
      if time.monotonic() > deadline:
        return self._missing(absent) if len(self.present) < fewest else None
      self._turn(min(deadline, time.monotonic() + _RETRY))
    return None

  def _missing(self, absent: list[int]) -> UserError:
    # An absent client may have come with other terms. The message then says so.
    claims = [f" ({self._refused[who]})" for who in absent if who in self._refused]
    names = ", ".join(map(str, absent[:10])) + ", ..." * (len(absent) > 10)
    late = "did not come in time; see connect_timeout" + (*claims, "")[0]
    return UserError(late, field="client", value=Verbatim(names))

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
    wrong = self._wrong(guest, theirs) if theirs else None
    if theirs and wrong is None:
      self._waiting.remove(guest)
      self.present[theirs["client"]] = guest.connection
      return
    if wrong:
      # If the peer reads nothing, this raises rather than waits, since the socket does not block.
      with contextlib.suppress(OSError):
        _say(guest.connection, {"wrong": wrong.facts()})
      self._refused.setdefault(theirs["client"], wrong)
    self._dismiss(guest)

  def _wrong(self, guest: _Guest, theirs: dict[str, Any]) -> UserError | None:
    """Returns why this peer cannot take part, or None."""
    who = theirs["client"]
    # The id that a peer claims may have any length, so it is cut to fit a line.
    shown = str(who)[:20]
    # The proof comes first: a stranger is told nothing of ids.
    proof = theirs.get("proof")
    due = _proof(self._secret, guest.word, who)
    known = proof if isinstance(proof, str) and proof.isascii() else ""
    if not hmac.compare_digest(known, due):
      return UserError(
        f"differ between the server and client {shown}; nothing was run", field="terms"
      )
    client = Verbatim(shown)
    if who not in self._clients:
      return UserError("is none of this sum; nothing was run", field="client", value=client)
    if who in self.present:
      return UserError(
        "two programs have it; nothing was run", field="client", value=client
      )
    return None

  def close(self) -> None:
    """Disconnects the peers that have not identified themselves."""
    for guest in self._waiting:
      guest.connection.close()


def host(
  at: Address, clients: Collection[int], secret: bytes, timeout: float, *, fewest: int
) -> dict[int, socket.socket]:
  """Returns the connections to the clients, by id. An error is also sent to all of them.

  Args:
    clients: ids of all clients of the sum.
    secret: bytes that only the parties of the sum know.
    fewest: number of clients that are enough when the time is over.

  Raises:
    UserError: too few clients came in time, or the port is in use.
  """
  deadline = time.monotonic() + timeout
  with (
    _listen(at) as server,
    contextlib.closing(_Lobby(server, clients, secret)) as lobby,
  ):
    wrong = lobby.gather(deadline, fewest)
  # Every client is told the outcome; otherwise it would wait until its own time is over.
  for connection in lobby.present.values():
    with contextlib.suppress(OSError):
      connection.settimeout(_PATIENCE)
      _say(connection, {"wrong": wrong and wrong.facts()})
    if wrong:
      connection.close()
  if wrong:
    raise wrong
  return lobby.present


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
          f"the server was not there in time ({error.strerror or 'timed out'}); see "
          "connect_timeout",
          field="coordinator",
          value=Verbatim(f"{at.host}:{at.port}"),
        ) from error
    # The server may start to listen later, so the attempt is repeated.
    time.sleep(_RETRY)


def _told(wrong: Any) -> UserError:
  """Returns the error that the server tells. Another program there may tell anything."""
  if not isinstance(wrong, list) or len(wrong) != len(UserError().facts()):
    return UserError(str(wrong))
  return UserError.of_facts([None if part is None else str(part) for part in wrong])


def join(at: Address, me: int, secret: bytes, timeout: float) -> socket.socket:
  """Returns client `me`'s connection to the server, which waits until all clients are there.

  Raises:
    UserError: the server is not there, does not answer, or refuses this client.
  """
  deadline = time.monotonic() + timeout
  while True:
    connection = _reach(at, deadline)
    word = _hear(connection, deadline).get("word")
    with contextlib.suppress(OSError):
      _say(connection, {"client": me, "proof": _proof(secret, str(word), me)})
    # The server may have started later and waits `timeout` seconds from then, so its answer may
    # come after the deadline.
    answer = _hear(connection, deadline + timeout + _PATIENCE) if word else {}
    if "wrong" in answer and not answer["wrong"]:
      return connection
    connection.close()
    if "wrong" in answer:
      raise _told(answer["wrong"])
    # The server may drop a peer in a crowd, so the peer tries again.
    if time.monotonic() >= deadline:
      raise UserError(
        f"no answer from a server there within {timeout:g} seconds (connect_timeout); is it "
        "another program's port, or did the server end or hang?",
        field="coordinator",
        value=Verbatim(f"{at.host}:{at.port}"),
      )
    time.sleep(_RETRY)
