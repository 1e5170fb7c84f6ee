"""What goes into a secure sum beside the vectors, and what comes out."""

from __future__ import annotations

from typing import NamedTuple

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
