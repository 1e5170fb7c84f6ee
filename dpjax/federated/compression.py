"""Compression: messages in fewer bits, with the upload counted exactly.

A `Compressor` turns a message into codes (integer arrays and a few floats) and back. `bits`
counts the codes as they would be packed; tests check that every code fits its width. Codes
carry no random numbers: a shared rotation is drawn from a key that both sides know.

| compressor    | bits for one leaf of d numbers               | biased | source                |
| ------------- | -------------------------------------------- | ------ | --------------------- |
| `quantize(b)` | b d + 64                                     | no     | Alistarh et al. 2017  |
| `top_k(r)`    | k (32 + ceil log2 d), k = max(1, floor(r d)) | yes    | Stich et al. 2018     |
| `rotated(b)`  | b D + 64, D: smallest power of two >= d      | no     | Suresh et al. 2017    |
| `drive()`     | D + 32                                       | yes    | Vargaftik et al. 2021 |

`error_feedback` corrects a bias over the rounds, such as that of `top_k`.

Compression gives no privacy. `dp_mean` clips the decoded messages, so its bound also holds where
rounding has raised a norm. Use `compressed(client_noise(...), ...)`: the noisy message is coded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import trees, validate
from dpjax.federated.client import ClientAlgorithm
from dpjax.key_uses import KeyUse, key_for
from dpjax.types import Array, ArrayTree
from dpjax.validate import UserError

_MEMORY = {"own", "left_out"}


class Compressor(NamedTuple):
  """Two pure functions on one message, encode and decode, and the size of the codes."""

  encode: Callable[..., Any]  # (key, message) -> codes, a list with one entry per leaf
  decode: Callable[..., Any]  # (key, codes, a message's shapes) -> message
  bits: Callable[[Any], int]  # (a message's shapes) -> bits of the codes, known beforehand


class Levels(NamedTuple):
  """Numbers on a grid of equally spaced levels from `low` to `high`."""

  index: Array  # integers in [0, 2^bits)
  low: Array  # []
  high: Array  # []


class Entries(NamedTuple):
  """The k numbers of a leaf that are sent, with their places."""

  value: Array  # [k]
  place: Array  # [k] int32


class Signs(NamedTuple):
  """The sign of each number of a leaf, and one absolute value for all numbers."""

  positive: Array  # [D] bool
  scale: Array  # []


def _by_leaf(encode: Callable, decode: Callable, bits: Callable) -> Compressor:
  """Makes a compressor from functions of one flat leaf [d]. Each leaf gets another key."""

  def encode_all(key: Array, message: Any) -> list[Any]:
    leaves = map(trees.at_least_float32, map(jnp.asarray, jax.tree.leaves(message)))
    return [encode(jax.random.fold_in(key, i), x.ravel()) for i, x in enumerate(leaves)]

  def decode_all(key: Array, codes: Any, like: Any) -> Any:
    leaves, treedef = jax.tree.flatten(like)
    flat = [
      decode(jax.random.fold_in(key, i), code, math.prod(leaf.shape))
      for i, (code, leaf) in enumerate(zip(codes, leaves))
    ]
    shaped = [x.reshape(leaf.shape) for x, leaf in zip(flat, leaves)]
    return jax.tree.unflatten(treedef, shaped)

  def bits_of_all(like: Any) -> int:
    return sum(bits(math.prod(np.shape(leaf))) for leaf in jax.tree.leaves(like))

  return Compressor(encode_all, decode_all, bits_of_all)


def _round_to_levels(key: Array, x: Array, bits: int) -> Levels:
  """Rounds each number to a level at random, so that the expected result is the number."""
  low = jnp.min(x)
  high = jnp.max(x)
  # A leaf of equal numbers has no width, and 0 / 0 would be NaN.
  width = jnp.where(high > low, high - low, 1.0)
  exact = (x - low) / width * (2**bits - 1)
  index = jnp.floor(exact + jax.random.uniform(key, x.shape))
  # Rounding may reach one level above the last, which has no code.
  return Levels(jnp.clip(index, 0, 2**bits - 1).astype(jnp.int32), low, high)


def _from_levels(code: Levels, bits: int) -> Array:
  return code.low + code.index * ((code.high - code.low) / (2**bits - 1))


def quantize(bits: int = 8) -> Compressor:
  """Rounds each leaf to 2^bits equally spaced levels from its smallest to its largest number.

  >>> compressor, x = quantize(1), {"w": jnp.array([0.0, 1.0, 1.0])}
  >>> codes = compressor.encode(jax.random.key(0), x)
  >>> compressor.decode(jax.random.key(0), codes, x)["w"], compressor.bits(x)
  (Array([0., 1., 1.], dtype=float32), 67)
  """
  validate.integer_in(1, 16, bits=bits)
  return _by_leaf(
    lambda key, x: _round_to_levels(key, x, bits),
    lambda key, code, size: _from_levels(code, bits),
    lambda size: bits * size + 64,
  )


def top_k(share: float) -> Compressor:
  """Keeps the largest entries of each leaf in absolute value, as (value, place).

  Args:
    share: share of the entries of a leaf, in (0, 1]; at least one is sent.

  >>> compressor, x = top_k(0.3), jnp.array([0.1, -5.0, 2.0, 0.0])
  >>> codes = compressor.encode(jax.random.key(0), x)
  >>> compressor.decode(jax.random.key(0), codes, x), compressor.bits(x)  # 1 * (32 + 2)
  (Array([ 0., -5.,  0.,  0.], dtype=float32), 34)
  """
  validate.probability(share=share)
  kept = lambda size: max(1, int(share * size))

  def encode(key: Array, x: Array) -> Entries:
    del key
    _, places = jax.lax.top_k(jnp.abs(x), kept(x.size))
    return Entries(x[places], places)

  def decode(key: Array, code: Entries, size: int) -> Array:
    del key
    return jnp.zeros(size, code.value.dtype).at[code.place].set(code.value)

  place_bits = lambda size: max(1, math.ceil(math.log2(size))) if size > 1 else 0
  return _by_leaf(encode, decode, lambda size: kept(size) * (32 + place_bits(size)))


def hadamard(x: Array) -> Array:
  """Returns the orthonormal Walsh-Hadamard transform of x [D], where D is a power of two. The
  transform is its own inverse.

  >>> hadamard(jnp.array([1.0, 0.0, 0.0, 0.0]))
  Array([0.5, 0.5, 0.5, 0.5], dtype=float32)
  """
  size = x.shape[0]
  # log2(D) stages of D sums and differences replace a product with D^2 multiplications.
  for stride in (1 << i for i in range(size.bit_length() - 1)):
    pairs = x.reshape(-1, 2, stride)
    x = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).ravel()
  return x / math.sqrt(size)


def _padded_size(size: int) -> int:
  return 1 << max(0, (size - 1).bit_length())


def _random_signs(key: Array, size: int) -> Array:
  return jax.random.rademacher(key, (size,), jnp.float32)


def rotate(key: Array, x: Array) -> Array:
  """Returns H S x [D]: x, zero-padded to a power of two D, with random signs S and `hadamard` H.

  The rotation H S makes the entries similar in size.
  """
  size = _padded_size(x.size)
  return hadamard(_random_signs(key, size) * jnp.pad(x, (0, size - x.size)))


def unrotate(key: Array, y: Array, size: int) -> Array:
  """Undoes `rotate` on y [D], and returns the first `size` numbers: [size].

  >>> x = jnp.arange(3.0)
  >>> bool(jnp.allclose(unrotate(jax.random.key(0), rotate(jax.random.key(0), x), 3), x,
  ...                   atol=1e-6))
  True
  """
  return (hadamard(y) * _random_signs(key, y.shape[0]))[:size]


def rotated(bits: int = 4) -> Compressor:
  """`quantize` after a random rotation, so that a few large entries do not widen the grid."""
  validate.integer_in(1, 16, bits=bits)

  def encode(key: Array, x: Array) -> Levels:
    # Both sides know the rotation. For unbiased results the rounding must not depend on the
    # rotation.
    rotation, rounding = jax.random.split(key)
    return _round_to_levels(rounding, rotate(rotation, x), bits)

  def decode(key: Array, code: Levels, size: int) -> Array:
    rotation, _ = jax.random.split(key)
    return unrotate(rotation, _from_levels(code, bits), size)

  return _by_leaf(encode, decode, lambda size: bits * _padded_size(size) + 64)


def drive() -> Compressor:
  """DRIVE, one bit per coordinate: the signs of the rotated leaf R x, scaled by ||R x||_1 / D.

  This scale gives the smallest squared error (Vargaftik et al. 2021, section 4). The error, as a
  mean over rotations, is at most half of ||x||^2. For large D it is about 1 - 2 / pi = 0.36 of it,
  unless a few entries dominate x.
  """

  def encode(key: Array, x: Array) -> Signs:
    y = rotate(key, x)
    return Signs(y >= 0, jnp.mean(jnp.abs(y)))

  def decode(key: Array, code: Signs, size: int) -> Array:
    return unrotate(key, jnp.where(code.positive, code.scale, -code.scale), size)

  return _by_leaf(encode, decode, lambda size: _padded_size(size) + 32)


def compressed(
  client: ClientAlgorithm, compressor: Compressor, *, error_feedback: bool = False
) -> ClientAlgorithm:
  """Wraps a client so that its message is coded, and decoded as the server would decode it.

  Args:
    error_feedback: whether the client keeps what the codes left out, and adds it to its next
      message (Karimireddy et al. 2019). The client's state is then {"own": ..., "left_out": a
      message}: initialise it with `error_memory`. This state never leaves the client. What was
      left out is sent as part of a later message, within the clip norm of the later message.

  Raises:
    UserError: `error_feedback` without this client state (raised while tracing).
  """

  def init(received: Any, memory: Any, num_examples: Array, key: Array) -> Any:
    if error_feedback and not (isinstance(memory, dict) and set(memory) == _MEMORY):
      raise UserError(
        "needs memory=lambda params: error_memory(own, message)",
        field="error_feedback",
        value=True,
      )
    inner = memory["own"] if error_feedback else memory
    local = client.init(received, inner, num_examples, key)
    return (local, memory["left_out"]) if error_feedback else local

  def step(received: Any, carry: Any, examples: Any, mask: Array) -> Any:
    if not error_feedback:
      return client.step(received, carry, examples, mask)
    return client.step(received, carry[0], examples, mask), carry[1]

  def finish(received: Any, carry: Any) -> Any:
    local, left_out = carry if error_feedback else (carry, None)
    sent, memory, info = client.finish(received, local)
    wanted = trees.add(sent.message, left_out) if error_feedback else sent.message
    key = key_for(KeyUse.CLIENT_ROUNDING, local.key)
    decoded = compressor.decode(key, compressor.encode(key, wanted), wanted)
    # A client of weight 0 must send exactly 0, also if it still holds what earlier codes left out.
    counts = sent.weight > 0
    decoded = jax.tree.map(lambda leaf: jnp.where(counts, leaf, 0), decoded)
    if error_feedback:
      memory = {"own": memory, "left_out": trees.add(wanted, trees.scale(decoded, -1.0))}
    info = info._replace(upload_bits=jnp.float32(compressor.bits(wanted)))
    return sent._replace(message=decoded), memory, info

  # The codes of two messages may be further apart than the messages.
  apart = math.inf if client.apart_from_empty else 0.0
  change = client._replace if error_feedback else client.wrap
  return change(init=init, step=step, finish=finish, apart_from_empty=apart)


def error_memory(inner: ArrayTree, message: ArrayTree) -> Any:
  """Returns the first client state under `compressed(..., error_feedback=True)`: the wrapped
  client's state `inner`, and zeros in the shapes of `message`."""
  return {"own": inner, "left_out": trees.zeros(message)}
