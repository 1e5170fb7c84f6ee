"""SecAgg without its cryptography: the same total, refusals and costs, but NO secrecy.

It is for sweeps over many rounds. Vectors are added as they are. Formulas count the messages, mask
streams and key agreements that SecAgg would need. The protocol's name says that it is simulated.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping

import numpy as np

from dpjax.secure.sums import messages
from dpjax.secure.sums.interface import NO_DROPS, Cost, Drops, Summed
from dpjax.secure.sums.secagg import SecAgg, SecAggPlus, begun
from dpjax.secure.sums.secagg_client import record_bytes
from dpjax.secure.sums.terms import Terms, neighbours
from dpjax.secure.sums.vectors import Present
from dpjax.validate import UserError


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

  def sum(self, vectors: Mapping[int, np.ndarray], drops: Drops = NO_DROPS) -> Summed:
    """Returns the sum (`SumProtocol.sum`), with the protocol's drop-outs and refusals."""
    start = time.perf_counter()
    there, read, terms = begun(self.protocol, vectors, drops)
    there = going_on(terms, there)
    total = np.zeros(read.length, self.protocol.dtype)
    for who in there.uploading:
      total += read(who)
    # With a directory the threshold is checked and messages are longer. No signature is made.
    if self.protocol.signed:
      terms = dataclasses.replace(terms, directory=(bytes(32),) * len(terms.clients))
    cost = predicted(terms, there)._replace(seconds=time.perf_counter() - start)
    return Summed(total, there.uploading, cost)


def _near(terms: Terms, who: int, there: Collection[int]) -> int:
  """Returns how many neighbours of a client are in `there`."""
  if terms.degree is None:
    return len(there) - (who in there)
  return sum(other in there for other in neighbours(terms, who))


def going_on(terms: Terms, there: Present) -> Present:
  """Returns the clients left in each phase, if clients with too few neighbours refuse to go on.

  Raises:
    UserError: the protocol would refuse the sum.
  """
  named = frozenset(there.named)

  def go_on(wish: Collection[int], among: frozenset[int]) -> frozenset[int]:
    ready = (who for who in wish if who in among)
    left = frozenset(x for x in ready if _near(terms, x, among) + 1 >= terms.threshold)
    fewest = max(terms.min_survivors, 0 if terms.degree else terms.threshold)
    if len(left) < fewest:
      raise UserError(
        f"only {len(left)} clients would be left; the sum is refused",
        field="min_survivors",
        value=fewest,
      )
    return left

  sharing = go_on(there.sharing, named)
  uploading = go_on(there.uploading, sharing)
  unmasking = go_on(there.unmasking, uploading)
  for who in sharing:
    shares = _near(terms, who, unmasking) + (who in unmasking)
    # The server must rebuild the own mask of a client that uploaded. It must rebuild the mask key
    # of a client that is gone if a neighbour has added a mask for it.
    needed = who in uploading or _near(terms, who, uploading) > 0
    if needed and shares < terms.threshold:
      raise UserError(
        f"too few shares of client {who}; the sum is refused", field="revealed"
      )
  order = lambda ids: tuple(sorted(ids))
  return Present(there.named, order(sharing), order(uploading), order(unmasking))


def predicted(terms: Terms, there: Present) -> Cost:
  """Predicts the cost of a sum in which these clients answer (`going_on`); seconds are 0.

  If all n clients answer, there are n (k + 2) expansions, 2 n k agreements and n (b + O(k)) bytes.
  Here k is the degree (n - 1 without a graph), and b is the number of bytes of a vector.

  >>> terms = Terms(bytes(16), tuple(range(10)), 6, 6, length=1000)
  >>> cost = predicted(terms, Present(*[tuple(range(10))] * 4))
  >>> cost.expansions, cost.operations, cost.client_bytes
  (110, 180, 6459)
  """
  phases = [frozenset(ids) for ids in there]
  named, sharing, uploading, _ = phases
  sent = {who: _client_bytes(terms, who, phases) for who in named}
  gone = [_near(terms, who, uploading) for who in sharing - uploading]
  near_named = sum(_near(terms, who, named) for who in sharing)
  near_sharing = sum(_near(terms, who, sharing) for who in uploading)
  return Cost(
    client_bytes=max(sent.values()),
    server_bytes=sum(sent.values()),
    expansions=near_sharing + 2 * len(uploading) + sum(gone),
    operations=near_named + near_sharing + sum(gone),
    seconds=0.0,
  )


def _client_bytes(terms: Terms, who: int, phases: list[frozenset[int]]) -> int:
  """Returns the number of bytes that one client sends and receives in all phases."""
  named, sharing, uploading, unmasking = phases
  message_bytes = lambda kind, count: messages.size(count, record_bytes(terms, kind))
  total = message_bytes("keys", 1) + message_bytes("roster", _near(terms, who, named))
  if who in sharing:
    total += message_bytes("envelopes", _near(terms, who, named))
    total += message_bytes("forwarded", _near(terms, who, sharing))
  held = _near(terms, who, sharing) + 1
  if who in uploading:
    total += message_bytes("masked", 1) + message_bytes("survivors", held)
  if who in unmasking:
    total += message_bytes("revealed", held)
    if terms.directory:
      total += message_bytes("agreed", 1) + message_bytes("signatures", len(unmasking))
  return total
