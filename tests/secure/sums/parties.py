"""A sum whose messages can be looked at and changed on their way."""

from typing import NamedTuple

import numpy as np

from dpjax.secure.sums import secagg_client, secagg_server
from dpjax.secure.sums.terms import Terms
from dpjax.validate import UserError


def terms(count, threshold, *, length=5, **others):
  """Of clients 0, 1, ...; the threshold is also the smallest cohort."""
  session = others.pop("session", bytes(range(16)))
  fewest = others.pop("min_survivors", threshold)
  named = {"session": session, "min_survivors": fewest, "length": length}
  return Terms(clients=tuple(range(count)), threshold=threshold, **named, **others)


def vectors(count, length=5, bits=32, seed=0):
  rng = np.random.default_rng(seed)
  dtype = np.dtype(f"uint{bits}")
  draw = lambda: rng.integers(0, 2**bits, length, dtype=dtype)
  return {who: draw() for who in range(count)}


def seeded(seed):
  """Entropy that is the same in every run: for tests alone."""
  return np.random.default_rng(seed).bytes


class Played(NamedTuple):
  """One sum, as the server saw it."""

  total: np.ndarray
  survivors: tuple
  messages: dict  # (kind, client) -> the message that it sent
  told: dict  # (kind of the answer, client) -> the message that it was sent
  members: dict  # client -> its last state
  server: secagg_server.Server
  refusals: list  # one line each, in their order


def play(
  terms,
  vectors,
  *,
  silent=None,
  sent=None,
  told=None,
  keys=None,
  entropy=None,
  messages=None,
):
  """A sum in which whoever raises is silent from then on.

  Args:
    silent: kind of message -> the clients that do not send it, nor any later one.
    sent: (kind, client, message) -> the messages that reach the server instead.
    told: (kind of the answer, client, message) -> the message that reaches the client.
    keys: Ed25519 private keys by client.
    messages: where to put the messages as they are written, for a sum that is refused.
  """
  server = secagg_server.start(terms)
  members, inbox, heard, refusals = {}, {}, {}, []
  messages = {} if messages is None else messages
  for who in terms.clients:
    more = {} if entropy is None else {"entropy": entropy(who)}
    key = (keys or {}).get(who)
    members[who], messages["keys", who] = secagg_client.start(
      terms, who, signing_key=key, **more
    )
  there = [*terms.clients]
  while server.phase:
    kind = server.phase
    there = [who for who in there if who not in (silent or {}).get(kind, ())]
    for who in [*there]:
      try:
        if kind != "keys":
          data = told(kind, who, inbox[who]) if told else inbox[who]
          heard[kind, who] = data
          vector = vectors[who] if kind == "masked" else None
          members[who], messages[kind, who] = members[who].answer(data, vector)
        data = messages[kind, who]
        for message in sent(kind, who, data) if sent else [data]:
          server, _ = server.receive(message, who)
      except UserError as error:
        refusals.append(str(error))
        there.remove(who)
    server, inbox = server.close()
  summed = server.result()
  return Played(summed.total, summed.survivors, messages, heard, members, server, refusals)
