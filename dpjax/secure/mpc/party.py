"""A party of a two-party computation, with its randomness and its links.

A PROGRAM is a function `program(party, ...)` that each party runs on its own shares, without
access to the other party's. Shares are pytrees of uint64 arrays (`ring64`). Every protocol of
this package is such a program, and so is whatever is composed of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpjax import validate
from dpjax.secure.mpc import ring64
from dpjax.secure.mpc.correlations import Part, Unique, arrays, expand
from dpjax.secure.mpc.dealer import Supply
from dpjax.secure.mpc.links import Link
from dpjax.validate import UserError

TRUNCATIONS = ("masked", "local")


class Spent(NamedTuple):
  """Bytes, messages and correlations used by one party's part of a program."""

  bytes_sent: int  # to the other party
  bytes_received: int
  bytes_dealt: int  # from the dealer
  rounds: int  # messages of the other party that had to be waited for
  dealt: dict[str, int]  # number of correlations by name


class Party(Unique):
  """Party of a two-party computation, with its own randomness, its link and its supply.

  Args:
    number: 0 or 1.
    link: link to the other party.
    supply: supply of correlated randomness, from the dealer.
    key: 32 bytes that nobody else knows, from which this party draws the masks of its inputs.
    frac_bits: f, the fraction bits of the fixed point; both parties must use the same number.
    truncation: way in which products lose their f surplus bits (`products.truncate`); both parties
      must use the same way.
  """

  def __init__(
    self,
    number: int,
    link: Link,
    supply: Supply,
    key: bytes,
    *,
    frac_bits: int = ring64.FRAC_BITS,
    truncation: str = "masked",
  ):
    validate.integer_in(0, 1, number=number)
    validate.integer_in(0, ring64.MOST_FRAC_BITS, frac_bits=frac_bits)
    validate.one_of(TRUNCATIONS, truncation=truncation)
    self.number = number
    self.link = link
    self.supply = supply
    self.frac_bits = frac_bits
    self.truncation = truncation
    self._key = key
    self._masks = itertools.count(1)

  @property
  def spent(self) -> Spent:
    link = self.link
    supply = self.supply
    counts = link.bytes_sent, link.bytes_received, supply.bytes_received, link.rounds
    return Spent(*counts, dict(supply.dealt))

  def mask(self, shape: tuple[int, ...]) -> np.ndarray:
    """Returns [...] words of a keystream (ChaCha20) that only this party knows."""
    return expand(self._key, next(self._masks), [Part(shape)])[0]

  def open(self, *shares: np.ndarray) -> list[np.ndarray]:
    """Reveals the sums of shares to both parties, in one message each way, and returns them.

    Open only values that a mask hides, or that both parties may learn.

    Raises:
      UserError: an argument is no share: values, or words that JAX has cut to 32 bits.
    """
    words(shares)
    theirs = self._swap(shares)
    return [np.add(mine, other) for mine, other in zip(shares, theirs)]

  def open_bits(self, *shares: np.ndarray) -> list[np.ndarray]:
    """Reveals the XOR of both parties' shares, of any unsigned type, in one message each way, and
    returns it."""
    theirs = self._swap(shares)
    return [mine ^ other for mine, other in zip(shares, theirs)]

  def _swap(self, mine: Sequence[np.ndarray]) -> list[np.ndarray]:
    data = self.link.exchange(b"".join(array.tobytes() for array in mine))
    return arrays(data, [(array.shape, array.dtype) for array in mine])


def words(shares: Sequence[np.ndarray]) -> None:
  """Raises UserError unless all are uint64, as shares are."""
  for share in shares:
    if getattr(share, "dtype", None) != np.uint64:
      raise UserError(
        "must be uint64 words, not "
        f"{getattr(share, 'dtype', type(share).__name__)}; values become shares "
        "by `share` or `split`",
        field="shares",
      )
