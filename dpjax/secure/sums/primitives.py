"""Cryptographic primitives of secure sums, all from `cryptography` and pycryptodome.

These are X25519 for key agreement, HKDF-SHA256 for keys, ChaCha20 as the generator of masks,
ChaCha20-Poly1305 for what passes through the server, Shamir's shares over GF(2^128), and Ed25519
for signatures and certificates. No algorithm here is our own. Other files of `sums` import neither
library.
"""

from __future__ import annotations

import datetime
import functools
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpjax import optional
from dpjax.validate import UserError

# Bytes of a shared secret: 128 bits, the strength of X25519.
SECRET_BYTES = 16
# Number of bytes of a stream that are processed at once, so that they stay in the cache.
_CHUNK = 1 << 18


@functools.cache
def library() -> Any:
  """Returns a namespace with the parts of the two libraries that are used here.

  Raises:
    UserError: one of them is not installed.
  """
  with optional.require_extra("secure"):
    from Crypto.Protocol.SecretSharing import (  # pyright: ignore[reportMissingImports]
      Shamir,
    )
    from cryptography import exceptions  # pyright: ignore[reportMissingImports]
    from cryptography.hazmat.primitives import (  # pyright: ignore[reportMissingImports]
      ciphers,
      hashes,
    )
    from cryptography.hazmat.primitives.asymmetric import (  # pyright: ignore[reportMissingImports]
      ed25519,
      x25519,
    )
    from cryptography.hazmat.primitives.ciphers import (  # pyright: ignore[reportMissingImports]
      aead,
      algorithms,
    )
    from cryptography.hazmat.primitives.kdf import (  # pyright: ignore[reportMissingImports]
      hkdf,
    )
  return types.SimpleNamespace(
    aead=aead, algorithms=algorithms, ciphers=ciphers, ed25519=ed25519,
    exceptions=exceptions, hashes=hashes, hkdf=hkdf, shamir=Shamir, x25519=x25519,
  )  # fmt: skip


def derive(secret: bytes, info: bytes, length: int = 32) -> bytes:
  """Derives a key by HKDF-SHA256 (RFC 5869). Different `info` gives unrelated keys."""
  lib = library()
  kdf = lib.hkdf.HKDF(algorithm=lib.hashes.SHA256(), length=length, salt=None, info=info)
  return kdf.derive(secret)


def public_key(private: bytes) -> bytes:
  """Returns the public key [32] of an X25519 private key [32]."""
  key = library().x25519.X25519PrivateKey.from_private_bytes(private)
  return key.public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, info: bytes, length: int = 32) -> bytes:
  """Returns the key [length] that only the owners of the two key pairs know (X25519, then
  HKDF-SHA256).

  Raises:
    UserError: a public key that makes the result a constant (RFC 7748, section 6.1).
  """
  x25519 = library().x25519
  try:
    shared = x25519.X25519PrivateKey.from_private_bytes(private).exchange(
      x25519.X25519PublicKey.from_public_bytes(public)
    )
  except ValueError as error:
    raise UserError("is no point that a key can be agreed with", field="public") from error
  return derive(shared, info, length)


@functools.cache
def _x509() -> Any:
  """Returns a namespace with the modules that make certificates. Few programs need them.

  Raises:
    UserError: `cryptography` is not installed.
  """
  library()
  from cryptography import x509  # pyright: ignore[reportMissingImports]
  from cryptography.hazmat.primitives import (  # pyright: ignore[reportMissingImports]
    serialization,
  )

  return types.SimpleNamespace(x509=x509, serialization=serialization)


def _certificate(private: bytes, name: str) -> Any:
  """Returns the certificate of an Ed25519 key, signed by the key itself; equal for equal input."""
  lib = _x509()
  key = library().ed25519.Ed25519PrivateKey.from_private_bytes(private)
  common = lib.x509.Name([lib.x509.NameAttribute(lib.x509.oid.NameOID.COMMON_NAME, name)])
  builder = lib.x509.CertificateBuilder(common, common, key.public_key(), serial_number=1)
  # Both ends must make the same bytes, so the dates are constants.
  builder = builder.not_valid_before(datetime.datetime(2000, 1, 1))
  return builder.not_valid_after(datetime.datetime(9999, 12, 31)).sign(key, None)


def certificate(private: bytes, name: str) -> bytes:
  """Returns the certificate (DER) of an Ed25519 private key [32] under a name.

  >>> certificate(bytes(32), "party 0") == certificate(bytes(32), "party 0")
  True
  """
  encoding = _x509().serialization.Encoding.DER
  return _certificate(private, name).public_bytes(encoding)


def key_file(private: bytes, name: str, password: bytes) -> bytes:
  """Returns a certificate and its private key as PEM. A password encrypts the key alone."""
  serialization = _x509().serialization
  pem = serialization.Encoding.PEM
  key = library().ed25519.Ed25519PrivateKey.from_private_bytes(private)
  encrypted = key.private_bytes(
    pem,
    serialization.PrivateFormat.PKCS8,
    serialization.BestAvailableEncryption(password),
  )
  return _certificate(private, name).public_bytes(pem) + encrypted


def seal(key: bytes, plain: bytes, context: bytes) -> bytes:
  """Encrypts and authenticates a text (ChaCha20-Poly1305). The result is 16 bytes longer.

  Use each key only ONCE.
  """
  # A nonce of 0 is safe, since each key is used only once.
  return library().aead.ChaCha20Poly1305(key).encrypt(bytes(12), plain, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
  """Decrypts and verifies a result of `seal`.

  Raises:
    UserError: the text was changed, or was sealed with another key or context.
  """
  lib = library()
  try:
    return lib.aead.ChaCha20Poly1305(key).decrypt(bytes(12), sealed, context)
  except lib.exceptions.InvalidTag as error:
    raise UserError(
      "was changed on its way, or is not for this client", field="envelope"
    ) from error


def split(secret: bytes, threshold: int, count: int) -> list[bytes]:
  """Returns Shamir's shares [16] of a secret [16]; fewer than `threshold` reveal nothing
  about it.

  >>> shares = split(b"0123456789abcdef", 2, 3)
  >>> combine({1: shares[1], 2: shares[2]})
  b'0123456789abcdef'
  """
  return [share for _, share in library().shamir.split(threshold, count, secret)]


def combine(shares: dict[int, bytes]) -> bytes:
  """Returns the secret from `threshold` shares, given by their places in the result of `split`.

  Wrong shares give another secret, not an error, so compare the result with a commitment.
  """
  # pycryptodome counts shares from 1.
  return library().shamir.combine([(place + 1, share) for place, share in shares.items()])


def add_streams(vector: np.ndarray, keystreams: Sequence[tuple[bytes, bool]]) -> None:
  """Adds (True) or subtracts (False) the ChaCha20 stream of each key, in place.

  Args:
    vector: [d] uint32 or uint64, contiguous; sums are modulo 2^32 or 2^64.
    keystreams: (key [32], whether to add). Use a key for one stream only, since its nonce is 0.
  """
  lib = library()
  ciphers = [
    (
      lib.ciphers.Cipher(lib.algorithms.ChaCha20(key, bytes(16)), None).encryptor(),
      np.add if plus else np.subtract,
    )
    for key, plus in keystreams
  ]
  step = _CHUNK // vector.itemsize
  zeros = memoryview(bytes(_CHUNK))
  words = np.empty(step, vector.dtype)
  # All streams are added to one part before the next part, so that the part stays in the cache.
  for start in range(0, len(vector), step):
    part = vector[start : start + step]  # [<= step]
    stream = words[: len(part)]
    for cipher, combined in ciphers:
      cipher.update_into(zeros[: stream.nbytes], stream.view(np.uint8).data)
      combined(part, stream, out=part)


def signing_public_key(private: bytes) -> bytes:
  """Returns the public key [32] of an Ed25519 private key [32]."""
  key = library().ed25519.Ed25519PrivateKey.from_private_bytes(private)
  return key.public_key().public_bytes_raw()


def sign(private: bytes, text: bytes) -> bytes:
  """Returns the Ed25519 signature [64] of a text by a private key [32]."""
  return library().ed25519.Ed25519PrivateKey.from_private_bytes(private).sign(text)


def signed_by(public: bytes, signature: bytes, text: bytes) -> bool:
  """Returns whether the owner of an Ed25519 public key [32] has signed the text."""
  lib = library()
  try:
    lib.ed25519.Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
  except (lib.exceptions.InvalidSignature, ValueError):
    return False
  return True
