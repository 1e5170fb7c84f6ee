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

import dataclasses
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
  """How vectors become shares; sums of shares are shares of the sum.

  Args:
    num_members: number of shares.
    colluding: largest number of shares that together reveal nothing; >= 1.
    packed: number of secrets in one polynomial. `needed` shares, `colluding` + `packed`, give the
      vector back, and each share is about `packed` times shorter than the vector.

  Raises:
    UserError: even all shares would not give a vector back, or there are more than points.

  >>> sharing = Sharing(num_members=5, colluding=2)
  >>> shares = sharing.split(np.array([5, 6], np.uint32))
  >>> sharing.combine({place: shares[place] for place in (0, 2, 4)}, length=2)
  array([5, 6], dtype=uint32)
  """

  num_members: int
  colluding: int
  packed: int = 1

  def __post_init__(self) -> None:
    # Two members need a point each, besides the points of the `packed` secrets.
    validate.integer_in(1, MOST_POINTS - 2, packed=self.packed)
    validate.integer_in(2, MOST_POINTS - self.packed, num_members=self.num_members)
    validate.integer_in(1, self.num_members - 1, colluding=self.colluding)
    if self.needed > self.num_members:
      raise UserError(
        f"must be >= colluding={self.colluding} + packed={self.packed}, whose sums give the total",
        field="num_members",
        value=self.num_members,
      )

  @property
  def needed(self) -> int:
    """Number of shares that give the vector back."""
    return self.colluding + self.packed

  @property
  def degree(self) -> int:
    """Degree d of the ring: the number of words in one element.

    >>> Sharing(num_members=5, colluding=1).degree
    3
    """
    return max(2, (self.num_members + self.packed - 1).bit_length())

  def share_words(self, length: int) -> int:
    """Returns the number of words in one share of a vector of `length` words.

    >>> Sharing(num_members=5, colluding=1, packed=3).share_words(1000)
    336
    """
    return self.degree * math.ceil(length / (self.degree * self.packed))

  def split(
    self, vector: np.ndarray, *, entropy: Callable[[int], bytes] = secrets.token_bytes
  ) -> list[np.ndarray]:
    """Returns shares of a vector; any `colluding` of them are uniform, whatever the vector is.

    Args:
      vector: [d] uint32 or uint64; sums are modulo 2^32 or 2^64.
      entropy: `entropy(n)` returns n random bytes. Use another source than the operating
        system only in tests.

    Returns:
      `num_members` vectors of `share_words` words.
    """
    words = self.share_words(len(vector))
    columns = words // self.degree
    padded = np.zeros(self.packed * words, vector.dtype)
    padded[: len(vector)] = vector
    drawn = np.frombuffer(entropy(self.colluding * words * vector.itemsize), vector.dtype)
    # The polynomial's values are secrets at the first points, and uniform at the next `colluding`.
    values = np.concatenate([padded, drawn]).reshape(-1, columns)
    held = tuple(range(self.needed))
    missing = tuple(range(self.needed, self.packed + self.num_members))
    others = _times(_interpolation(held, missing, self.degree), values)
    return [*drawn.reshape(self.colluding, words), *others.reshape(len(missing), words)]

  def combine(self, shares: Mapping[int, np.ndarray], *, length: int) -> np.ndarray:
    """Returns the vector from some of its shares.

    Shares beyond `needed` are compared with what the first ones determine.

    Args:
      shares: shares of `share_words` words, by their place in the result of `split`.
      length: number of words of the vector.

    Raises:
      UserError: too few shares, or shares that do not lie on one polynomial.
    """
    if len(shares) < self.needed:
      raise UserError(
        f"{len(shares)} are too few: {self.needed} determine the sum", field="shares"
      )
    places = sorted(shares)
    first = places[: self.needed]
    held = tuple(self.packed + place for place in first)
    more = places[self.needed :]
    wanted = (*range(self.packed), *(self.packed + place for place in more))
    values = np.concatenate([shares[place] for place in first])
    words = len(shares[places[0]])
    matrix = _interpolation(held, wanted, self.degree)
    found = _times(matrix, values.reshape(len(held) * self.degree, -1))
    found = found.reshape(len(wanted), words)
    for place, expected in zip(more, found[self.packed :]):
      if not np.array_equal(shares[place], expected):
        raise UserError(
          "do not fit together: at least one of them is wrong, and the sum is refused",
          field="shares",
        )
    return found[: self.packed].reshape(-1)[:length].copy()


# --- the ring


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Returns products of ring elements, [..., d] uint64 coefficients, lowest first.

  >>> x = np.array([0, 1], np.uint64)
  >>> multiply(x, x).astype(np.int64)  # X^2 = -X - 1
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


def invert(units: np.ndarray) -> np.ndarray:
  """Returns inverses modulo f, [..., d], of ring elements that are no multiples of 2."""
  degree = units.shape[-1]
  # u^(2^d - 2) inverts u modulo 2, where the ring is a field of 2^d elements.
  power = units
  inverse = np.zeros_like(units)
  inverse[..., 0] = 1
  for _ in range(degree - 1):
    power = multiply(power, power)
    inverse = multiply(inverse, power)
  two = np.zeros(degree, np.uint64)
  two[0] = 2
  # By Hensel's lemma each step doubles the number of right bits, from 1 to 64.
  for _ in range(6):
    inverse = multiply(inverse, two - multiply(units, inverse))
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
    numerator[:, others] = multiply(numerator[:, others], (to - at[place])[:, None])
    denominator[others] = multiply(denominator[others], at[others] - at[place])
  factors = multiply(numerator, invert(denominator))  # [w, h, d]
  # Multiplication by an element a is linear in the words of the other factor. Column j of its
  # matrix is a * X^j.
  columns = [factors]
  power = np.zeros(degree, np.uint64)
  power[1] = 1
  for _ in range(degree - 1):
    columns.append(multiply(columns[-1], power))
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
