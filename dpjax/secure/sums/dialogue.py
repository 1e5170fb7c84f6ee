"""The parties of a secure sum, for separate programs. Each takes a message and returns messages.

`socket_sums` moves bytes and knows no protocol. For each type of terms `server` and `client` return
an object that says which messages it waits for, how large they may be, and what it answers.

| terms            | protocol                                                  |
| ---------------- | --------------------------------------------------------- |
| `Terms`          | SecAgg and SecAgg+ (`secagg_server`, `secagg_client`)      |
| `CommitteeTerms` | one message of each client, a committee adds (`committee`) |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from dpjax.secure.sums import committee, messages, secagg_client, secagg_server, simulated
from dpjax.secure.sums.committee import CommitteeTerms
from dpjax.secure.sums.terms import Terms
from dpjax.secure.sums.vectors import Present, check_client
from dpjax.validate import UserError

AnyTerms = Terms | CommitteeTerms


class SumResult(NamedTuple):
  """Result of a sum, as its server knows it."""

  total: np.ndarray  # [d] uint32 or uint64
  survivors: tuple[int, ...]  # clients whose vectors are in the total, ascending
  expansions: int  # as in `Cost`
  operations: int  # as in `Cost`


class SumServer(Protocol):
  """The server of one sum, as a state machine: it takes messages, and returns those to send."""

  @property
  def phase(self) -> str:
    """Kind of message that the server receives now. Empty: the sum is complete."""
    ...

  def expected(self) -> frozenset[int]:
    """Returns the clients that may still send a message in this phase."""
    ...

  def largest(self) -> int:
    """Returns the largest size of a message of this phase, in bytes."""
    ...

  def receive(self, data: bytes, sender: int) -> Mapping[int, bytes]:
    """Takes a message. Returns the messages to send now, by the client that gets each.

    Raises:
      UserError: the message is wrong. The server stays as it was.
    """
    ...

  def close(self) -> Mapping[int, bytes]:
    """Ends the phase. Returns the messages that open the next one, by client.

    Raises:
      UserError: too few clients are left.
    """
    ...

  def result(self) -> SumResult:
    """Returns the sum, after the last phase was closed.

    Raises:
      UserError: the messages of the last phase do not determine the sum.
    """
    ...


class SumClient(Protocol):
  """A client of one sum, as a state machine: it takes messages, and returns those to send."""

  @property
  def first(self) -> bytes | None:
    """The message that the client sends before it receives one. None: it waits for one first."""
    ...

  @property
  def is_done(self) -> bool:
    """Whether the client receives nothing more."""
    ...

  def largest(self) -> int:
    """Returns the largest size of the next message from the server, in bytes."""
    ...

  def answer(self, data: bytes, vector: np.ndarray) -> bytes | None:
    """Takes a message of the server. Returns the answer; None where there is none.

    Args:
      vector: [d] unsigned integers of the terms' type.

    Raises:
      UserError: the message is wrong. Nothing is revealed.
    """
    ...


class _SecAggServer:
  """Server of SecAgg: the functions of `secagg_server`, with the state that they change."""

  def __init__(self, terms: Terms):
    self._terms = terms
    self._state = secagg_server.start(terms)
    self._answered: list[int] = []
    # The clients that answered, for each phase that the formula of costs counts.
    self._there: list[tuple[int, ...]] = []

  @property
  def phase(self) -> str:
    return self._state.phase

  def expected(self) -> frozenset[int]:
    return secagg_server.expected(self._state)

  def largest(self) -> int:
    # For keys, masked vectors and signatures a client sends one record, about itself only.
    is_single = self.phase in ("keys", "masked", "agreed")
    count = 1 if is_single else len(self._terms.clients)
    return messages.size(count, secagg_client.record_bytes(self._terms, self.phase))

  def receive(self, data: bytes, sender: int) -> Mapping[int, bytes]:
    self._state = secagg_server.receive(self._state, data, sender)
    self._answered.append(sender)
    return {}

  def close(self) -> Mapping[int, bytes]:
    if self.phase != "agreed":
      self._there.append(tuple(sorted(self._answered)))
    self._answered = []
    self._state, outgoing = secagg_server.close(self._state)
    return outgoing

  def result(self) -> SumResult:
    unmasked = secagg_server.total(self._state)
    # Clients do not tell what they computed, so a formula counts it.
    cost = simulated.predicted(self._terms, Present(*self._there))
    return SumResult(unmasked.total, unmasked.survivors, cost.expansions, cost.operations)


class _SecAggClient:
  """A client of SecAgg, which answers every message."""

  def __init__(self, terms: Terms, me: int, signing_key: bytes | None):
    self._member, self.first = secagg_client.start(terms, me, signing_key=signing_key)

  @property
  def is_done(self) -> bool:
    return not self._member.expects

  def largest(self) -> int:
    terms = self._member.terms
    size = secagg_client.record_bytes(terms, self._member.expects)
    return messages.size(len(terms.clients), size)

  def answer(self, data: bytes, vector: np.ndarray) -> bytes:
    held = vector if self._member.expects == "forwarded" else None
    self._member, said = secagg_client.answer(self._member, data, held)
    return said


class _CommitteeServer:
  """Server of a sum by a committee. It forwards each share when it comes."""

  def __init__(self, terms: CommitteeTerms):
    # A missing extra is reported before the server waits for anybody.
    committee.primitives.library()
    self._terms = terms
    self._state = committee.CommitteeServer(terms)

  @property
  def phase(self) -> str:
    return self._state.phase

  def expected(self) -> frozenset[int]:
    return committee.expected(self._state)

  def largest(self) -> int:
    count = self._terms.num_members if self.phase == "shares" else 1
    return messages.size(count, committee.record_bytes(self._terms, self.phase))

  def receive(self, data: bytes, sender: int) -> Mapping[int, bytes]:
    self._state, forwarded = committee.receive(self._state, data, sender)
    return forwarded

  def close(self) -> Mapping[int, bytes]:
    self._state, outgoing = committee.close(self._state)
    return outgoing

  def result(self) -> SumResult:
    total = committee.total(self._state).astype(f"uint{self._terms.bits}", copy=False)
    survivors = tuple(sorted(self._state.uploaded))
    return SumResult(total, survivors, *committee.work(self._state))


class _CommitteeClient:
  """A client in a sum by a committee. If it is no member, it sends its shares and leaves."""

  def __init__(self, terms: CommitteeTerms, me: int, signing_key: bytes | None):
    if signing_key is not None:
      raise UserError("must be None: a committee has no directory", field="signing_key")
    check_client(me, terms.clients)
    self._terms = terms
    self._me = me
    self._has_sent = False
    self._member: committee.CommitteeMember | None = None
    self.first: bytes | None = None
    if me in terms.members:
      self._member, self.first = committee.start_member(terms, me)

  @property
  def is_done(self) -> bool:
    return self._has_sent and (self._member is None or self._member.answered)

  def largest(self) -> int:
    terms = self._terms
    if not self._has_sent:
      return messages.size(terms.num_members, committee.record_bytes(terms, "roster"))
    one_share = messages.size(1, committee.record_bytes(terms, "forwarded"))
    every_client = messages.size(
      len(terms.clients), committee.record_bytes(terms, "survivors")
    )
    return max(one_share, every_client)

  def answer(self, data: bytes, vector: np.ndarray) -> bytes | None:
    if not self._has_sent:
      said = committee.shares_for(self._terms, self._me, data, vector)
      self._has_sent = True
      return said
    if self._member is None:
      raise UserError(f"client {self._me}: has said all it says in this sum")
    if messages.kind(data) == "survivors":
      self._member, said = committee.answer(self._member, data)
      return said
    self._member = committee.add_share(self._member, data)
    return None


def server(terms: AnyTerms) -> SumServer:
  """Returns the server of a sum on these terms.

  Raises:
    UserError: the extra `secure` is not installed.
  """
  if isinstance(terms, CommitteeTerms):
    return _CommitteeServer(terms)
  return _SecAggServer(terms)


def client(terms: AnyTerms, me: int, *, signing_key: bytes | None = None) -> SumClient:
  """Returns a client of a sum on these terms, with fresh keys from the operating system's entropy.

  Args:
    terms: terms on which all parties agreed.
    me: id of the client.
    signing_key: Ed25519 private key [32], where the terms have a directory.

  Raises:
    UserError: `me` is not among the clients, the signing key is not that of the directory, or
      the extra `secure` is not installed.
  """
  if isinstance(terms, CommitteeTerms):
    return _CommitteeClient(terms, me, signing_key)
  return _SecAggClient(terms, me, signing_key)


def fewest(terms: AnyTerms) -> int:
  """Returns the smallest number of clients with which a sum on these terms can succeed."""
  if isinstance(terms, CommitteeTerms):
    return max(terms.min_survivors, terms.colluding + terms.packed)
  return max(terms.min_survivors, terms.threshold)
