"""Links between two programs, which carry bytes over a queue or a socket.

A socket's frames are sealed. Each end sends a fresh X25519 key. From both keys, and a token that
they were given beforehand, the ends derive a ChaCha20-Poly1305 key for each direction. The nonce of
a frame is its number. So anyone who listens reads nothing, not even with the token. A frame that
was altered, repeated, left out or sent by somebody without the token is refused. The lengths of
frames are public.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import secrets
import selectors
import socket
import struct
import time
from typing import Any, Protocol

from dpjax import validate
from dpjax.secure.sums import primitives
from dpjax.validate import UserError

TIMEOUT = 60.0  # seconds
_LENGTH = struct.Struct(">Q")
_TAG = 16
_PIECE = 1 << 20
# Largest number of bytes that the cipher takes at once.
_MOST = (1 << 31) - 64
TOKEN_BYTES = 16


class PeerFailed(UserError):
  """Raised when the peer is gone, silent or violates the protocol."""


class Link(Protocol):
  """End of a link between two parties.

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
    """Sends data, and receives equally many bytes at the same time."""
    ...

  def close(self) -> None: ...


def _checked(peer: str, data: bytes, length: int | None) -> bytes:
  if length is not None and len(data) != length:
    raise PeerFailed(
      f"{peer}: sent {len(data)} bytes where {length} were due; do both run the same program "
      "on the same shapes?"
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
      raise PeerFailed(f"{self.peer}: silent for {self._timeout:g} seconds") from None
    if data is None:
      raise PeerFailed(f"{self.peer}: has left")
    self.bytes_received += len(data)
    self.rounds += 1
    return _checked(self.peer, data, length)

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


class SocketLink:
  """A link between two processes. It sends and receives at once, so that neither side
  blocks on a full buffer.

  Args:
    connection: open socket; this object closes it.
    me, peer: "party 0", "party 1" or "dealer".
    token: >= 16 bytes that both got over another channel. Without them nobody can take part.
    topic: text that says what both are about to do; a peer with another topic is refused.
    timeout: longest time in seconds that the peer may be silent, computing included.
    patience: longest time in seconds of the peer's whole greeting, if below `timeout`; None:
      `timeout`.

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
    patience: float | None = None,
  ):
    validate.positive(timeout=timeout)
    if len(token) < TOKEN_BYTES:
      raise UserError(
        f"has {len(token)} bytes, must have at least {TOKEN_BYTES}", field="token"
      )
    self.peer = peer
    self._connection = connection
    self._timeout = min(timeout, patience or timeout)
    self.bytes_sent = self.bytes_received = self.rounds = 0
    # A frame's number is its nonce, and never used twice.
    self._sent = itertools.count()
    self._received = 0
    # Deadline of the whole greeting, however slowly its bytes arrive.
    self._until = time.monotonic() + self._timeout
    connection.setblocking(False)
    with contextlib.suppress(OSError):
      connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
      self._seal, self._unseal = self._agree(me, token, topic)
      # A peer with another token, name or topic fails here, before any data.
      self._frames(b"here", 4)
    except UserError:
      connection.close()
      raise
    # The deadline was for the greeting. From now on only silence counts.
    self._timeout = timeout
    self._until = math.inf
    self.bytes_sent = self.bytes_received = self.rounds = 0

  def _agree(self, me: str, token: bytes, topic: str) -> tuple[Any, Any]:
    lib = primitives.library()
    secret = secrets.token_bytes(32)
    mine = primitives.public_key(secret)
    theirs = self._transfer(mine, lambda data: 32)

    def direction(sender: str, *keys: bytes) -> Any:
      # Each direction has its own key, so that a frame sent back to its sender cannot be opened.
      said = f"dpjax mpc {sender} {len(token)} {topic} ".encode() + token + b"".join(keys)
      return lib.aead.ChaCha20Poly1305(primitives.agree(secret, theirs, said))

    try:
      return direction(me, mine, theirs), direction(self.peer, theirs, mine)
    except UserError:
      raise PeerFailed(f"{self.peer}: sent no valid key") from None

  def send(self, data: bytes) -> None:
    self._frames(data, None, listen=False)

  def receive(self, length: int | None) -> bytes:
    return self._frames(None, length)

  def exchange(self, data: bytes) -> bytes:
    return self._frames(data, len(data))

  def close(self) -> None:
    self._connection.close()

  def _frames(self, data: bytes | None, length: int | None, listen: bool = True) -> bytes:
    """Sends `data` as a frame, if it is given, and receives a frame if `listen`."""
    out = b""
    if data is not None and len(data) > _MOST:
      raise UserError(f"{self.peer}: {len(data)} bytes are no one message; at most {_MOST}")
    if data is not None:
      head = _LENGTH.pack(len(data) + _TAG)
      # The length in front of a frame is authenticated, too.
      out = head + self._seal.encrypt(next(self._sent).to_bytes(12, "big"), data, head)
      self.bytes_sent += len(data)
    if not listen:
      self._transfer(out, None)
      return b""
    frame = self._transfer(out, lambda start: self._due(start, length))
    nonce = self._received.to_bytes(12, "big")
    head = frame[:8]
    sealed = frame[8:]
    try:
      opened = self._unseal.decrypt(nonce, bytes(sealed), bytes(head))
    except primitives.library().exceptions.InvalidTag as error:
      raise PeerFailed(
        f"{self.peer}: message {self._received} is not what it sealed: altered, repeated, or "
        "another token or program"
      ) from error
    self._received += 1
    self.bytes_received += len(opened)
    self.rounds += 1
    return opened

  def _due(self, start: bytes, length: int | None) -> int:
    """Returns the number of bytes of the whole frame, or of its length field while that is
    incomplete."""
    if len(start) < _LENGTH.size:
      return _LENGTH.size
    (sealed,) = _LENGTH.unpack_from(start)
    # A length that nobody knows in advance must be small, since the peer may announce any.
    if length is None and not _TAG <= sealed <= _PIECE:
      raise PeerFailed(f"{self.peer}: announced {sealed} bytes, at most {_PIECE} are taken")
    if length is not None and sealed != length + _TAG:
      raise PeerFailed(
        f"{self.peer}: sent {max(sealed - _TAG, 0)} bytes where {length} were due; do both run "
        "the same program on the same shapes, and the same token?"
      )
    return _LENGTH.size + sealed

  def _transfer(self, out: bytes, due: Any) -> bytes:
    """Writes `out`, and meanwhile reads as many bytes as `due(bytes read so far)` says."""
    left = memoryview(out)
    read = bytearray()
    wanted = due(read) if due else 0
    silent_until = time.monotonic() + self._timeout
    while left or len(read) < wanted:
      moved = self._move(left, read, wanted, min(silent_until, self._until))
      left = left[moved:]
      silent_until = time.monotonic() + self._timeout
      wanted = due(read) if due else 0
    return bytes(read)

  def _move(self, left: memoryview, read: bytearray, wanted: int, until: float) -> int:
    """Waits until bytes can be sent or read, and moves them. Returns the number of sent bytes."""
    writing = bool(left)
    reading = len(read) < wanted
    events = selectors.EVENT_WRITE * writing | selectors.EVENT_READ * reading
    with selectors.DefaultSelector() as ready:
      ready.register(self._connection, events)
      ready_events = ready.select(max(until - time.monotonic(), 0.0))
    if not ready_events or time.monotonic() > self._until:
      raise PeerFailed(f"{self.peer}: silent for {self._timeout:g} seconds")
    (_, now), *_ = ready_events
    try:
      if now & selectors.EVENT_READ:
        more = self._connection.recv(min(wanted - len(read), _PIECE))
        # An empty read means that the peer has closed.
        if not more:
          raise ConnectionResetError
        read += more
      return self._connection.send(left[:_PIECE]) if now & selectors.EVENT_WRITE else 0
    # Nothing could be moved after all: the caller tries again.
    except BlockingIOError:
      return 0
    except OSError as error:
      raise PeerFailed(f"{self.peer}: has closed its connection") from error
