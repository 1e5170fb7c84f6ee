"""Vectors under additively homomorphic encryption: CKKS, and plain floats with the same interface.

Parties exchange bytes. Anyone who holds a `Vectors` can encrypt, add, and multiply by numbers of
its own; only the holder of `KeyPair.decrypt` can read.

| keys        | library                | for                                      |
| ----------- | ---------------------- | ---------------------------------------- |
| `plaintext` | none                   | NO secrecy: a reference for tests        |
| `ckks`      | TenSEAL (`vertical`)   | 128-bit security, errors of about 1e-11  |

| who could read what                              | what is done                                 |
| ------------------------------------------------ | -------------------------------------------- |
| who made a ciphertext subtracts it from a result | what is added is encrypted first, so results |
|                                                  | differ by a fresh ciphertext                 |
| the key's holder reads factors from the noise    | masks are complex, of all slots: the noise   |
|                                                  | is in the imaginary parts, too               |
| who knows what was encrypted learns the key from | the key's holder passes on sums that are     |
| the noise (Li and Micciancio 2021)               | rounded to steps far above the noise         |

Masks and rounding are the work of the caller (`network.masked_sums`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dpjax import validate
from dpjax.secure.homomorphic.ckks import (
  Chain,
  Coder,
  SlotEvaluator,
  dumps,
  library,
  loads,
)

# A product takes one level. One more level leaves room for masks of 2^24.
_SPARE = 1
_SCALE_BITS = 48
_END_BITS = 60


class Vectors(Protocol):
  """Operations that the public key allows; ciphertexts are bytes."""

  slots: int  # largest length of a vector

  def encrypt(self, values: np.ndarray) -> bytes: ...
  def add(self, cipher: bytes, values: np.ndarray) -> bytes: ...
  def combine(
    self, ciphers: Sequence[bytes], factors: Sequence[np.ndarray], terms: np.ndarray
  ) -> bytes: ...  # sum of cipher * factor, plus terms (real or complex), entry by entry


class KeyPair(NamedTuple):
  """A key pair: `public` may go to every party, `decrypt` stays with one."""

  public: Vectors
  # -> [n] float64, or complex128 with all that slots hold
  decrypt: Callable[[bytes], np.ndarray]


class _Plain:
  slots = 4096  # as `ckks` of depth 1

  def encrypt(self, values: np.ndarray) -> bytes:
    return np.asarray(values, np.float64).tobytes()

  def add(self, cipher: bytes, values: np.ndarray) -> bytes:
    return self.encrypt(np.frombuffer(cipher) + values)

  def combine(
    self, ciphers: Sequence[bytes], factors: Sequence[np.ndarray], terms: np.ndarray
  ) -> bytes:
    products = [np.frombuffer(c) * factor for c, factor in zip(ciphers, factors)]
    # Without noise there are no imaginary parts to hide.
    return self.encrypt(sum(products) + np.real(terms))


def plaintext() -> KeyPair:
  """Returns keys that encrypt nothing and keep float64 unchanged, to test and read the protocol.

  >>> keys = plaintext()
  >>> cipher = keys.public.encrypt(np.array([1.0, 2.0]))
  >>> keys.decrypt(keys.public.combine([cipher], [np.array([3.0, 0.0])], np.ones(2)))
  array([4., 1.])
  """
  return KeyPair(_Plain(), np.frombuffer)


class _Ckks:
  """Operations on CKKS vectors with the public key, of which no secret key is a part."""

  def __init__(self, chain: Chain, public_key: bytes):
    self._coder = Coder(chain)
    key = loads("PublicKey", chain, public_key)
    self._encryptor = self._coder.seal.Encryptor(self._coder.context, key)
    self._on = SlotEvaluator(chain, None)
    self.slots = chain.slots

  def _encrypt(self, values: np.ndarray, level: int) -> Any:
    out = self._coder.seal.Ciphertext()
    self._encryptor.encrypt(self._coder.encode(values, level), out)
    return out

  def encrypt(self, values: np.ndarray) -> bytes:
    return dumps(self._encrypt(values, self._on.chain.levels))

  def add(self, cipher: bytes, values: np.ndarray) -> bytes:
    return self._sum(self._on.load(cipher), values)

  def combine(
    self, ciphers: Sequence[bytes], factors: Sequence[np.ndarray], terms: np.ndarray
  ) -> bytes:
    return self._sum(
      self._on.weighted_sum(zip(map(self._on.load, ciphers), factors)), terms
    )

  def _sum(self, cipher: Any, values: np.ndarray) -> bytes:
    # A plain number that was added could be read by who has made the ciphertext before: it is the
    # difference of both. So numbers are encrypted before they are added.
    return dumps(self._on.add(cipher, self._encrypt(values, self._on.level(cipher))))


def ckks(*, depth: int = 1) -> KeyPair:
  """Makes a fresh CKKS key pair by TenSEAL at scale 2^48, for `depth` successive products (1 or
  2).

  Numbers below about 2^50 fit. A product by numbers up to 1 has an error of about 1e-11.
  Source: Cheon, Kim, Kim and Song 2017; Microsoft SEAL through TenSEAL.

  Raises:
    UserError: another depth, or TenSEAL is not installed.
  """
  validate.one_of((1, 2), depth=depth)
  library("vertical")
  chain = Chain(levels=depth + _SPARE, scale_bits=_SCALE_BITS, end_bits=_END_BITS)
  coder = Coder(chain)
  seal = coder.seal
  keys = seal.KeyGenerator(coder.context)
  # The secret key stays in `decrypt`; the others get the public key.
  decryptor = seal.Decryptor(coder.context, keys.secret_key())

  def decrypt(cipher: bytes) -> np.ndarray:
    plain = seal.Plaintext()
    decryptor.decrypt(loads("Ciphertext", chain, cipher), plain)
    return coder.decode_complex(plain)

  public_key = seal.PublicKey()
  keys.create_public_key(public_key)
  return KeyPair(_Ckks(chain, dumps(public_key)), decrypt)
