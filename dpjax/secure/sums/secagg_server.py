"""The server of SecAgg: it receives messages one by one, closes each phase, and then sends
messages.

    state = start(terms)
    state = receive(state, message)          # of any client, while the phase is open
    state, messages = close(state)           # by client; the phase is over
    ...                                      # keys, envelopes, masked, (agreed,) revealed
    unmasked = total(state)

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
from dpjax.secure.sums.messages import SERVER
from dpjax.secure.sums.primitives import SECRET_BYTES
from dpjax.secure.sums.secagg_client import (
  ALIVE,
  DEAD,
  KEY_BYTES,
  MASK_KEY,
  OWN_MASK,
  commitment,
  is_signed,
  mask_key,
  own_stream,
  pair_stream,
  record_bytes,
)
from dpjax.secure.sums.terms import Terms, holders, neighbours
from dpjax.validate import UserError

# Agreement with a low-order point gives zero, which is an error, for any private key. So this
# private key finds such points.
_ANY_PRIVATE = bytes(31) + b"@"


class Collected(NamedTuple):
  """State of the server between two messages. Nothing is secret from its operator."""

  terms: Terms
  phase: str  # the kind of message that is received now; "": the sum is complete
  keys: Mapping[int, bytes]  # client -> its public keys [96], or [160] when signed
  envelopes: Mapping[int, Mapping[int, bytes]]  # sender -> receiver -> sealed shares
  total: np.ndarray  # [d] sum of the masked vectors so far
  uploaded: frozenset[int]
  signatures: Mapping[int, bytes]
  revealed: Mapping[int, Mapping[int, bytes]]  # sender -> client -> share of its secret


class Unmasked(NamedTuple):
  """Result of one sum, and what it cost the server."""

  total: np.ndarray  # [d] uint32 or uint64
  survivors: tuple[int, ...]
  expansions: int  # number of streams that the server expanded
  agreements: int  # number of the server's key agreements


def start(terms: Terms) -> Collected:
  """Returns the state of a server that waits for keys.

  Raises:
    UserError: the extra `secure` is not installed.
  """
  primitives.library()
  zero = np.zeros(terms.length, terms.dtype)
  return Collected(terms, "keys", {}, {}, zero, frozenset(), {}, {})


def expected(state: Collected) -> frozenset[int]:
  """Returns the clients that may still send a message in this phase."""
  phases = {
    "keys": (state.terms.clients, state.keys),
    "envelopes": (state.keys, state.envelopes),
    "masked": (state.envelopes, state.uploaded),
    "agreed": (state.uploaded, state.signatures),
    "revealed": (state.signatures or state.uploaded, state.revealed),
    "": ((), ()),
  }
  allowed, received = phases[state.phase]
  return frozenset(allowed) - frozenset(received)


def receive(state: Collected, data: bytes, sender: int | None = None) -> Collected:
  """Returns the state with one more message.

  Args:
    sender: id of the sender, as the transport knows it; None: trust the id in the message.

  Raises:
    UserError: the message is not of this phase and session, is a second one, or is wrong; or its
      sender is no client, or dropped out before. The state stays as it was.
  """
  terms = state.terms
  kind = state.phase
  if not kind:
    raise UserError("came after the sum was closed", field="message")
  message = messages.read(data, kind, terms.session, record_bytes(terms, kind))
  if sender is not None and message.sender != sender:
    raise UserError(
      f"{kind}: from client {sender}, who says to be {messages.name(message.sender)}"
    )
  if message.sender not in expected(state):
    raise UserError(
      f"{kind}: of {messages.name(message.sender)} is a second one, or too late"
    )
  take = {
    "keys": _take_keys,
    "envelopes": _take_envelopes,
    "masked": _take_masked,
    "agreed": _take_signature,
    "revealed": _take_revealed,
  }
  return take[kind](state, message)


def _own_record(kind: str, message: messages.Message) -> memoryview:
  if [*message.records] != [message.sender]:
    raise UserError(f"{kind}: of client {message.sender} must be about itself alone")
  return message.records[message.sender]


def _take_keys(state: Collected, message: messages.Message) -> Collected:
  record = bytes(_own_record("keys", message))
  terms = state.terms
  if terms.directory and not is_signed(terms, message.sender, record):
    raise UserError(f"of client {message.sender} are not signed by it", field="keys")
  _check_keys(state, message.sender, record)
  return state._replace(keys={**state.keys, message.sender: record})


def _check_keys(state: Collected, sender: int, record: bytes) -> None:
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


def _take_envelopes(state: Collected, message: messages.Message) -> Collected:
  wanted = {*holders(state.terms, message.sender, state.keys)} - {message.sender}
  if {*message.records} != wanted:
    raise UserError(
      f"of client {message.sender} are not one for each neighbour", field="envelopes"
    )
  sealed = {who: bytes(record) for who, record in message.records.items()}
  return state._replace(envelopes={**state.envelopes, message.sender: sealed})


def _take_masked(state: Collected, message: messages.Message) -> Collected:
  vector = np.frombuffer(_own_record("masked", message), state.terms.dtype)  # [d]
  uploaded = state.uploaded | {message.sender}
  return state._replace(total=state.total + vector, uploaded=uploaded)


def _take_signature(state: Collected, message: messages.Message) -> Collected:
  signature = bytes(_own_record("agreed", message))
  return state._replace(signatures={**state.signatures, message.sender: signature})


def _take_revealed(state: Collected, message: messages.Message) -> Collected:
  survivors = _survivors(state, message.sender)
  kinds = {who: bytes(record[:1]) for who, record in message.records.items()}
  wanted = {who: OWN_MASK if mark == ALIVE else MASK_KEY for who, mark in survivors.items()}
  if kinds != wanted:
    raise UserError(
      f"of client {message.sender} are not the shares asked for", field="revealed"
    )
  shares = {who: bytes(record[1:]) for who, record in message.records.items()}
  return state._replace(revealed={**state.revealed, message.sender: shares})


def _survivors(state: Collected, who: int) -> dict[int, bytes]:
  """Returns marks of survival by client: of `who`, and of neighbours whose shares `who` holds."""
  there = holders(state.terms, who, state.envelopes)
  return {other: ALIVE if other in state.uploaded else DEAD for other in there}


def close(state: Collected) -> tuple[Collected, dict[int, bytes]]:
  """Ends the phase. Returns the server in the next phase, and its message to each client.

  Raises:
    UserError: fewer than min_survivors or threshold clients are left. Nothing was revealed, except
      in the last phase: the server then holds the shares that the remaining clients revealed.
  """
  opening = {
    "keys": _open_sharing,
    "envelopes": _open_upload,
    "masked": _open_unmasking,
    "agreed": _open_revealing,
    "revealed": _finish,
  }
  return opening[state.phase](state)


def _enough(state: Collected, left: int) -> None:
  terms = state.terms
  # On a graph the threshold is a number of each client's neighbours, not of all clients.
  fewest = (
    terms.min_survivors if terms.degree else max(terms.min_survivors, terms.threshold)
  )
  if left < fewest:
    raise UserError(
      f"only {left} clients sent their {state.phase}; the sum is refused",
      field="min_survivors",
      value=fewest,
    )


def _messages(
  state: Collected, kind: str, records: Mapping[int, Mapping[int, bytes]]
) -> dict[int, bytes]:
  session = state.terms.session
  return {who: messages.write(kind, session, SERVER, of) for who, of in records.items()}


def _open_sharing(state: Collected) -> tuple[Collected, dict[int, bytes]]:
  _enough(state, len(state.keys))
  rosters = {
    who: {x: state.keys[x] for x in neighbours(state.terms, who) if x in state.keys}
    for who in state.keys
  }
  return state._replace(phase="envelopes"), _messages(state, "roster", rosters)


def _open_upload(state: Collected) -> tuple[Collected, dict[int, bytes]]:
  _enough(state, len(state.envelopes))
  forwarded = {
    who: {
      x: state.envelopes[x][who]
      for x in neighbours(state.terms, who)
      if x in state.envelopes
    }
    for who in state.envelopes
  }
  return state._replace(phase="masked"), _messages(state, "forwarded", forwarded)


def _open_unmasking(state: Collected) -> tuple[Collected, dict[int, bytes]]:
  _enough(state, len(state.uploaded))
  survivors = {who: _survivors(state, who) for who in sorted(state.uploaded)}
  phase = "agreed" if state.terms.directory else "revealed"
  return state._replace(phase=phase), _messages(state, "survivors", survivors)


def _open_revealing(state: Collected) -> tuple[Collected, dict[int, bytes]]:
  _enough(state, len(state.signatures))
  everybody = dict.fromkeys(state.signatures, state.signatures)
  return state._replace(phase="revealed"), _messages(state, "signatures", everybody)


def _finish(state: Collected) -> tuple[Collected, dict[int, bytes]]:
  _enough(state, len(state.revealed))
  return state._replace(phase=""), {}


def total(state: Collected) -> Unmasked:
  """Returns the sum of the vectors of all who uploaded, after the last phase was closed.

  Raises:
    UserError: a phase is open, or a secret cannot be rebuilt: too few or wrong shares.
  """
  terms = state.terms
  if state.phase:
    raise UserError(f"the sum still receives {state.phase}", field="total")
  keystreams = []
  # Masks between two survivors cancel; each survivor's own mask is subtracted.
  for who in sorted(state.uploaded):
    seed = _rebuilt(state, who)
    keystreams.append((own_stream(terms, who, seed), False))
  agreements = 0
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
    agreements += len(alive)
  unmasked = state.total.copy()
  primitives.add_streams(unmasked, keystreams)
  survivors = tuple(sorted(state.uploaded))
  return Unmasked(unmasked, survivors, len(keystreams), agreements)


def _rebuilt(state: Collected, whose: int) -> bytes:
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
