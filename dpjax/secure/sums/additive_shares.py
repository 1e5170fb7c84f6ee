"""Additive secret sharing: a vector is the sum of uniform vectors. As long as one of them is
missing, the others reveal nothing.

| protocol          | who adds up              | hides from                                |
| ----------------- | ------------------------ | ----------------------------------------- |
| `AdditiveSharing` | the clients, n of n      | the server and all but two of the clients |
| `AdditiveServers` | k servers, k of k        | any k - 1 of the servers, and clients     |

Both are information-theoretically secure. They only assume good randomness (here the operating
system's) and private channels between the parties, which this file does not provide. All parties
are honest-but-curious: a party that adds something else changes the sum, and nobody notices.

Among clients the traffic is n (n - 1) vectors. If a client falls silent after sharing, the shares
that it holds are missing and the sum is refused. SecAgg avoids both problems. With servers, each
client sends k vectors and may leave, but at least one server must not collude with the others. Prio
and SecureML build on such servers.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from dpjax import validate
from dpjax.secure.sums import messages
from dpjax.secure.sums.interface import Cost, Present, Reader, Summed, SumProtocol
from dpjax.validate import UserError

_MOST_SERVERS = 64


def split(
  vector: np.ndarray, count: int, entropy: Callable[[int], bytes] = secrets.token_bytes
) -> list[np.ndarray]:
  """Returns `count` vectors whose sum is `vector`; any count - 1 of them are uniform.

  Args:
    vector: [d] uint32 or uint64; sums are modulo 2^32 or 2^64.
    entropy: `entropy(n)` returns n random bytes. Use another source than the operating
      system only in tests.

  Returns:
    `count` vectors [d] of the same type.

  >>> shares = split(np.array([5, 6], np.uint32), 3)
  >>> sum(shares[1:], shares[0])
  array([5, 6], dtype=uint32)
  """
  drawn = [np.frombuffer(entropy(vector.nbytes), vector.dtype) for _ in range(count - 1)]
  # Integers wrap around, and modulo 2^bits a number minus uniform numbers is uniform.
  last = vector.copy()
  for share in drawn:
    last -= share
  return [*drawn, last]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdditiveSharing(SumProtocol):
  """Each client sends each other client a share, adds what it receives, and sends the sum.

  The server and any n - 2 clients together learn the sum of the other two vectors, and nothing
  else about these (information-theoretic; honest-but-curious). If a client falls silent between
  sharing and upload, the sum is refused.

  `Cost.expansions` counts the uniform vectors drawn, n (n - 1).
  """

  _name: ClassVar[str] = "additive_sharing"
  survives_dropouts: ClassVar[bool] = False
  hides: ClassVar[str] = "each vector from the server and all but two of the clients"

  def _add(self, there: Present, read: Reader) -> Summed:
    parties = there.uploading
    silent = sorted({*there.sharing} - {*parties})
    if silent:
      raise UserError(
        f"client {silent[0]} fell silent after sharing, and every sum lacks what "
        "it holds; the sum is refused and nothing was revealed (secagg goes on)",
        field="additive_sharing",
      )
    held = {who: np.zeros(read.length, self.dtype) for who in parties}
    # Every party holds one share of each vector, and a single share reveals nothing.
    for who in parties:
      for party, share in zip(parties, split(read(who), len(parties))):
        held[party] += share
    total = np.zeros(read.length, self.dtype)
    # Parties reveal sums of shares, and never the share of one client.
    for who in parties:
      total += held[who]
    each = messages.size(1, total.nbytes)
    others = len(parties) - 1
    cost = Cost(
      client_bytes=each * (2 * others + 1),
      server_bytes=each * len(parties),
      expansions=len(parties) * others,
    )
    return Summed(total, parties, cost)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdditiveServers(SumProtocol):
  """Each client sends every server a share. Each server adds its shares, and then the servers'
  sums are added.

  Any num_servers - 1 servers, with any clients, learn only the sum of the honest clients' vectors,
  and only once it is revealed (information-theoretic; honest-but-curious). All servers together
  can read every vector. A client counts once all servers have its shares.

  `Cost.server_bytes` counts all servers together, with what they send each other.
  """

  num_servers: int = 2

  def __post_init__(self) -> None:
    super().__post_init__()
    validate.integer_in(2, _MOST_SERVERS, num_servers=self.num_servers)

  _name: ClassVar[str] = "additive_servers"
  hides: ClassVar[str] = "each vector from all servers but one"

  def _add(self, there: Present, read: Reader) -> Summed:
    survivors = there.uploading
    sums = [np.zeros(read.length, self.dtype) for _ in range(self.num_servers)]
    # Every server holds one share of each vector, and a single share reveals nothing.
    for who in survivors:
      for held, share in zip(sums, split(read(who), self.num_servers)):
        held += share
    # The servers exchange sums of shares, and never the share of one client.
    total = sums[0]
    for held in sums[1:]:
      total += held
    each = messages.size(1, total.nbytes)
    servers = self.num_servers
    cost = Cost(
      client_bytes=each * servers,
      server_bytes=each * (servers * len(survivors) + 2 * (servers - 1)),
      expansions=(servers - 1) * len(survivors),
    )
    return Summed(total, survivors, cost)
