"""A client of SecAgg, as a state machine: (state, message) -> (state, message).

`start` draws the client's keys. From then on `Client.answer` takes each message of the server:

| message      | what the client does                                                        |
| ------------ | --------------------------------------------------------------------------- |
| `roster`     | shares the seeds of its mask key and of its own mask, t of n, sealed        |
| `forwarded`  | opens the others' shares, masks its vector, sends it                        |
| `survivors`  | reveals its shares: of survivors' own masks, of absent clients' mask keys;  |
|              | with a directory it signs this list instead ...                             |
| `signatures` | ... and reveals when t clients have signed the same                         |

The client answers each kind of message once. It does not answer a message that is wrong in any way:
the error tells why, and the state is unchanged. So it reveals only one kind of share for each
client, whatever the server asks.

Client i masks its vector x_i with its own seed b_i and a seed s_ij for each neighbour j, and sends

  y_i = x_i + PRG(b_i) + sum over neighbours j > i of PRG(s_ij) - sum over j < i of PRG(s_ij)

Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", figure 4; Bell et al. 2020 for neighbours. Shamir's shares are of two seeds of 128 bits:
the paper's b and, in place of the paper's s^SK, the seed of an X25519 key.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dpjax.secure.sums import primitives
from dpjax.secure.sums.messages import SERVER, Records
from dpjax.secure.sums.primitives import SECRET_BYTES
from dpjax.secure.sums.terms import KEY_BYTES, Terms, holders, neighbours
from dpjax.validate import UserError

# First byte of a revealed share: it says which of two secrets is shared.
OWN_MASK = b"\0"
MASK_KEY = b"\1"
DEAD = b"\0"
ALIVE = b"\1"


class Client(NamedTuple):
  """State of a client between two messages. Its keys, seeds, channels and shares are secret."""

  terms: Terms
  me: int
  expects: str  # the kind of message that the client answers next; "": none
  channel_key: bytes  # [32] X25519
  mask_seed: bytes  # [16] seed of the X25519 key for masks
  own_seed: bytes  # [16] seed of the client's own mask: the paper's b
  public: bytes  # its own public keys, as the server got them
  signing_key: bytes | None
  roster: Mapping[int, bytes]  # neighbour -> its public keys [96], or [160] when signed
  channels: Mapping[int, tuple[bytes, bytes]]  # neighbour -> keys (to it, from it)
  shares: Mapping[int, bytes]  # client -> share of its mask seed + share of its own seed
  survivors: Mapping[int, bytes]  # the list that the client has signed

  @property
  def is_done(self) -> bool:
    """Whether the client receives nothing more."""
    return not self.expects

  def largest(self) -> int:
    """Returns the largest size of the next message from the server, in bytes."""
    return self.terms.size(self.expects, len(self.terms.clients))

  def answer(self, data: bytes, vector: np.ndarray | None = None) -> tuple[Client, bytes]:
    """Returns the client's next state, and its answer to a message of the server.

    Args:
      vector: [d] unsigned integers of the terms' type; needed if `expects` is "forwarded".

    Raises:
      UserError: the message is not the one that the client expects, or the message or the vector
        is wrong. Nothing is revealed, and the sum goes on without this client.
    """
    if self.is_done:
      raise UserError("has said all it says in this sum", field="client", value=self.me)
    records = self.terms.read(self.expects, data, SERVER)
    if self.expects == "forwarded":
      return _mask(self, records, vector)
    answers = {"roster": _share, "survivors": _settle, "signatures": _confirm}
    return answers[self.expects](self, records)


def start(
  terms: Terms,
  me: int,
  *,
  signing_key: bytes | None = None,
  entropy: Callable[[int], bytes] = secrets.token_bytes,
) -> tuple[Client, bytes]:
  """Returns a client with fresh keys, and its message with the public keys.

  Args:
    signing_key: Ed25519 private key [32], needed if the terms have a directory.
    entropy: `entropy(n)` returns n random bytes, to make keys. Use another source than the
      operating system only in tests: anyone who knows the bytes sees the vector.

  Raises:
    UserError: `me` is not among the clients, the signing key is not that of the directory, or
      the extra `secure` is not installed.
  """
  terms.check_client(me)
  me = int(me)
  public_key = primitives.signing_public_key(signing_key) if signing_key else None
  listed = terms.directory[terms.clients.index(me)] if terms.directory else None
  if public_key != listed:
    raise UserError(
      f"of client {me} is not the one that the directory lists", field="signing_key"
    )
  # The three secrets are for the sealed channels, the pairwise masks and the client's own mask.
  channel = entropy(32)
  mask = entropy(SECRET_BYTES)
  seed = entropy(SECRET_BYTES)
  public = b"".join(
    (
      primitives.public_key(channel),
      primitives.public_key(mask_key(terms, me, mask)),
      commitment(terms, me, seed),
    )
  )
  if signing_key:
    public += primitives.sign(signing_key, _signed_keys(terms, me, public))
  client = Client(
    terms, me, "roster", channel, mask, seed, public, signing_key, {}, {}, {}, {}
  )
  return client, terms.write("keys", me, {me: public})


def mask_key(terms: Terms, who: int, seed: bytes) -> bytes:
  """Derives the X25519 private key [32] for a client's pairwise masks."""
  return primitives.derive(seed, terms.context(b"mask key", who))


def commitment(terms: Terms, who: int, seed: bytes) -> bytes:
  """Returns the commitment [32] with which the server verifies the rebuilt seed of an own mask."""
  return primitives.derive(seed, terms.context(b"commitment", who))


def own_stream(terms: Terms, who: int, seed: bytes) -> bytes:
  """Derives the key [32] of a client's own mask, the stream PRG(b) of its seed b."""
  return primitives.derive(seed, terms.context(b"own mask", who))


def pair_stream(terms: Terms, me: int, private: bytes, other: int, public: bytes) -> bytes:
  """Derives the key [32] of the stream that two neighbours share.

  Args:
    private: private mask key of `me`.
    public: public mask key of `other`.
  """
  # Both ends derive the key, so the ids are in a fixed order.
  info = terms.context(b"pair mask", min(me, other), max(me, other))
  return primitives.agree(private, public, info)


def _signed_keys(terms: Terms, who: int, public: bytes) -> bytes:
  return terms.context(b"signed keys", who) + public


def is_signed(terms: Terms, who: int, record: bytes) -> bool:
  """Returns whether client `who` of the directory has signed this record of public keys."""
  public = dict(zip(terms.clients, terms.directory or ()))[who]
  text = _signed_keys(terms, who, record[:KEY_BYTES])
  return primitives.signed_by(public, record[KEY_BYTES:], text)


def signed_survivors(terms: Terms, survivors: Mapping[int, bytes]) -> bytes:
  """Returns the bytes that a client signs for a list of survivors."""
  alive = sorted(who for who, mark in survivors.items() if mark == ALIVE)
  return terms.context(b"signed survivors", *alive)


def _share(client: Client, records: Records) -> tuple[Client, bytes]:
  terms = client.terms
  me = client.me
  roster = {who: bytes(record) for who, record in records.items()}
  _check_roster(client, roster)
  there = holders(terms, me, roster)
  if len(there) < terms.threshold:
    raise UserError(
      f"{len(there)} to share with; the threshold is {terms.threshold}", field="roster"
    )
  seen = {**roster, me: client.public}
  # Without a graph all clients see one roster. On a graph each sees another one, so a channel is
  # bound to the keys of its two ends.
  all_seen = _digest(seen) if terms.degree is None else None
  channels = {
    who: _channel(client, who, keys[:32], all_seen or _digest({me: seen[me], who: keys}))
    for who, keys in roster.items()
  }
  halves = [
    primitives.split(seed, terms.threshold, len(there))
    for seed in (client.mask_seed, client.own_seed)
  ]
  shares = {who: mask + share for who, mask, share in zip(there, *halves)}
  sealed = {
    who: primitives.seal(channels[who][0], shares[who], terms.context(b"shares", me, who))
    for who in roster
  }
  # The client holds a share of its own secrets, as its neighbours do.
  client = client._replace(
    expects="forwarded", roster=roster, channels=channels, shares={me: shares[me]}
  )
  return client, terms.write("envelopes", me, sealed)


def _check_roster(client: Client, roster: Mapping[int, bytes]) -> None:
  terms = client.terms
  me = client.me
  strangers = sorted({*roster} - {*neighbours(terms, me)})
  if strangers:
    raise UserError(f"client {strangers[0]} is no neighbour of client {me}", field="roster")
  secret_keys = (client.channel_key, mask_key(terms, me, client.mask_seed))
  keys = [primitives.public_key(key) for key in secret_keys]
  keys += [part for record in roster.values() for part in (record[:32], record[32:64])]
  # The protocol requires distinct keys (Bonawitz et al. 2017, figure 4).
  if len({*keys}) != len(keys):
    raise UserError("two clients have the same key", field="roster")
  for who, record in roster.items():
    if terms.directory and not is_signed(terms, who, record):
      raise UserError(f"the keys of client {who} are not signed by it", field="roster")


def _digest(records: Mapping[int, bytes]) -> bytes:
  """Returns a digest [32] of clients' public keys."""
  held = b"".join(who.to_bytes(8, "little") + records[who] for who in sorted(records))
  return hashlib.sha256(held).digest()


def _channel(client: Client, who: int, public: bytes, seen: bytes) -> tuple[bytes, bytes]:
  """Returns (key for messages to a neighbour, key for messages from it).

  Args:
    seen: digest of the public keys that both ends must have seen. If one was changed on its way,
      neither end can open the other's shares. Otherwise masks would not cancel, and the sum would
      be wrong.
  """
  low, high = sorted((client.me, who))
  info = client.terms.context(b"channel", low, high) + seen
  both = primitives.agree(client.channel_key, public, info, 64)
  upwards = both[:32]
  downwards = both[32:]
  return (upwards, downwards) if client.me == low else (downwards, upwards)


def _mask(
  client: Client, records: Records, vector: np.ndarray | None
) -> tuple[Client, bytes]:
  terms = client.terms
  me = client.me
  strangers = sorted({*records} - {*client.roster})
  if strangers:
    raise UserError(f"client {strangers[0]} was not on the roster", field="forwarded")
  if len(records) + 1 < terms.threshold:
    raise UserError(
      f"shares of {len(records)}; with its own the threshold is {terms.threshold}",
      field="forwarded",
    )
  vector = terms.check_vector(vector)
  shares = {
    who: primitives.unseal(
      client.channels[who][1], bytes(sealed), terms.context(b"shares", who, me)
    )
    for who, sealed in records.items()
  }
  private = mask_key(terms, me, client.mask_seed)
  keystreams = [(own_stream(terms, me, client.own_seed), True)]
  for who in shares:
    key = pair_stream(terms, me, private, who, client.roster[who][32:64])
    # Two clients share a stream. The client with the smaller id adds it, the other subtracts it.
    keystreams.append((key, who > me))
  masked = np.array(vector, terms.dtype)
  primitives.add_streams(masked, keystreams)
  # The channels' keys are no longer needed, and are deleted. `channel_key` could derive them.
  client = client._replace(
    expects="survivors", shares={**client.shares, **shares}, channels={}
  )
  return client, terms.write("masked", me, {me: masked.tobytes()})


def _settle(client: Client, records: Records) -> tuple[Client, bytes]:
  terms = client.terms
  me = client.me
  survivors = {who: bytes(mark) for who, mark in records.items()}
  if {*survivors} != {*client.shares} or not {*survivors.values()} <= {DEAD, ALIVE}:
    raise UserError(
      "must say of each client whose shares this one holds", field="survivors"
    )
  # If this client were listed as gone, its mask key would be revealed. Both of its secrets
  # could then become known.
  if survivors[me] != ALIVE:
    raise UserError(f"client {me} is said to be gone, and is here", field="survivors")
  alive = sum(mark == ALIVE for mark in survivors.values())
  fewest = terms.threshold
  # Without a graph the client sees the marks of all clients, and counts the survivors itself.
  if terms.degree is None:
    fewest = max(fewest, terms.min_survivors)
  if alive < fewest:
    raise UserError(
      f"only {alive}; fewer than {fewest} are not unmasked", field="survivors"
    )
  if client.signing_key is None:
    return _reveal(client, survivors)
  signature = primitives.sign(client.signing_key, signed_survivors(terms, survivors))
  client = client._replace(expects="signatures", survivors=survivors)
  return client, terms.write("agreed", me, {me: signature})


def _confirm(client: Client, records: Records) -> tuple[Client, bytes]:
  terms = client.terms
  text = signed_survivors(terms, client.survivors)
  directory = dict(zip(terms.clients, terms.directory or ()))
  signed = [
    who
    for who, signature in records.items()
    if client.survivors.get(who) == ALIVE
    and primitives.signed_by(directory[who], bytes(signature), text)
  ]
  # A second list cannot get as many signatures, unless more than a third of the clients lie.
  if len(signed) < max(terms.threshold, terms.min_survivors):
    raise UserError(
      f"{len(signed)} clients have signed this list of survivors; the threshold "
      f"is {terms.threshold}",
      field="signatures",
    )
  return _reveal(client, client.survivors)


def _reveal(client: Client, survivors: Mapping[int, bytes]) -> tuple[Client, bytes]:
  """Reveals one of the two shares for each client, as the survivors' marks ask, and never both."""
  revealed = {
    who: OWN_MASK + client.shares[who][SECRET_BYTES:]
    if mark == ALIVE
    else MASK_KEY + client.shares[who][:SECRET_BYTES]
    for who, mark in survivors.items()
  }
  # All shares are deleted, so that no later message can get a client's second share.
  client = client._replace(expects="", shares={})
  return client, client.terms.write("revealed", client.me, revealed)
