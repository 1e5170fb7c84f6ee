"""The parties of a sum by a committee: a client, who may be a member, and the server.

`committee` says what is hidden, and from whom.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dpjax.secure.sums import messages, primitives
from dpjax.secure.sums.dialogue import SumResult
from dpjax.secure.sums.galois_shares import Sharing
from dpjax.secure.sums.messages import SERVER
from dpjax.secure.sums.terms import SumTerms
from dpjax.validate import UserError

KEY_BYTES = 32
# Bytes that sealing adds to a share: the sender's public key, and the cipher's tag.
SEALED_EXTRA = KEY_BYTES + 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitteeTerms(SumTerms):
  """The public terms of one sum by a committee.

  Args:
    num_members, colluding, packed: see `committee.Committee`.
  """

  num_members: int
  colluding: int
  packed: int

  def __post_init__(self) -> None:
    super().__post_init__()
    _ = self.sharing  # is checked when it is made
    if self.num_members > len(self.clients):
      raise UserError(
        f"must be <= the {len(self.clients)} clients of a sum, who are its members",
        field="num_members",
        value=self.num_members,
      )

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
  def sharing(self) -> Sharing:
    """How vectors become shares."""
    return Sharing(
      num_members=self.num_members, colluding=self.colluding, packed=self.packed
    )

  @property
  def fewest(self) -> int:
    """Smallest number of clients with which the sum can succeed."""
    return max(self.min_survivors, self.sharing.needed)

  def record_bytes(self, kind: str) -> int:
    share = self.sharing.share_words(self.length) * self.bits // 8
    return {
      "keys": KEY_BYTES,
      "roster": KEY_BYTES,
      "shares": share + SEALED_EXTRA,
      "forwarded": share + SEALED_EXTRA,
      "survivors": 1,
      "sums": share,
    }[kind]

  def binding(self, client: int, member: int) -> bytes:
    """Returns the bytes that a sealed share is bound to: this sum, its client and its member."""
    return self.context(b"committee share", client, member)


class Client(NamedTuple):
  """State of a client between two messages. A member's `private` and `total` are secret."""

  terms: CommitteeTerms
  me: int
  entropy: Callable[[int], bytes]  # returns that many random bytes
  private: bytes = b""  # [32] X25519 of a member that has not sent its sum
  total: np.ndarray = np.zeros(0)  # of a member: the sum of the shares received so far
  added: frozenset[int] = frozenset()  # clients whose shares are in `total`
  has_sent: bool = False  # whether its own shares were sent

  @property
  def is_done(self) -> bool:
    """Whether the client receives nothing more."""
    return self.has_sent and not self.private

  def largest(self) -> int:
    """Returns the largest size of the next message from the server, in bytes."""
    size = self.terms.size
    roster = size("roster", self.terms.num_members)
    if not self.private:
      return roster
    survivors = size("survivors", len(self.terms.clients))
    return max(roster, size("forwarded", 1), survivors)

  def answer(
    self, data: bytes, vector: np.ndarray | None = None
  ) -> tuple[Client, bytes | None]:
    """Returns the client's next state, and its answer to a message of the server.

    It answers the roster with its shares, once, and is then done if it is no member. A member adds
    each share that is forwarded to it. It answers the list of survivors with its sum, once, and
    then forgets its key and its sum.

    Args:
      vector: [d] unsigned integers of the terms' type; needed to answer the roster.

    Raises:
      UserError: the message is wrong in any way, or is not for this client now. The state stays.
    """
    kind = messages.kind(data)
    if self.is_done:
      raise UserError(f"client {self.me} has said all it says in this sum", field=kind)
    # A member may get others' shares before it has sent its own.
    if not self.has_sent and not (self.private and kind == "forwarded"):
      return _share(self, data, vector)
    if kind == "survivors":
      return _reveal(self, data)
    return _add(self, data), None


def start(
  terms: CommitteeTerms,
  me: int,
  *,
  entropy: Callable[[int], bytes] = secrets.token_bytes,
) -> tuple[Client, bytes | None]:
  """Returns a client, and its first message: a member's public key; None for others.

  Args:
    entropy: `entropy(n)` returns n random bytes. Use another source than the operating
      system only in tests: anyone who knows the bytes sees the vector.

  Raises:
    UserError: `me` is no client of this sum, or the extra `secure` is not installed.
  """
  terms.check_client(me)
  client = Client(terms, int(me), entropy)
  if me not in terms.members:
    return client, None
  private = entropy(KEY_BYTES)
  zeros = np.zeros(terms.sharing.share_words(terms.length), terms.dtype)
  public = primitives.public_key(private)
  member = client._replace(private=private, total=zeros)
  return member, terms.write("keys", member.me, {member.me: public})


def _share(
  client: Client, roster: bytes, vector: np.ndarray | None
) -> tuple[Client, bytes]:
  """Returns the client's one message: a sealed share for each member that the roster names."""
  terms = client.terms
  vector = terms.check_vector(vector)
  keys = terms.read("roster", roster, SERVER)
  members = terms.members
  needed = terms.sharing.needed
  if not {*keys} <= {*members} or len(keys) < needed:
    raise UserError(
      f"must name {needed} or more of the {len(members)} members, and nobody else",
      field="roster",
    )
  shares = terms.sharing.split(vector, entropy=client.entropy)
  private = client.entropy(KEY_BYTES)
  public = primitives.public_key(private)
  records: dict[int, bytes] = {}
  for member, share in zip(members, shares):
    if member not in keys:
      continue
    context = terms.binding(client.me, member)
    # The client's key is fresh, and the context names both ends: each agreed key seals only once.
    key = primitives.agree(private, bytes(keys[member]), context)
    records[member] = public + primitives.seal(key, share.tobytes(), context)
  return client._replace(has_sent=True), terms.write("shares", client.me, records)


def _add(member: Client, forwarded: bytes) -> Client:
  """Returns the member after adding one more client's share to its sum."""
  terms = member.terms
  records = terms.read("forwarded", forwarded, SERVER)
  if len(records) != 1 or not {*records} <= {*terms.clients}:
    raise UserError("must be the share of one client of this sum", field="forwarded")
  ((client, sealed),) = records.items()
  if client in member.added:
    raise UserError(f"the share of client {client} came twice", field="forwarded")
  context = terms.binding(client, member.me)
  key = primitives.agree(member.private, bytes(sealed[:KEY_BYTES]), context)
  share = primitives.unseal(key, bytes(sealed[KEY_BYTES:]), context)
  total = member.total + np.frombuffer(share, terms.dtype)
  return member._replace(total=total, added=member.added | {client})


def _reveal(member: Client, survivors: bytes) -> tuple[Client, bytes]:
  """Returns the member's sum of shares, if exactly those clients survive whose shares it added."""
  terms = member.terms
  listed = frozenset(terms.read("survivors", survivors, SERVER))
  if listed != member.added:
    different = min(listed ^ member.added)
    raise UserError(
      f"client {member.me} holds the shares of other clients than those listed; "
      f"client {different} is one of them",
      field="survivors",
    )
  if len(listed) < terms.min_survivors:
    raise UserError(
      f"only {len(listed)} clients are listed; nothing is revealed",
      field="min_survivors",
      value=terms.min_survivors,
    )
  message = terms.write("sums", member.me, {member.me: member.total.tobytes()})
  return member._replace(private=b"", total=np.zeros(0)), message


def start_server(terms: CommitteeTerms) -> Server:
  """Returns the state of a server that waits for members' keys.

  Raises:
    UserError: the extra `secure` is not installed.
  """
  primitives.library()
  return Server(terms)


class Server(NamedTuple):
  """State of the server between two messages. The server may see all of it."""

  terms: CommitteeTerms
  phase: str = "keys"  # "": the sum is complete
  keys: Mapping[int, bytes] = {}
  uploaded: frozenset[int] = frozenset()
  sums: Mapping[int, bytes] = {}

  def _speakers(self) -> tuple[frozenset[int], frozenset[int]]:
    """Returns (who sends a message in this phase, who has sent it)."""
    if self.phase == "shares":
      return frozenset(self.terms.clients), self.uploaded
    if self.phase == "sums":
      # Only members on the roster were sent shares. The sum of another member would be garbage.
      return frozenset(self.keys), frozenset(self.sums)
    return frozenset(self.terms.members), frozenset(self.keys)

  def expected_clients(self) -> frozenset[int]:
    """Returns the clients that may still send a message in this phase."""
    speakers, heard = self._speakers()
    return speakers - heard

  def largest(self) -> int:
    """Returns the largest size of a message of this phase, in bytes."""
    count = self.terms.num_members if self.phase == "shares" else 1
    return self.terms.size(self.phase, count)

  def receive(self, data: bytes, sender: int) -> tuple[Server, dict[int, bytes]]:
    """Returns the server's next state, and the messages that it forwards, by member.

    Args:
      sender: id of the client that sent the message, as the transport knows it.

    Raises:
      UserError: a message that is wrong in any way, or a party's second message. The state is then
        unchanged.
    """
    terms = self.terms
    if not self.phase:
      raise UserError("came after the sum was closed", field="message")
    records = terms.read(self.phase, data, sender)
    speakers, heard = self._speakers()
    if sender not in speakers:
      raise UserError(f"{messages.name(sender)} sends none in this sum", field=self.phase)
    if sender in heard:
      raise UserError(f"{messages.name(sender)} has sent one before", field=self.phase)
    if self.phase == "shares":
      if {*records} != {*self.keys}:
        raise UserError(
          f"client {sender} must send one to each member of the roster", field="shares"
        )
      forwarded = {
        member: terms.write("forwarded", SERVER, {sender: bytes(sealed)})
        for member, sealed in records.items()
      }
      return self._replace(uploaded=self.uploaded | {sender}), forwarded
    if {*records} != {sender}:
      raise UserError(f"client {sender} must send one record, its own", field=self.phase)
    record = {sender: bytes(records[sender])}
    if self.phase == "keys":
      return self._replace(keys={**self.keys, **record}), {}
    return self._replace(sums={**self.sums, **record}), {}

  def close(self) -> tuple[Server, dict[int, bytes]]:
    """Ends the phase. Returns the server in the next phase, and its message to each client.

    Raises:
      UserError: too few members or clients are left. Nothing was revealed, unless more than
        `colluding` members sent a sum: then some combinations of the total's entries are known.
    """
    terms = self.terms
    needed = terms.sharing.needed
    members = len(self.keys if self.phase == "keys" else self.sums)
    if self.phase != "shares" and members < needed:
      # More than `colluding` sums, if too few for the total, determine combinations of its entries.
      is_nothing = members <= terms.colluding or self.phase == "keys"
      revealed = "nothing was revealed" if is_nothing else "less was revealed than the sum"
      raise UserError(
        f"only {members} of {terms.num_members} members sent their {self.phase}, and "
        f"{needed} are needed; the sum is refused and {revealed}",
        field="committee",
      )
    if self.phase == "keys":
      roster = terms.write("roster", SERVER, self.keys)
      return self._replace(phase="shares"), dict.fromkeys(terms.clients, roster)
    if self.phase == "shares":
      if len(self.uploaded) < terms.min_survivors:
        raise UserError(
          f"only {len(self.uploaded)} clients sent their shares; nothing was revealed",
          field="min_survivors",
          value=terms.min_survivors,
        )
      survivors = terms.write("survivors", SERVER, dict.fromkeys(self.uploaded, b"\1"))
      return self._replace(phase="sums"), dict.fromkeys(self.keys, survivors)
    return self._replace(phase=""), {}

  def result(self) -> SumResult:
    """Returns the sum of the vectors of all who uploaded, after the last phase was closed.

    Raises:
      UserError: a phase is open, or the members' sums do not fit together.
    """
    terms = self.terms
    if self.phase:
      raise UserError(f"the sum still receives {self.phase}", field="total")
    places = {member: place for place, member in enumerate(terms.members)}
    held = {
      places[member]: np.frombuffer(data, terms.dtype) for member, data in self.sums.items()
    }
    total = terms.sharing.combine(held, length=terms.length)
    uploads = len(self.uploaded)
    # Each share needs one agreement by its client and one by its member.
    return SumResult(
      total.astype(f"uint{terms.bits}", copy=False),
      tuple(sorted(self.uploaded)),
      expansions=terms.colluding * uploads,
      operations=2 * len(self.keys) * uploads,
    )
