"""Sums of ciphertexts: clients encrypt, the server adds, one client decrypts the sum.

| class     | adds                | error            | library                       |
| --------- | ------------------- | ---------------- | ----------------------------- |
| `BfvSum`  | integers mod 2^bits | none             | TenSEAL (SEAL), extra `he`    |
| `CkksSum` | float64             | below 1e-7       | the same                      |

Security is 128 bits (RLWE at SEAL's parameters) if all parties are honest-but-curious. The server
holds no secret key. It sees ciphertexts, and in the end the sum. ALL CLIENTS hold one secret key.
So a single client that tells the server this key opens every vector to it. A server that lies can
have a single vector decrypted as if it were the sum. SecAgg has no such key. The client that
decrypts sees the sum before it is reduced modulo 2^bits.

Decrypted CKKS numbers carry noise. Anyone who knows what was encrypted can learn the secret key
from this noise (Li and Micciancio 2021). So the numbers are rounded to 1e-7 before they leave the
client. That makes the attack harder, but nothing is proved. BFV decrypts exactly.

Sources: Fan and Vercauteren 2012 (BFV); Cheon, Kim, Kim and Song 2017 (CKKS).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dpjax.secure.homomorphic import ckks
from dpjax.secure.sums.interface import Cost, Present, Reader, Summed, SumProtocol
from dpjax.validate import UserError

# Number of bits of each entry that go into one ciphertext, the sign's included.
_LIMB = 32
# Largest number of clients -> (degree, plaintext modulus). A modulus must be above clients * 2^32.
# It is the first prime above 2^42, or above 2^46, that is 1 modulo 2 * degree. SEAL's default
# moduli are 128-bit secure at either degree, and the noise budget allows that many additions.
BFV_PARAMETERS = {1024: (4096, 4398046568449), 10_000: (8192, 70368744210433)}
# With 109 bits of moduli, this degree is 128-bit secure.
_CKKS_DEGREE = 4096
_CKKS_MODULI = (60, 49)
_CKKS_SCALE = 2.0**44
# Largest absolute sum. At this scale 60 bits with a sign hold up to 2^15, and half of it is used.
_CKKS_LARGEST = 2.0**14
_CKKS_DECIMALS = 7


class _Scheme(NamedTuple):
  """Keys of a scheme, and functions of the library that use them."""

  secret: bytes  # serialised context with the secret key, for the clients
  public: bytes  # serialised context without the secret key, for the server
  make: Any  # (context, numbers) -> ciphertext
  load: Any  # (context, bytes) -> ciphertext
  open: Any  # bytes -> context
  slots: int


def _scheme(library: Any, context: Any, make: Any, load: Any, slots: int) -> _Scheme:
  only = {"save_galois_keys": False, "save_relin_keys": False}
  return _Scheme(
    context.serialize(save_secret_key=True, **only),
    context.serialize(save_secret_key=False, **only),
    make,
    load,
    library.context_from,
    slots,
  )


def bfv_parameters(num_clients: int) -> tuple[int, int]:
  """Returns (degree, plaintext modulus) for sums of `num_clients` integers below 2^32.

  Raises:
    UserError: more than 10,000 clients.
  """
  fitting = [pair for most, pair in BFV_PARAMETERS.items() if num_clients <= most]
  if not fitting:
    raise UserError(
      f"BFV's plaintext modulus is made for {10**4}", field="num_clients", value=num_clients
    )
  return fitting[0]


def bfv_keys(num_clients: int) -> _Scheme:
  """Makes fresh BFV keys that fit sums of `num_clients` integers below 2^32.

  Raises:
    UserError: more than 10,000 clients, or TenSEAL is not installed.
  """
  degree, modulus = bfv_parameters(num_clients)
  ts = ckks.library()
  context = ts.context(
    ts.SCHEME_TYPE.BFV, poly_modulus_degree=degree, plain_modulus=modulus
  )
  return _scheme(ts, context, ts.bfv_vector, ts.bfv_vector_from, degree)


def ckks_keys() -> _Scheme:
  """Makes fresh CKKS keys that allow sums, but no products.

  Raises:
    UserError: TenSEAL is not installed.
  """
  ts = ckks.library()
  context = ts.context(
    ts.SCHEME_TYPE.CKKS,
    poly_modulus_degree=_CKKS_DEGREE,
    coeff_mod_bit_sizes=list(_CKKS_MODULI),
  )
  context.global_scale = _CKKS_SCALE
  return _scheme(ts, context, ts.ckks_vector, ts.ckks_vector_from, _CKKS_DEGREE // 2)


class KeyHolder:
  """A client that encrypts, and decrypts sums.

  Args:
    scheme: scheme with the secret key that all clients share.
  """

  def __init__(self, scheme: _Scheme):
    self._scheme = scheme
    self._context = scheme.open(scheme.secret)

  def encrypt(self, rows: Sequence[np.ndarray]) -> list[bytes]:
    """Returns the vectors encrypted, as serialised ciphertexts of at most `slots` entries."""
    slots = self._scheme.slots
    return [
      self._scheme.make(self._context, row[start : start + slots].tolist()).serialize()
      for row in rows
      for start in range(0, len(row), slots)
    ]

  def decrypt(self, ciphers: Sequence[bytes], num_rows: int) -> np.ndarray:
    """Returns the decrypted sums [num_rows, d], int64 or float64."""
    parts = [self._scheme.load(self._context, each).decrypt() for each in ciphers]
    return np.concatenate([np.asarray(part) for part in parts]).reshape(num_rows, -1)


class AddingServer:
  """The server: it adds ciphertexts as they arrive, and cannot read them.

  Args:
    scheme: keys. Only the public part is used.
  """

  def __init__(self, scheme: _Scheme):
    self._scheme = scheme
    self._context = scheme.open(scheme.public)
    self.sums: list[Any] = []

  def add(self, ciphers: Sequence[bytes]) -> None:
    """Adds the ciphertexts of one client to the sum."""
    loaded = [self._scheme.load(self._context, each) for each in ciphers]
    self.sums = [a + b for a, b in zip(self.sums, loaded)] if self.sums else loaded

  def total(self) -> list[bytes]:
    """Returns the serialised ciphertexts of the sum."""
    return [each.serialize() for each in self.sums]


def _add_encrypted(
  keys: _Scheme,
  cut: Callable[[np.ndarray], list[np.ndarray]],
  total_of: Callable[[np.ndarray], np.ndarray],
  there: Present,
  read: Reader,
) -> Summed:
  """Returns the sum of vectors through ciphertexts.

  `cut(vector)` returns the rows to encrypt, and `total_of` the total from their decrypted sums.
  """
  if not there.unmasking:
    raise UserError(
      "nobody is left to decrypt the sum; nothing was revealed", field="drops"
    )
  server = AddingServer(keys)
  holder = KeyHolder(keys)
  sent: dict[int, int] = {}
  num_rows = count = 0
  for who in there.uploading:
    rows = cut(read(who))
    ciphers = holder.encrypt(rows)
    server.add(ciphers)
    sent[who] = sum(map(len, ciphers))
    num_rows = len(rows)
    count = len(ciphers)
  encrypted = server.total()
  total = total_of(holder.decrypt(encrypted, num_rows))
  # The first client that has not dropped out receives the sum, decrypts it, and sends it back.
  asked = sum(map(len, encrypted))
  moved = [
    size + len(keys.secret) + asked * (who == there.unmasking[0])
    for who, size in sent.items()
  ]
  cost = Cost(
    client_bytes=max(moved) + total.nbytes,
    server_bytes=sum(sent.values()) + asked + len(keys.public) + total.nbytes,
    operations=count * (len(sent) + 1),
  )
  return Summed(total, there.uploading, cost)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BfvSum(SumProtocol):
  """The exact sum of integers through BFV ciphertexts. The module says what each party sees.

  Entries are added with their sign, as the two's complement of encoded messages. So of entries
  below 2^31 the client that decrypts sees the sum, and not how many of them are negative.

  The plaintext modulus is larger than any sum, so nothing wraps around inside. Entries of 64 bits
  are encrypted in two halves, unless `largest` is below 2^31. `Cost` counts the bytes of serialised
  ciphertexts and keys, and of the sum. Its operations encrypt or decrypt one ciphertext each. A
  client that drops out before unmasking is not asked to decrypt; if nobody is left, the sum is
  refused.

  >>> vectors = {who: np.array([who, 2**32 - 1], np.uint32) for who in range(3)}
  >>> BfvSum().sum(vectors).total
  array([         3, 4294967293], dtype=uint32)
  """

  _name: ClassVar[str] = "bfv"
  hides: ClassVar[str] = "each vector from the server, unless a client tells it the key"

  def check_library(self) -> None:
    ckks.library()

  def _add(self, there: Present, read: Reader) -> Summed:
    is_small = self.largest is not None and self.largest < 2 ** (_LIMB - 1)
    shifts = (0,) if self.bits == _LIMB or is_small else (0, _LIMB)

    def cut(vector: np.ndarray) -> list[np.ndarray]:
      # Entries are cut into parts of 32 bits, so that a sum stays below the plaintext modulus.
      # Parts have signs: unsigned, each negative number would add 2^32 to what is decrypted.
      wide = vector.view(f"int{self.bits}").astype(np.int64)
      low = wide.astype(np.int32)
      high = (wide >> _LIMB) + (low < 0)
      return [low, high][: len(shifts)]

    def total_of(rows: np.ndarray) -> np.ndarray:
      total = np.zeros(read.length, np.uint64)
      for shift, row in zip(shifts, rows):
        total += row.astype(np.int64).view(np.uint64) << np.uint64(shift)
      # The conversion reduces the total modulo 2^bits.
      return total.astype(self.dtype)

    return _add_encrypted(bfv_keys(len(there.uploading)), cut, total_of, there, read)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CkksSum(SumProtocol):
  """The sum of float64 vectors with an error below 1e-7, through CKKS ciphertexts.

  It takes and returns [d] float64, with absolute values of at most 2^14 / number of clients, and
  rounds the sum to 7 decimals.

  Args:
    min_survivors: fewest vectors in a sum.

  Raises:
    UserError: raised by `sum` as by `BfvSum`, or for an entry that is too large or not finite.
  """

  # Floats have no modulus and no largest entry.
  bits: ClassVar[int] = 64  # type: ignore[misc]
  largest: ClassVar[None] = None  # type: ignore[misc]
  _name: ClassVar[str] = "ckks"
  hides: ClassVar[str] = BfvSum.hides

  @property
  def dtype(self) -> np.dtype:
    return np.dtype(np.float64)

  def check_library(self) -> None:
    ckks.library()

  def _add(self, there: Present, read: Reader) -> Summed:
    bound = _CKKS_LARGEST / len(there.named)

    def cut(vector: np.ndarray) -> list[np.ndarray]:
      # The condition is written so that NaN is refused, too.
      if not np.all(np.abs(vector) <= bound):
        raise UserError(
          f"entries must be finite and at most {bound:g} for CKKS", field="vectors"
        )
      return [vector]

    rounded = lambda rows: np.round(rows[0], _CKKS_DECIMALS)
    return _add_encrypted(ckks_keys(), cut, rounded, there, read)
