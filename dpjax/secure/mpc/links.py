"""Links between two programs, which carry bytes over a queue or a socket.

A socket carries TLS 1.3. Its certificates follow from a token that both ends were given beforehand
(`dpjax.secure.mpc.tls`). Anyone who listens reads nothing, not even with the token. What was
altered, repeated, left out or sent by somebody without the token is refused. The lengths of
messages are public.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any, Protocol

from dpjax import validate
from dpjax.secure.mpc import tls
from dpjax.validate import UserError

TIMEOUT = 60.0  # seconds
_LENGTH = struct.Struct(">Q")
_PIECE = 1 << 20
# Largest number of bytes of one message, since each end has several copies of it in memory.
_MOST = (1 << 31) - 64
# Largest number of bytes that go one way under one key. AES-GCM, which TLS 1.3 prefers, loses its
# margin from 2^38.5 bytes on (RFC 8446, section 5.5).
_MOST_UNDER_ONE_KEY = 1 << 38
# Number of seconds for one wait of a selector, which takes at most 2^31 milliseconds.
_LONGEST_WAIT = 1e6
TOKEN_BYTES = 16


class PeerFailed(UserError):
  """Raised when the peer is gone, silent or violates the protocol."""


class Link(Protocol):
  """End of a link between two programs.

  Classes of links take `timeout`: longest silence of the peer in seconds, computing included.
  """

  peer: str
  bytes_sent: int
  bytes_received: int
  rounds: int  # number of messages received: each had to be waited for

  def send(self, data: bytes) -> None: ...

  def receive(self, length: int | None) -> bytes:
    """Returns the next message. Raises PeerFailed unless it has `length` bytes (None: any
    length)."""
    ...

  def exchange(self, data: bytes) -> bytes:
    """Sends data, and receives and returns equally many bytes at the same time."""
    ...

  def close(self) -> None: ...


def _check(peer: str, data: bytes, length: int | None) -> bytes:
  if length is not None and len(data) != length:
    raise PeerFailed(
      f"sent {len(data)} bytes where {length} were due; do both run the same program "
      "on the same shapes?",
      field=peer,
    )
  return data


class QueueLink:
  """A link inside one process, between two threads."""

  def __init__(
    self, peer: str, outgoing: queue.Queue, incoming: queue.Queue, timeout: float
  ):
    self.peer = peer
    self._out = outgoing
    self._in = incoming
    self._timeout = timeout
    self.bytes_sent = self.bytes_received = self.rounds = 0

  def send(self, data: bytes) -> None:
    self.bytes_sent += len(data)
    self._out.put(data)

  def receive(self, length: int | None) -> bytes:
    try:
      data = self._in.get(timeout=self._timeout)
    except queue.Empty:
      raise PeerFailed(f"silent for {self._timeout:g} seconds", field=self.peer) from None
    if data is None:
      raise PeerFailed("has left", field=self.peer)
    self.bytes_received += len(data)
    self.rounds += 1
    return _check(self.peer, data, length)

  def exchange(self, data: bytes) -> bytes:
    self.send(data)
    return self.receive(len(data))

  def close(self) -> None:
    self._out.put(None)


def queue_links(timeout: float = TIMEOUT) -> tuple[QueueLink, QueueLink]:
  """Returns the ends of party 0 and of party 1. Raises UserError unless timeout is positive.

  >>> ours, theirs = queue_links()
  >>> ours.send(b"abc"); theirs.receive(3)
  b'abc'
  """
  validate.positive(timeout=timeout)
  forth: queue.Queue = queue.Queue()
  back: queue.Queue = queue.Queue()
  return QueueLink("party 1", forth, back, timeout), QueueLink(
    "party 0", back, forth, timeout
  )


def check(token: bytes, timeout: float) -> None:
  """Raises UserError for a token or a timeout that no link takes."""
  validate.positive(timeout=timeout)
  if not isinstance(token, bytes):
    raise UserError(f"must be bytes, is {type(token).__name__}", field="token")
  if len(token) < TOKEN_BYTES:
    raise UserError(
      f"has {len(token)} bytes, must have at least {TOKEN_BYTES}", field="token"
    )


class SocketLink:
  """A link between two processes.

  `exchange` sends and receives at once, so that neither side blocks on a full buffer. `send` alone
  does not read: only one side at a time may send a large message. After an error in the middle of a
  message every call raises PeerFailed.

  Args:
    connection: open socket; this object closes it.
    me, peer: "party 0", "party 1" or "dealer".
    token: >= 16 bytes that both ends got over another channel. Without the token nobody can take
      part.
    topic: text that says what both are about to do; a peer with another topic is refused.
    timeout: longest time in seconds that the peer may be silent, computing included.

  Raises:
    PeerFailed: the peer is not there, or has another token, name or topic.
  """

  def __init__(
    self,
    connection: socket.socket,
    *,
    me: str,
    peer: str,
    token: bytes,
    topic: str = "",
    timeout: float = TIMEOUT,
  ):
    self.peer = peer
    self._plain = connection
    self._connection: socket.socket = connection  # soon a TLS socket over `_plain`
    self.bytes_sent = self.bytes_received = self.rounds = 0
    self._messages = 0  # number received, the greeting's included
    self._under_this_key = 0
    self._failure = ""
    self._is_inside = False  # whether a frame was sent or received in part
    try:
      check(token, timeout)
      self._timeout = timeout
      connection.setblocking(False)
      with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
      self._greet(me, token, topic)
    except OSError as error:
      self.close()
      raise PeerFailed(f"its connection cannot be used ({error})", field=peer) from error
    except BaseException:
      self.close()
      raise
    self.bytes_sent = self.bytes_received = self.rounds = 0

  def _greet(self, me: str, token: bytes, topic: str) -> None:
    """Meets the peer. Raises PeerFailed for another token, name or topic, before any data."""
    names = {"peer": self.peer, "token": token, "topic": topic}
    sealed = tls.wrap(self._plain, me=me, **names)
    self._connection = sealed
    while (event := self._try(sealed.do_handshake)[1]) is not None:
      self._wait(event)
    if sealed.getpeercert(binary_form=True) != tls.expected_certificate(**names):
      raise self._not_sealed()
    # In TLS 1.3 the handshake does not tell a client whether its certificate was accepted. The
    # first data from the server tell it, so both ends send some now.
    self._frames(b"here", 4)

  def _not_sealed(self) -> PeerFailed:
    return PeerFailed(
      f"message {self._messages} is not what it sealed: altered, repeated, or another "
      "token or program",
      field=self.peer,
    )

  def send(self, data: bytes) -> None:
    self._frames(data, None, listen=False)

  def receive(self, length: int | None) -> bytes:
    return self._frames(None, length)

  def exchange(self, data: bytes) -> bytes:
    return self._frames(data, len(data))

  def close(self) -> None:
    self._failure = self._failure or "the link was closed"
    self._connection.close()
    self._plain.close()

  def _frames(self, data: bytes | None, length: int | None, listen: bool = True) -> bytes:
    """Sends `data` as a frame, unless None. Returns the data of a frame, b"" if not `listen`."""
    if self._failure:
      raise PeerFailed(f"{self._failure}", field=self.peer)
    out = b""
    if data is not None:
      if len(data) > _MOST:
        raise UserError(
          f"{len(data)} bytes are no one message; at most {_MOST}", field=self.peer
        )
      self._under_this_key += len(data)
      if self._under_this_key > _MOST_UNDER_ONE_KEY:
        raise UserError(
          f"{_MOST_UNDER_ONE_KEY} bytes were sent, the most of one connection",
          field=self.peer,
        )
      out = _LENGTH.pack(len(data)) + data
      self.bytes_sent += len(data)
    due = (lambda start: self._due(start, length)) if listen else None
    try:
      frame = self._transfer(out, due)
    except BaseException:
      # If a frame broke off, in either direction, later frames would not begin where they should.
      if self._is_inside:
        self._failure = "the link has failed before"
      raise
    if not listen:
      return b""
    opened = frame[_LENGTH.size :]
    self.bytes_received += len(opened)
    self.rounds += 1
    self._messages += 1
    return opened

  def _due(self, start: bytes, length: int | None) -> int:
    """Returns the number of bytes of the whole frame, or of its length field while that is
    incomplete."""
    if len(start) < _LENGTH.size:
      return _LENGTH.size
    (announced,) = _LENGTH.unpack_from(start)
    # A length that nobody knows in advance must be small, since the peer may announce any.
    if length is None and announced > _PIECE:
      raise PeerFailed(
        f"announced {announced} bytes, at most {_PIECE} are taken", field=self.peer
      )
    if length is not None and announced != length:
      raise PeerFailed(
        f"sent {announced} bytes where {length} were due; do both run the same "
        "program on the same shapes?",
        field=self.peer,
      )
    return _LENGTH.size + announced

  def _transfer(self, out: bytes, due: Any) -> bytes:
    """Writes `out`, and meanwhile reads as many bytes as `due(bytes read so far)` says.

    Returns the bytes that were read.
    """
    left = memoryview(out)
    self._is_inside = bool(out)
    read = bytearray()
    wanted = due(read) if due else 0
    while left or len(read) < wanted:
      count = opened = events = None
      if len(read) < wanted:
        most = min(wanted - len(read), _PIECE)
        opened, events = self._try(self._connection.recv, most)
        # The peer has ended the connection, without an error of the socket.
        if opened == b"":
          raise self._not_sealed()
      if opened:
        self._is_inside = True
        read += opened
        wanted = due(read)
      if left:
        try:
          count, event = self._try(self._connection.send, left[:_PIECE])
        except PeerFailed:
          # The last that a peer said may tell why it has gone.
          self._try(self._connection.recv, 1)
          raise
        events = (events or 0) | (event or 0)
        left = left[count or 0 :]
      if not (opened or count) and events:
        self._wait(events)
    return bytes(read)

  def _gone(self) -> PeerFailed:
    return PeerFailed("has closed its connection", field=self.peer)

  def _try(self, move: Callable[..., Any], *arguments: Any) -> tuple[Any, int | None]:
    """Calls a function of the socket, which does not block.

    Returns (its result, None), or (None, the event to wait for before it is called again).

    Raises:
      PeerFailed: the peer is gone, or its bytes are not what it sealed.
    """
    try:
      return move(*arguments), None
    except ssl.SSLWantReadError:
      return None, selectors.EVENT_READ
    except ssl.SSLWantWriteError:
      return None, selectors.EVENT_WRITE
    except BlockingIOError:
      is_read = move == self._connection.recv
      return None, selectors.EVENT_READ if is_read else selectors.EVENT_WRITE
    except (ssl.SSLEOFError, ssl.SSLSyscallError) as error:
      raise self._gone() from error
    except ssl.SSLError as error:
      self._is_inside = True
      raise self._not_sealed() from error
    except OSError as error:
      raise self._gone() from error

  def _wait(self, events: int) -> None:
    """Waits for one of these events. Raises PeerFailed for silence."""
    try:
      with selectors.DefaultSelector() as ready:
        ready.register(self._connection, events)
        has_come = ready.select(min(self._timeout, _LONGEST_WAIT))
    # The socket is closed, or the process may open no more files.
    except (OSError, ValueError) as error:
      raise PeerFailed(
        f"its connection cannot be used ({error})", field=self.peer
      ) from error
    if not has_come:
      raise PeerFailed(f"silent for {self._timeout:g} seconds", field=self.peer)
