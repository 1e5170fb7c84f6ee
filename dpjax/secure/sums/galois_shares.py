"""Shamir's shares of vectors modulo 2^32 or 2^64. Sums of shares reveal only the vectors' sum.

Shamir's scheme needs points whose differences can be inverted. Modulo 2^bits there are only two
such points, for example 0 and 1. So d words together are one element of the Galois ring
Z_2^bits[X] / f(X), where f is irreducible modulo 2 and of degree d. Its 2^d elements with
coefficients 0 and 1 are such points, because no difference of two of them is a multiple of 2.

A prime field would be simpler, and would leak: its sum counts how often the integers wrapped
around, which no noise hides. Here the total is a function of the sum modulo 2^bits.

One polynomial has the `packed` secrets as its values at `packed` points. At the points of the first
shares it has `colluding` uniform values. Its values at any `colluding` + `packed` points determine
the polynomial. So, given the secrets, any `colluding` shares and the uniform values determine each
other: these shares are uniform, whatever the secrets are.

Sources: Shamir 1979; Franklin and Yung 1992 for several secrets in a polynomial; Abspoel, Cramer,
Damgard, Escudero and Yuan 2019 (eprint 2019/872) for Galois rings.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dpjax import validate
from dpjax.validate import UserError

# Irreducible polynomials modulo 2, by degree: the exponents below the degree (Seroussi 1998,
# "Table of low-weight binary irreducible polynomials").
POLYNOMIALS = {
  2: (1, 0), 3: (1, 0), 4: (1, 0), 5: (2, 0), 6: (1, 0), 7: (1, 0), 8: (4, 3, 1, 0),
  9: (1, 0), 10: (3, 0),
}  # fmt: skip
MOST_POINTS = 2 ** max(POLYNOMIALS)


def degree_for(num_shares: int, packed: int) -> int:
  """Returns the degree d of the ring: the number of words in one element.

  >>> degree_for(5, 1), degree_for(100, 20)
  (3, 7)
  """
  validate.integer_in(1, MOST_POINTS - 1, packed=packed)
  validate.integer_in(1, MOST_POINTS - packed, num_shares=num_shares)
  return max(2, (num_shares + packed - 1).bit_length())


def share_words(length: int, *, num_shares: int, packed: int) -> int:
  """Returns the number of words in one share of a vector of `length` words.

  >>> share_words(1000, num_shares=5, packed=1), share_words(1000, num_shares=5, packed=3)
  (1002, 336)
  """
  degree = degree_for(num_shares, packed)
  return degree * math.ceil(length / (degree * packed))


def split(
  vector: np.ndarray,
  *,
  num_shares: int,
  colluding: int,
  packed: int = 1,
  entropy: Callable[[int], bytes] = secrets.token_bytes,
) -> list[np.ndarray]:
  """Returns shares of a vector; any `colluding` of them are uniform, whatever the vector is.

  Args:
    vector: [d] uint32 or uint64; sums are modulo 2^32 or 2^64.
    num_shares: number of shares.
    colluding: largest number of shares that together reveal nothing.
    packed: number of secrets in one polynomial. `colluding` + `packed` shares give the vector
      back, and each share is about `packed` times shorter than the vector.
    entropy: `entropy(n)` returns n random bytes. Use another source than the operating
      system only in tests.

  Returns:
    `num_shares` vectors of `share_words` words. Sums of shares are shares of the sum.

  Raises:
    UserError: `num_shares` is too small: even all shares would not give the vector back.

  >>> shares = split(np.array([5, 6], np.uint32), num_shares=5, colluding=2)
  >>> held = {place: shares[place] for place in (0, 2, 4)}
  >>> combine(held, length=2, num_shares=5, colluding=2)
  array([5, 6], dtype=uint32)
  """
  _check(num_shares, colluding, packed)
  degree = degree_for(num_shares, packed)
  words = share_words(len(vector), num_shares=num_shares, packed=packed)
  columns = words // degree
  padded = np.zeros(packed * words, vector.dtype)
  padded[: len(vector)] = vector
  drawn = np.frombuffer(entropy(colluding * words * vector.itemsize), vector.dtype)
  # The polynomial's values are secrets at the first points, and uniform at the next `colluding`.
  values = np.concatenate([padded, drawn]).reshape(-1, columns)
  uniform = list(drawn.reshape(colluding, words))
  held = tuple(range(packed + colluding))
  missing = tuple(range(packed + colluding, packed + num_shares))
  if not missing:
    return uniform
  others = _times(_interpolation(held, missing, degree), values)
  return [*uniform, *others.reshape(len(missing), words)]


def combine(
  shares: Mapping[int, np.ndarray],
  *,
  length: int,
  num_shares: int,
  colluding: int,
  packed: int = 1,
) -> np.ndarray:
  """Returns the vector from some of its shares.

  Shares beyond `colluding` + `packed` are compared with what the first ones determine.

  Args:
    shares: shares of `share_words` words, by their place in the result of `split`.
    length: number of words of the vector.
    num_shares, colluding, packed: as in `split`.

  Raises:
    UserError: too few shares, or shares that do not lie on one polynomial.
  """
  _check(num_shares, colluding, packed)
  needed = colluding + packed
  if len(shares) < needed:
    raise UserError(
      f"{len(shares)} are too few: {needed} determine the sum",
      field="shares",
    )
  degree = degree_for(num_shares, packed)
  places = sorted(shares)
  held = tuple(packed + place for place in places[:needed])
  wanted = (*range(packed), *(packed + place for place in places[needed:]))
  values = np.concatenate([shares[place] for place in places[:needed]])
  words = len(shares[places[0]])
  found = _times(
    _interpolation(held, wanted, degree), values.reshape(needed * degree, words // degree)
  ).reshape(len(wanted), words)
  for place, expected in zip(places[needed:], found[packed:]):
    if not np.array_equal(shares[place], expected):
      raise UserError(
        "do not fit together: at least one of them is wrong, and the sum is refused",
        field="shares",
      )
  return found[:packed].reshape(-1)[:length].copy()


def _check(num_shares: int, colluding: int, packed: int) -> None:
  degree_for(num_shares, packed)
  validate.integer_in(1, num_shares, colluding=colluding)
  if colluding + packed > num_shares:
    raise UserError(
      f"must be <= num_shares={num_shares} - colluding={colluding}, or no shares suffice",
      field="packed",
      value=packed,
    )


# --- the ring


def multiplied(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Returns products of ring elements, [..., d] uint64 coefficients, lowest first.

  >>> x = np.array([0, 1], np.uint64)
  >>> multiplied(x, x).astype(np.int64)  # X^2 = -X - 1
  array([-1, -1])
  """
  degree = a.shape[-1]
  shape = np.broadcast_shapes(a.shape, b.shape)
  full = np.zeros((*shape[:-1], 2 * degree - 1), np.uint64)
  for power in range(degree):
    full[..., power : power + degree] += a[..., power : power + 1] * b
  # The loop goes down from the top power, since reducing a power changes only lower powers.
  for power in range(2 * degree - 2, degree - 1, -1):
    for exponent in POLYNOMIALS[degree]:
      full[..., power - degree + exponent] -= full[..., power]
  return full[..., :degree]


def inverted(units: np.ndarray) -> np.ndarray:
  """Returns inverses modulo f, [..., d], of ring elements that are no multiples of 2."""
  degree = units.shape[-1]
  # u^(2^d - 2) inverts u modulo 2, where the ring is a field of 2^d elements.
  power = units
  inverse = np.zeros_like(units)
  inverse[..., 0] = 1
  for _ in range(degree - 1):
    power = multiplied(power, power)
    inverse = multiplied(inverse, power)
  two = np.zeros(degree, np.uint64)
  two[0] = 2
  # By Hensel's lemma each step doubles the number of right bits, from 1 to 64.
  for _ in range(6):
    inverse = multiplied(inverse, two - multiplied(units, inverse))
  return inverse


@functools.lru_cache(maxsize=64)
def _interpolation(
  held: tuple[int, ...], wanted: tuple[int, ...], degree: int
) -> np.ndarray:
  """Returns the matrix that maps the words of values at `held` points to those at `wanted` points.

  Its shape is [len(wanted) * degree, len(held) * degree], uint64 (Lagrange interpolation).
  """
  at = _points(held, degree)  # [h, d]
  to = _points(wanted, degree)  # [w, d]
  numerator = np.zeros((len(wanted), len(held), degree), np.uint64)
  numerator[..., 0] = 1
  denominator = np.zeros((len(held), degree), np.uint64)
  denominator[..., 0] = 1
  for place in range(len(held)):
    others = np.arange(len(held)) != place
    numerator[:, others] = multiplied(numerator[:, others], (to - at[place])[:, None])
    denominator[others] = multiplied(denominator[others], at[others] - at[place])
  factors = multiplied(numerator, inverted(denominator))  # [w, h, d]
  # Multiplication by an element a is linear in the words of the other factor. Column j of its
  # matrix is a * X^j.
  columns = [factors]
  power = np.zeros(degree, np.uint64)
  power[1] = 1
  for _ in range(degree - 1):
    columns.append(multiplied(columns[-1], power))
  blocks = np.stack(columns, axis=-1)  # [w, h, d, d]
  return blocks.transpose(0, 2, 1, 3).reshape(len(wanted) * degree, len(held) * degree)


def _points(numbers: Sequence[int], degree: int) -> np.ndarray:
  """Returns the elements whose coefficients are the bits of these numbers, [n, d] uint64."""
  bits = np.asarray(numbers, np.uint64)[:, None] >> np.arange(degree, dtype=np.uint64)
  return bits & np.uint64(1)


def _times(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
  """Multiplies matrices modulo 2^32 or 2^64, the type of `values`: [r, c] by [c, n] is [r, n]."""
  # 2^32 divides 2^64, so the low 32 bits of the matrix are the matrix for a ring modulo 2^32.
  # einsum is ten times faster than matmul, which has no BLAS for integers.
  return np.einsum("rc,cn->rn", matrix.astype(values.dtype), values)
