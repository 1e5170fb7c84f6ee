"""SecAgg without its cryptography: the same total, refusals and costs, but NO secrecy.

It is for sweeps over many rounds. Vectors are added as they are. Formulas count the messages, mask
streams and key agreements that SecAgg would need. The protocol's name says that it is simulated.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

import numpy as np

from dpjax.secure.sums.interface import NO_DROPS, Drops, Summed
from dpjax.secure.sums.secagg import SecAgg, SecAggPlus
from dpjax.secure.sums.secagg_costs import going_on, predicted
from dpjax.secure.sums.vectors import admitted


@dataclasses.dataclass(frozen=True)
class Simulated:
  """Total and cost of `protocol` in the time of a plain sum; the server sees every vector.

  `Cost` equals that of the protocol for equal terms, except for the seconds, which are those of
  the simulation.

  >>> protocol = Simulated(SecAgg(min_survivors=2))
  >>> protocol.name
  'simulated secagg'
  >>> protocol.sum({who: np.full(2, who, np.uint32) for who in range(3)}).total
  array([3, 3], dtype=uint32)
  """

  protocol: SecAgg | SecAggPlus

  @property
  def name(self) -> str:
    return f"simulated {self.protocol.name}"

  @property
  def bits(self) -> int:
    return self.protocol.bits

  @property
  def min_survivors(self) -> int:
    return self.protocol.min_survivors

  def check_library(self) -> None:
    """Does nothing: a simulation needs no library."""

  def sum(self, vectors: Mapping[int, np.ndarray], drops: Drops = NO_DROPS) -> Summed:
    """Returns the sum (`SumProtocol.sum`), with the protocol's drop-outs and refusals."""
    start = time.perf_counter()
    there, read = admitted(self.protocol, vectors, drops)
    terms = self.protocol.terms(there.named, read.length)
    there = going_on(terms, there)
    total = np.zeros(read.length, self.protocol.dtype)
    for who in there.uploading:
      total += read(who)
    # With a directory the threshold is checked and messages are longer. No signature is made.
    if self.protocol.signed:
      terms = dataclasses.replace(terms, directory=(bytes(32),) * len(terms.clients))
    cost = predicted(terms, there)._replace(seconds=time.perf_counter() - start)
    return Summed(total, there.uploading, cost)
