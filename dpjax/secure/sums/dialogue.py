"""The parties of a secure sum as state machines, and all of them in one process.

A party takes a message, and returns its next state with the messages that it sends. `socket_sums`
carries these messages between programs, and `run` within one. Neither knows a protocol.

| protocol              | server                     | client                        |
| --------------------- | -------------------------- | ----------------------------- |
| SecAgg and SecAgg+    | `secagg_server.Server`     | `secagg_client.Client`        |
| one message of each   | `committee_parties.Server` | `committee_parties.Client`    |
| client to a committee |                            |                               |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from dpjax.secure.sums.interface import Cost, Present, Summed
from dpjax.validate import UserError


class SumResult(NamedTuple):
  """Result of a sum, as its server knows it."""

  total: np.ndarray  # [d] uint32 or uint64
  survivors: tuple[int, ...]  # clients whose vectors are in the total, ascending
  expansions: int  # as in `Cost`
  operations: int  # as in `Cost`


def with_cost(
  result: SumResult, num_bytes: Mapping[int, int], *, seconds: float = 0.0
) -> Summed:
  """Returns a sum with its cost, from the bytes that each client sent and received."""
  cost = Cost(
    client_bytes=max(num_bytes.values()),
    server_bytes=sum(num_bytes.values()),
    expansions=result.expansions,
    operations=result.operations,
    seconds=seconds,
  )
  return Summed(result.total, result.survivors, cost)


class SumServer(Protocol):
  """The server of one sum."""

  @property
  def phase(self) -> str:
    """Kind of message that the server receives now. Empty: the sum is complete."""
    ...

  def expected_clients(self) -> frozenset[int]:
    """Returns the clients that may still send a message in this phase."""
    ...

  def largest(self) -> int:
    """Returns the largest size of a message of this phase, in bytes."""
    ...

  def receive(self, data: bytes, sender: int) -> tuple[SumServer, Mapping[int, bytes]]:
    """Takes a message. Returns the next state, and the messages to send now, by client.

    Raises:
      UserError: the message is wrong.
    """
    ...

  def close(self) -> tuple[SumServer, Mapping[int, bytes]]:
    """Ends the phase. Returns the next state, and the messages that open the next phase, by client.

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
  """A client of one sum."""

  @property
  def is_done(self) -> bool:
    """Whether the client receives nothing more."""
    ...

  def largest(self) -> int:
    """Returns the largest size of the next message from the server, in bytes."""
    ...

  def answer(
    self, data: bytes, vector: np.ndarray | None
  ) -> tuple[SumClient, bytes | None]:
    """Takes a message of the server. Returns the next state and the answer; None where there is
    none.

    Args:
      vector: [d] unsigned integers of the terms' type; None if the answer does not hold it.

    Raises:
      UserError: the message is wrong. Nothing is revealed.
    """
    ...


# A client that has begun, and what it sends before it receives a message; None: it sends nothing.
Begun = tuple[SumClient, bytes | None]
# Kinds of messages that hold a vector.
_WITH_VECTOR = ("masked", "shares")


def run(
  server: SumServer,
  begun: Mapping[int, Begun],
  there: Present,
  read: Callable[[int], np.ndarray],
) -> Summed:
  """Runs one sum with all parties in this process, and returns it; its seconds are 0.

  A client that refuses a message is a drop-out for all others.

  Args:
    begun: every client of the sum.
    there: clients that answer, by phase.
    read: function that returns a client's vector. It is called once for each client that
      uploads, in ascending order.

  Raises:
    UserError: too few clients are left, or their messages do not determine the sum.
  """
  clients = {who: client for who, (client, _) in begun.items()}
  answering = {"keys": there.named, "envelopes": there.sharing}
  answering |= dict.fromkeys(_WITH_VECTOR, there.uploading)
  num_bytes = Counter[int]()  # that each client sends and receives
  refused = dict[int, UserError]()
  inbox: Mapping[int, bytes] = {}

  def answer(who: int, data: bytes, vector: np.ndarray | None = None) -> bytes | None:
    if who in refused:
      return None
    try:
      clients[who], said = clients[who].answer(data, vector)
    except UserError as error:
      refused[who] = error
      return None
    return said

  while server.phase:
    kind = server.phase
    speakers = server.expected_clients().intersection(answering.get(kind, there.unmasking))
    for who in sorted(speakers - {*refused}):
      # A vector is read when it is sent, so those of two clients are never in memory at once.
      vector = read(who) if kind in _WITH_VECTOR else None
      said = begun[who][1] if kind == "keys" else answer(who, inbox[who], vector)
      if said is None:
        continue
      num_bytes[who] += len(said)
      server, forwarded = server.receive(said, who)
      for receiver, data in forwarded.items():
        num_bytes[receiver] += len(data)
        answer(receiver, data)
    try:
      server, inbox = server.close()
    except UserError as error:
      why = [f"client {who}: {refusal}" for who, refusal in sorted(refused.items())][:1]
      must = "; ".join([error.must, *why])
      raise UserError(must, field=error.field, value=error.value) from error
    for receiver, data in inbox.items():
      num_bytes[receiver] += len(data)
  return with_cost(server.result(), num_bytes)
