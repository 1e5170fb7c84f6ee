"""What secure sums cost by number of clients and length of their vectors: time, bytes, memory.

  python -m benchmarks secure_sums --workloads=10x1000000 --repeats=1

It writes sums.csv and sums.md. The best of --repeats sums is reported.

All parties run in one process, one after the other, so the time is what ALL clients and the
server compute together; on their own machines the clients' share of it is divided by their
number. Every client holds the same vector, made beforehand, and every sum is compared with
the plain one. Memory is the peak above what the process held before, in a process of its own.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

from benchmarks import alone, options
from benchmarks import entries as entries_file
from dpjax import validate
from dpjax.experiments.run.provenance import process_memory
from dpjax.gradients.ghost.explain import aligned
from dpjax.secure import sums
from dpjax.secure.sums.interface import SumProtocol
from dpjax.validate import UserError

METHODS = ("plain", "additive_sharing", "additive_servers", "secagg", "secagg_plus", "bfv",
           "simulated")  # fmt: skip
SIZES = ((10, 10_000), (100, 10_000), (10, 1_000_000), (30, 1_000_000), (100, 1_000_000))
DROPPED = 0.1  # of the clients, before they upload, in the entries with drop-outs
WITH_DROPPED = (
  "additive_sharing",
  "secagg",
  "secagg_plus",
)  # to which it makes a difference
_MOST_SHARED_BYTES = 10e9


class Entry(NamedTuple):
  """One sum; None where it did not run."""

  method: str
  clients: int
  length: int
  dropped: int  # clients that fell silent between sharing and upload
  status: str  # "ok", or why it did not run
  seconds: float | None = None  # best of the repeats, all parties together
  client_bytes: int | None = None
  server_bytes: int | None = None
  expansions: int | None = None
  operations: int | None = None
  peak_bytes: int | None = None  # above what the process held before


class _OneVector(Mapping[int, np.ndarray]):
  """The same vector for each of `count` clients."""

  def __init__(self, count: int, length: int):
    self._count = count
    self._vector = np.arange(length, dtype=np.uint32) * np.uint32(2654435761)

  def __getitem__(self, who: int) -> np.ndarray:
    return self._vector

  def __iter__(self):
    return iter(range(self._count))

  def __len__(self) -> int:
    return self._count


def protocol(method: str, clients: int) -> SumProtocol:
  """With t above two thirds for SecAgg, and for SecAgg+ 10 % corrupt and 20 % silent."""
  validate.one_of(METHODS, methods=method)
  if method in ("simulated", "secagg"):
    return sums.SecAgg(min_survivors=2 * clients // 3 + 1, simulated=method == "simulated")
  options = {"corrupt": 0.1, "dropout_share": 0.2} if method == "secagg_plus" else {}
  return sums.by_name(method, **options)


def sizes(texts: Sequence[str]) -> list[tuple[int, int]]:
  """(clients, length) of texts as "100x1000000".

  >>> sizes(["10x1000"])
  [(10, 1000)]
  """
  pairs = []
  for text in texts:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
      raise UserError(
        "must be CLIENTSxLENGTH, as 100x1000000", field="workloads", value=text
      )
    clients, length = map(int, parts)
    validate.integer_in(3, 10_000, **{"workloads (clients)": clients})
    validate.integer_in(1, 10**8, **{"workloads (length)": length})
    pairs.append((clients, length))
  return pairs


def cases(
  methods: Sequence[str], of_sizes: Sequence[tuple[int, int]] = SIZES
) -> list[tuple[str, int, int, int]]:
  """(method, clients, length, dropped) of a table.

  >>> cases(["plain", "secagg"], [(20, 5)])
  [('plain', 20, 5, 0), ('secagg', 20, 5, 0), ('secagg', 20, 5, 2)]
  """
  return [
    (method, clients, length, dropped)
    for clients, length in of_sizes
    for method in methods
    for dropped in sorted({0, int(DROPPED * clients)})
    if not dropped or method in WITH_DROPPED
  ]


def why_not(method: str, clients: int, length: int, dropped: int) -> str:
  """Why a sum is not run; "" where it is."""
  if method != "additive_sharing":
    return ""
  if dropped:
    return "refused: no sum without everybody"
  shared = 4.0 * clients * (clients - 1) * length
  return f"skipped: {shared / 1e9:.0f} GB of shares" if shared > _MOST_SHARED_BYTES else ""


def measure(
  method: str,
  clients: int,
  length: int,
  *,
  dropped: int,
  repeats: int = 1,
  fresh_process: bool = True,
) -> Entry:
  """One entry.

  Args:
    dropped: clients that fall silent between sharing and upload.
    fresh_process: in a fresh process, whose peak memory is measured.

  Raises:
    UserError: an unknown method, or a sum that is not the plain one.
  """
  validate.one_of(METHODS, methods=method)
  first = (method, clients, length, dropped)
  reason = why_not(*first)
  if reason:
    return Entry(*first, reason)
  if not fresh_process:
    return _measured(*first, repeats)
  outcome = alone.run(__name__, *first, repeats)
  if outcome.printed is None:
    return Entry(*first, f"failed: {outcome.reason[:80]}")
  return Entry(*outcome.printed)


def _measured(method: str, clients: int, length: int, dropped: int, repeats: int) -> Entry:
  chosen = protocol(method, clients)
  small = _OneVector(clients, 1)
  chosen.sum(small)  # loads the libraries
  vectors = _OneVector(clients, length)
  drops = sums.Drops(before_upload=frozenset(range(dropped)))
  before = process_memory("VmRSS", forget_peak=True)  # of the imports
  results = [chosen.sum(vectors, drops) for _ in range(repeats)]
  peak = process_memory("VmHWM")
  above = None if peak is None or before is None else max(peak - before, 0)
  expected = vectors[0] * np.uint32(clients - dropped)
  if not all(np.array_equal(result.total, expected) for result in results):
    raise UserError("the sum is not the plain one", field="methods", value=method)
  cost = results[0].cost._replace(seconds=min(result.cost.seconds for result in results))
  return Entry(method, clients, length, dropped, "ok", cost.seconds, *cost[:4], above)


_HEADER = ("method", "clients", "length", "dropped", "seconds", "client", "server",
           "expansions", "operations", "memory")  # fmt: skip


def table(entries: Sequence[Entry]) -> str:
  """The entries for people; bytes of one client and of the server, sent and received.

  >>> print(table([Entry("plain", 3, 10, 0, "ok", 0.001, 81, 243, 0, 0, 5e6)]))
  method  clients  length  dropped  seconds  client     server     expansions  operations  memory
  plain   3        10      0        0.001    0.0001 MB  0.0002 MB  0           0           5 MB
  """
  return aligned([_HEADER, *map(_cells, entries)])


def _cells(entry: Entry) -> tuple[str, ...]:
  first = tuple(map(str, entry[:4]))
  if entry.status != "ok":
    return (*first, entry.status, *[""] * 5)
  megabytes = lambda value, form: "" if value is None else f"{value / 1e6:{form}} MB"
  return (
    *first,
    f"{entry.seconds:.3g}",
    megabytes(entry.client_bytes, ".4g" if (entry.client_bytes or 0) > 1e3 else ".4f"),
    megabytes(entry.server_bytes, ".4g" if (entry.server_bytes or 0) > 1e3 else ".4f"),
    str(entry.expansions),
    str(entry.operations),
    megabytes(entry.peak_bytes, ".0f"),
  )


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/sums.csv and, as text, `out`/sums.md."""
  entries_file.write(out / "sums.csv", entries)
  (out / "sums.md").write_text(f"```\n{table(entries)}\n```\n")


def define() -> None:
  """Defines the flags."""
  texts = [f"{clients}x{length}" for clients, length in SIZES]
  flags.DEFINE_list("workloads", texts, "CLIENTSxLENGTH of each sum.")
  options.define_names("methods", METHODS)
  options.define_repeats()
  options.define_peak_rss()


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  methods = options.names("methods", METHODS)
  for method, clients, length, dropped in cases(methods, sizes(values.workloads)):
    entry = measure(
      method,
      clients,
      length,
      dropped=dropped,
      repeats=values.repeats,
      fresh_process=values.peak_rss,
    )
    yield f"{method} {clients}x{length}", [entry]


if __name__ == "__main__":
  print(json.dumps(_measured(*alone.ordered())))
