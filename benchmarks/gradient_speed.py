"""Time, memory and compile time of clipped gradients, as ratios to an ordinary gradient.

  python -m benchmarks gradients --workloads=small_cnn,mlp --methods=vmap,auto --repeats=9

Methods are the ordinary gradient, the vmap route, the fast route (ghost), auto, auto over 16
microbatches (microbatches), and the same in a hand-written scan (plain_loop). Where they are
installed (pip install -e '.[bench]') it adds jax_privacy.clipped_grad, PyTorch's ordinary gradient
of a twin (torch), and Opacus's clipped one by hooks (opacus) and by ghost norms (opacus_ghost). A
method is skipped, and says so, if it cannot do a workload, or if twice its per-example gradients
exceed 8 GB (on an accelerator: .9 of its memory). It writes gradients.csv and gradients.png to
--out; entries that are there already for this device are not measured again. All of it takes half
an hour or more on two idle CPU cores. On an accelerator compiling takes most of the time:
--compile_ahead=8 compiles all programs first, in eight processes.

All methods of a workload are compiled first and then timed in turns, round after round in
one process, so that whatever else the machine does falls on each of them alike; the ratio
is that of the medians. Peak memory comes from one fresh process per entry.

PyTorch and Opacus run the twins of `opacus_twins`, in the same process and the same turns;
their ratio is to OUR ordinary gradient, and the row "torch" is PyTorch's own. They compile
nothing, and XLA's account of buffers does not know them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import alone, calls, opacus_twins, options, workloads
from benchmarks import entries as entries_file
from benchmarks.workloads import Workload
from dpjax import gradients, pictures, trees, validate
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import provenance
from dpjax.gradients.ghost.explain import aligned

ORDINARY = "ordinary"
FILE = "gradients.csv"
_LOOPS = ("microbatches", "plain_loop")
METHODS = (
  *(ORDINARY, "vmap", "ghost", "auto", *_LOOPS, "jax_privacy"),
  *opacus_twins.METHODS,
)
_PARTS = 16  # of a batch, in a loop
_STACKS = ("vmap", "jax_privacy", "opacus")  # hold a gradient per example
_MOST_STACKED_BYTES = 8e9  # on a CPU
_MOST_STACKED_SHARE = 0.9  # of what an accelerator may use
_REST_SECONDS = 0.02  # in which the threads of the method before stop to spin
_LEAST_SECONDS = (
  0.05  # that an accelerator is kept busy for, so that its start does not count
)


class Entry(NamedTuple):
  """One method on one workload; seconds and bytes are None where it did not run."""

  workload: str
  method: str
  status: str  # "ok", or why it did not run
  median_s: float | None = None
  ratio: float | None = None  # to the ordinary gradient, medians
  compile_s: float | None = None  # tracing and compiling
  compile_ratio: float | None = None
  buffer_bytes: float | None = None  # arguments, results and temporaries, by XLA's account
  memory_ratio: float | None = None
  peak_rss_bytes: float | None = None  # of a fresh process that ran this entry alone
  batch: int | None = None  # examples
  examples_per_s: float | None = None
  device: str = ""

  @property
  def key(self) -> tuple[str, int | None, str, str]:
    return self.workload, self.batch, self.method, self.device


def _ordinary(work: Workload) -> Callable:
  total = lambda p, b: jnp.sum(jax.vmap(work.loss_fn, (None, 0))(p, b))
  return jax.grad(total)


def _clipped(method: str) -> Callable[[Workload], Callable]:
  def build(work: Workload) -> Callable:
    grad_fn = gradients.clipped_grad(work.loss_fn, l2_clip_norm=1.0, method=method)
    return lambda p, b: grad_fn(p, b, True).total

  return build


def _microbatches(work: Workload) -> Callable:
  size = -(-len(jax.tree.leaves(work.batch)[0]) // _PARTS)
  grad_fn = gradients.clipped_grad(work.loss_fn, l2_clip_norm=1.0, microbatch_size=size)
  return lambda p, b: grad_fn(p, b, True).total


def _plain_loop(work: Workload) -> Callable:
  """What the microbatches would be without `gradients.canonical_convolutions`."""
  grad_fn = gradients.clipped_grad(work.loss_fn, l2_clip_norm=1.0)

  def total(p: Any, b: Any) -> Any:
    parts = jax.tree.map(lambda leaf: leaf.reshape(_PARTS, -1, *leaf.shape[1:]), b)
    add = lambda total, part: (trees.add(total, grad_fn(p, part, True).total), None)
    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), parts)[0]

  return total


def _jax_privacy(work: Workload) -> Callable:
  from jax_privacy import clipping  # pyright: ignore[reportMissingImports]

  return clipping.clipped_grad(work.loss_fn, l2_clip_norm=1.0, keep_batch_dim=False)


_BUILD: dict[str, Callable[[Workload], Callable]] = {
  ORDINARY: _ordinary,
  "vmap": _clipped("vmap"),
  "ghost": _clipped("ghost"),
  "auto": _clipped("auto"),
  "microbatches": _microbatches,
  "plain_loop": _plain_loop,
  "jax_privacy": _jax_privacy,
}


def function(work: Workload, method: str) -> Callable:
  """Returns (params, batch) -> the gradient that JAX's methods of `METHODS` compute."""
  return _BUILD[method](work)


def why_not(name: str, work: Workload, method: str) -> str:
  """Why a method is not run on a workload; "" where it is."""
  if method in opacus_twins.METHODS and (reason := opacus_twins.why_not(name, method)):
    return reason
  if method == "jax_privacy" and importlib.util.find_spec("jax_privacy") is None:
    return "not installed"
  if method in _STACKS and 2 * work.stacked_bytes > _most_stacked_bytes():
    return f"skipped: per-example gradients alone take {work.stacked_bytes / 1e9:.0f} GB"
  return ""


def _most_stacked_bytes() -> float:
  """Bytes that a stack of gradients and its clipped copy may take on the first device."""
  stats = jax.local_devices()[0].memory_stats() or {}
  limit = stats.get("bytes_limit")
  return _MOST_STACKED_BYTES if limit is None else _MOST_STACKED_SHARE * limit


class _Compiled(NamedTuple):
  run: calls.Run
  seconds: float | None = None
  bytes: float | None = None


def _compile(name: str, work: Workload, method: str) -> _Compiled:
  if method in opacus_twins.METHODS:
    twin = opacus_twins.build(name, work.batch, trees.size(work.params))
    step = opacus_twins.step(twin, method)
    return _Compiled(calls.of(step, ()))
  start = time.perf_counter()
  compiled = jax.jit(function(work, method)).lower(work.params, work.batch).compile()
  seconds = time.perf_counter() - start
  memory: Any = compiled.memory_analysis()
  parts = ("argument", "output", "temp")
  buffers = sum(getattr(memory, f"{part}_size_in_bytes") for part in parts)
  return _Compiled(calls.of(compiled, (work.params, work.batch)), seconds, buffers)


def _workload(name: str, batch_size: int | None) -> Workload:
  work = workloads.build(name, jax.default_backend())
  return work if batch_size is None else workloads.resized(work, batch_size)


def measure(
  name: str,
  methods: Sequence[str],
  *,
  repeats: int,
  fresh_process: bool = True,
  batch_size: int | None = None,
) -> list[Entry]:
  """One workload: each method compiled, warmed up, then timed `repeats` times in turns.

  On an accelerator several calls are timed at once: alone, a step of .1 ms would show the time
  that a resting card takes to start.

  Args:
    name: one of `workloads.NAMES`.
    methods: of `METHODS`; the ordinary gradient is always measured.
    repeats: rounds; medians are reported.
    fresh_process: also run each entry once in its own process, for its peak memory.
    batch_size: examples; None: the workload's own number, which is larger on an accelerator.
  """
  work = _workload(name, batch_size)
  methods = list(dict.fromkeys([ORDINARY, *methods]))
  reasons = {method: why_not(name, work, method) for method in methods}
  compiled = {m: _compile(name, work, m) for m in methods if not reasons[m]}
  # On a CPU one call: the threads of the method before rest before each.
  on_cpu = jax.default_backend() == "cpu"
  least = 0.0 if on_cpu else _LEAST_SECONDS
  counts = {method: calls.enough(each.run, least) for method, each in compiled.items()}
  times: dict[str, list[float]] = {method: [] for method in compiled}
  for _ in range(repeats):
    for method, each in compiled.items():
      # So that the machine is as quiet for the next one as for the first.
      time.sleep(_REST_SECONDS)
      times[method].append(calls.seconds(each.run, counts[method]))
  medians = {method: statistics.median(seconds) for method, seconds in times.items()}
  base = compiled[ORDINARY]
  count = len(work.batch.y)
  device = jax.local_devices()[0].device_kind

  def entry(method: str) -> Entry:
    if reasons[method]:
      return Entry(name, method, reasons[method], batch=count, device=device)
    each = compiled[method]
    return Entry(
      name,
      method,
      "ok",
      medians[method],
      medians[method] / medians[ORDINARY],
      each.seconds,
      _ratio(each.seconds, base.seconds),
      each.bytes,
      _ratio(each.bytes, base.bytes),
      alone.run(__name__, name, method, batch_size).printed if fresh_process else None,
      batch=count,
      examples_per_s=count / medians[method],
      device=device,
    )

  return [entry(method) for method in methods]


def _ratio(value: float | None, base: float | None) -> float | None:
  return value / base if value is not None and base else None


def _run_alone(name: str, method: str, batch_size: int | None) -> int:
  """Runs one entry once; bytes of this process at its peak."""
  _compile(name, _workload(name, batch_size), method).run(1)
  return provenance.peak_rss()


def compile_ahead(
  names: Sequence[str],
  methods: Sequence[str],
  *,
  processes: int,
  cache: pathlib.Path | None = None,
  batch_size: int | None = None,
) -> None:
  """Compiles all programs into JAX's persistent cache, several at a time, before any is timed.

  To be called before this process asks JAX for its devices, whose memory it would take. What
  cannot be compiled says so when it is timed. Seconds of compiling are then those of reading.

  Args:
    names, methods, batch_size: as `measure` takes them.
    processes: programs that are compiled at a time.
    cache: a folder for programs, in which a later call finds them; None: a temporary one. JAX's
      own `JAX_COMPILATION_CACHE_DIR` goes before it.
  """
  # They share the card with each other.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.mkdtemp(prefix="dpjax-programs-") if cache is None else str(cache)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
  jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
  of_jax = [m for m in dict.fromkeys([ORDINARY, *methods]) if m in _BUILD]
  pairs = [(name, method) for name in names for method in of_jax]

  def compile_one(pair: tuple[str, str]) -> None:
    alone.run(__name__, *pair, batch_size, "compile")
    print(f"compiled {' '.join(pair)}", file=sys.stderr, flush=True)

  with concurrent.futures.ThreadPoolExecutor(processes) as pool:
    list(pool.map(compile_one, pairs))


def _compile_alone(name: str, method: str, batch_size: int | None) -> float | None:
  """Compiles one entry, unless it would not run; seconds that it took."""
  work = _workload(name, batch_size)
  return None if why_not(name, work, method) else _compile(name, work, method).seconds


def check(names: Iterable[str], methods: Iterable[str]) -> None:
  """Raises UserError where a workload or a method is unknown."""
  for name in names:
    validate.one_of(workloads.NAMES, workloads=name)
  for method in methods:
    validate.one_of(METHODS, methods=method)


_HEADER = (
  "workload",
  "method",
  "median",
  "ratio",
  "compile",
  "x",
  "memory",
  "x",
  "peak RSS",
)


def table(entries: Sequence[Entry]) -> str:
  """Aligned text, one line per entry.

  >>> print(table([Entry("mlp", "vmap", "skipped: too big")]))
  workload  method  median            ratio  compile  x  memory  x  peak RSS
  mlp       vmap    skipped: too big
  """
  return aligned([_HEADER, *map(_cells, _by_batch(entries))])


def _by_batch(entries: Sequence[Entry]) -> list[Entry]:
  """Returns the entries, named by their batch where a workload was measured with several."""
  batches = collections.defaultdict(set)
  for entry in entries:
    batches[entry.workload].add(entry.batch)

  def name(entry: Entry) -> str:
    alone = len(batches[entry.workload]) == 1
    return entry.workload if alone else f"{entry.workload}, {entry.batch}"

  return [entry._replace(workload=name(entry)) for entry in entries]


def _cells(entry: Entry) -> tuple[str, ...]:
  if entry.status != "ok":
    return (entry.workload, entry.method, entry.status, *[""] * 6)
  show = lambda value, form, scale=1.0: "" if value is None else form.format(value * scale)
  return (
    entry.workload,
    entry.method,
    show(entry.median_s, "{:.1f} ms", 1e3),
    show(entry.ratio, "{:.2f}"),
    show(entry.compile_s, "{:.1f} s"),
    show(entry.compile_ratio, "{:.1f}"),
    show(entry.buffer_bytes, "{:.0f} MB", 1e-6),
    show(entry.memory_ratio, "{:.2f}"),
    show(entry.peak_rss_bytes, "{:.0f} MB", 1e-6),
  )


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/gradients.csv, beside what stands there, and `out`/gradients.png of these entries."""
  rows = {row.key: row for row in (*read(out), *entries)}
  entries_file.write(out / FILE, list(rows.values()))
  redraw.write(out / FILE, recipe(jax.default_backend(), entries))


def recipe(platform: str, entries: Sequence[Entry] = ()) -> Recipe:
  """Returns how gradients.csv is drawn: times over those of an ordinary gradient."""
  several = len({(e.workload, e.batch) for e in entries}) > len(
    {e.workload for e in entries}
  )
  return Recipe(
    "points", ("ratio",), ("workload", *(["batch"] if several else [])), "method",
    log=("ratio",), without={"method": (ORDINARY,)},
    references=(("an ordinary gradient", 1.0, None),),
    words={"ratio": "time over that of an ordinary gradient"},
    title=f"Clipped gradients on {pictures.proper_name(platform)}",
  )  # fmt: skip


def read(out: pathlib.Path) -> list[Entry]:
  """Returns the entries of `out`/gradients.csv; none where there is no such file."""
  return entries_file.read(out / FILE, Entry)


def among(
  known: Sequence[Entry], name: str, methods: Sequence[str], batch_size: int | None
) -> list[Entry]:
  """Returns the entries of one workload on this device, where all of them are known; else none."""
  if not known:
    return []
  count = batch_size or len(_workload(name, None).batch.y)
  device = jax.local_devices()[0].device_kind
  rows = {row.key: row for row in known}
  wanted = [(name, count, m, device) for m in dict.fromkeys([ORDINARY, *methods])]
  return [rows[key] for key in wanted] if all(key in rows for key in wanted) else []


def main(name: str, method: str, batch_size: int | None, task: str = "run") -> None:
  """What a process of its own does, and prints as JSON."""
  work = {"run": _run_alone, "compile": _compile_alone}[task]
  print(json.dumps(work(name, method, batch_size)))


def define() -> None:
  """Defines the flags."""
  options.define_names("workloads", workloads.NAMES)
  options.define_names("methods", METHODS)
  flags.DEFINE_list(
    "batches", [], "Examples of a batch, one measurement each (default: as it is)."
  )
  flags.DEFINE_integer(
    "compile_ahead",
    0,
    "Processes that first compile all programs into JAX's persistent cache.",
    lower_bound=0,
    upper_bound=256,
  )
  options.define_repeats()
  options.define_peak_rss()


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  names, methods = values.workloads, values.methods
  check(names, methods)
  batches = options.counts("batches") or [None]
  out = None if values.out is None else pathlib.Path(values.out)
  known = [] if out is None else read(out)
  for batch_size in batches if values.compile_ahead else ():
    compile_ahead(
      names,
      methods,
      processes=values.compile_ahead,
      cache=None if out is None else out.absolute() / "programs",
      batch_size=batch_size,
    )
  for name in names:
    for batch_size in batches:
      entries = among(known, name, methods, batch_size)
      if not entries:
        entries = measure(
          name,
          methods,
          repeats=values.repeats,
          fresh_process=values.peak_rss,
          batch_size=batch_size,
        )
      yield name, entries


if __name__ == "__main__":
  main(*alone.ordered())
