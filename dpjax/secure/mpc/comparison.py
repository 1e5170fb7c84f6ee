"""Signs of shared values, and functions built on them: ReLU, SecureML's sigmoid, argmax.

The sign of x is computed as follows. All numbers from the dealer serve one comparison only.

1. c = x + r is opened for a dealt mask r, so it tells nothing. (A product with a random factor,
   which other designs open, tells the size of x.)
2. x = c - r has the highest bit c_63 ^ r_63 ^ borrow, where borrow = [c mod 2^63 < r mod 2^63].
   The parties hold the bits of r as XOR shares. At each place the bits of c and r
   generate a borrow, pass one on or stop it. Six layers of ANDs combine the places in pairs, as in
   a parallel-prefix adder. Each layer takes one dealt triple.
3. The bit b = [x >= 0] is opened under a dealt random bit s, which makes v = b ^ s public. In the
   ring b is then v + s - 2 v s, which each party computes alone. The dealer deals r s, too: so b x,
   with x = c - r, costs no product.

Each party sends 8 messages for a comparison, with 43 bytes for each value. One honest-but-curious
party learns nothing if masks from ChaCha20 are as good as uniform. (SecureML uses garbled circuits;
Catrina and de Hoogh 2010, "Improved primitives for secure multiparty integer computation", compare
a masked value.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpjax import validate
from dpjax.secure.mpc import ring64
from dpjax.secure.mpc.correlations import CORRELATIONS, Correlated, Part
from dpjax.secure.mpc.party import Party
from dpjax.secure.mpc.products import Shares, constant, multiply
from dpjax.validate import UserError, Verbatim

# Number of places after each layer. A layer combines every two places into one.
_HALVES = (32, 16, 8, 4, 2, 1)
# Types that hold both results of a layer; smaller layers use bytes.
_TYPES = {32: "uint64", 16: "uint32", 8: "uint16"}
_ONE = np.uint64(1)
# Mask of all bits except the highest.
_LOW = np.uint64((1 << 63) - 1)


def shuffle_bits(words: np.ndarray) -> np.ndarray:
  """Moves bit p to the place with the six binary digits of p reversed.

  Neighbouring bits, which a tree combines first, then lie in the two halves of a word. The function
  is its own inverse.

  >>> shuffle_bits(np.array([2, 2**63], np.uint64)) == np.array([2**32, 2**63], np.uint64)
  array([ True,  True])
  """
  # Three exchanges reverse the digits of a bit's place.
  for low, high in ((0, 5), (1, 4), (2, 3)):
    shift = np.uint64((1 << high) - (1 << low))
    places = [place for place in range(64) if place >> low & 1 and not place >> high & 1]
    moved = ((words >> shift) ^ words) & np.uint64(sum(1 << place for place in places))
    words = words ^ moved ^ (moved << shift)
  return words


def sign(shape: Sequence[int]) -> Correlated:
  """Returns the correlation of a comparison.

  Its free parts: r; s; a and b of each layer. Its bound parts: the bits of r; s as a number; r s;
  a & b of each layer.
  """
  shape = tuple(shape)
  bits = Part(shape, "uint8", xor=True)
  layers = [Part(shape, _TYPES.get(half, "uint8"), xor=True) for half in _HALVES]

  def solve(r: np.ndarray, s: np.ndarray, *ab: np.ndarray) -> tuple[np.ndarray, ...]:
    number = (s & 1).astype(np.uint64)
    ands = [a & b for a, b in zip(ab[::2], ab[1::2])]
    return (shuffle_bits(r), number, number * r, *ands)

  free = (Part(shape), bits, *(part for part in layers for _ in range(2)))
  bound = (Part(shape, xor=True), Part(shape), Part(shape), *layers)
  return Correlated(free, bound, solve)


CORRELATIONS["sign"] = sign


class Signs(NamedTuple):
  """Shares of whether x >= 0, and of max(x, 0)."""

  bit: Shares  # [...] 1 where x >= 0, else 0, as whole numbers
  part: Shares  # [...] x where x >= 0, else 0


def signs(party: Party, x: Shares) -> Signs:
  """Returns shares of whether x >= 0, and of max(x, 0). Exact for every word as a signed number.

  Args:
    x: [...] shares.
  """
  r, s, *parts = party.supply.deal("sign", x.shape).use()
  ab = parts[:12]
  bits, number, product = parts[12:15]
  c = parts[15:]
  (opened,) = party.open(x + r)
  borrow = _borrow(party, opened, bits, list(zip(ab[::2], ab[1::2], c)))
  top = ((bits >> np.uint64(63)) & _ONE).astype(np.uint8) ^ borrow
  (hidden,) = party.open_bits(top ^ s)
  # v ^ s is the inverted sign bit: 1 if x >= 0.
  v = (hidden & np.uint8(1)).astype(np.uint64) ^ (opened >> np.uint64(63)) ^ _ONE
  flip = _ONE - (v << _ONE)  # 1 or -1
  bit = flip * number
  part = flip * (opened * number - product)
  # For additive shares, only one party adds a public number.
  if party.number == 0:
    bit = bit + v
  return Signs(bit, part + v * x)


def _borrow(party: Party, c: np.ndarray, bits: np.ndarray, triples: list) -> np.ndarray:
  """Returns a share [...] uint8 of whether c < r in the lower 63 bits, from r's shuffled bits."""
  inverse = ~shuffle_bits(c)
  # Bit 63 lets every borrow pass: it neither generates nor stops one.
  generates = inverse & bits & _LOW
  passes = ((bits ^ inverse) | ~_LOW) if party.number == 0 else bits & _LOW
  for half, (a, b, product) in zip(_HALVES, triples):
    kind = a.dtype.type
    shift = a.dtype.type(half)
    ones = kind((1 << half) - 1)
    generates = generates.astype(kind)
    passes = passes.astype(kind)
    # Both ANDs of a layer are in one word, so that one message opens both.
    left = (passes >> shift) & ones
    left = left | (left << shift)
    right = (generates & ones) | ((passes & ones) << shift)
    d, e = party.open_bits(left ^ a, right ^ b)
    both = (d & b) ^ (a & e) ^ product
    if party.number == 0:
      both = both ^ (d & e)
    generates = ((generates >> shift) & ones) ^ (both & ones)
    passes = (both >> shift) & ones
  return generates


def relu(party: Party, x: Shares) -> Shares:
  """Returns shares of max(x, 0), for [...] shares."""
  return signs(party, x).part


def sigmoid(party: Party, x: Shares) -> Shares:
  """Returns shares of min(max(x + 1/2, 0), 1), SecureML's sigmoid (section IV), for [...] shares.

  This is relu(x + 1/2) - relu(x - 1/2), and one comparison computes both. The result is right if
  neither sum leaves the signed words: |x| < 2^(63-f) - 1/2. Raises UserError for f = 0.
  """
  # Without fraction bits, 1/2 cannot be encoded.
  validate.integer_in(1, ring64.MOST_FRAC_BITS, frac_bits=party.frac_bits)
  offset = constant(party, 0.5)
  upper, lower = signs(party, np.stack([x + offset, x - offset])).part
  return upper - lower


def argmax(party: Party, x: Shares) -> Shares:
  """Returns shares of the place of the largest value along the last axis, by a tournament.

  Args:
    x: [..., n] shares, n >= 1. Any two values must differ by less than 2^63 units of 2^-f.

  Returns:
    [...] shares of a whole number: `reveal(..., frac_bits=0)`. The first of equal values counts.
  """
  if not x.ndim or not x.shape[-1]:
    raise UserError(
      f"shape {x.shape} must have a last axis of at least one", field="argmax"
    )
  places = np.arange(x.shape[-1], dtype=np.uint64) * np.uint64(party.number == 0)
  places = np.broadcast_to(places, x.shape)
  while x.shape[-1] > 1:
    odd = x.shape[-1] % 2
    pairs = x.shape[-1] - odd
    first = x[..., 0:pairs:2]
    second = x[..., 1:pairs:2]
    left_places = places[..., 0:pairs:2]
    right_places = places[..., 1:pairs:2]
    compared = signs(party, first - second)
    place = right_places + multiply(
      party, compared.bit, left_places - right_places, truncated=False
    )
    # max(first, second) = second + relu(first - second).
    x = np.concatenate([second + compared.part, x[..., pairs:]], axis=-1)
    places = np.concatenate([place, places[..., pairs:]], axis=-1)
  return places[..., 0]


def reciprocal(party: Party, x: Shares, *, low: float, high: float) -> Shares:
  """Returns shares of 1 / x by Newton's steps y <- y (2 - x y), from y = 1 / high on.

  Args:
    x: [...] shares of numbers in [low, high]; outside, the result means nothing.
    low, high: public bounds, 2^(6-f) <= low <= high <= 2^(f-6), with f = `party.frac_bits`.

  Returns:
    [...] shares; at f = 18 the error is below 2^-15 max(1, 1 / x^2).
  """
  validate.positive(low=low, high=high)
  most = 2.0 ** (party.frac_bits - 6)
  if not 1 / most <= low <= high <= most:
    raise UserError(
      f"must be in [{1 / most:g}, high={high:g}], and high <= {most:g}, at "
      f"frac_bits={party.frac_bits}",
      field="low",
      value=Verbatim(f"{low:g}"),
    )
  # 1 - x y is at most 1 - low / high at the start, and each step squares it. This gives the number
  # of steps.
  ratio = np.log2(high / low)
  y = np.full(x.shape, constant(party, 1.0 / high))
  two = constant(party, 2.0)
  for _ in range(int(np.ceil(ratio)) + 5):
    y = multiply(party, y, two - multiply(party, x, y))
  return y


def normalized_relu(party: Party, x: Shares) -> Shares:
  """Returns shares of relu(x_i) / (sum_j relu(x_j) + 2^-6).

  SecureML replaces softmax by this function without the 2^-6 (section IV). Due to the 2^-6 all
  results are 0 if no score is positive.

  Args:
    x: [n, classes] shares, |x| < 2^(f-6) / classes.
  """
  positive = relu(party, x)
  total = np.add.reduce(positive, axis=-1) + constant(party, 2.0**-6)
  inverse = reciprocal(party, total, low=2.0**-6, high=2.0 ** (party.frac_bits - 6))
  return multiply(party, positive, np.repeat(inverse[:, None], x.shape[1], axis=1))
