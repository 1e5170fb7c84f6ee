"""Vectors under additively homomorphic encryption: CKKS, and plain floats with the same interface.

Parties exchange bytes. Anyone who holds a `Vectors` can encrypt, add, and multiply by numbers of
its own; only the holder of `KeyPair.decrypt` can read.

| keys        | library                | for                                   |
| ----------- | ---------------------- | ------------------------------------- |
| `plaintext` | none                   | NO secrecy: a reference for tests     |
| `ckks`      | TenSEAL (`vertical`)   | 128-bit security, errors about 1e-6   |

A CKKS decryption carries noise of the ciphertext. Anyone who reads this noise can learn the secret
key (Li and Micciancio 2021), so the key holder must not pass on raw decryptions.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from dpjax import optional, validate

_PARAMETERS = {  # successive products -> (polynomial degree, bits of the moduli)
  1: (8192, (60, 40, 40, 60)),  # 200 bits; up to 218 are 128-bit secure at this degree
  2: (16384, (60, 40, 40, 40, 60)),  # 240 bits; up to 438
}
_SCALE = 2.0**40


class Vectors(Protocol):
  """Operations that the public key allows; ciphertexts are bytes."""

  slots: int  # largest length of a vector

  def encrypt(self, values: np.ndarray) -> bytes: ...
  def add(self, cipher: bytes, values: np.ndarray) -> bytes: ...
  def combine(
    self, ciphers: Sequence[bytes], factors: Sequence[np.ndarray], terms: np.ndarray
  ) -> bytes: ...  # sum of cipher * factor, plus terms, entry by entry


class KeyPair(NamedTuple):
  """A key pair: `public` may go to every party, `decrypt` stays with one."""

  public: Vectors
  decrypt: Callable[[bytes], np.ndarray]  # [n] float64


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
    return self.encrypt(sum(products) + terms)


def plaintext() -> KeyPair:
  """Returns keys that encrypt nothing and keep float64 unchanged, to test and read the protocol.

  >>> keys = plaintext()
  >>> cipher = keys.public.encrypt(np.array([1.0, 2.0]))
  >>> keys.decrypt(keys.public.combine([cipher], [np.array([3.0, 0.0])], np.ones(2)))
  array([4., 1.])
  """
  return KeyPair(_Plain(), np.frombuffer)


class _Ckks:
  """Operations on CKKS vectors with the public key. The context holds no secret key."""

  def __init__(self, library: Any, context: bytes, slots: int):
    self._library = library
    self._context = library.context_from(context)
    self.slots = slots

  def _load(self, cipher: bytes) -> Any:
    return self._library.ckks_vector_from(self._context, cipher)

  def encrypt(self, values: np.ndarray) -> bytes:
    return self._library.ckks_vector(self._context, values).serialize()

  def add(self, cipher: bytes, values: np.ndarray) -> bytes:
    return (self._load(cipher) + values.tolist()).serialize()

  def combine(
    self, ciphers: Sequence[bytes], factors: Sequence[np.ndarray], terms: np.ndarray
  ) -> bytes:
    products = [self._load(c) * factor.tolist() for c, factor in zip(ciphers, factors)]
    total = functools.reduce(operator.add, products)
    return (total + terms.tolist()).serialize()


def ckks(*, depth: int = 1) -> KeyPair:
  """Makes a fresh CKKS key pair by TenSEAL at scale 2^40, for `depth` successive products (1 or
  2).

  Numbers below about 2^50 fit. A product has an error of about 1e-6.
  Source: Cheon, Kim, Kim and Song 2017; Microsoft SEAL through TenSEAL.

  Raises:
    UserError: another depth, or TenSEAL is not installed.
  """
  validate.one_of(_PARAMETERS, depth=depth)
  tenseal = library()
  degree, moduli = _PARAMETERS[depth]
  secret = tenseal.context(
    tenseal.SCHEME_TYPE.CKKS,
    poly_modulus_degree=degree,
    coeff_mod_bit_sizes=list(moduli),
  )
  secret.global_scale = _SCALE
  # The secret key stays in `decrypt`; the others get the public part.
  public = secret.serialize(
    save_secret_key=False, save_galois_keys=False, save_relin_keys=False
  )
  decrypt = lambda cipher: np.array(tenseal.ckks_vector_from(secret, cipher).decrypt())
  return KeyPair(_Ckks(tenseal, public, degree // 2), decrypt)


def library(extra: str = "vertical") -> Any:
  """Imports TenSEAL, and returns the module.

  Args:
    extra: the extra of dpjax that the error message names.

  Raises:
    UserError: TenSEAL is not installed.
  """
  with optional.needed(extra):
    import tenseal  # pyright: ignore[reportMissingImports]
  return tenseal
