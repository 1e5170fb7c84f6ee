"""Secure sums between processes: server and clients are separate programs.

`serve` runs the server, and `take_part` a client. They use the same states and messages as a sum
in memory, over the sockets of `meeting`. A client that is killed, leaves or hangs at any
time is a drop-out. The server waits at most `connect_timeout` seconds for clients and at most
`phase_timeout` for the messages of each phase. Meanwhile it sends its own messages, to all clients
at once. A client that takes no byte of a message for 5 seconds is left out. So a sum ends after at
most connect_timeout + 5 phase_timeout seconds, plus the time that the server computes.

Strangers are disconnected at the meeting (`meeting`), without a report. A client that sends
garbage or a wrong message is left out, with one line to `report`. Others go on, with one exception:
a client that cannot open an envelope falls silent (`secagg`). Clients that send so slowly that they
keep others waiting are left out after a quarter of the phase, or 5 seconds if that is longer. With
messages above 8 MiB, 32 such clients use up a phase. The server of a committee holds the shares
that its members have not taken yet.

`secagg` says what is hidden, and `committee` says it for `CommitteeTerms`. Connections are neither
encrypted nor authenticated, so the network is trusted no more than the server. A listener learns no
more than the server does. Against anyone who changes messages or takes a client's place, terms with
a directory are needed. A committee has no directory. The server sees when each message came.

    organiser:  terms = SecAgg(min_survivors=t).terms(clients, length); written(terms)
                or terms = Committee(num_members=5, colluding=2).terms(clients, length)
    server:     serve(terms, "0.0.0.0:9000")
    client 7:   take_part(terms, 7, vector, "HOST:9000")

A client can also compute its vector in its own process, by a function of the user. The function is
called with `client=`, and returns [d] unsigned integers of the terms' type:

    python -m dpjax.secure.sums.socket_sums TERMS.json HOST:9000 7 package.module:name
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import operator
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from dpjax import names, validate
from dpjax.secure import meeting
from dpjax.secure.meeting import FRAME
from dpjax.secure.sums import committee_parties, secagg_client, secagg_server
from dpjax.secure.sums.committee_parties import CommitteeTerms
from dpjax.secure.sums.dialogue import Begun, SumServer, with_cost
from dpjax.secure.sums.interface import Summed
from dpjax.secure.sums.terms import Terms
from dpjax.validate import UserError

_PIECE = 1 << 20
# Number of messages that may be half read at once. More are allowed if they fit in _MOST_HALF_READ
# bytes. So memory does not grow with the number of clients.
_AT_ONCE = 8
_MOST_HALF_READ = 1 << 26
# A message that keeps others waiting may take 1 / _SHARE of a phase, or _STALL if that is longer.
_SHARE = 4
# A client is left out after this many seconds without a byte in the middle of a message, in either
# direction.
_STALL = 5.0
_TURN = 0.2
_BUFFER = 1 << 18
# Digits of a client's id that are read. No id has more than ten.
_DIGITS = 20
# Name of the protocol in a file of terms -> the terms' class.
_PROTOCOLS = {"secagg": Terms, "committee": CommitteeTerms}
AnyTerms = Terms | CommitteeTerms
Report = Callable[[str], None]


# --- terms, as a file for all parties


def serialise(terms: AnyTerms) -> str:
  """Serialises the terms as JSON.

  >>> terms = Terms(session=bytes(16), clients=(1, 2, 3), threshold=2, min_survivors=2, length=10)
  >>> read(serialise(terms)) == terms
  True
  """
  (protocol,) = (name for name, kind in _PROTOCOLS.items() if type(terms) is kind)
  # Integers of NumPy are written as plain ones.
  plain = lambda value: value.hex() if isinstance(value, bytes) else operator.index(value)
  return json.dumps({"protocol": protocol, **dataclasses.asdict(terms)}, default=plain)


def read(text: str) -> AnyTerms:
  """Parses terms from the text that `serialise` makes.

  Raises:
    UserError: the text is not JSON of terms, or holds a value that `Terms` or `CommitteeTerms`
      does not accept.
  """
  try:
    fields = json.loads(text)
    kind = _PROTOCOLS[fields.pop("protocol")]
    fields["session"] = bytes.fromhex(fields["session"])
    fields["clients"] = tuple(fields["clients"])
    if fields.get("directory") is not None:
      fields["directory"] = tuple(bytes.fromhex(key) for key in fields["directory"])
    return kind(**fields)
  except UserError:
    raise
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
    raise UserError(
      f"are not those that `serialise` gives ({error!r})", field="terms"
    ) from error


def server(terms: AnyTerms) -> SumServer:
  """Returns the server of a sum on these terms.

  Raises:
    UserError: the extra `secure` is not installed.
  """
  if isinstance(terms, Terms):
    return secagg_server.start(terms)
  return committee_parties.start_server(terms)


def client(terms: AnyTerms, me: int, *, signing_key: bytes | None = None) -> Begun:
  """Returns a client of a sum on these terms, with fresh keys from the operating system's entropy,
  and what it sends first.

  Args:
    terms: terms on which all parties agreed.
    me: id of the client.
    signing_key: Ed25519 private key [32], where the terms have a directory.

  Raises:
    UserError: `me` is not among the clients, the signing key is not that of the directory, or
      the extra `secure` is not installed.
  """
  if isinstance(terms, Terms):
    return secagg_client.start(terms, me, signing_key=signing_key)
  if signing_key is not None:
    raise UserError("must be None: a committee has no directory", field="signing_key")
  return committee_parties.start(terms, me)


def secret_of(terms: AnyTerms) -> bytes:
  """Returns a digest of the terms. A client that has other terms is refused at the meeting."""
  return hashlib.sha256(serialise(terms).encode()).digest()


# --- server


class _Gone(Exception):
  """Raised with the reason why a client will send nothing more."""


class _Line:
  """The server's connection to one client."""

  def __init__(self, connection: socket.socket):
    self._connection = connection
    self._data = bytearray()
    self._wanted = FRAME.size
    self._head = True  # whether the next bytes are a message's length
    self._unsent: collections.deque[memoryview] = collections.deque()
    self.bytes_sent = 0
    connection.setblocking(False)
    # A socket is ready for more once a third of its buffer is free. With a buffer of megabytes a
    # slow client, which reads all the time, would seem to take nothing for seconds.
    with contextlib.suppress(OSError):
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)

  @property
  def has_unsent(self) -> bool:
    return bool(self._unsent)

  def fileno(self) -> int:
    return self._connection.fileno()

  def more(self, most: int) -> bytes | None:
    """Reads what has come of a message of at most `most` bytes.

    Returns the message once it is complete, and None before. Raises _Gone if none will come.
    """
    try:
      piece = self._connection.recv(min(_PIECE, self._wanted - len(self._data)))
    except BlockingIOError:
      return None
    except OSError as error:
      raise _Gone("closed its connection") from error
    if not piece:
      raise _Gone("closed its connection")
    self._data += piece
    if len(self._data) < self._wanted:
      return None
    data = bytes(self._data)
    self._data = bytearray()
    if not self._head:
      self._head = True
      self._wanted = FRAME.size
      return data
    (announced,) = FRAME.unpack(data)
    # The length is checked before memory is allocated: an unknown peer may announce any length.
    if not 0 < announced <= most:
      raise _Gone(f"announced {announced} bytes, at most {most} are taken")
    self._head = False
    self._wanted = announced
    return None

  def put(self, data: bytes) -> None:
    """Queues a message for the client; `flush` sends it."""
    self._unsent.append(memoryview(FRAME.pack(len(data))))
    self._unsent.append(memoryview(data))

  def flush(self) -> bool:
    """Sends at most one piece, without waiting. Returns whether the client took any byte."""
    piece = self._unsent[0]
    try:
      count = self._connection.send(piece[:_PIECE])
    except BlockingIOError:
      return False
    except OSError as error:
      raise _Gone("does not take its message") from error
    self.bytes_sent += count
    self._unsent[0] = piece[count:]
    if count == len(piece):
      self._unsent.popleft()
    return count > 0

  def forget(self) -> None:
    """Drops what was not sent: the client takes nothing more."""
    self._unsent.clear()

  def close(self) -> None:
    self._connection.close()


class _Phase:
  """The clients expected in a phase, and when each of them was last active."""

  def __init__(
    self, lines: Mapping[int, _Line], wanted: Collection[int], most: int, until: float
  ):
    start = time.monotonic()
    self._lines = lines
    self._most = most
    self._until = until
    self.waiting = set(wanted)
    self._begun = dict[int, float]()  # client -> when it last sent something
    self._first = dict[int, float]()  # client -> when its message began
    self._taken = dict.fromkeys(wanted, start)  # client -> when it last took something
    self._at_once = max(_AT_ONCE, _MOST_HALF_READ // most)
    self._patience = max(_STALL, (until - start) / _SHARE)

  def _listens(self, who: int) -> bool:
    # At the limit of half-read messages, further messages wait in their sockets.
    return who in self._begun or len(self._begun) < self._at_once

  def ready(self) -> list[tuple[int, int]]:
    """Waits at most _TURN seconds, within the phase's time.

    Returns (client, events) for each connection that can be read or written now.
    """
    with selectors.DefaultSelector() as ready:
      for who, line in self._lines.items():
        # A client that has sent its message may still be sent messages of others.
        is_heard = who in self.waiting and self._listens(who)
        events = selectors.EVENT_READ * is_heard
        events |= selectors.EVENT_WRITE * line.has_unsent
        if events:
          ready.register(self._lines[who].fileno(), events, who)
      # The wait is short, so that late clients are noticed soon.
      left = min(_TURN, max(self._until - time.monotonic(), 0.0))
      return [(key.data, events) for key, events in ready.select(left)]

  def move(self, who: int, events: int, now: float) -> bytes | str | None:
    """Sends and reads what is possible now. Returns a message, the reason (a text) why none will
    come, or None while it is incomplete."""
    try:
      if events & selectors.EVENT_WRITE and self._lines[who].flush():
        self._taken[who] = now
      if events & selectors.EVENT_READ and self._listens(who):
        self._begun[who] = now
        self._first.setdefault(who, now)
        return self._lines[who].more(self._most)
    except _Gone as gone:
      if who in self.waiting:
        return str(gone)
      # Nothing is due from this client now. A later phase that waits for it finds it gone.
      self._lines[who].forget()
    return None

  def late(self, now: float) -> dict[int, str]:
    """Returns the clients whose time is over, with the reason."""
    # Slowness counts against a client only while others wait for its place.
    full = len(self._begun) >= self._at_once and len(self.waiting) > len(self._begun)
    late = dict[int, str]()
    for who, last in self._begun.items():
      slow = now - self._first[who] > self._patience
      if now - last > _STALL or (full and slow):
        late[who] = "is slow" if slow else "is silent"
    if now >= self._until:
      late = dict.fromkeys(self.waiting, "is silent")
    for who in self.waiting:
      if self._lines[who].has_unsent and now - self._taken[who] > _STALL:
        late[who] = "does not take its message"
    return late

  def end(self, who: int) -> None:
    """Stops waiting for a client: its message arrived, or it is left out."""
    self.waiting.discard(who)
    self._begun.pop(who, None)


def _heard(
  lines: Mapping[int, _Line], wanted: Collection[int], most: int, until: float
) -> Iterator[tuple[int, bytes | str]]:
  """Yields (client, its message or the reason for its absence), once for each of `wanted`.

  Messages are yielded as they arrive. Meanwhile queued messages are sent, to all at once.
  """
  phase = _Phase(lines, wanted, most, until)
  while phase.waiting:
    ready = phase.ready()
    # The clock is read before the caller handles a message: handling it is no client's silence.
    now = time.monotonic()
    for who, events in ready:
      said = phase.move(who, events, now)
      if said is not None:
        phase.end(who)
        yield who, said
    for who, why in sorted(phase.late(now).items()):
      phase.end(who)
      yield who, why


def serve(
  terms: AnyTerms,
  coordinator: str,
  *,
  connect_timeout: float = 60.0,
  phase_timeout: float = 60.0,
  report: Report = lambda line: None,
) -> Summed:
  """Runs the server's side of one sum.

  Args:
    coordinator: "HOST:PORT" where the server listens until the clients have come; at 0.0.0.0 on all
      addresses of its machine.
    connect_timeout: seconds to wait for the clients. A client that comes later is a drop-out.
    phase_timeout: seconds for the messages of a phase; a later client is a drop-out, too. It must
      be enough for the slowest honest client's upload and for what all compute.
    report: function that is given one line about each client that is left out, with the reason.

  Returns:
    The sum. Its cost counts the bytes that were sent. Its expansions and operations come from a
    formula, since clients do not report theirs.

  Raises:
    UserError: too few clients came, or are left, or shares do not fit.
  """
  validate.positive(connect_timeout=connect_timeout, phase_timeout=phase_timeout)
  start = time.perf_counter()
  at = meeting.address(coordinator)
  begun = server(terms)
  with meeting.listen(at) as listening:
    met = meeting.host(
      listening, terms.clients, secret_of(terms), connect_timeout, fewest=terms.fewest
    )
  lines = {who: _Line(link) for who, link in met.items()}
  for who in terms.clients:
    if who not in lines:
      report(f"client {who} did not come in time")
  try:
    return _serve(begun, lines, phase_timeout, report, start)
  finally:
    for line in lines.values():
      line.close()


def _serve(
  server: SumServer,
  lines: dict[int, _Line],
  seconds: float,
  report: Report,
  start: float,
) -> Summed:
  moved = Counter[int]()
  while server.phase:
    kind = server.phase
    until = time.monotonic() + seconds
    wanted = [who for who in server.expected_clients() if who in lines]
    # Messages wait here while a client sends its own message, since it does not read meanwhile.
    held = {who: list[bytes]() for who in wanted}
    for who, said in _heard(lines, wanted, server.largest(), until):
      # This client sends no more in this phase, so its waiting messages can be sent.
      waiting = held.pop(who)
      try:
        if isinstance(said, str):
          raise UserError(f"client {who} {said}", field=kind)
        server, outgoing = server.receive(said, who)
      except UserError as error:
        report(str(error))
        moved[who] += lines[who].bytes_sent
        lines.pop(who).close()
        continue
      moved[who] += len(said) + FRAME.size
      for data in waiting:
        lines[who].put(data)
      _put_on(lines, outgoing, held)
    # These messages are sent while those of the next phase are received.
    server, outgoing = server.close()
    _put_on(lines, outgoing, {})
  moved.update({who: line.bytes_sent for who, line in lines.items()})
  result = server.result()  # before the clock is read
  return with_cost(result, moved, seconds=time.perf_counter() - start)


def _put_on(
  lines: Mapping[int, _Line],
  outgoing: Mapping[int, bytes],
  held: Mapping[int, list[bytes]],
) -> None:
  """Queues each message on its client's line, or in the client's list if `held` has one."""
  for who, data in outgoing.items():
    if who in held:
      held[who].append(data)
    elif who in lines:
      lines[who].put(data)


# --- client


def take_part(
  terms: AnyTerms,
  me: int,
  vector: np.ndarray,
  coordinator: str,
  *,
  signing_key: bytes | None = None,
  connect_timeout: float = 60.0,
  phase_timeout: float = 60.0,
) -> None:
  """Runs a client's side of one sum. Keys are drawn from the operating system's entropy, and are
  not kept.

  Args:
    vector: [d] unsigned integers of the terms' type. It leaves this process only masked, or as
      sealed shares.
    coordinator: "HOST:PORT" of the server.
    signing_key: Ed25519 private key [32], if the terms have a directory.
    connect_timeout: seconds to wait for the server.
    phase_timeout: same as the server's. For each message the client waits at most
      2 phase_timeout + connect_timeout seconds.

  Raises:
    UserError: as `client`; the vector does not fit the terms; or the server is not there,
      refuses this client, sends something wrong or nothing, or ends the sum before this client has
      sent its last message.
  """
  validate.positive(connect_timeout=connect_timeout, phase_timeout=phase_timeout)
  terms.check_vector(vector)
  party, first = client(terms, me, signing_key=signing_key)
  enough_time = 2 * phase_timeout + connect_timeout
  at = meeting.address(coordinator)
  connection = meeting.join(at, int(me), secret_of(terms), connect_timeout)
  with contextlib.closing(connection):
    if first is not None:
      _put(connection, first, enough_time)
    while not party.is_done:
      most = party.largest()
      # A long message is refused before it is read: a server must not fill a client's memory.
      until = time.monotonic() + enough_time
      (length,) = FRAME.unpack(_read(connection, FRAME.size, until))
      if length > most:
        raise UserError(
          f"announced {length} bytes, at most {most} are taken", field="server"
        )
      data = _read(connection, length, until)
      party, said = party.answer(data, vector)
      if said is not None:
        _put(connection, said, enough_time)


def _put(connection: socket.socket, data: bytes, seconds: float) -> None:
  connection.settimeout(seconds)
  try:
    connection.sendall(FRAME.pack(len(data)) + data)
  except OSError as error:
    raise UserError(
      "has ended the sum, or does not read any more", field="server"
    ) from error


def _read(connection: socket.socket, length: int, until: float) -> bytes:
  try:
    return meeting.read(connection, length, until)
  except TimeoutError as error:
    raise UserError(
      "said nothing for too long; the sum goes on without", field="server"
    ) from error
  except OSError as error:
    raise UserError("has ended the sum before it was complete", field="server") from error


def main(arguments: list[str]) -> None:
  """Runs a client; a user's function makes its vector. Arguments: TERMS.json HOST:PORT CLIENT PATH.

  Raises:
    UserError: as `take_part`, there are not four arguments, or a file or function is missing.
  """
  if len(arguments) != 4 or not arguments[2].isdecimal():
    raise UserError(
      "must be called with TERMS.json HOST:PORT CLIENT PATH", field="socket_sums"
    )
  file, coordinator, who, path = arguments
  try:
    with open(file) as opened:
      terms = read(opened.read())
  except OSError as error:
    raise UserError(
      f"cannot be read ({error.strerror})", field="terms", value=file
    ) from error
  except UnicodeDecodeError as error:
    raise UserError("is no text", field="terms", value=file) from error
  if not names.is_path(path):
    raise UserError(f"must be {names.FORM}", field="vector", value=path)
  client = int(who[:_DIGITS])
  vector = names.call(path, "vector", client=client)
  try:
    vector = np.asarray(vector)
  # A user's object may raise anything.
  except Exception as error:
    raise UserError(
      f"is no array ({type(error).__name__})", field="vector", value=path
    ) from error
  take_part(terms, client, vector, coordinator)


if __name__ == "__main__":
  try:
    main(sys.argv[1:])
  except UserError as error:
    sys.exit(f"error: {error}")
