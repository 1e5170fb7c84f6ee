"""Sum without any secrecy: the reference for the other protocols."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import numpy as np

from dpjax.secure.sums import messages
from dpjax.secure.sums.interface import NO_DROPS, Cost, Drops, Summed
from dpjax.secure.sums.vectors import Reader, SumSettings, enough, present


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainSum(SumSettings):
  """Each client sends its vector unchanged: NOTHING is hidden from the server.

  >>> vectors = {3: np.array([1, 2], np.uint32), 7: np.array([4, 2**32 - 1], np.uint32)}
  >>> PlainSum().sum(vectors).total
  array([5, 1], dtype=uint32)
  """

  @property
  def name(self) -> str:
    return "plain"

  def sum(self, vectors: Mapping[int, np.ndarray], drops: Drops = NO_DROPS) -> Summed:
    """Returns the sum over the clients who upload (`interface.SumProtocol.sum`)."""
    start = time.perf_counter()
    survivors = present(self, vectors, drops).uploading
    enough(self, len(survivors), "before upload")
    read = Reader(self, vectors, survivors)
    total = np.zeros(read.length, self.dtype)
    for who in survivors:
      total += read(who)
    each = messages.size(1, total.nbytes)
    cost = Cost(each, each * len(survivors), 0, 0, time.perf_counter() - start)
    return Summed(total, survivors, cost)
