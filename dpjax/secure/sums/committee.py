"""Sums for which each client sends one message: a committee adds shares of the vectors.

| phase    | who sends                        | what                                             |
| -------- | -------------------------------- | ------------------------------------------------ |
| `keys`   | each member                      | a public key, fresh for this sum                 |
| `shares` | each client                      | a share for each member, sealed to that member   |
| `sums`   | each member                      | the sum of the shares that it was sent           |

Members are clients, too; any other client sends ONLY its shares, which are those of
`galois_shares`. The sums of any `colluding` + `packed` members give the total, so the other members
may fall silent. A client that falls silent before its shares costs no more work: none of its shares
is in a sum, so nothing must be rebuilt.

**What is hidden.** Suppose that the server, `colluding` members and any clients who are no members
pool what they know. They learn the sum of the remaining clients' vectors, and nothing else. Proof.
The shares that they hold are uniform, whatever the vectors are. With these shares and the sum
given, the polynomial of all sums of shares is determined: it has `packed` + `colluding` known
values. So they could have computed everything else that they saw. The channels rest on X25519 and
ChaCha20-Poly1305.

**What is assumed.** All parties follow the protocol.

- A server that tells members different lists of clients learns other sums than the one sum, and
  nobody notices. It can also hand out keys of its own making, and then it reads every vector.
- A member may send a wrong sum. If more than `colluding` + `packed` members answer, their sums then
  do not fit together, and the total is refused. If just that many answer, the total is wrong, and
  nobody notices. The same holds for a client whose shares do not fit together.
- Who draws the session draws it once. Of several it could choose one with corrupt members.
- A client may send any vector. If a member cannot open a client's share, the member drops out.

Members are drawn from all clients by a hash of the session. `parameters` says how many members
are needed where a fraction of the clients is corrupt.

Source: the committee of DisAgg (2026, arXiv:2605.13708), known here by its abstract and by its
authors' published code. There the shares are elements of a prime field.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from dpjax import validate
from dpjax.secure.sums import committee_parties, dialogue, primitives
from dpjax.secure.sums.committee_parties import CommitteeTerms
from dpjax.secure.sums.galois_shares import MOST_POINTS, Sharing
from dpjax.secure.sums.interface import MOST_CLIENTS, Present, Reader, Summed, SumProtocol
from dpjax.secure.sums.terms import corrupt_and_staying, largest_part
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Committee(SumProtocol):
  """Each client sends each member of a committee a share, in one message. Members add the shares.

  If the server, `colluding` members and any clients who are no members pool what they know, they
  learn only the sum of the remaining vectors (honest-but-curious). `colluding` + `packed` members
  must stay until the end. A member that drops out, whenever that is, has sent its key and sends no
  sum.

  `Cost.expansions` counts the uniform vectors drawn, `Cost.operations` the key agreements.
  `Cost.client_bytes` is usually that of a member: other clients only send shares and receive keys.

  Args:
    num_members: number of members of the committee, drawn from the clients of each sum.
    colluding: largest number of members who may tell the server all they know; >= 1.
    packed: number of secrets in one polynomial. Each share is about that many times shorter than
      the vector, and `colluding` + `packed` members must stay.

  Raises:
    UserError: as `SumProtocol`, or a committee that could never rebuild a sum.

  >>> vectors = {who: np.array([who, 2**32 - 1], np.uint32) for who in range(4)}
  >>> from dpjax.secure.sums import Drops
  >>> drops = Drops(before_upload=frozenset({1}))
  >>> summed = Committee(num_members=4, colluding=1).sum(vectors, drops)
  >>> summed.total, summed.survivors
  (array([         5, 4294967293], dtype=uint32), (0, 2, 3))
  """

  num_members: int = 5
  colluding: int = 2
  packed: int = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    Sharing(num_members=self.num_members, colluding=self.colluding, packed=self.packed)

  _name: ClassVar[str] = "committee"
  hides: ClassVar[str] = (
    "each vector from the server and colluding members of the committee"
  )

  def terms(self, clients: Sequence[int], length: int) -> CommitteeTerms:
    """Returns the terms of a new sum with a random session, which determines the members."""
    return CommitteeTerms(
      session=secrets.token_bytes(16),
      clients=tuple(clients),
      num_members=self.num_members,
      colluding=self.colluding,
      packed=self.packed,
      min_survivors=self.min_survivors,
      length=length,
      bits=self.bits,
    )

  @property
  def min_clients(self) -> int:
    # The members are clients.
    return max(self.min_survivors, self.num_members)

  def check_clients(self, num_clients: int) -> None:
    self.terms(range(num_clients), length=1)

  def most_silent(self, num_clients: int) -> int:
    # Members are drawn, so all who are silent may be members.
    spare = self.num_members - self.colluding - self.packed
    return min(super().most_silent(num_clients), spare)

  def check_library(self) -> None:
    primitives.library()

  def _add(self, there: Present, read: Reader) -> Summed:
    return run(self.terms(there.named, read.length), there, read)


def run(terms: CommitteeTerms, there: Present, read: Callable[[int], np.ndarray]) -> Summed:
  """Runs one sum on given terms, with all parties in this process (`dialogue.run`)."""
  clients = {who: committee_parties.start(terms, who) for who in terms.clients}
  return dialogue.run(committee_parties.start_server(terms), clients, there, read)


def parameters(
  num_clients: int,
  *,
  corrupt: float,
  dropout: float,
  packed: int = 1,
  security_bits: float = 40,
  failure_bits: float = 20,
) -> tuple[int, int]:
  """Returns (num_members, colluding) of the smallest committee that meets two bounds.

  Members are drawn at random. With probability at most 2^-security_bits more than `colluding` of
  them are corrupt. With probability at most 2^-failure_bits fewer than `colluding` + `packed` stay.

  Args:
    num_clients: number of clients from whom the members are drawn.
    corrupt: largest fraction of the clients that tell the server all they know.
    dropout: largest fraction of the clients that falls silent.
    packed: number of secrets in one polynomial, as in `Committee`.

  Raises:
    UserError: no committee of these clients meets both bounds.

  >>> parameters(1000, corrupt=0.05, dropout=0.1)
  (25, 13)
  """
  validate.integer_in(2, MOST_CLIENTS, num_clients=num_clients)
  validate.share(corrupt=corrupt, dropout=dropout)
  validate.integer_at_least(1, packed=packed)
  validate.positive(security_bits=security_bits, failure_bits=failure_bits)
  corrupt_clients = largest_part(corrupt, num_clients)
  staying_clients = num_clients - largest_part(dropout, num_clients)
  largest = min(num_clients, MOST_POINTS - packed)
  for num_members in range(packed + 1, largest + 1):
    corrupt_above, staying_below = corrupt_and_staying(
      num_clients, corrupt_clients, staying_clients, num_members
    )
    safe = np.flatnonzero(corrupt_above <= 2.0**-security_bits)
    colluding = max(1, int(safe[0]))
    needed = colluding + packed
    if needed <= num_members and staying_below[needed] <= 2.0**-failure_bits:
      return num_members, colluding
  raise UserError(
    f"no committee of {num_clients} clients survives it together with dropout={dropout:g}",
    field="corrupt",
    value=corrupt,
  )
