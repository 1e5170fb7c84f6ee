"""Sum without any secrecy: the reference for the other protocols."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dpjax.secure.sums import messages
from dpjax.secure.sums.interface import Cost, Present, Reader, Summed, SumProtocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainSum(SumProtocol):
  """Each client sends its vector unchanged: NOTHING is hidden from the server.

  >>> vectors = {3: np.array([1, 2], np.uint32), 7: np.array([4, 2**32 - 1], np.uint32)}
  >>> PlainSum().sum(vectors).total
  array([5, 1], dtype=uint32)
  """

  _name: ClassVar[str] = "plain"
  hides: ClassVar[str] = "nothing: the server sees every vector"

  @property
  def is_simulated(self) -> bool:
    return True

  def _add(self, there: Present, read: Reader) -> Summed:
    total = np.zeros(read.length, self.dtype)
    for who in there.uploading:
      total += read(who)
    each = messages.size(1, total.nbytes)
    cost = Cost(each, each * len(there.uploading))
    return Summed(total, there.uploading, cost)
