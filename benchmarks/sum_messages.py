"""Messages and bytes of one client in a secure sum, counted from the layout of its messages.

  python -m benchmarks sum_messages --workloads=1000x1000000

It writes sum_messages.csv.

Nothing is measured: the counts are those of the messages that the protocols write, with everybody
there. Committees and SecAgg+ are made for the same clients: `CORRUPT` of them tell the server all
they know, and `SILENT` fall silent.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from absl import flags

from benchmarks import entries as entries_file
from benchmarks import sum_overhead
from dpjax.gradients.ghost.explain import aligned
from dpjax.secure import sums
from dpjax.secure.sums import committee, messages
from dpjax.validate import UserError

SIZES = ((100, 1_000_000), (1_000, 1_000_000))
CORRUPT = 0.1
SILENT = 0.2
_BITS = 32
# Packed secrets that are tried for the committee of the fewest bytes.
_PACKED = (1, 2, 5, 10, 20, 50, 100)


class Entry(NamedTuple):
  """What one client sends and receives in one sum."""

  method: str
  role: str  # "client", or "member" of a committee, who is a client, too
  clients: int
  length: int  # entries of 32 bits
  messages: int  # that it sends
  sent_bytes: int
  received_bytes: int


def secagg(protocol: sums.SecAgg | sums.SecAggPlus, clients: int, length: int) -> Entry:
  """Returns the counts of SecAgg or SecAgg+."""
  terms = protocol.terms(range(clients), length)
  # With how many others each client shares masks.
  near = len(terms.clients) - 1 if terms.degree is None else terms.degree
  sent = {"keys": 1, "envelopes": near, "masked": 1, "revealed": near + 1}
  # The server names a client itself among the survivors.
  received = {"roster": near, "forwarded": near, "survivors": near + 1}
  size = {kind: terms.size(kind, count) for kind, count in {**sent, **received}.items()}
  return Entry(
    protocol.name,
    "client",
    clients,
    length,
    len(sent),
    sum(size[kind] for kind in sent),
    sum(size[kind] for kind in received),
  )


def of_committee(protocol: sums.Committee, clients: int, length: int) -> list[Entry]:
  """Returns the counts of a client of a committee, and of one of its members."""
  terms = protocol.terms(range(clients), length)
  members = terms.num_members

  size = terms.size
  shares = size("shares", members)
  roster = size("roster", members)
  forwarded = clients * size("forwarded", 1)
  name = f"committee of {members}, {protocol.colluding} colluding, {protocol.packed} packed"
  own = (name, "client", clients, length, 1, shares, roster)
  of_member = (
    *(name, "member", clients, length, 3),
    shares + size("keys", 1) + size("sums", 1),
    roster + forwarded + size("survivors", clients),
  )
  return [Entry(*own), Entry(*of_member)]


def cheapest(clients: int, length: int) -> sums.Committee:
  """Returns the safe committee whose clients send the fewest bytes."""
  candidates = []
  for packed in _PACKED:
    try:
      members, colluding = committee.parameters(
        clients, corrupt=CORRUPT, dropout=SILENT, packed=packed
      )
    # No committee of so few clients has that many packed secrets.
    except UserError:
      continue
    candidates.append(
      sums.Committee(num_members=members, colluding=colluding, packed=packed)
    )
  return min(candidates, key=lambda made: of_committee(made, clients, length)[0].sent_bytes)


def measure(sizes: Sequence[tuple[int, int]] = SIZES) -> list[Entry]:
  """Returns all entries.

  >>> [entry.messages for entry in measure([(100, 1000)])]
  [1, 2, 4, 4, 1, 3, 1, 3]
  """
  entries = []
  for clients, length in sizes:
    vector = messages.size(1, length * _BITS // 8)
    entries += [
      Entry("plain", "client", clients, length, 1, vector, 0),
      Entry("additive_servers", "client", clients, length, 2, 2 * vector, 0),
      secagg(sums.SecAgg(min_survivors=2 * clients // 3 + 1), clients, length),
      secagg(sums.SecAggPlus(corrupt=CORRUPT, dropout_share=SILENT), clients, length),
      *of_committee(sums.Committee(), clients, length),
      *of_committee(cheapest(clients, length), clients, length),
    ]
  return entries


_HEADER = ("method", "role", "clients", "length", "messages", "sent", "received")


def table(entries: Sequence[Entry]) -> str:
  """Returns the entries for people.

  >>> print(table([Entry("plain", "client", 3, 10, 1, 81, 0)]))
  method  role    clients  length  messages  sent      received
  plain   client  3        10      1         0.000 MB  0.000 MB
  """
  rows = [
    (*map(str, entry[:5]), *(f"{count / 1e6:.3f} MB" for count in entry[5:]))
    for entry in entries
  ]
  return aligned([_HEADER, *rows])


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """Writes `out`/sum_messages.csv."""
  entries_file.write(out / "sum_messages.csv", entries)


def define() -> None:
  """Defines the flags."""
  sizes = [f"{clients}x{length}" for clients, length in SIZES]
  flags.DEFINE_list("workloads", sizes, "CLIENTSxLENGTH of each sum.")


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  yield "sums", measure(sum_overhead.sizes(values.workloads))
