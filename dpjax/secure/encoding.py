"""Encodes messages of floats as integers modulo 2^bits, and decodes the sum of many.

A secure sum adds integers modulo a power of two, so a client sends

  message, weight  ->  clip, scale, round  ->  integers mod 2^bits  ->  their sum  ->  mean

| what may go wrong                  | what is done                                           |
| ---------------------------------- | ------------------------------------------------------ |
| the sum wraps around               | it cannot: max_clients * largest < 2^(bits - 1)        |
| a coordinate is very large         | it is clipped to [-largest_value, largest_value]       |
| a message holds NaN or infinity,   | the client sends zeros, of weight 0                    |
| or its norm is beyond float32      |                                                        |
| a finite weight is above 1         | it counts as 1, the public bound                       |
| a weight is <= 0 or not finite     | the client sends zeros, of weight 0                    |
| rounding a weight                  | to the nearest multiple of 1 / `largest`, never to 0   |
| rounding a coordinate              | its product with the rounded weight, to nearest: the   |
|                                    | mean errs by `Encoding.error_bound(weights)` at most   |

The weight is one more integer of the message. With a secure sum the server learns the sum of the
weighted messages and the sum of the weights, but no message and no weight of one client.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.federated.aggregation import finite
from dpjax.secure.sums.interface import dtype_of
from dpjax.types import Array, ArrayLike, ArrayTree
from dpjax.validate import UserError

# Smallest and largest number of bits of the modulus. JAX adds 32-bit integers, and the modulus uses
# their low bits.
BITS = (8, 32)


class Encoded(NamedTuple):
  """Integers modulo 2^32: of one client, of several clients [C, ...], or of their sum."""

  values: Any  # a tree like the message, uint32
  weight: Array  # uint32, of shape [C] for several clients and [] otherwise


def _to_unsigned(whole: Array) -> Array:
  # In two's complement a negative number wraps around, as it must modulo 2^32.
  return whole.astype(jnp.int32).astype(jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Encoding:
  """Encodes messages as integers, so that a sum of `max_clients` messages does not wrap around.

  Args:
    max_clients: largest number of clients of one sum; public.
    largest_value: a coordinate of a message is clipped to [-largest_value, largest_value].
    bits: bits of the modulus, 8 to 32.

  Guarantee: max_clients * largest < 2^(bits - 1), so a sum of max_clients messages never wraps
  around. The mean of messages within `largest_value` stays within it, and errs by
  `error_bound(weights)` at most. If all weights are 1, the bound is `resolution` / 2, plus
  2^-21 `largest_value` for the rounding of floats. With equal weights w in [1 / `largest`, 1) the
  first part is about 1 / w times as large: small weights need more `bits`. Weights that differ may
  more than double the bound, since each is rounded.

  >>> encoding = Encoding(max_clients=100, largest_value=1.0, bits=16)
  >>> encoding.largest, round(encoding.resolution, 6)
  (327, 0.003058)
  """

  max_clients: int
  largest_value: float = 8.0
  bits: int = 32

  def __post_init__(self):
    validate.integer_at_least(1, max_clients=self.max_clients)
    validate.positive(largest_value=self.largest_value)
    validate.integer_in(*BITS, bits=self.bits)
    if self.largest < 1:
      raise UserError(
        f"2^(bits - 1) must be > max_clients={self.max_clients}",
        field="bits",
        value=self.bits,
      )

  @property
  def largest(self) -> int:
    """Largest integer that one client sends: for a coordinate, and for a weight of 1."""
    most = (2 ** (self.bits - 1) - 1) // self.max_clients
    # Values are clipped in float32. If float32 rounds the bound up, the float below is taken.
    held = np.float32(most)
    return int(np.nextafter(held, np.float32(0)) if int(held) > most else held)

  @property
  def resolution(self) -> float:
    """Step between values that a client of weight 1 can send, in the message's units."""
    return self.largest_value / self.largest

  def error_bound(self, weights: ArrayLike) -> float:
    """Returns a bound on the error of a coordinate of the weighted mean, in the message's units.

    It is 0 if there are no weights. Proof. Client i of C, with value v_i and weight w_i, sends
    W_i = max(1, round(w_i L)) and round(v_i W_i / m), with L `largest` and m `largest_value`.
    Rounding C products moves the mean by at most C m / (2 sum W_i). The weights W_i / L in place of
    w_i move it by |sum (W_i / L - w_i) (v_i - mean)| L / sum W_i, and |v_i - mean| <= 2 m. Floats
    add 2^-21 m.

    Args:
      weights: [C] weights of the clients that count, in (0, 1]. A larger one counts as 1.

    >>> encoding = Encoding(max_clients=100, largest_value=1.0, bits=16)
    >>> round(encoding.error_bound(np.ones(100)) / encoding.resolution, 3)
    0.5
    >>> round(encoding.error_bound(np.full(10, 0.01)) / encoding.resolution, 1)  # 3.27 -> 3
    54.5
    """
    weights = np.minimum(np.asarray(weights, np.float64), 1.0)
    if not len(weights):
      return 0.0
    whole = np.maximum(np.round(weights * self.largest), 1.0)
    half_steps = len(weights) / 2
    moved = 2 * np.abs(whole - weights * self.largest).sum()
    # Equal weights are rounded equally, so no client counts more than another.
    moved = 0.0 if np.ptp(weights) == 0 else moved
    return float(self.largest_value * ((half_steps + moved) / whole.sum() + 2.0**-21))

  def encode(self, messages: ArrayTree, weights: Array, mask: Array) -> Encoded:
    """Encodes messages [C, *p] and weights [C] as uint32 of the same shapes; pure JAX.

    Args:
      messages: [C, *p] floats.
      weights: [C], in [0, 1].
      mask: [C] bool, False for rows that do not count.

    Raises:
      UserError: messages of complex numbers.

    >>> encoding = Encoding(max_clients=2, largest_value=1.0, bits=8)
    >>> messages = jnp.array([[0.5, -1.0], [jnp.nan, 0.0]])
    >>> encoding.encode(messages, jnp.ones(2), jnp.ones(2, bool)).values.tolist()
    [[32, 4294967233], [0, 0]]
    """
    weights = jnp.asarray(weights)
    counted = finite(messages, mask) & jnp.isfinite(weights) & (weights > 0)
    weights = trees.at_least_float32(jnp.where(counted, jnp.minimum(weights, 1.0), 0.0))
    # The weight is rounded first, and multiplies the value. A message then counts with the
    # weight that is sent. So the mean stays between the clients' values, up to their rounding.
    whole = jnp.clip(jnp.round(weights * self.largest), 1, self.largest)
    whole = jnp.where(counted, whole, 0)  # [C]

    def integers(leaf: Array) -> Array:
      leaf = trees.at_least_float32(jnp.asarray(leaf))
      if jnp.iscomplexobj(leaf):
        raise UserError("must be real numbers", field="messages", value=leaf.dtype)
      row = (-1,) + (1,) * (leaf.ndim - 1)
      clipped = jnp.clip(leaf, -self.largest_value, self.largest_value)
      # 0 x NaN is NaN, so a message that does not count is replaced by zeros.
      kept = jnp.where(counted.reshape(row), clipped, 0.0)
      limit = whole.astype(leaf.dtype).reshape(row)
      scaled = jnp.round(kept * (limit / self.largest_value))
      # The product may be rounded above the weight. The mean would then exceed `largest_value`.
      return _to_unsigned(jnp.clip(scaled, -limit, limit))

    return Encoded(jax.tree.map(integers, messages), _to_unsigned(whole))

  def coordinates_cut(self, message: ArrayTree) -> Array:
    """Returns the number of coordinates of ONE message beyond `largest_value`; 0 if it is left out,
    since it holds NaN or infinity.

    >>> Encoding(max_clients=2, largest_value=1.0).coordinates_cut(jnp.array([0.5, -3.0])).item()
    1
    """
    stacked = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], message)
    cut = [jnp.sum(jnp.abs(leaf) > self.largest_value) for leaf in jax.tree.leaves(stacked)]
    return jnp.where(finite(stacked, jnp.ones(1, bool))[0], sum(cut), 0)

  def add(self, encoded: Encoded) -> Encoded:
    """Sums over the leading axis, modulo 2^32. Every order gives the same bits."""
    total = lambda leaf: jnp.sum(leaf, axis=0, dtype=jnp.uint32)
    return jax.tree.map(total, encoded)

  def mean(self, total: Encoded) -> Any:
    """Returns the weighted mean [*p] float32; 0 if no client counted.

    >>> encoding = Encoding(max_clients=2, largest_value=1.0, bits=8)
    >>> messages = jnp.array([[0.5, -1.0], [jnp.nan, 0.0]])
    >>> sent = encoding.encode(messages, jnp.ones(2), jnp.ones(2, bool))
    >>> encoding.mean(encoding.add(sent)).round(2).tolist()
    [0.5099999904632568, -1.0]
    """
    weight = self._centre(total.weight)
    factor = jnp.where(weight > 0, self.largest_value / jnp.maximum(weight, 1.0), 0.0)
    return jax.tree.map(lambda leaf: self._centre(leaf) * factor, total.values)

  def _centre(self, total: Array) -> Array:
    """Returns the residue modulo 2^bits that is in [-2^(bits - 1), 2^(bits - 1)), as a float32."""
    # Bits are shifted up, and down again as signed numbers: unused bits then copy the sign bit.
    unused = 32 - self.bits
    shifted = jax.lax.bitcast_convert_type(jnp.left_shift(total, unused), jnp.int32)
    return jnp.right_shift(shifted, unused).astype(jnp.float32)


# --- vectors for the protocols


def to_vector(encoded: Encoded, bits: int) -> np.ndarray:
  """Returns the integers of one client as [d + 1] uint32, or uint64 if a protocol has 64 `bits`.

  Negative integers wrap around in the PROTOCOL's modulus, so that its total is a function of the
  sum alone. Reduced by a smaller modulus, each negative integer would add that modulus to the
  total, which would then tell how many clients have negative integers.

  >>> to_vector(Encoded({"a": np.ones((1, 2), np.uint32)}, np.uint32(2**32 - 1)), 64)
  array([                   1,                    1, 18446744073709551615],
        dtype=uint64)
  """
  leaves = [np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(encoded)]
  # Integers are read as signed first, so that they keep their sign in a wider modulus.
  signed = np.concatenate(leaves).astype(np.uint32).view(np.int32)
  return signed.astype(np.int64).astype(dtype_of(bits))


def from_vector(vector: np.ndarray, like: Encoded) -> Encoded:
  """Inverts `to_vector`: turns [d + 1] integers modulo 2^32 or 2^64 into an `Encoded` like `like`.

  >>> like = Encoded({"a": np.zeros((1, 2), np.uint32)}, np.uint32(0))
  >>> from_vector(np.array([1, 2**40 + 3, 7], np.uint64), like).values["a"]
  array([[1, 3]], dtype=uint32)
  """
  low = (vector & vector.dtype.type(2**32 - 1)).astype(np.uint32)
  return trees.unflatten(low, like)
