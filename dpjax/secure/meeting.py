"""Meeting of several programs: one listens, the server, and the clients identify themselves.

| who    | sends                                                            |
| ------ | ---------------------------------------------------------------- |
| server | a random word                                                    |
| client | its id, and a digest of word and id under a secret of all        |
| server | why the client is refused, at once; or nothing wrong, at the end |

What was overheard at one meeting is of no use at another. Who does not know the secret, or claims
an id that is taken, is told so, and is disconnected. The others wait on, so neither a stranger nor
a client that was started wrongly ends a meeting.

A connection has a few seconds to identify itself, and is closed otherwise, so none keeps the others
waiting. If too many wait, the oldest from the most frequent address is closed first. A client that
was closed tries again until its time is over. Every wait ends at a known time.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Collection

from dpjax.parallel.runtime import Address as Address
from dpjax.parallel.runtime import address as address
from dpjax.validate import UserError, Verbatim

# Length of a message that follows.
FRAME = struct.Struct("<Q")
_WORD_BYTES = 16
# Id and digest.
_HELLO = struct.Struct("<I32s")
# Largest number of bytes of what the server tells.
_MOST = 4096
_PIECE = 1 << 20
# Largest number of connections that have not identified themselves. With more than 32 clients it is
# twice the number of clients.
_CROWD = 64
# Seconds for one message of a connected peer.
_PATIENCE = 5.0
_RETRY = 0.1


def listen(at: Address, field: str = "coordinator") -> socket.socket:
  """Returns a socket that listens there; at 0.0.0.0 on every IPv4 address of this machine.

  Args:
    field: name of the argument that holds the address, for the error.

  Raises:
    UserError: the port is in use, or the address is none of this machine.
  """
  family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
  try:
    return socket.create_server((at.host, at.port), family=family)
  # A part of the host's name that is empty or above 63 letters raises UnicodeError.
  except (OSError, UnicodeError) as error:
    raise UserError(
      f"cannot listen there ({getattr(error, 'strerror', error)}); is the port in use?",
      field=field,
      value=Verbatim(f"{at.host}:{at.port}"),
    ) from error


def _hello(secret: bytes, word: bytes, who: int) -> bytes:
  """Returns what a client that knows the secret answers to a word."""
  proof = hmac.digest(secret, word + who.to_bytes(4, "little"), "sha256")
  return _HELLO.pack(who, proof)


def _message(wrong: UserError | None) -> bytes:
  """Returns the server's message on what is wrong; of no bytes if nothing is."""
  text = b"" if wrong is None else json.dumps(wrong.facts()).encode()
  return FRAME.pack(len(text)) + text


class _Caller:
  """A connected peer that has not identified itself yet."""

  def __init__(self, connection: socket.socket, address: tuple):
    self.connection = connection
    self.hello = b""
    self.host = address[0]
    self.until = time.monotonic() + _PATIENCE
    self.word = secrets.token_bytes(_WORD_BYTES)
    connection.setblocking(False)
    with contextlib.suppress(OSError):
      connection.sendall(self.word)

  def read(self) -> bool:
    """Reads what has come of the hello. Returns whether the peer has left."""
    try:
      more = self.connection.recv(_HELLO.size - len(self.hello))
    except BlockingIOError:
      return False
    except OSError:
      return True
    self.hello += more
    return not more


class _Meeting:
  """Connections of the server while it waits for the clients. No peer can block it."""

  def __init__(self, server: socket.socket, clients: Collection[int], secret: bytes):
    self._server = server
    self._clients = clients
    self._secret = secret
    # On a blocking socket `accept` would wait if the peer has left again.
    server.setblocking(False)
    self._most = max(_CROWD, 2 * len(clients))
    self._waiting: list[_Caller] = []
    self.present: dict[int, socket.socket] = {}
    # Maps a client's id to why the first who claimed it was refused.
    self._refused: dict[int, UserError] = {}

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
    late = "did not come in time" + (*claims, "")[0]
    return UserError(
      late, field="client", value=Verbatim(names), hint="see connect_timeout"
    )

  def _turn(self, until: float) -> None:
    """Reads from every peer that has sent something."""
    self._let_go()
    with selectors.DefaultSelector() as ready:
      ready.register(self._server, selectors.EVENT_READ)
      for caller in self._waiting:
        ready.register(caller.connection, selectors.EVENT_READ, caller)
      for who, connection in self.present.items():
        ready.register(connection, selectors.EVENT_READ, who)
      events = ready.select(max(until - time.monotonic(), 0.001))
    for key, _ in events:
      self._serve(key.data)

  def _let_go(self) -> None:
    """Disconnects callers whose time is over. If too many are left, disconnects the oldest callers
    of the address with the most callers."""
    now = time.monotonic()
    for caller in [caller for caller in self._waiting if caller.until <= now]:
      self._dismiss(caller)
    while len(self._waiting) > self._most:
      (crowded, _), *_ = Counter(caller.host for caller in self._waiting).most_common(1)
      self._dismiss(next(caller for caller in self._waiting if caller.host == crowded))

  def _dismiss(self, caller: _Caller) -> None:
    self._waiting.remove(caller)
    caller.connection.close()

  def _serve(self, caller: _Caller | int | None) -> None:
    if caller is None:
      with contextlib.suppress(OSError):
        self._waiting.append(_Caller(*self._server.accept()))
    # An admitted peer sends nothing more, so its socket is readable only once it has left.
    elif isinstance(caller, int):
      self.present.pop(caller).close()
    elif caller.read():
      self._dismiss(caller)
    elif len(caller.hello) == _HELLO.size:
      self._admit(caller)

  def _admit(self, caller: _Caller) -> None:
    who, _ = _HELLO.unpack(caller.hello)
    knows_secret = hmac.compare_digest(caller.hello, _hello(self._secret, caller.word, who))
    wrong = self._wrong(who, knows_secret)
    if wrong is None:
      self._waiting.remove(caller)
      self.present[who] = caller.connection
      return
    # If the peer reads nothing, this raises rather than waits, since the socket does not block.
    with contextlib.suppress(OSError):
      caller.connection.sendall(_message(wrong))
    # Strangers claim as many ids as they like.
    if who in self._clients:
      self._refused.setdefault(who, wrong)
    self._dismiss(caller)

  def _wrong(self, who: int, knows_secret: bool) -> UserError | None:
    """Returns why this peer cannot take part, or None."""
    # A stranger is told nothing of ids.
    if not knows_secret:
      return UserError(
        f"differ between the server and client {who}; nothing was run", field="terms"
      )
    if who not in self._clients:
      return UserError("is none of this sum; nothing was run", field="client", value=who)
    if who in self.present:
      return UserError("two programs have it; nothing was run", field="client", value=who)
    return None

  def close(self) -> None:
    """Disconnects the peers that have not identified themselves."""
    for caller in self._waiting:
      caller.connection.close()


def host(
  server: socket.socket,
  clients: Collection[int],
  secret: bytes,
  timeout: float,
  *,
  fewest: int,
) -> dict[int, socket.socket]:
  """Returns the connections to the clients, by id. An error is also sent to all of them.

  Args:
    server: the listening socket.
    clients: ids of all clients.
    secret: bytes that only these programs know.
    fewest: number of clients that are enough when the time is over.

  Raises:
    UserError: too few clients came in time.
  """
  deadline = time.monotonic() + timeout
  with contextlib.closing(_Meeting(server, clients, secret)) as meeting:
    wrong = meeting.gather(deadline, fewest)
  # Every client is told the outcome; otherwise it would wait until its own time is over.
  for connection in meeting.present.values():
    with contextlib.suppress(OSError):
      connection.settimeout(_PATIENCE)
      connection.sendall(_message(wrong))
    if wrong:
      connection.close()
  if wrong:
    raise wrong
  return meeting.present


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
          f"the server was not there in time ({error.strerror or 'timed out'})",
          field="coordinator",
          value=Verbatim(f"{at.host}:{at.port}"),
          hint="see connect_timeout",
        ) from error
    # The server may start to listen later, so the attempt is repeated.
    time.sleep(_RETRY)


def read(connection: socket.socket, length: int, until: float) -> bytes:
  """Returns the next `length` bytes of a connection.

  Raises:
    TimeoutError: `time.monotonic` has reached `until` before.
    OSError: the connection has ended.
  """
  data = bytearray()
  while len(data) < length:
    # A timeout of 0 would make the socket non-blocking.
    connection.settimeout(max(until - time.monotonic(), 0.001))
    piece = connection.recv(min(_PIECE, length - len(data)))
    if not piece:
      raise ConnectionError("has ended")
    data += piece
  return bytes(data)


def _refusal(text: bytes) -> UserError:
  """Returns the error that the server tells. Another program there may tell anything."""
  try:
    facts = json.loads(text)
  except (ValueError, RecursionError):
    facts = None
  if not isinstance(facts, list) or len(facts) != len(UserError().facts()):
    return UserError(text.decode(errors="replace"))
  return UserError.of_facts([None if fact is None else str(fact) for fact in facts])


def join(at: Address, me: int, secret: bytes, timeout: float) -> socket.socket:
  """Returns client `me`'s connection to the server, which waits until all clients are there.

  Raises:
    UserError: the server is not there, does not answer, or refuses this client.
  """
  deadline = time.monotonic() + timeout
  while True:
    connection = _reach(at, deadline)
    answer = None
    with contextlib.suppress(OSError):
      connection.sendall(_hello(secret, read(connection, _WORD_BYTES, deadline), me))
      # The server may have started later and waits `timeout` seconds from then, so its answer may
      # come after the deadline.
      until = deadline + timeout + _PATIENCE
      (length,) = FRAME.unpack(read(connection, FRAME.size, until))
      answer = read(connection, length, until) if length <= _MOST else None
    if answer == b"":
      return connection
    connection.close()
    if answer is not None:
      raise _refusal(answer)
    # The server may drop a peer in a crowd, so the peer tries again.
    if time.monotonic() >= deadline:
      raise UserError(
        f"no answer from a server there within {timeout:g} seconds; is it another program's "
        "port, or did the server end or hang?",
        field="coordinator",
        value=Verbatim(f"{at.host}:{at.port}"),
        hint="see connect_timeout",
      )
    time.sleep(_RETRY)
