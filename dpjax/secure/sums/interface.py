"""Interface of all secure sums.

Integer vectors go in; their sum modulo 2^bits and its cost come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np


class Cost(NamedTuple):
  """Cost of one sum; bytes are those of the serialised messages."""

  client_bytes: int  # largest number of bytes that one client sent and received together
  server_bytes: int  # all bytes that the server sent and received
  expansions: int = 0  # streams of masks expanded, by all parties
  operations: int = 0  # key agreements, encryptions and decryptions, by all parties
  seconds: float = 0.0


class Drops(NamedTuple):
  """Clients that drop out, by phase."""

  before_sharing: frozenset[int] = frozenset()  # after they have sent their keys, if any
  before_upload: frozenset[int] = frozenset()  # after they have shared their keys
  before_unmasking: frozenset[int] = frozenset()  # their vectors count


class Summed(NamedTuple):
  """Total, survivors and cost of one sum."""

  total: np.ndarray  # [d] uint32 or uint64: sum of the survivors' vectors modulo 2^bits
  survivors: tuple[int, ...]  # clients whose vectors are in the total, ascending
  cost: Cost


NO_DROPS = Drops()


class SumProtocol(Protocol):
  """A protocol that adds the vectors of named clients. Each class says what it hides."""

  @property
  def name(self) -> str: ...

  @property
  def bits(self) -> int: ...  # bits of the modulus: 32 or 64

  @property
  def min_survivors(self) -> int: ...  # with fewer clients the sum is refused

  def check_library(self) -> None:
    """Raises UserError if a library that the protocol needs is not installed."""
    ...

  def sum(self, vectors: Mapping[int, np.ndarray], drops: Drops = NO_DROPS) -> Summed:
    """Returns the sum over the clients of `vectors` that do not drop out before upload.

    Args:
      vectors: [d] unsigned integers below 2^bits, by client id. A vector is looked up at most
        once, in ascending order of ids, and is not kept. So a mapping may compute each vector when
        it is read.
      drops: clients that fall silent, by phase.

    Raises:
      UserError: fewer than `min_survivors` clients are left, there are fewer than two clients at
        all, or vectors have different lengths or types. Nothing beyond the sum is then revealed.
    """
    ...
