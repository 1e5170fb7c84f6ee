"""Correlated randomness of two parties: made by a dealer, and delivered in parts.

A correlation has free parts, uniform in both parties, and bound parts, which follow from the
sums of the free ones (a product, for a Beaver triple). Each party shares a key with the dealer.
From its key party 0 expands all of its parts, and party 1 its free parts. The dealer knows both
keys, and sends party 1 its bound parts: for a triple a third of all its parts. The dealer hears
nothing but names, shapes and public numbers.

`CORRELATIONS` lists the correlations by name. Protocols in other files add entries to this table.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax.secure.mpc import ring64
from dpjax.secure.sums import primitives
from dpjax.validate import UserError

KEY_BYTES = 32


class Part(NamedTuple):
  """An array of which each party holds a share."""

  shape: tuple[int, ...]
  dtype: str = "uint64"
  xor: bool = False  # True: shares add up by XOR; False: modulo 2^64


class Correlated(NamedTuple):
  """A correlation: parts that are dealt together."""

  free: tuple[Part, ...]
  bound: tuple[Part, ...]
  solve: Callable[..., tuple[np.ndarray, ...]]  # values: free parts -> bound parts


def _triple(
  x: Sequence[int], y: Sequence[int], out: Sequence[int], product: Any
) -> Correlated:
  free = (Part(tuple(x)), Part(tuple(y)))
  return Correlated(free, (Part(tuple(out)),), lambda a, b: (product(a, b),))


def elementwise(shape: Sequence[int]) -> Correlated:
  """Returns the correlation of Beaver's triple (a, b, a * b) of arrays of one shape."""
  return _triple(shape, shape, shape, np.multiply)


def matrices(x: Sequence[int], y: Sequence[int]) -> Correlated:
  """Returns the correlation of Beaver's triple (a, b, a @ b) of matrices a [m, k] and b [k, n]."""
  return _triple(x, y, (x[0], y[1]), ring64.matmul)


def truncation(shape: Sequence[int], bits: int) -> Correlated:
  """Returns a truncation's correlation: r, (r mod 2^63) >> `bits`, and the highest bit of r."""
  part = Part(tuple(shape))
  low = np.uint64((1 << 63) - 1)

  def solve(r: np.ndarray) -> tuple[np.ndarray, ...]:
    return (r & low) >> np.uint64(bits), r >> np.uint64(63)

  return Correlated((part,), (part, part), solve)


class Unique:
  """Base class of objects whose masks are used once. Such objects cannot be copied or pickled."""

  def __reduce_ex__(self, protocol: Any) -> Any:
    raise UserError(
      "must not be copied or pickled: both would use the same "
      "masks, and two uses of one mask tell the difference of what they hide",
      field=type(self).__name__.lower(),
    )


CORRELATIONS: dict[str, Callable[..., Correlated]] = {
  "elementwise": elementwise,
  "matrices": matrices,
  "truncation": truncation,
}


def correlation_named(name: str, arguments: Sequence[Any]) -> Correlated:
  """Returns the correlation with this name; arguments are integers and lists of integers."""
  if name not in CORRELATIONS:
    raise UserError(
      f"must be one of {', '.join(CORRELATIONS)}", field="correlation", value=name
    )
  return CORRELATIONS[name](*arguments)


def fresh_key(seed: int | None, label: str) -> bytes:
  """Returns a key of 32 bytes from the operating system. With a seed it is the key of a
  SIMULATION, which anybody can repeat."""
  if seed is None:
    return secrets.token_bytes(KEY_BYTES)
  return hashlib.blake2b(
    f"dpjax simulation {seed} {label}".encode(), digest_size=32
  ).digest()


def expand(key: bytes, index: int, parts: Sequence[Part]) -> list[np.ndarray]:
  """Returns uniform arrays: the ChaCha20 keystream of a key and the nonce `index`, cut into
  `parts`.

  >>> first, again = (expand(bytes(32), 7, [Part((2,))])[0] for _ in range(2))
  >>> bool((first == again).all()), bool((expand(bytes(32), 8, [Part((2,))])[0] == first).any())
  (True, False)
  """
  lib = primitives.library()
  forms = [(part.shape, part.dtype) for part in parts]
  length = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in forms)
  # The library's nonce of 16 bytes begins with ChaCha20's block counter of 8 bytes. The index fills
  # the other 8.
  nonce = bytes(8) + index.to_bytes(8, "little")
  cipher = lib.ciphers.Cipher(lib.algorithms.ChaCha20(key, nonce), None)
  return arrays(cipher.encryptor().update(bytes(length)), forms)


def arrays(data: bytes, forms: Sequence[tuple[tuple[int, ...], Any]]) -> list[np.ndarray]:
  """Splits bytes into consecutive arrays, whose (shape, dtype) are in `forms`."""
  parts = []
  start = 0
  for shape, dtype in forms:
    count = math.prod(shape)
    parts.append(np.frombuffer(data, dtype, count, start).reshape(shape))
    start += parts[-1].nbytes
  return parts


def total(part: Part, mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
  return mine ^ theirs if part.xor else np.add(mine, theirs)


def bind(dealt: Correlated, keys: Sequence[bytes], index: int) -> list[np.ndarray]:
  """Returns party 1's shares of the bound parts, which the dealer computes from both keys."""
  first = expand(keys[0], index, (*dealt.free, *dealt.bound))
  second = expand(keys[1], index, dealt.free)
  values = [total(part, *pair) for part, *pair in zip(dealt.free, first, second)]
  theirs = zip(dealt.bound, dealt.solve(*values), first[len(dealt.free) :])
  return [
    value ^ known if part.xor else np.subtract(value, known)
    for part, value, known in theirs
  ]
