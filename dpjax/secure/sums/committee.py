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
- A client may send any vector. If a member cannot open a client's share, the member drops out (over
  sockets), or the sum is refused and nothing is revealed (in one process).

Members are drawn from all clients by a hash of the session. `parameters` says how many members
are needed where a fraction of the clients is corrupt.

Source: the committee of DisAgg (2026, arXiv:2605.13708), known here by its abstract and by its
authors' published code. There the shares are elements of a prime field.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dpjax import validate
from dpjax.secure.sums import galois_shares, messages, primitives
from dpjax.secure.sums.interface import NO_DROPS, Cost, Drops, Summed
from dpjax.secure.sums.messages import SERVER
from dpjax.secure.sums.terms import corrupt_and_staying, largest_part
from dpjax.secure.sums.vectors import (
  LAST_ID,
  MOST_CLIENTS,
  MOST_ENTRIES,
  Present,
  Reader,
  SumSettings,
  check_client,
  enough,
  present,
)
from dpjax.validate import UserError

KEY_BYTES = 32
# Bytes that sealing adds to a share: the sender's public key, and the cipher's tag.
SEALED_EXTRA = KEY_BYTES + 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Committee(SumSettings):
  """Each client sends each member of a committee a share, in one message. Members add the shares.

  If the server, `colluding` members and any clients who are no members pool what they know, they
  learn only the sum of the remaining vectors (honest-but-curious). `colluding` + `packed` members
  must stay until the end.

  `Cost.expansions` counts the uniform vectors drawn, `Cost.operations` the key agreements.
  `Cost.client_bytes` is usually that of a member: other clients only send shares and receive keys.

  Args:
    num_members: number of members of the committee, drawn from the clients of each sum.
    colluding: largest number of members who may tell the server all they know; >= 1.
    packed: number of secrets in one polynomial. Each share is about that many times shorter than
      the vector, and `colluding` + `packed` members must stay.

  Raises:
    UserError: as `SumSettings`, or a committee that could never rebuild a sum.

  >>> vectors = {who: np.array([who, 2**32 - 1], np.uint32) for who in range(4)}
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
    check_committee(self.num_members, self.colluding, self.packed)

  @property
  def name(self) -> str:
    return "committee"

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

  def sum(self, vectors: Mapping[int, np.ndarray], drops: Drops = NO_DROPS) -> Summed:
    """Returns the sum over the clients who upload (`interface.SumProtocol.sum`).

    A member that drops out has sent its public key. It sends no sum, whenever it drops out.

    Raises:
      UserError: as `SumProtocol.sum`, too few members are left, or the extra `secure` is missing.
    """
    start = time.perf_counter()
    # A missing extra is reported before any vector is read.
    primitives.library()
    there = present(self, vectors, drops)
    enough(self, len(there.uploading), "before upload")
    read = Reader(self, vectors, there.uploading)
    summed = run(self.terms(there.named, read.length), there, read)
    cost = summed.cost._replace(seconds=time.perf_counter() - start)
    return summed._replace(cost=cost)


def check_committee(num_members: int, colluding: int, packed: int) -> None:
  """Raises UserError for a committee that could never rebuild a sum, or that hides nothing."""
  # Two members need a point each, besides the points of the `packed` secrets.
  validate.integer_in(1, galois_shares.MOST_POINTS - 2, packed=packed)
  validate.integer_in(2, galois_shares.MOST_POINTS - packed, num_members=num_members)
  validate.integer_in(1, num_members - 1, colluding=colluding)
  if colluding + packed > num_members:
    raise UserError(
      f"must be >= colluding={colluding} + packed={packed}, whose sums give the total",
      field="num_members",
      value=num_members,
    )


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
  largest = min(num_clients, galois_shares.MOST_POINTS - packed)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitteeTerms:
  """The public terms of one sum, which all parties know in advance.

  Args:
    session: 16 bytes that no other sum has, so that messages of another sum are refused.
    clients: ids of the clients, ascending.
    num_members, colluding, packed: see `Committee`.
    min_survivors: fewest vectors in a sum.
    length: d, the number of entries of each vector.
    bits: bits of the modulus.
  """

  session: bytes
  clients: tuple[int, ...]
  num_members: int
  colluding: int
  packed: int
  min_survivors: int
  length: int
  bits: int = 32

  def __post_init__(self) -> None:
    SumSettings(bits=self.bits, min_survivors=self.min_survivors)
    check_committee(self.num_members, self.colluding, self.packed)
    validate.integer_in(1, MOST_ENTRIES, length=self.length)
    if not isinstance(self.session, bytes) or len(self.session) != 16:
      raise UserError("must be 16 bytes", field="session", value=self.session)
    for who in self.clients:
      validate.integer_in(0, LAST_ID, client=who)
    # Ids become plain ints: shares are bound to the text of an id, and NumPy writes another text.
    object.__setattr__(self, "clients", tuple(int(who) for who in self.clients))
    if list(self.clients) != sorted({*self.clients}):
      raise UserError("must be ids in ascending order, each once", field="clients")
    validate.integer_in(2, MOST_CLIENTS, num_clients=len(self.clients))
    if self.min_survivors > len(self.clients):
      raise UserError(
        f"must be <= the {len(self.clients)} clients of a sum",
        field="min_survivors",
        value=self.min_survivors,
      )
    if self.num_members > len(self.clients):
      raise UserError(
        f"must be <= the {len(self.clients)} clients of a sum, who are its members",
        field="num_members",
        value=self.num_members,
      )

  @property
  def dtype(self) -> np.dtype:
    """Type of the words of shares and of the total."""
    return np.dtype(f"<u{self.bits // 8}")

  @property
  def members(self) -> tuple[int, ...]:
    """Returns the members, in the order of their shares."""
    # A hash of session and id ranks the clients, so a random session draws random members.
    rank = {
      who: hashlib.sha256(b"member" + self.session + who.to_bytes(4, "little")).digest()
      for who in self.clients
    }
    return tuple(sorted(self.clients, key=rank.__getitem__)[: self.num_members])

  @property
  def share_bytes(self) -> int:
    """Number of bytes of one share of a vector, and of a sum of shares."""
    words = galois_shares.share_words(
      self.length, num_shares=self.num_members, packed=self.packed
    )
    return words * self.bits // 8

  def context(self, client: int, member: int) -> bytes:
    """Returns the bytes that a sealed share is bound to: this sum, its client and its member."""
    ends = repr((client, member)).encode()
    return b"|".join([b"dpjax committee sum 1", self.session, ends])


def record_bytes(terms: CommitteeTerms, kind: str) -> int:
  """Returns the number of bytes of one record in a message of this kind."""
  return {
    "keys": KEY_BYTES,
    "roster": KEY_BYTES,
    "shares": terms.share_bytes + SEALED_EXTRA,
    "forwarded": terms.share_bytes + SEALED_EXTRA,
    "survivors": 1,
    "sums": terms.share_bytes,
  }[kind]


def _read(terms: CommitteeTerms, kind: str, data: bytes, sender: int) -> messages.Message:
  """Parses a message, and refuses one of another kind or sender."""
  message = messages.read(data, kind, terms.session, record_bytes(terms, kind))
  if message.sender != sender:
    raise UserError(
      f"{kind}: is signed {messages.name(message.sender)}, and came from {messages.name(sender)}"
    )
  return message


# --- a client


def shares_for(
  terms: CommitteeTerms,
  me: int,
  roster: bytes,
  vector: np.ndarray,
  *,
  entropy: Callable[[int], bytes] = secrets.token_bytes,
) -> bytes:
  """Returns the one message of a client: a sealed share for each member that the roster names.

  Args:
    roster: the server's message with the members' keys.
    vector: [d] unsigned integers below 2^bits.
    entropy: `entropy(n)` returns n random bytes. Use another source than the operating
      system only in tests: anyone who knows the bytes sees the vector.

  Raises:
    UserError: `me` is no client of this sum, the roster is wrong in any way, or the vector has
      another length or type.
  """
  me = int(me)
  check_client(me, terms.clients)
  if vector.shape != (terms.length,) or vector.dtype != terms.dtype:
    raise UserError(
      f"must be {terms.length} entries of {terms.dtype}, is {vector.dtype} of shape "
      f"{vector.shape}",
      field=f"vectors[{me}]",
    )
  keys = _read(terms, "roster", roster, SERVER).records
  members = terms.members
  if not {*keys} <= {*members} or len(keys) < terms.colluding + terms.packed:
    raise UserError(
      f"must name {terms.colluding + terms.packed} or more of the {len(members)} members, and "
      "nobody else",
      field="roster",
    )
  shares = galois_shares.split(
    vector,
    num_shares=terms.num_members,
    colluding=terms.colluding,
    packed=terms.packed,
    entropy=entropy,
  )
  private = entropy(KEY_BYTES)
  public = primitives.public_key(private)
  records: dict[int, bytes] = {}
  for member, share in zip(members, shares):
    if member not in keys:
      continue
    context = terms.context(me, member)
    # The client's key is fresh, and the context names both ends: each agreed key seals only once.
    key = primitives.agree(private, bytes(keys[member]), context)
    records[member] = public + primitives.seal(key, share.tobytes(), context)
  return messages.write("shares", terms.session, me, records)


# --- a member


class CommitteeMember(NamedTuple):
  """State of a member between two messages. `private` and `total` are secret."""

  terms: CommitteeTerms
  me: int
  private: bytes  # [32] X25519
  total: np.ndarray  # sum of the shares received so far
  added: frozenset[int]  # clients whose shares are in `total`
  answered: bool = False


def start_member(
  terms: CommitteeTerms,
  me: int,
  *,
  entropy: Callable[[int], bytes] = secrets.token_bytes,
) -> tuple[CommitteeMember, bytes]:
  """Returns a member with a fresh key, and its message with the public key.

  Raises:
    UserError: `me` is not a member of this sum.
  """
  me = int(me)
  if me not in terms.members:
    raise UserError("is no member of this sum", field="client", value=me)
  private = entropy(KEY_BYTES)
  zeros = np.zeros(terms.share_bytes // terms.dtype.itemsize, terms.dtype)
  public = primitives.public_key(private)
  member = CommitteeMember(terms, me, private, zeros, frozenset())
  return member, messages.write("keys", terms.session, me, {me: public})


def add_share(member: CommitteeMember, forwarded: bytes) -> CommitteeMember:
  """Returns the member after adding one more client's share to its sum.

  Raises:
    UserError: a message that is wrong in any way, a second share of one client, or a message after
      the answer. The member's state is then unchanged.
  """
  terms = member.terms
  if member.answered:
    raise UserError(f"forwarded: client {member.me} has answered, and adds nothing more")
  records = _read(terms, "forwarded", forwarded, SERVER).records
  if len(records) != 1 or not {*records} <= {*terms.clients}:
    raise UserError("must be the share of one client of this sum", field="forwarded")
  ((client, sealed),) = records.items()
  if client in member.added:
    raise UserError(f"forwarded: the share of client {client} came twice")
  context = terms.context(client, member.me)
  public = bytes(sealed[:KEY_BYTES])
  key = primitives.agree(member.private, public, context)
  share = primitives.unseal(key, bytes(sealed[KEY_BYTES:]), context)
  total = member.total + np.frombuffer(share, terms.dtype)
  return member._replace(total=total, added=member.added | {client})


def answer(member: CommitteeMember, survivors: bytes) -> tuple[CommitteeMember, bytes]:
  """Returns the member's next state, and its message with the sum of shares.

  `survivors` must list exactly the clients whose shares the member has added. A member answers
  once, and then forgets its key and its sum.

  Raises:
    UserError: the message is wrong in any way, the list names other clients, or fewer than
      `min_survivors`, or the member has answered before.
  """
  terms = member.terms
  if member.answered:
    raise UserError(f"survivors: client {member.me} has answered, and does so once")
  listed = frozenset(_read(terms, "survivors", survivors, SERVER).records)
  if listed != member.added:
    different = min(listed ^ member.added)
    raise UserError(
      f"survivors: client {member.me} holds the shares of other clients than those listed; "
      f"client {different} is one of them"
    )
  if len(listed) < terms.min_survivors:
    raise UserError(
      f"only {len(listed)} clients are listed; nothing is revealed",
      field="min_survivors",
      value=terms.min_survivors,
    )
  message = messages.write(
    "sums", terms.session, member.me, {member.me: member.total.tobytes()}
  )
  empty = np.zeros(0, terms.dtype)
  return member._replace(private=b"", total=empty, answered=True), message


# --- the server


class CommitteeServer(NamedTuple):
  """State of the server between two messages. The server may see all of it."""

  terms: CommitteeTerms
  phase: str = "keys"  # "": the sum is complete
  keys: Mapping[int, bytes] = {}
  uploaded: frozenset[int] = frozenset()
  sums: Mapping[int, bytes] = {}


def receive(
  state: CommitteeServer, data: bytes, sender: int
) -> tuple[CommitteeServer, dict[int, bytes]]:
  """Returns the server's next state, and the messages that it forwards, by member.

  Args:
    sender: id of the client that sent the message, as the transport knows it.

  Raises:
    UserError: a message that is wrong in any way, or a party's second message. The state is then
      unchanged.
  """
  terms = state.terms
  message = _read(terms, state.phase, data, sender)
  senders, heard = _senders(state)
  if sender not in senders:
    raise UserError(f"{state.phase}: {messages.name(sender)} sends none in this sum")
  if sender in heard:
    raise UserError(f"{state.phase}: {messages.name(sender)} has sent one before")
  if state.phase == "shares":
    if {*message.records} != {*state.keys}:
      raise UserError(f"shares: client {sender} must send one to each member of the roster")
    forwarded = {
      member: messages.write("forwarded", terms.session, SERVER, {sender: bytes(sealed)})
      for member, sealed in message.records.items()
    }
    return state._replace(uploaded=state.uploaded | {sender}), forwarded
  if {*message.records} != {sender}:
    raise UserError(f"{state.phase}: client {sender} must send one record, its own")
  record = {sender: bytes(message.records[sender])}
  if state.phase == "keys":
    return state._replace(keys={**state.keys, **record}), {}
  return state._replace(sums={**state.sums, **record}), {}


def _senders(state: CommitteeServer) -> tuple[frozenset[int], frozenset[int]]:
  """Returns (who sends a message in this phase, who has sent it)."""
  if state.phase == "shares":
    return frozenset(state.terms.clients), state.uploaded
  if state.phase == "sums":
    # Only members on the roster were sent shares. The sum of another member would be garbage.
    return frozenset(state.keys), frozenset(state.sums)
  return frozenset(state.terms.members), frozenset(state.keys)


def expected(state: CommitteeServer) -> frozenset[int]:
  """Returns the clients that may still send a message in this phase."""
  senders, heard = _senders(state)
  return senders - heard


def close(state: CommitteeServer) -> tuple[CommitteeServer, dict[int, bytes]]:
  """Ends the phase. Returns the server in the next phase, and its message to each client.

  Raises:
    UserError: too few members or clients are left. Nothing was revealed, unless more than
      `colluding` members sent a sum: then some combinations of the total's entries are known.
  """
  terms = state.terms
  needed = terms.colluding + terms.packed
  members = len(state.keys if state.phase == "keys" else state.sums)
  if state.phase != "shares" and members < needed:
    # More than `colluding` sums, if too few for the total, determine combinations of its entries.
    revealed = "nothing" if members <= terms.colluding or state.phase == "keys" else "less"
    raise UserError(
      f"only {members} of {terms.num_members} members sent their {state.phase}, and {needed} are "
      f"needed; the sum is refused and {revealed} was revealed"
      + (" than the sum" if revealed == "less" else ""),
      field="committee",
    )
  if state.phase == "keys":
    roster = messages.write("roster", terms.session, SERVER, state.keys)
    return state._replace(phase="shares"), {who: roster for who in terms.clients}
  if state.phase == "shares":
    if len(state.uploaded) < terms.min_survivors:
      raise UserError(
        f"only {len(state.uploaded)} clients sent their shares; nothing was revealed",
        field="min_survivors",
        value=terms.min_survivors,
      )
    listed = dict.fromkeys(state.uploaded, b"\1")
    survivors = messages.write("survivors", terms.session, SERVER, listed)
    return state._replace(phase="sums"), {who: survivors for who in state.keys}
  return state._replace(phase=""), {}


def total(state: CommitteeServer) -> np.ndarray:
  """Returns the sum of the vectors of all who uploaded, after the last phase was closed.

  Raises:
    UserError: a phase is open, or the members' sums do not fit together.
  """
  terms = state.terms
  if state.phase:
    raise UserError(f"the sum still receives {state.phase}", field="total")
  places = {member: place for place, member in enumerate(terms.members)}
  shares = {
    places[member]: np.frombuffer(data, terms.dtype) for member, data in state.sums.items()
  }
  return galois_shares.combine(
    shares,
    length=terms.length,
    num_shares=terms.num_members,
    colluding=terms.colluding,
    packed=terms.packed,
  )


def work(state: CommitteeServer) -> tuple[int, int]:
  """Returns (expansions, operations) of all parties, as `Cost` counts them."""
  uploads = len(state.uploaded)
  # Each share needs one agreement by its client and one by its member.
  return state.terms.colluding * uploads, 2 * len(state.keys) * uploads


# --- all parties in one process


def run(terms: CommitteeTerms, there: Present, read: Callable[[int], np.ndarray]) -> Summed:
  """Runs one sum on given terms, with all parties in this process, and returns it.

  Args:
    there: clients that answer, by phase.
    read: function that returns a client's vector. It is called once for each client that
      uploads, in ascending order.

  Raises:
    UserError: as `Committee.sum`.
  """
  num_bytes: Counter[int] = Counter()  # bytes that each client sends and receives
  server = CommitteeServer(terms)
  members: dict[int, CommitteeMember] = {}
  for who in terms.members:
    members[who], message = start_member(terms, who)
    num_bytes[who] += len(message)
    server, _ = receive(server, message, who)
  server, rosters = close(server)
  for who in there.named:
    num_bytes[who] += len(rosters[who])
  # A client that drops out before upload has received the keys, and sends nothing.
  for who in there.uploading:
    message = shares_for(
      terms, who, rosters[who], read(who).astype(terms.dtype, copy=False)
    )
    num_bytes[who] += len(message)
    server, forwarded = receive(server, message, who)
    # Shares are added as they come, so that those of two clients are never in memory at once.
    for member, sealed in forwarded.items():
      num_bytes[member] += len(sealed)
      members[member] = add_share(members[member], sealed)
  server, lists = close(server)
  for member in (who for who in terms.members if who in there.unmasking):
    members[member], message = answer(members[member], lists[member])
    num_bytes[member] += len(lists[member]) + len(message)
    server, _ = receive(server, message, member)
  server, _ = close(server)
  expansions, operations = work(server)
  cost = Cost(
    client_bytes=max(num_bytes.values()),
    server_bytes=sum(num_bytes.values()),
    expansions=expansions,
    operations=operations,
    seconds=0.0,
  )
  found = total(server).astype(f"uint{terms.bits}", copy=False)
  return Summed(found, there.uploading, cost)
