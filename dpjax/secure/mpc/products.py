"""Products of shares, each with one Beaver triple, and truncation of their surplus bits.

One honest-but-curious party learns nothing: only operands under masks are opened. Each mask is
used once. Masks are as good as uniform if the keystream of ChaCha20 is. Shapes are public.

| function          | rounds | opened, words per party           |
| ----------------- | ------ | --------------------------------- |
| `multiply`        | 1      | 2 per element                     |
| `matmul`          | 1      | m k + k n                         |
| `truncate` masked | 1      | 1 per element                     |
| `truncate` local  | 0      | none                              |
| `add`; `scale`    | 0      | none                              |

A truncation after `multiply`, `matmul` or `scale` is counted in the rows of `truncate` alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jax.typing import ArrayLike

from dpjax import validate
from dpjax.secure.mpc import ring64
from dpjax.secure.mpc.dealer import Dealt
from dpjax.secure.mpc.party import Party
from dpjax.validate import UserError

Shares = np.ndarray  # [...] uint64, of one party


def beaver(party: Party, x: Shares, y: Shares, triple: Dealt, product: Callable) -> Shares:
  """Returns shares of product(x, y), for a bilinear `product`.

  The result is not truncated: its scale is the product of the scales of x and y.

  x y = (x - a)(y - b) + a (y - b) + (x - a) b + c for c = a b: both differences are opened
  (Beaver 1991; SecureML, section IV).

  Raises:
    UserError: the triple was used before, or is for other shapes.
  """
  a, b, c = triple.use()
  if (a.shape, b.shape) != (x.shape, y.shape):
    raise UserError(
      f"is for {a.shape}, {b.shape}, not for {x.shape}, {y.shape}", field="triple"
    )
  d, e = party.open(x - a, y - b)
  # (x - a)(y - b) is public: only party 0 adds it, inside the first product.
  return product(d, b + e if party.number == 0 else b) + product(a, e) + c


def multiply(party: Party, x: Shares, y: Shares, *, truncated: bool = True) -> Shares:
  """Returns shares of x y, element by element, for shares [...] of one shape.

  Args:
    truncated: False if one factor is a whole number, such as a bit.

  If |x y| < 2^(62-2f), the product adds an error below 2^-f (masked) or 2^(1-f) (local, unless the
  truncation fails) to that of the operands.
  """
  if x.shape != y.shape:
    raise UserError(f"shapes {x.shape} and {y.shape} must be equal", field="multiply")
  product = beaver(party, x, y, party.supply.deal("elementwise", x.shape), np.multiply)
  return truncate(party, product) if truncated else product


def matmul(
  party: Party,
  x: Shares,
  y: Shares,
  *,
  bias: Shares | None = None,
  surplus: int | None = None,
) -> Shares:
  """Returns shares of x @ y + bias.

  Args:
    x: [m, k] shares.
    y: [k, n] shares.
    bias: [n] shares, or None.
    surplus: number of bits to truncate; None: f. With 0 nothing is truncated, as for whole
      numbers. With more than f bits the result is (x @ y + bias) / 2^(surplus - f).

  Returns:
    [m, n] shares, truncated once, after the sum over k.
  """
  if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[0]:
    raise UserError(
      f"shapes {x.shape} and {y.shape} must be [m, k] and [k, n]", field="matmul"
    )
  triple = party.supply.deal("matrices", x.shape, y.shape)
  product = beaver(party, x, y, triple, ring64.matmul)
  if bias is not None:
    # A product has twice the fraction bits, so the bias is shifted to the same scale.
    product = product + (bias << np.uint64(party.frac_bits))[None, :]
  return truncate(party, product, surplus)


def constant(party: Party, public: ArrayLike) -> Shares:
  """Returns shares of public numbers, without messages: party 0 holds them, party 1 zeros."""
  words = ring64.encode(public, party.frac_bits)
  return words if party.number == 0 else np.zeros_like(words)


def add(party: Party, x: Shares, public: ArrayLike) -> Shares:
  """Returns shares of x plus a public number or [...] array, without messages."""
  words = constant(party, public)
  if np.broadcast_shapes(words.shape, x.shape) != x.shape:
    raise UserError(f"of shape {words.shape}; must fit into {x.shape}", field="public")
  return x + words


def truncate(party: Party, x: Shares, bits: int | None = None) -> Shares:
  """Returns shares of x / 2^bits, for -2^62 <= x < 2^62 as a signed word.

  `masked` (the default of `Party`): c = u + r is opened, with u = x + 2^62 and a dealt mask r.
  The result is one of the two words next to x / 2^bits. The upper one has the probability
  (x mod 2^bits) / 2^bits, so the result is unbiased. It never fails: u < 2^63 is (c mod 2^63) -
  (r mod 2^63), plus 2^63 if the highest bits of c and r differ; the highest bit of r is dealt, too.
  (Escudero et al. 2020, "Improved primitives for MPC over mixed arithmetic-binary circuits", do the
  same against another adversary.)

  `local` (SecureML, section IV, theorem 1): each party shifts its own share. The result is off by
  at most one unit, except for failures by about 2^(64 - bits). A failure has probability
  |x| / 2^64 (theorem: at most 2^(l + 1 - 64) for |x| < 2^l). At f = 18 and products below 8 that is
  1 in 2^25, so it happens over millions of elements.

  Args:
    bits: bits to remove; None: f.
  """
  bits = party.frac_bits if bits is None else bits
  validate.integer_in(0, 62, bits=bits)
  if not bits:
    return x
  shift = np.uint64(bits)
  if party.truncation == "local":
    # Party 1 shifts 2^64 minus its share, and negates the result (SecureML, theorem 1).
    return x >> shift if party.number == 0 else np.negative(np.negative(x) >> shift)
  r, r_high_bits, r_top = party.supply.deal("truncation", x.shape, bits).use()
  # Adding 2^62 makes the number non-negative. It is subtracted at the end, as 2^(62 - bits).
  offset = np.uint64((1 << 62) if party.number == 0 else 0)
  (opened,) = party.open(x + offset + r)
  top = opened >> np.uint64(63)
  # `wrapped` is a share of (top XOR r_top) - top, for the top bits of c and r. `public` adds top.
  wrapped = r_top - np.uint64(2) * top * r_top
  low = np.uint64((1 << 63) - 1)
  result = (wrapped << np.uint64(63 - bits)) - r_high_bits
  if party.number == 1:
    return result
  public = ((opened & low) >> shift) + (top << np.uint64(63 - bits))
  return result + public - np.uint64(1 << (62 - bits))
