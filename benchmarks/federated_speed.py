"""Rounds per second of federated averaging against the floor: a Python loop of jitted local
steps that does nothing else (no padding, no clipping, no diagnostics); and against FedJAX.

  python -m benchmarks federated --workloads=cnn,mlp --methods=loop,vmap
  python -m benchmarks federated --workloads=mlp --methods=vmap,pmap,shard_map --cpu_devices=8 \\
    --data_mb=2,188

A round has 40 clients of 3 local steps. "loop" is one thread, "threads" is what launch.federate
does on a CPU, "pmap" and "shard_map" run over all devices (8 devices of one CPU show that the
program is right, not how fast it is). With --clients a round is timed over the number of clients,
by the last of --methods (default: threads). It writes federated.csv and federated.png.

All ways are compiled first and then timed in turns, so that whatever else the machine does
falls on each of them alike; the ratio is that of the medians.
"""

from __future__ import annotations

import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from benchmarks import entries as entries_file
from benchmarks import fedjax_peer, options
from dpjax import data, federated, losses, pictures, validate
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.federated.cohort import Cohort, LocalBatches
from dpjax.federated.execution.named import by_name
from dpjax.gradients.ghost.explain import aligned
from dpjax.types import Example
from dpjax.validate import UserError
from dpjax.zoo import networks

FLOOR = "floor"
OVER_DEVICES = ("pmap", "shard_map")
METHODS = (FLOOR, "loop", "threads", "vmap", *OVER_DEVICES, "fedjax")
_KEY_SEED = 0
_RATE = 0.1
_ROW_BYTES = 4 * 28 * 28
WORKLOADS = ("cnn", "mlp")


class Entry(NamedTuple):
  """One way to run one round; None where it did not run."""

  workload: str
  method: str
  num_clients: int
  steps_per_client: int
  median_s: float | None = None  # of one round
  ratio: float | None = None  # of medians: to the floor, or to the first size of the data
  rounds_per_s: float | None = None
  num_devices: int = 1  # that the method runs on
  data_mb: int | None = None  # of the data set, where that was chosen; most of it nobody's
  note: str = ""  # versions of a peer, or why it did not run


class RoundLoad(NamedTuple):
  """A model and its cohort."""

  loss_fn: Any
  params: Any
  cohort: Cohort


def default_methods() -> list[str]:
  """All that can run here."""
  there = [FLOOR, "loop", "threads", "vmap", *OVER_DEVICES]
  return [*there, "fedjax"] if fedjax_peer.is_installed() else there


def use_cpu_devices(count: int) -> None:
  """Makes so many devices of one CPU, for pmap and shard_map; before anything touches a device.

  Raises:
    UserError: count < 1, JAX runs on something else than a CPU, or runs already.
  """
  validate.integer_at_least(1, cpu_devices=count)
  try:
    jax.config.update("jax_num_cpu_devices", count)
  except (RuntimeError, ValueError) as error:
    if jax.local_device_count("cpu") != count:
      raise UserError(
        "must be asked for before JAX runs, which has "
        f"{jax.local_device_count('cpu')} already, and not beside XLA_FLAGS",
        field="cpu_devices",
        value=count,
      ) from error
  if jax.default_backend() != "cpu" or jax.local_device_count() != count:
    raise UserError(
      f"is for a CPU; JAX has {jax.local_device_count()} devices of "
      f"{jax.default_backend()!r} here",
      field="cpu_devices",
      value=count,
    )


def build(
  name: str,
  num_clients: int,
  steps: int,
  batch_size: int = 20,
  data_mb: int | None = None,
) -> RoundLoad:
  """Random 28x28 images, `steps` local batches for each client.

  Args:
    data_mb: size of a data set that holds the clients' rows first, and then rows that none of
      them takes; None for theirs alone, on the device.
  """
  validate.one_of(WORKLOADS, workloads=name)
  shapes = {"cnn": {}, "mlp": {"features": (200, 200), "activation": "relu"}}
  model: Any = networks.build(name, num_classes=10, **shapes[name])
  held = steps * batch_size
  total = min(num_clients * held, 4096)  # rows are shared: speed does not depend on them
  rng = np.random.default_rng(0)
  rows_in_all = max(total, (data_mb or 0) * 10**6 // _ROW_BYTES)
  x = np.zeros((rows_in_all, 28, 28, 1), np.float32)
  x[:total] = rng.random((total, 28, 28, 1), np.float32)
  y = np.concatenate([rng.integers(0, 10, total), np.zeros(rows_in_all - total, int)])
  dataset = data.from_arrays(x, y, num_classes=10)
  rows = [
    np.arange(i * held, (i + 1) * held, dtype=np.int32) % total for i in range(num_clients)
  ]
  shape = (steps, batch_size)
  batches = [LocalBatches(row.reshape(shape), np.ones(shape, bool)) for row in rows]
  cohort = Cohort(
    ids=np.arange(num_clients),
    num_examples=np.full(num_clients, held),
    batches=tuple(batches),
    data=Example(dataset.x, dataset.y)
    if data_mb is not None
    else jax.tree.map(jnp.asarray, dataset[np.arange(total)]),
  )
  params: Any = model.init(jax.random.key(0), jnp.asarray(x[:1]))
  return RoundLoad(losses.softmax_cross_entropy(model.apply), params, cohort)


def _floor(work: RoundLoad) -> Callable[[], Any]:
  """FedAvg by hand: SGD steps under jit, differences added up, one division."""

  @jax.jit
  def step(params: Any, data: Any, rows: Any) -> Any:
    examples = jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0), data)
    mean = lambda p: jnp.mean(jax.vmap(work.loss_fn, (None, 0))(p, examples))
    return jax.tree.map(lambda p, g: p - _RATE * g, params, jax.grad(mean)(params))

  @jax.jit
  def add(total: Any, params: Any) -> Any:
    return jax.tree.map(jnp.add, total, params)

  def one_round() -> Any:
    total = jax.tree.map(jnp.zeros_like, work.params)
    for batches in work.cohort.batches:
      params = work.params
      for rows in batches.examples:
        params = step(params, work.cohort.data, rows)
      total = add(total, params)
    count = len(work.cohort.batches)
    return jax.block_until_ready(jax.tree.map(lambda leaf: leaf / count, total))

  return one_round


def _runner(work: RoundLoad, method: str) -> Callable[[], Any]:
  if method == FLOOR:
    return _floor(work)
  if method == "fedjax":
    return fedjax_peer.one_round(work.loss_fn, work.params, work.cohort, _RATE)
  name = "loop" if method == "threads" else method  # threads: as launch.federate on a CPU
  algorithm = federated.fed_avg(
    work.loss_fn,
    optax.sgd(_RATE),
    map_clients=by_name(name, num_threads=1 if method == "loop" else None),
    key=jax.random.key(_KEY_SEED),
  )
  state = algorithm.init(work.params)
  return lambda: jax.block_until_ready(algorithm.round(state, work.cohort)[0].params)


def _num_devices(method: str) -> int:
  return jax.local_device_count() if method in OVER_DEVICES else 1


def _timed(run: Callable[[], Any]) -> float:
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def measure(
  name: str,
  methods: Sequence[str],
  *,
  num_clients: int = 40,
  steps: int = 3,
  repeats: int = 5,
) -> list[Entry]:
  """One entry per method, the floor first.

  Raises:
    UserError: an unknown workload or method, or one that is not installed.
  """
  validate.one_of(
    METHODS, **{"methods": next((m for m in methods if m not in METHODS), FLOOR)}
  )
  if "fedjax" in methods and not fedjax_peer.is_installed():
    raise UserError(
      "is not installed, see benchmarks/fedjax_peer.py", field="methods", value="fedjax"
    )
  validate.integer_at_least(1, num_clients=num_clients, steps=steps, repeats=repeats)
  work = build(name, num_clients, steps)
  methods = [FLOOR, *(method for method in methods if method != FLOOR)]
  runs = [_runner(work, m) for m in methods]
  for run in runs:
    run()
  times = [[_timed(run) for run in runs] for _ in range(repeats)]
  medians = [statistics.median(column) for column in zip(*times)]
  return [
    Entry(
      name,
      method,
      num_clients,
      steps,
      median,
      median / medians[0],
      1 / median,
      _num_devices(method),
    )
    for method, median in zip(methods, medians)
  ]


def scaling(
  name: str, method: str, counts: Sequence[int], *, repeats: int = 3
) -> list[Entry]:
  """Entries of one method alone for several numbers of clients, one local step each."""
  entries = []
  for count in counts:
    run = _runner(build(name, count, 1), method)
    run()
    median = statistics.median(_timed(run) for _ in range(repeats))
    devices = _num_devices(method)
    entries.append(Entry(name, method, count, 1, median, None, 1 / median, devices))
  return entries


def beside(
  name: str, methods: Sequence[str], megabytes: Sequence[int], *, repeats: int = 5
) -> list[Entry]:
  """Entries of rounds that differ in nothing but the size of the data set beside them, in
  turns; each one's ratio is to the round of the same method beside the first size.

  Raises:
    UserError: a method that is given its data set as one array, on one device.
  """
  for method in methods:
    validate.one_of(("loop", "threads", "vmap", *OVER_DEVICES), methods=method)
  entries = []
  for method in methods:
    runs = [_runner(build(name, 40, 1, data_mb=size), method) for size in megabytes]
    for run in runs:
      run()
    times = [[_timed(run) for run in runs] for _ in range(repeats)]
    medians = [statistics.median(column) for column in zip(*times)]
    devices = _num_devices(method)
    for size, median in zip(megabytes, medians):
      ratio = median / medians[0]
      rate = 1 / median
      entries.append(Entry(name, method, 40, 1, median, ratio, rate, devices, size))
  return entries


_HEADER = (
  "workload",
  "method",
  "devices",
  "clients",
  "steps",
  "data",
  "round",
  "ratio",
  "rounds/s",
)


def table(entries: Sequence[Entry]) -> str:
  """The entries for people; a ratio is to the floor, or to the first size of the data.

  >>> print(table([Entry("mlp", "loop", 10, 3, 0.5, 1.25, 2.0)]))
  workload  method  devices  clients  steps  data  round     ratio  rounds/s
  mlp       loop    1        10       3            500.0 ms  1.25   2.00
  """
  notes = [f"{entry.method}: {entry.note}" for entry in entries if entry.note]
  return "\n".join([aligned([_HEADER, *map(_cells, entries)]), *notes])


def _cells(entry: Entry) -> tuple[str, ...]:
  show = lambda value, form, scale=1.0: "" if value is None else form.format(value * scale)
  return (
    entry.workload,
    entry.method,
    str(entry.num_devices),
    str(entry.num_clients),
    str(entry.steps_per_client),
    show(entry.data_mb, "{:.0f} MB"),
    show(entry.median_s, "{:.1f} ms", 1e3),
    show(entry.ratio, "{:.2f}"),
    show(entry.rounds_per_s, "{:.2f}"),
  )


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/federated.csv and `out`/federated.png."""
  entries_file.write(out / "federated.csv", entries)
  redraw.write(out / "federated.csv", recipe(jax.default_backend(), entries))


def recipe(platform: str, entries: Sequence[Entry] = ()) -> Recipe:
  """Returns how federated.csv is drawn: seconds of a round by method and number of clients.

  Entries on data of a chosen size are left out.
  """
  sizes = tuple(dict.fromkeys(e.data_mb for e in entries if e.data_mb is not None))
  return Recipe(
    "points", ("median_s",), ("method", "num_clients"), "workload", log=("median_s",),
    words={"median_s": "seconds a round; a row is a method and its clients"},
    without={"data_mb": sizes} if sizes else {},
    title=f"One round on {pictures.proper_name(platform)}",
  )  # fmt: skip


def define() -> None:
  """Defines the flags."""
  options.define_names("workloads", WORKLOADS)
  flags.DEFINE_list(
    "methods", None, f"Some of {', '.join(METHODS)} (default: all that are installed)."
  )
  options.define_cpu_devices()
  flags.DEFINE_list("clients", [], "Also time cohorts of these many clients.")
  flags.DEFINE_list(
    "data_mb", [], "Also time rounds beside data sets of these many megabytes."
  )
  options.define_repeats()


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  methods = values.methods or default_methods()
  if values.cpu_devices is not None and not set(methods) & set(OVER_DEVICES):
    raise UserError(
      f"is for pmap and shard_map, of which none is in methods={','.join(methods)}",
      field="cpu_devices",
      value=values.cpu_devices,
    )
  if values.cpu_devices is not None:
    use_cpu_devices(values.cpu_devices)
  scaled = values.methods[-1] if values.methods else "threads"
  counts = options.counts("clients")
  sizes = options.counts("data_mb")
  mapped = [name for name in methods if name not in (FLOOR, "fedjax")]
  for name in options.names("workloads", WORKLOADS):
    entries = measure(name, methods, repeats=values.repeats)
    entries += scaling(name, scaled, counts)
    if sizes:
      entries += beside(name, mapped, sizes, repeats=values.repeats)
    yield name, entries
