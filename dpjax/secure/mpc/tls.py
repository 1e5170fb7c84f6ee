"""TLS 1.3 between two programs that share a token.

Each end derives two Ed25519 keys from the token: its own and that of its peer. A certificate of
fixed fields makes each key known to Python's `ssl`, and each end accepts the peer's certificate
alone. So who lacks the token is refused, and so is a peer of another name or topic. The keys of the
session are ephemeral: who listens reads nothing, not even with the token.

The token must have at least 128 bits of entropy. A stranger who connects is sent a certificate, and
could test guesses of a weaker token against it.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import tempfile

from dpjax.secure.sums import primitives
from dpjax.validate import UserError


def wrap(
  connection: socket.socket, *, me: str, peer: str, token: bytes, topic: str
) -> ssl.SSLSocket:
  """Returns a TLS socket over a connection. The end with the smaller name is TLS's server.

  It shares the connection with the argument; both must be closed. The caller still makes the
  handshake, and then compares the peer's certificate with `expected_certificate`.

  Args:
    me: name of this end.
    peer: name that the peer must have.
    token: secret of both ends.
    topic: text that both ends must share.

  Raises:
    UserError: the extra `secure` is not installed, or TLS has no Ed25519 keys.
    OSError: no temporary file can be written.
  """
  is_server = me < peer
  protocol = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
  context = ssl.SSLContext(protocol)
  context.minimum_version = ssl.TLSVersion.TLSv1_3
  # The certificate itself is compared, so a name in it decides nothing.
  context.check_hostname = False
  context.verify_mode = ssl.CERT_REQUIRED
  if is_server:
    # Tickets would let a later connection begin without the certificates.
    context.num_tickets = 0
  context.load_verify_locations(cadata=expected_certificate(peer, token, topic))
  _load(context, _key(token, me, topic), me)
  return context.wrap_socket(
    connection.dup(),
    server_side=is_server,
    do_handshake_on_connect=False,
    # A connection that breaks off is told apart from one that the peer has ended.
    suppress_ragged_eofs=False,
  )


def expected_certificate(peer: str, token: bytes, topic: str) -> bytes:
  """Returns the certificate (DER) that the peer must have."""
  return primitives.certificate(_key(token, peer, topic), peer)


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
      f"1.3 with Ed25519 keys is not available ({error.reason})", field="TLS"
    ) from error
