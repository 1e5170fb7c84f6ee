"""The server of SecAgg: it receives messages one by one, closes each phase, and then sends
messages.

    state = start(terms)
    state, _ = state.receive(message, sender)  # of any client, while the phase is open
    state, messages = state.close()            # by client; the phase is over
    ...                                        # keys, envelopes, masked, (agreed,) revealed
    summed = state.result()

Masked vectors are added up as they come, so the state holds one vector, not one per client. A
message that is wrong in any way raises UserError and leaves the state unchanged. Its sender counts
as silent. Beside the sum the server learns who was there in which phase, and when each message
came.

Source: Bonawitz et al. 2017, figure 4; Bell et al. 2020, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dpjax.secure.sums import messages, primitives
from dpjax.secure.sums.dialogue import SumResult
from dpjax.secure.sums.interface import Present
from dpjax.secure.sums.messages import SERVER, Records
from dpjax.secure.sums.primitives import SECRET_BYTES
from dpjax.secure.sums.secagg_client import (
  ALIVE,
  DEAD,
  MASK_KEY,
  OWN_MASK,
  commitment,
  is_signed,
  mask_key,
  own_stream,
  pair_stream,
)
from dpjax.secure.sums.secagg_costs import predict_cost
from dpjax.secure.sums.terms import KEY_BYTES, Terms, holders, neighbours
from dpjax.validate import UserError

# Agreement with a low-order point gives zero, which is an error, for any private key. So this
# private key finds such points.
_ANY_PRIVATE = bytes(31) + b"@"


class Server(NamedTuple):
  """State of the server between two messages. Nothing is secret from its operator."""

  terms: Terms
  phase: str  # the kind of message that is received now; "": the sum is complete
  keys: Mapping[int, bytes]  # client -> its public keys [96], or [160] when signed
  envelopes: Mapping[int, Mapping[int, bytes]]  # sender -> receiver -> sealed shares
  total: np.ndarray  # [d] sum of the masked vectors so far
  uploaded: frozenset[int]
  signatures: Mapping[int, bytes]
  revealed: Mapping[int, Mapping[int, bytes]]  # sender -> client -> share of its secret

  def expected_clients(self) -> frozenset[int]:
    """Returns the clients that may still send a message in this phase."""
    phases = {
      "keys": (self.terms.clients, self.keys),
      "envelopes": (self.keys, self.envelopes),
      "masked": (self.envelopes, self.uploaded),
      "agreed": (self.uploaded, self.signatures),
      "revealed": (self.signatures or self.uploaded, self.revealed),
      "": ((), ()),
    }
    allowed, received = phases[self.phase]
    return frozenset(allowed) - frozenset(received)

  def largest(self) -> int:
    """Returns the largest size of a message of this phase, in bytes."""
    # For keys, masked vectors and signatures a client sends one record, about itself only.
    is_single = self.phase in ("keys", "masked", "agreed")
    return self.terms.size(self.phase, 1 if is_single else len(self.terms.clients))

  def receive(self, data: bytes, sender: int) -> tuple[Server, dict[int, bytes]]:
    """Returns the state with one more message, and no message to send.

    Args:
      sender: id of the sender, as the transport knows it.

    Raises:
      UserError: the message is not of this phase and session, is a second one, or is wrong; or its
        sender is no client, or dropped out before. The state stays as it was.
    """
    kind = self.phase
    if not kind:
      raise UserError("came after the sum was closed", field="message")
    records = self.terms.read(kind, data, sender)
    if sender not in self.expected_clients():
      raise UserError(
        f"of {messages.name(sender)} is a second one, or too late", field=kind
      )
    take = {
      "keys": _take_keys,
      "envelopes": _take_envelopes,
      "masked": _take_masked,
      "agreed": _take_signature,
      "revealed": _take_revealed,
    }
    return take[kind](self, sender, records), {}

  def close(self) -> tuple[Server, dict[int, bytes]]:
    """Ends the phase. Returns the server in the next phase, and its message to each client.

    Raises:
      UserError: too few clients are left. Nothing was revealed, except in the last phase: the
        server then holds the shares that the remaining clients revealed.
    """
    there = {
      "keys": self.keys,
      "envelopes": self.envelopes,
      "masked": self.uploaded,
      "agreed": self.signatures,
      "revealed": self.revealed,
    }[self.phase]
    if len(there) < self.terms.fewest:
      raise UserError(
        f"only {len(there)} of {len(self.terms.clients)} clients sent a message of the phase "
        f"{self.phase!r}; the sum is refused",
        field="min_survivors",
        value=self.terms.fewest,
      )
    next_phase, kind, records = _opening(self)
    outgoing = {who: self.terms.write(kind, SERVER, of) for who, of in records.items()}
    return self._replace(phase=next_phase), outgoing

  def result(self) -> SumResult:
    """Returns the sum of the vectors of all who uploaded, after the last phase was closed.

    Raises:
      UserError: a phase is open, or a secret cannot be rebuilt: too few or wrong shares.
    """
    if self.phase:
      raise UserError(f"the sum still receives {self.phase}", field="total")
    total = self.total.copy()
    primitives.add_streams(total, _masks_left(self))
    phases = (self.keys, self.envelopes, self.uploaded, self.revealed)
    there = Present(*(tuple(sorted(ids)) for ids in phases))
    # Clients do not tell what they computed, so a formula counts it.
    cost = predict_cost(self.terms, there)
    return SumResult(total, there.uploading, cost.expansions, cost.operations)


def start(terms: Terms) -> Server:
  """Returns the state of a server that waits for keys.

  Raises:
    UserError: the extra `secure` is not installed.
  """
  primitives.library()
  zero = np.zeros(terms.length, terms.dtype)
  return Server(terms, "keys", {}, {}, zero, frozenset(), {}, {})


def _own_record(kind: str, sender: int, records: Records) -> memoryview:
  if [*records] != [sender]:
    raise UserError(f"of client {sender} must be about itself alone", field=kind)
  return records[sender]


def _take_keys(state: Server, sender: int, records: Records) -> Server:
  record = bytes(_own_record("keys", sender, records))
  terms = state.terms
  if terms.directory and not is_signed(terms, sender, record):
    raise UserError(f"of client {sender} are not signed by it", field="keys")
  _check_keys(state, sender, record)
  return state._replace(keys={**state.keys, sender: record})


def _check_keys(state: Server, sender: int, record: bytes) -> None:
  """Raises UserError for keys that every client would refuse.

  Otherwise one client's keys would silence all the others.
  """
  fresh = (record[:32], record[32:64])
  known = {part for keys in state.keys.values() for part in (keys[:32], keys[32:64])}
  if fresh[0] == fresh[1] or known & {*fresh}:
    raise UserError(f"of client {sender} are there already", field="keys")
  for public in fresh:
    # This raises an error if no key agreement with the public key is possible.
    primitives.agree(_ANY_PRIVATE, public, b"")


def _take_envelopes(state: Server, sender: int, records: Records) -> Server:
  wanted = {*holders(state.terms, sender, state.keys)} - {sender}
  if {*records} != wanted:
    raise UserError(f"of client {sender} are not one for each neighbour", field="envelopes")
  sealed = {who: bytes(record) for who, record in records.items()}
  return state._replace(envelopes={**state.envelopes, sender: sealed})


def _take_masked(state: Server, sender: int, records: Records) -> Server:
  vector = np.frombuffer(_own_record("masked", sender, records), state.terms.dtype)  # [d]
  uploaded = state.uploaded | {sender}
  return state._replace(total=state.total + vector, uploaded=uploaded)


def _take_signature(state: Server, sender: int, records: Records) -> Server:
  signature = bytes(_own_record("agreed", sender, records))
  return state._replace(signatures={**state.signatures, sender: signature})


def _take_revealed(state: Server, sender: int, records: Records) -> Server:
  survivors = _survivors(state, sender)
  kinds = {who: bytes(record[:1]) for who, record in records.items()}
  wanted = {who: OWN_MASK if mark == ALIVE else MASK_KEY for who, mark in survivors.items()}
  if kinds != wanted:
    raise UserError(f"of client {sender} are not the shares asked for", field="revealed")
  shares = {who: bytes(record[1:]) for who, record in records.items()}
  return state._replace(revealed={**state.revealed, sender: shares})


def _survivors(state: Server, who: int) -> dict[int, bytes]:
  """Returns marks of survival by client: of `who`, and of neighbours whose shares `who` holds."""
  there = holders(state.terms, who, state.envelopes)
  return {other: ALIVE if other in state.uploaded else DEAD for other in there}


def _opening(state: Server) -> tuple[str, str, Mapping[int, Mapping[int, bytes]]]:
  """Returns (next phase, kind of the messages that open it, their records by client)."""
  near = lambda who: neighbours(state.terms, who)
  if state.phase == "keys":
    keys = state.keys
    rosters = {who: {x: keys[x] for x in near(who) if x in keys} for who in keys}
    return "envelopes", "roster", rosters
  if state.phase == "envelopes":
    sealed = state.envelopes
    forwarded = {
      who: {x: sealed[x][who] for x in near(who) if x in sealed} for who in sealed
    }
    return "masked", "forwarded", forwarded
  if state.phase == "masked":
    survivors = {who: _survivors(state, who) for who in sorted(state.uploaded)}
    return "agreed" if state.terms.directory else "revealed", "survivors", survivors
  if state.phase == "agreed":
    everybody = dict.fromkeys(state.signatures, state.signatures)
    return "revealed", "signatures", everybody
  return "", "", {}


def _masks_left(state: Server) -> list[tuple[bytes, bool]]:
  """Returns the streams that are still in the sum of masked vectors, for `add_streams`."""
  terms = state.terms
  keystreams = []
  # Masks between two survivors cancel; each survivor's own mask is subtracted.
  for who in sorted(state.uploaded):
    seed = _rebuilt(state, who)
    keystreams.append((own_stream(terms, who, seed), False))
  # Survivors also added masks for clients that shared keys but sent no vector. These masks do not
  # cancel.
  for gone in sorted({*state.envelopes} - state.uploaded):
    alive = [who for who in neighbours(terms, gone) if who in state.uploaded]
    # If no neighbour has uploaded, there is no mask to subtract, and nothing to rebuild.
    private = mask_key(terms, gone, _rebuilt(state, gone)) if alive else b""
    for who in alive:
      key = pair_stream(terms, gone, private, who, state.keys[who][32:64])
      # The survivor added the stream if gone > who. In that case it is subtracted here.
      keystreams.append((key, gone < who))
  return keystreams


def _rebuilt(state: Server, whose: int) -> bytes:
  """Returns the rebuilt own seed of a survivor, or the mask seed of a client that is gone.

  A rebuilt seed is compared with the client's commitment or public key. With the holders on a
  circle, any `threshold` successive shares are tried. So one wrong share does no harm if
  `threshold` others are right.
  """
  terms = state.terms
  keys = state.keys[whose]
  order = holders(terms, whose, state.keys)
  shares = [
    (order.index(holder), revealed[whose])
    for holder, revealed in sorted(state.revealed.items())
    if whose in revealed
  ]
  what = "own mask" if whose in state.uploaded else "mask key"
  if len(shares) < terms.threshold:
    raise UserError(
      f"{len(shares)} shares of the {what} of client {whose}; the threshold "
      f"is {terms.threshold}, so the sum is refused",
      field="revealed",
    )
  for first in range(len(shares)):
    chosen = dict((shares + shares)[first : first + terms.threshold])
    seed = primitives.combine(chosen)
    if _is_right(terms, whose, seed, keys, what):
      return seed
  raise UserError(
    f"the shares of the {what} of client {whose} do not fit together; the sum is refused",
    field="revealed",
  )


def _is_right(terms: Terms, whose: int, seed: bytes, keys: bytes, what: str) -> bool:
  if len(seed) != SECRET_BYTES:
    return False
  if what == "own mask":
    return commitment(terms, whose, seed) == keys[64:KEY_BYTES]
  return primitives.public_key(mask_key(terms, whose, seed)) == keys[32:64]
