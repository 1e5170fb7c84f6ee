"""Real numbers as fixed point in the ring Z_2^64, and exact products in the ring.

A word is an unsigned 64-bit integer; it holds x as round(x 2^f), negatives in two's
complement. Words are NumPy arrays, which wrap around without a flag, so that nobody's
`jax_enable_x64` has to be set. Large products of matrices run as an XLA program.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpjax import validate
from dpjax.validate import UserError

FRAC_BITS = 18
MOST_FRAC_BITS = 24
# Reserved bits: nine for sums between two truncations, one because `truncate` needs |x| < 2^62.
_HEADROOM = 10
# Number of multiplications below which a compiled program is not worthwhile.
_SMALL = 1 << 17
# This many products of two 22-bit digits add up exactly in float64.
_DEPTH = 1 << 11


def largest(frac_bits: int = FRAC_BITS) -> float:
  """Returns the bound on |x|: 2^9 products of x and a number of at most 1 can be added.

  Nobody can check a product of two shared numbers. Such a product, and a sum of products before the
  truncation, must stay below 2^(62-2f), 2^26 at f = 18, as if both factors are below 2^13.
  Otherwise the result is wrong, and no error is raised. Scale columns beforehand: if all numbers
  are below 2^8, 2^10 products can be added.

  >>> largest(18)
  131072.0
  """
  return 2.0 ** (63 - 2 * frac_bits - _HEADROOM)


def encode(x: ArrayLike, frac_bits: int = FRAC_BITS) -> np.ndarray:
  """Returns round(x 2^f) modulo 2^64.

  Args:
    x: [...] real numbers, |x| < `largest(frac_bits)`.
    frac_bits: f, in [0, 24].

  Returns:
    [...] uint64.

  Raises:
    UserError: a value that is not finite or too large, or is no real number.

  >>> encode([1.5, -1.0], frac_bits=1)
  array([                   3, 18446744073709551614], dtype=uint64)
  """
  validate.integer_in(0, MOST_FRAC_BITS, frac_bits=frac_bits)
  values = np.asarray(x)
  if values.dtype.kind not in "fiub" and values.dtype.name != "bfloat16":
    raise UserError(f"must be real numbers, not {values.dtype}", field="x")
  values = values.astype(np.float64)
  worst = np.max(np.abs(values), initial=0.0)
  # The condition is written so that NaN is refused, too.
  if not worst < largest(frac_bits):
    raise UserError(
      f"holds {worst:g}, must be below {largest(frac_bits):g} in absolute value "
      f"at frac_bits={frac_bits}, so that 512 products with numbers of at most 1 fit 64 bits",
      field="x",
      hint=f"a product of two must itself stay below {2.0 ** (62 - 2 * frac_bits):g}, as of "
      f"factors below {2.0 ** (31 - frac_bits):g}; nobody can check it",
    )
  return np.asarray(np.rint(values * 2.0**frac_bits)).astype(np.int64).view(np.uint64)


def decode(words: np.ndarray, frac_bits: int = FRAC_BITS) -> np.ndarray:
  """Inverts `encode`: returns the float64 numbers [...] of words [...].

  >>> decode(encode([0.5, -3.25]))
  array([ 0.5 , -3.25])
  """
  signed = np.asarray(words, np.uint64).view(np.int64)
  return np.asarray(signed.astype(np.float64) / 2.0**frac_bits)


def matmul(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Returns x @ y modulo 2^64, exactly.

  Large products are six float64 products of balanced 22-bit digits, since libraries for fast
  products of matrices take floats, but no 64-bit integers.

  Args:
    x: [m, k] uint64.
    y: [k, n] uint64.

  >>> matmul(np.full((1, 2), 2**63 + 1, np.uint64), np.full((2, 1), 3, np.uint64))
  array([[6]], dtype=uint64)
  """
  if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[0]:
    raise UserError(
      f"shapes {x.shape} and {y.shape} must be [m, k] and [k, n]", field="matmul"
    )
  if x.size * y.shape[1] < _SMALL:
    return x @ y
  # JAX needs x64 for words; the user's own setting is unchanged.
  with jax.enable_x64(True):
    return np.asarray(_by_digits(x, y))


def _digits(x: jax.Array) -> list[jax.Array]:
  """Returns three float64 digits in [-2^21, 2^21), lowest first. They represent the number modulo
  2^64."""
  signed = x.astype(jnp.int64)
  digits = []
  for _ in range(3):
    # Balanced digits have half the absolute value, so more products add up exactly in float64.
    digit = ((signed + (1 << 21)) & ((1 << 22) - 1)) - (1 << 21)
    signed = (signed - digit) >> 22
    digits.append(digit.astype(jnp.float64))
  return digits


@jax.jit
def _by_digits(x: jax.Array, y: jax.Array) -> jax.Array:
  total = jnp.zeros((x.shape[0], y.shape[1]), jnp.int64)
  for start in range(0, x.shape[1], _DEPTH):
    a = _digits(x[:, start : start + _DEPTH])
    b = _digits(y[start : start + _DEPTH])
    # The other pairs have weight 2^66 or more, which is 0 modulo 2^64.
    for i, j in ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0)):
      total += (a[i] @ b[j]).astype(jnp.int64) << (22 * (i + j))
  return total.astype(jnp.uint64)
