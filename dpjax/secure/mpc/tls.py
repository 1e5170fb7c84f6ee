"""TLS 1.3 between two programs that share a token: from bytes to bytes, without a socket.

Each end derives two Ed25519 keys from the token: its own and that of its peer. A certificate of
fixed fields makes each key known to Python's `ssl`, and each end accepts the peer's certificate
alone. So who lacks the token is refused, and so is a peer of another name or topic. The keys of the
session are ephemeral: who listens reads nothing, not even with the token.

The token must have at least 128 bits of entropy. A stranger who connects is sent a certificate, and
could test guesses of a weaker token against it.
"""

from __future__ import annotations

import hashlib
import secrets
import ssl
import tempfile

from dpjax.secure.sums import primitives
from dpjax.validate import UserError

# Number of bytes that each end sends first. The end with the smaller bytes is TLS's server.
HELLO_BYTES = 8


class Broken(Exception):
  """Raised where bytes are not what the peer sent, or the peer is not who it should be."""


def hello(name: str) -> bytes:
  """Returns the bytes that an end sends first, [HELLO_BYTES]; they reveal its name alone."""
  return hashlib.sha256(name.encode()).digest()[:HELLO_BYTES]


class Channel:
  """An end of a TLS connection.

  Bytes from the network go in by `feed`, and bytes for the network come out of `pending`.

  Args:
    me: name of this end.
    peer: name that the peer must have.
    token: secret of both ends.
    topic: text that both ends must share.
    is_server: whether this end has the server's role; see `HELLO_BYTES`.

  Raises:
    UserError: the extra `secure` is not installed, or TLS has no Ed25519 keys.
    OSError: no temporary file can be written.
  """

  def __init__(self, *, me: str, peer: str, token: bytes, topic: str, is_server: bool):
    protocol = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate itself is compared, so a name in it decides nothing.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
      # Tickets would let a later connection begin without the certificates.
      context.num_tickets = 0
    self._expected = primitives.certificate(_key(token, peer, topic), peer)
    context.load_verify_locations(cadata=self._expected)
    _load(context, _key(token, me, topic), me)
    self._incoming = ssl.MemoryBIO()
    self._outgoing = ssl.MemoryBIO()
    self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)

  def feed(self, data: bytes) -> None:
    """Takes bytes from the network."""
    self._incoming.write(data)

  def pending(self) -> bytes:
    """Returns the bytes that must go to the network."""
    return self._outgoing.read()

  def is_met(self) -> bool:
    """Goes on with the handshake. Returns whether it is complete; if not, it needs more bytes.

    Raises:
      Broken: the peer is not who it should be.
    """
    try:
      self._tls.do_handshake()
    except ssl.SSLWantReadError:
      return False
    except ssl.SSLError as error:
      raise Broken(error.reason) from error
    if self._tls.getpeercert(binary_form=True) != self._expected:
      raise Broken("another certificate")
    return True

  def backlog(self) -> int:
    """Returns the number of bytes that `pending` would return."""
    return self._outgoing.pending

  def write(self, data: bytes | memoryview) -> None:
    """Encrypts data; `pending` returns the result.

    Raises:
      Broken: the connection has ended.
    """
    left = memoryview(data)
    try:
      while left:
        left = left[self._tls.write(left) :]
    except ssl.SSLError as error:
      raise Broken(error.reason) from error

  def read(self, most: int) -> bytes:
    """Returns at most `most` decrypted bytes; b"" if more bytes of the network are needed.

    Raises:
      Broken: bytes were altered, repeated or left out, or the peer has ended the connection.
    """
    try:
      opened = self._tls.read(most)
    except ssl.SSLWantReadError:
      return b""
    except ssl.SSLError as error:
      raise Broken(error.reason) from error
    # Python returns b"" once the peer has ended the connection. Here b"" means that more bytes are
    # needed, so the caller would wait for more, and keep in memory whatever still comes.
    if not opened:
      raise Broken("ended")
    return opened


def _key(token: bytes, name: str, topic: str) -> bytes:
  """Derives the Ed25519 private key [32] of the end with this name and topic."""
  return primitives.derive(token, f"dpjax mpc tls {len(name)} {name} {topic}".encode())


def _load(context: ssl.SSLContext, key: bytes, name: str) -> None:
  """Loads a key and its certificate through a file, since `ssl` reads them only from files.

  Raises UserError if TLS has no Ed25519 keys, and OSError if no temporary file can be written.
  """
  # The key in the file is encrypted under a password that never leaves this process.
  password = secrets.token_bytes(16).hex().encode()
  try:
    with tempfile.NamedTemporaryFile() as file:
      file.write(primitives.key_file(key, name, password))
      file.flush()
      context.load_cert_chain(file.name, password=password)
  except ssl.SSLError as error:
    raise UserError(
      f"TLS 1.3 with Ed25519 keys is not available ({error.reason})"
    ) from error
