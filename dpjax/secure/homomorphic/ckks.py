"""CKKS encryption of many numbers at once, for a planned number of successive products.

There are two halves. `SecretKeys` stays with one party, who alone encrypts and decrypts. (With the
secret key a ciphertext is half as long as with a public key.) `SlotEvaluator` is made from what
that party publishes: it adds, multiplies and rotates, and holds no secret key. Both exchange bytes.

Every product takes one prime of the `Chain`. The primes are not powers of two, so each level has
a scale of its own (`SlotEvaluator.scales`): products of two ciphertexts of a level land exactly on
the scale of the level below. TenSEAL's vectors set the scale to a constant instead, which is off
by up to 1e-5 of the value at each product.

Guarantee: 128 bits by the table of the Homomorphic Encryption Standard, against anyone who sees
public keys and ciphertexts and follows the protocol. There is no circuit privacy: the noise of a
result tells its decryptor about the numbers that multiplied it. From the noise of a raw decryption
anyone may learn the SECRET KEY (IND-CPA-D). So the key's holder keeps decryptions. It passes on
only numbers that are rounded to steps far above `Chain.error`, or to which it has added noise.
Source: Cheon, Kim, Kim and Song 2017; Li and Micciancio 2021; Microsoft SEAL through TenSEAL.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax import optional, validate
from dpjax.validate import UserError, Verbatim

# Degree -> largest sum of the primes' bits for 128 bits of security, with ternary secrets.
MOST_BITS = {4096: 109, 8192: 218, 16384: 438}
# SEAL's type, which Python cannot name before TenSEAL is imported.
Ciphertext = Any
# Rotations by k slots are the automorphisms x -> x^(3^k).
_ROOT = 3


@dataclasses.dataclass(frozen=True)
class Chain:
  """Parameters for `levels` successive products, at a precision of about `scale_bits` - 12 bits.

  Args:
    levels: number of successive products; each takes a prime of `scale_bits`.
    scale_bits: bits of the scale by which numbers are multiplied.
    end_bits: bits of the prime that remains after all products, and of the prime of the keys.
      Results must be below 2^(end_bits - scale_bits - 1).

  Raises:
    UserError: no degree up to 16,384 holds such a chain at 128 bits of security.

  >>> chain = Chain(levels=3, scale_bits=36, end_bits=54)
  >>> chain.degree, chain.slots, sum(chain.bits)
  (8192, 4096, 216)
  >>> Chain(levels=9)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: levels=9: needs 470 bits of primes; must be at most 438, ...
  """

  levels: int
  scale_bits: int = 40
  end_bits: int = 55

  def __post_init__(self) -> None:
    validate.integer_in(1, 20, levels=self.levels)
    validate.integer_in(20, 50, scale_bits=self.scale_bits)
    validate.integer_in(self.scale_bits + 5, 60, end_bits=self.end_bits)
    if sum(self.bits) > max(MOST_BITS.values()):
      raise UserError(
        f"needs {sum(self.bits)} bits of primes; must be at most "
        f"{max(MOST_BITS.values())}, beyond which degree {max(MOST_BITS)} is "
        "not secure",
        field="levels",
        value=self.levels,
      )

  @property
  def bits(self) -> tuple[int, ...]:
    """Sizes of the primes in bits. The last prime is for the keys."""
    return (self.end_bits, *[self.scale_bits] * self.levels, self.end_bits)

  @property
  def degree(self) -> int:
    """Degree of the polynomials: the smallest that is secure."""
    return next(n for n, most in MOST_BITS.items() if sum(self.bits) <= most)

  @property
  def slots(self) -> int:
    """Number of slots of a ciphertext, each for one number."""
    return self.degree // 2

  @property
  def error(self) -> float:
    """Standard deviation of the rounding error of one product, per slot.

    Both parts of a ciphertext are rounded, with errors that are uniform in [-1/2, 1/2]. One of the
    errors is multiplied by a ternary secret.
    Source: Cheon et al. 2017, lemma 2, as a standard deviation and not a bound.
    """
    return (self.degree / 12 * (1 + 2 * self.degree / 3)) ** 0.5 / 2.0**self.scale_bits

  @property
  def encoding_error(self) -> float:
    """Standard deviation of the error when a plain number is rounded to the scale."""
    return (self.degree / 12) ** 0.5 / 2.0**self.scale_bits


class PublicKeys(NamedTuple):
  """Keys that a server needs to multiply and rotate.

  Both keys are functions of the secret key, but hide it. There is no public key to encrypt with:
  the holder of the secret key encrypts.
  """

  relin: bytes
  rotations: bytes

  @property
  def size(self) -> int:
    """Size of both keys in bytes."""
    return len(self.relin) + len(self.rotations)


def library(extra: str = "he") -> Any:
  """Imports TenSEAL, and returns the module.

  Args:
    extra: the extra of dpjax that the error message names.

  Raises:
    UserError: TenSEAL is not installed.
  """
  with optional.require_extra(extra):
    import tenseal  # pyright: ignore[reportMissingImports]
  return tenseal


@functools.cache
def _sealapi() -> Any:
  library()
  from tenseal import sealapi  # pyright: ignore[reportMissingImports]

  return sealapi


@functools.cache
def _context(chain: Chain) -> Any:
  seal = _sealapi()
  params = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
  params.set_poly_modulus_degree(chain.degree)
  params.set_coeff_modulus(seal.CoeffModulus.Create(chain.degree, list(chain.bits)))
  return seal.SEALContext(params, True, seal.SEC_LEVEL_TYPE.TC128)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
  """Context that turns SEAL's refusals of a level, key or size into a UserError of one line."""
  try:
    yield
  except UserError:
    raise
  except (ValueError, RuntimeError, TypeError, IndexError) as error:
    raise UserError(validate.first_line(error), field="ckks") from error


def dumps(held: Any) -> bytes:
  """Serialises an object of SEAL through a file: SEAL's bindings write only to files."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "seal"
    held.save(str(path))
    return path.read_bytes()


def loads(kind: str, chain: Chain, content: bytes) -> Any:
  if not isinstance(content, bytes):
    raise UserError(f"must be bytes, not {type(content).__name__}", field="message")
  held = getattr(_sealapi(), kind)()
  # SEAL's bindings load only from files.
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "seal"
    path.write_bytes(content)
    try:
      held.load(_context(chain), str(path))
    except (RuntimeError, ValueError) as error:
      raise UserError(
        f"are no {kind} of these parameters",
        field="message",
        value=Verbatim(f"{len(content)} bytes"),
      ) from error
  return held


class _Levels:
  """Scale, prime and SEAL's id of each level of a chain, the lowest level first."""

  def __init__(self, chain: Chain):
    data = _context(chain).first_context_data()
    self.ids = []
    primes = [prime.value() for prime in data.parms().coeff_modulus()]
    for _ in primes:
      self.ids.insert(0, data.parms_id())
      data = data.next_context_data()
    self.scales = [2.0**chain.scale_bits]
    # A level's scale is the square of the scale above it, divided by the prime that a product
    # consumes.
    for prime in reversed(primes[1:]):
      self.scales.insert(0, self.scales[0] ** 2 / prime)
    self.primes = primes


class Coder:
  """Encodes real or complex numbers as plaintexts of a level, and decodes plaintexts."""

  def __init__(self, chain: Chain):
    self.chain = chain
    self.seal = _sealapi()
    self.context = _context(chain)
    self.levels = _Levels(chain)
    self._encoder = self.seal.CKKSEncoder(self.context)

  def encode(self, values: np.ndarray | float, level: int, scale: float | None = None):
    validate.integer_in(0, self.chain.levels, level=level)
    kind = np.complex128 if np.iscomplexobj(values) else np.float64
    try:
      plain = self.seal.Plaintext()
      numbers = np.asarray(values, kind)
    except (ValueError, TypeError) as error:
      raise UserError("must be real numbers", field="values") from error
    if numbers.ndim > 1:
      raise UserError(f"are of shape {numbers.shape}; must be [n]", field="values")
    if numbers.size > self.chain.slots:
      raise UserError(
        f"must be at most {self.chain.slots}",
        field="values",
        value=Verbatim(f"{numbers.size} numbers"),
      )
    if not np.isfinite(numbers).all():
      raise UserError("hold NaN or infinity, which no ciphertext can", field="values")
    scale = self.levels.scales[level] if scale is None else scale
    # SEAL refuses numbers that are too large for the remaining primes.
    with _one_line():
      self._encoder.encode(numbers.tolist(), self.levels.ids[level], scale, plain)
    return plain

  def decode(self, plain: Any) -> np.ndarray:
    return np.array(self._encoder.decode_double(plain))

  def decode_complex(self, plain: Any) -> np.ndarray:
    return np.array(self._encoder.decode_complex(plain))


class SecretKeys:
  """A fresh secret key, from SEAL's generator on the operating system's entropy.

  Args:
    rotations: numbers of slots that the server may rotate by, to the left.
  """

  def __init__(self, chain: Chain, rotations: Iterable[int] = ()):
    self.chain = chain
    self._coder = Coder(chain)
    seal = self._coder.seal
    context = self._coder.context
    keys = seal.KeyGenerator(context)
    self._decryptor = seal.Decryptor(context, keys.secret_key())
    self._encryptor = seal.Encryptor(context, keys.secret_key())
    elements = [pow(_ROOT, step, 2 * chain.degree) for step in sorted({*rotations})]
    self.public = PublicKeys(
      dumps(keys.create_relin_keys()), dumps(keys.create_galois_keys(elements))
    )

  def encrypt(self, values: np.ndarray, *, level: int | None = None) -> bytes:
    """Encrypts up to `chain.slots` numbers, padded with zeros, so that `level` successive products
    are possible (None: all of the chain).

    Raises:
      UserError: too many numbers, one that is not finite, or a level above the chain's.
    """
    at = self.chain.levels if level is None else level
    plain = self._coder.encode(values, at)
    return dumps(self._encryptor.encrypt_symmetric(plain))

  def decrypt(self, cipher: bytes) -> np.ndarray:
    """Returns the decrypted numbers, [slots] float64. Never pass them on unrounded (see module)."""
    plain = self._coder.seal.Plaintext()
    self._decryptor.decrypt(loads("Ciphertext", self.chain, cipher), plain)
    return self._coder.decode(plain)


class SlotEvaluator:
  """The server's part: everything except encryption and decryption.

  Ciphertexts are SEAL's objects here; `load` and `dump` convert them from and to bytes.

  Args:
    public: keys for products of two ciphertexts and for rotations; None for neither.

  >>> keys = SecretKeys(Chain(levels=1, scale_bits=30, end_bits=40), rotations=[1])
  >>> server = SlotEvaluator(keys.chain, keys.public)
  >>> x = server.load(keys.encrypt(np.array([1.0, 2.0, 3.0])))
  >>> square = server.products([(x, x)])
  >>> both = server.add(square, server.rotate(square, 1))
  >>> keys.decrypt(server.dump(both))[:3].round(2).tolist()
  [5.0, 13.0, 9.0]
  """

  def __init__(self, chain: Chain, public: PublicKeys | None):
    self.chain = chain
    self._coder = Coder(chain)
    self._seal = self._coder.seal
    context = self._coder.context
    self._evaluator = self._seal.Evaluator(context)
    if public is not None:
      self._relin = loads("RelinKeys", chain, public.relin)
      self._rotations = loads("GaloisKeys", chain, public.rotations)
    self.scales = tuple(self._coder.levels.scales)

  def load(self, cipher: bytes) -> Ciphertext:
    """Loads a ciphertext. Raises UserError if it does not belong to this chain."""
    return loads("Ciphertext", self.chain, cipher)

  def dump(self, cipher: Ciphertext) -> bytes:
    return dumps(cipher)

  def level(self, cipher: Ciphertext) -> int:
    """Returns the level of a ciphertext: how many successive products it still allows."""
    return self._coder.context.get_context_data(cipher.parms_id()).chain_index()

  @_one_line()
  def add(self, left: Ciphertext, right: Ciphertext) -> Ciphertext:
    """Returns the sum of two ciphertexts of one level."""
    out = self._seal.Ciphertext()
    self._evaluator.add(left, right, out)
    return out

  @_one_line()
  def plus(self, cipher: Ciphertext, values: np.ndarray | float) -> Ciphertext:
    """Returns the ciphertext plus plain numbers, one for each slot, or one for all slots."""
    out = self._seal.Ciphertext()
    plain = self._coder.encode(values, self.level(cipher))
    self._evaluator.add_plain(cipher, plain, out)
    return out

  @_one_line()
  def rotate(self, cipher: Ciphertext, steps: int) -> Ciphertext:
    """Returns `cipher` rotated to the left by `steps` slots. Needs a key for `steps`, unless 0."""
    if not steps:
      return cipher
    out = self._seal.Ciphertext()
    self._evaluator.rotate_vector(cipher, steps, self._rotations, out)
    return out

  def fold(self, cipher: Ciphertext, stride: int, count: int) -> Ciphertext:
    """Returns a ciphertext of sums. Each slot holds the sum of `count` slots: itself and those at
    distances stride, 2 * stride, ... to its right, cyclically. `count` is a power of two."""
    while count > 1:
      cipher = self.add(cipher, self.rotate(cipher, stride))
      stride = 2 * stride
      count = count // 2
    return cipher

  @_one_line()
  def product(self, left: Ciphertext, right: Ciphertext) -> Ciphertext:
    """Returns the unreduced product of two ciphertexts of one level, for `total` and `reduce`."""
    self._has_level(left)
    out = self._seal.Ciphertext()
    self._evaluator.multiply(left, right, out)
    return out

  @_one_line()
  def total(self, sum_so_far: Ciphertext, cipher: Ciphertext) -> Ciphertext:
    """Adds `cipher` to `sum_so_far` in place, and returns the sum. None means an empty sum."""
    if sum_so_far is None:
      return cipher
    self._evaluator.add_inplace(sum_so_far, cipher)
    return sum_so_far

  @_one_line()
  def reduce(self, raw: Ciphertext) -> Ciphertext:
    """Relinearises and rescales a sum of products in place, and returns it: one level down."""
    # Relinearising and rescaling are slower than a product, so they run once for a whole sum.
    self._evaluator.relinearize_inplace(raw, self._relin)
    self._evaluator.rescale_to_next_inplace(raw)
    return raw

  def products(self, pairs: Iterable[tuple[Ciphertext, Any]]) -> Ciphertext:
    """Returns the sum of left * right over pairs of ciphertexts, one level down."""
    raw = None
    for left, right in pairs:
      raw = self.total(raw, self.product(left, right))
    return self.reduce(raw)

  def encode(self, values: np.ndarray | float, level: int) -> Ciphertext:
    """Returns plain numbers encoded once, for `weighted_sum` with ciphertexts of `level`."""
    return self._coder.encode(values, level)

  @_one_line()
  def weighted_sum(self, pairs: Iterable[tuple[Ciphertext, Any]]) -> Ciphertext:
    """Returns the sum of left * right over pairs, one level down. `left` is a ciphertext, `right`
    plain numbers or a result of `encode`.

    If all numbers are zero, the result is the first ciphertext times 2^-scale_bits: SEAL refuses a
    ciphertext that hides nothing. Raises UserError if there are no pairs.
    """
    raw = first = None
    for cipher, values in pairs:
      self._has_level(cipher)
      first = cipher if first is None else first
      coded = isinstance(values, self._seal.Plaintext)
      plain = values if coded else self._coder.encode(values, self.level(cipher))
      if not plain.is_zero():
        out = self._seal.Ciphertext()
        self._evaluator.multiply_plain(cipher, plain, out)
        raw = self.total(raw, out)
    if first is None:
      raise UserError("are none, so there is nothing to compute", field="weights")
    if raw is None:
      least = self._coder.encode(2.0**-self.chain.scale_bits, self.level(first))
      raw = self._seal.Ciphertext()
      self._evaluator.multiply_plain(first, least, raw)
    # The sum is rescaled once, since rescaling each product would take longer.
    self._evaluator.rescale_to_next_inplace(raw)
    return raw

  @_one_line()
  def lower(self, cipher: Ciphertext, level: int) -> Ciphertext:
    """Returns the same numbers at a lower level, on the scale of that level."""
    before = self.level(cipher)
    if before == level:
      return cipher
    out = self._seal.Ciphertext()
    levels = self._coder.levels
    self._evaluator.mod_switch_to(cipher, levels.ids[level + 1], out)
    # At this scale, the product by 1 lands exactly on the scale of the lower level.
    scale = self.scales[level] * levels.primes[level + 1] / self.scales[before]
    encoded_one = self._coder.encode(1.0, level + 1, scale)
    self._evaluator.multiply_plain_inplace(out, encoded_one)
    self._evaluator.rescale_to_next_inplace(out)
    return out

  def _has_level(self, cipher: Ciphertext) -> None:
    if not self.level(cipher):
      raise UserError("are used up; must be more", field="levels", value=self.chain.levels)


def rotations_of(strides: Sequence[int], counts: Sequence[int]) -> list[int]:
  """Returns the rotations that `SlotEvaluator.fold` needs, for each pair of a stride and a count.

  >>> rotations_of([1, 16], [8, 2])
  [1, 2, 4, 16]
  """
  rotations = []
  for stride, count in zip(strides, counts):
    while count > 1:
      rotations.append(stride)
      stride = 2 * stride
      count = count // 2
  return rotations
