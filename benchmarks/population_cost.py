"""What a population costs: SCAFFOLD over many clients, whose c_i lie in memory or on disk.

  python -m benchmarks population --clients=100,10000 --rounds=100

It writes population.csv.

A model of 1e5 parameters, cohorts of 10 clients that take part in turn, a checkpoint every ten
rounds. Each entry runs in a process of its own; its memory is the peak above what the process
held after its first round, by Linux's account. Memory of a device is the largest sum of its live
arrays, before and after rounds.
"""

from __future__ import annotations

import functools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from benchmarks import alone, options
from benchmarks import entries as entries_file
from dpjax import federated, validate
from dpjax.experiments.run import checkpoint
from dpjax.experiments.run.provenance import process_memory
from dpjax.federated.cohort import Cohort
from dpjax.gradients.ghost.explain import aligned
from dpjax.parallel.client_states import Memory
from dpjax.validate import UserError

METHODS = ("memory", "disk")
SIZES = (100, 10_000)
_COHORT = 10
_SAVE_EVERY = 10
_IN = 1000  # 1e5 parameters
_OUT = 100
_EXAMPLES = 4
_RATE = 1e-4


class Entry(NamedTuple):
  """One population."""

  clients: int
  method: str  # where clients' states lie
  rounds: int
  touched: int  # clients that have taken part
  round_s: float  # median
  save_s: float  # median
  saved_bytes: int  # written by one checkpoint and the rounds since the one before, median
  disk_bytes: int  # of all checkpoints in the end
  device_bytes: int
  host_bytes: int | None  # peak, above what it held after the first round; None: unknown


def _loss(params: Any, example: Any) -> Any:
  return 0.5 * jnp.mean((example @ params["w"] - example[:_OUT]) ** 2)


def _cohorts(num_clients: int, rounds: int) -> Iterator[Cohort]:
  """All clients in turn, each with the same few examples of its own in every round."""
  for number in range(rounds):
    ids = (np.arange(_COHORT) + number * _COHORT) % num_clients
    draw = lambda who: np.random.default_rng(who).random((_EXAMPLES, _IN), np.float32)
    cohort = federated.from_batches([draw(int(who)) for who in ids], batch_size=2)
    yield cohort._replace(ids=ids)


def _files(folder: pathlib.Path) -> dict[pathlib.Path, int]:
  return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _measured(num_clients: int, method: str, rounds: int, folder: pathlib.Path) -> Entry:
  algorithm = federated.scaffold(
    _loss, optax.sgd(_RATE), map_clients=federated.vmap_clients(), key=jax.random.key(0),
    client_learning_rate=_RATE, num_clients=num_clients,
  )  # fmt: skip
  checkpoints = checkpoint.Checkpoints(
    folder, memory=functools.partial(Memory, on_disk=method == "disk")
  )
  start = {"w": jnp.zeros((_IN, _OUT))}
  state = checkpoints.begin(algorithm.init(start, num_clients))
  round_s = []
  save_s = []
  saved = []
  device = 0
  held = None
  files = _files(folder)
  for number, cohort in enumerate(_cohorts(num_clients, rounds), 1):
    began = time.perf_counter()
    state, _ = algorithm.round(state, cohort)
    jax.block_until_ready(state.params)
    round_s.append(time.perf_counter() - began)
    device = max(device, sum(leaf.nbytes for leaf in jax.live_arrays()))
    if number == 1:
      checkpoints.save(0, state, {})
      held = process_memory("VmRSS", forget_peak=True)
      files = _files(folder)
    elif number % _SAVE_EVERY == 0:
      began = time.perf_counter()
      checkpoints.save(number, state, {})
      save_s.append(time.perf_counter() - began)
      before = files
      files = _files(folder)
      # Bytes that were written, of files that are appended to or made whole.
      saved.append(sum(max(0, size - before.get(path, 0)) for path, size in files.items()))
  peak = process_memory("VmHWM")
  memories = state.memories
  assert memories is not None
  return Entry(
    clients=num_clients,
    method=method,
    rounds=rounds,
    touched=len(memories.touched),
    round_s=statistics.median(round_s[1:]),
    save_s=statistics.median(save_s),
    saved_bytes=int(statistics.median(saved)),
    disk_bytes=sum(files.values()),
    device_bytes=device,
    host_bytes=None if peak is None or held is None else max(0, peak - held),
  )


def measure(num_clients: int, method: str, *, rounds: int) -> Entry:
  """One entry, in a process of its own; its checkpoints lie in a temporary folder.

  Args:
    num_clients: of the population, at least one cohort of 10.
    method: "memory" or "disk".
    rounds: at least 20, for two checkpoints.

  Raises:
    UserError: a wrong argument, or the process failed, as where the disk is full.
  """
  validate.one_of(METHODS, methods=method)
  validate.integer_at_least(_COHORT, clients=num_clients)
  validate.integer_at_least(2 * _SAVE_EVERY, rounds=rounds)
  outcome = alone.run(__name__, num_clients, method, rounds)
  if outcome.printed is None:
    raise UserError(f"failed: {outcome.reason[:160]}", field="clients", value=num_clients)
  return Entry(*outcome.printed)


_HEADER = ("clients", "method", "rounds", "touched", "round", "save", "saved", "on disk",
           "device", "host")  # fmt: skip


def table(entries: Sequence[Entry]) -> str:
  """The entries for people.

  >>> print(table([Entry(100, "disk", 20, 100, 0.01, 0.1, 4e7, 8e7, 9e6, 2e6)]))
  clients  method  rounds  touched  round     save    saved  on disk  device  host
  100      disk    20      100      0.0100 s  0.10 s  40 MB  80 MB    9 MB    2 MB
  """
  mb = lambda value: "" if value is None else f"{value / 1e6:.0f} MB"
  rows = [
    (*map(str, e[:4]), f"{e.round_s:.4f} s", f"{e.save_s:.2f} s", *map(mb, e[6:]))
    for e in entries
  ]
  return aligned([_HEADER, *rows])


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/population.csv."""
  entries_file.write(out / "population.csv", entries)


def define() -> None:
  """Defines the flags."""
  flags.DEFINE_list("clients", [*map(str, SIZES)], "Sizes of the population.")
  options.define_names("methods", METHODS)
  flags.DEFINE_integer(
    "rounds", 100, "Rounds of 10 clients.", lower_bound=20, upper_bound=10**6
  )


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  methods = options.names("methods", METHODS)
  for count in options.counts("clients"):
    for method in methods:
      yield f"{count} {method}", [measure(count, method, rounds=values.rounds)]


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as folder:
    asked_clients, asked_method, asked_rounds = alone.ordered()
    entry = _measured(asked_clients, asked_method, asked_rounds, pathlib.Path(folder))
  print(json.dumps(entry))
