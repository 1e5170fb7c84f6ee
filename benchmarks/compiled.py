"""Clipped gradients as compiled for machines that are not here: work, memory, kernels, a roofline.

  python -m benchmarks compiled --targets=tpu:v5e:1x1,gpu:h100:1 --workloads=mlp,gpt

It needs pip install -e '.[targets]', reports flops, bytes, memory, kernels, loops and a roofline,
and writes compiled.csv.

Nothing is run and nothing is timed but the compiler. Each entry stands in the CSV as soon as it is
made, and the same command goes on where it stopped. Ratios are to the ordinary gradient.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
from absl import flags

from benchmarks import entries as entries_file
from benchmarks import gradient_speed, options, workloads
from benchmarks.gradient_speed import ORDINARY
from benchmarks.workloads import Workload
from dpjax import validate
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import report
from dpjax.gradients.ghost.explain import aligned
from dpjax.parallel import targets
from dpjax.parallel.targets import Machine

METHODS = (ORDINARY, "auto", "vmap")
RECIPE = Recipe(
  "points", ("roofline_ratio", "memory_ratio"), ("workload",), "method", panels=("target",),
  log=("roofline_ratio", "memory_ratio"), without={"method": (ORDINARY,)},
  references=(("an ordinary gradient", 1.0, None),),
  words={
    "roofline_ratio": "roofline over an ordinary gradient",
    "memory_ratio": "memory held over an ordinary gradient",
    "gpu:h100:1": "H100 GPU",
    "tpu:v5e:1x1": "v5e TPU",
  },
  title="Clipped gradients, compiled and not run",
)  # fmt: skip
TARGETS = ("tpu:v5e:1x1", "gpu:h100:1")
FILE = "compiled.csv"
NOTE = (
  "compiled, not run: the roofline is the compiler's work at published peaks, no timing"
)


class Entry(NamedTuple):
  """One method on one workload for one target; None where it does not fit."""

  target: str
  workload: str
  method: str
  batch: int
  status: str  # "ok", or why there is no program
  compile_s: float | None = None
  flops: float | None = None  # of matrix products and convolutions, loops times their trips
  memory_bytes: float | None = None  # read from and written to the device's memory
  held_bytes: float | None = None  # at most
  argument_bytes: float | None = None
  temporary_bytes: float | None = None
  kernels: int | None = None  # that run
  fusions: int | None = None  # in the program
  loops: int | None = None  # in the program
  unknown_loops: int | None = None  # counted as one turn
  sent_bytes: float | None = None  # between devices
  compiler_flops: float | None = None  # XLA's own count, loops once; TPUs
  compiler_bytes: float | None = None  # XLA's own count, fast memory too; TPUs
  roofline_s: float | None = None

  @property
  def key(self) -> tuple[str, str, str]:
    return self.target, self.workload, self.method


_Rows = dict[tuple[str, str, str], Entry]


def check(names: Iterable[str], methods: Iterable[str], machines: Iterable[str]) -> None:
  """Raises UserError where a workload, a method or a target is unknown, or has no compiler."""
  for name in names:
    validate.one_of(workloads.NAMES, workloads=name)
  for method in methods:
    validate.one_of(METHODS, methods=method)
  for text in machines:
    targets.parse(text).devices()


def entry(target: Machine, name: str, work: Workload, method: str) -> Entry:
  """Compiles one method of a workload for one device of a target."""
  first = (target.text, name, method, len(work.batch.y))
  with targets.compiling_for(target):
    shapes = targets.on_device((work.params, work.batch))
    began = time.perf_counter()
    lowered = jax.jit(gradient_speed.function(work, method)).lower(*shapes)
    try:
      program = targets.compile_for(lowered, target)
    except targets.NotFitting as error:
      known = "" if error.wanted is None else f": {error.wanted / 1e9:.1f} GB"
      seconds = time.perf_counter() - began
      return Entry(
        *first, f"does not fit{known}", compile_s=seconds, held_bytes=error.wanted
      )
  seconds = time.perf_counter() - began
  usable = target.chip.usable_bytes
  counts = program.counts
  return Entry(
    *first,
    status="ok" if program.held <= usable else f"does not fit: {program.held / 1e9:.1f} GB",
    compile_s=seconds,
    flops=counts.flops,
    memory_bytes=counts.memory_bytes,
    held_bytes=program.held,
    argument_bytes=program.arguments,
    temporary_bytes=program.temporaries,
    kernels=counts.kernels,
    fusions=counts.fusions,
    loops=counts.loops,
    unknown_loops=counts.unknown_loops,
    sent_bytes=counts.sent_bytes,
    compiler_flops=program.compiler_flops,
    compiler_bytes=program.compiler_bytes,
    roofline_s=program.seconds(target.chip),
  )


def measure(
  names: Sequence[str],
  methods: Sequence[str],
  machines: Sequence[str],
  *,
  out: pathlib.Path | None = None,
) -> list[Entry]:
  """Compiles each method of each workload for each target, at the accelerator's batch size.

  Args:
    names: of `workloads.NAMES`.
    methods: of `METHODS`; the ordinary gradient is always compiled.
    machines: texts as `targets.parse` reads.
    out: a folder, whose CSV holds what an earlier call compiled: it is not compiled again.
  """
  done: _Rows = {} if out is None else {row.key: row for row in read(out)}
  for name in names:
    work = workloads.build(name, "gpu")
    for text in machines:
      for method in dict.fromkeys([ORDINARY, *methods]):
        if (text, name, method) in done:
          continue
        row = entry(targets.parse(text), name, work, method)
        done[row.key] = row
        print(
          f"compiled {name}, {method}, {text}: {row.status}", file=sys.stderr, flush=True
        )
        # After each entry: some take minutes, and a stopped command keeps what it has.
        if out is not None:
          write(list(done.values()), out)
  wanted = [
    (text, name, method)
    for text in machines
    for name in names
    for method in dict.fromkeys([ORDINARY, *methods])
  ]
  return [done[key] for key in wanted]


def ratios(entries: Sequence[Entry]) -> list[dict[str, float | None]]:
  """Returns, for each entry, its bytes, its memory and its roofline over the ordinary
  gradient's."""
  first = {e.key[:2]: e for e in entries if e.method == ORDINARY}

  def over(row: Entry, name: str) -> float | None:
    base = getattr(first.get(row.key[:2]), name, None)
    value = getattr(row, name)
    return value / base if value and base else None

  names = {
    "bytes_ratio": "memory_bytes",
    "memory_ratio": "held_bytes",
    "roofline_ratio": "roofline_s",
  }
  return [{ratio: over(row, name) for ratio, name in names.items()} for row in entries]


def read(out: pathlib.Path) -> list[Entry]:
  """Returns the entries of `out`/compiled.csv; none where there is no such file."""
  return entries_file.read(out / FILE, Entry)


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/compiled.csv and compiled.png."""
  out.mkdir(parents=True, exist_ok=True)
  order = {name: place for place, name in enumerate(workloads.NAMES)}
  ordered = sorted(
    entries, key=lambda e: (e.target, order.get(e.workload, 0), METHODS.index(e.method))
  )
  rows = [
    {**row._asdict(), **ratio, "jax": jax.__version__}
    for row, ratio in zip(ordered, ratios(ordered))
  ]
  report.write_csv(out / FILE, rows)
  # The ordinary gradient, with which the others are compared, is no point of the picture.
  if any(row["method"] != METHODS[0] for row in rows):
    redraw.write(out / FILE, RECIPE)


def table(entries: Sequence[Entry]) -> str:
  """Aligned text, one line per entry.

  >>> print(table([Entry("gpu:h100:1", "mlp", "vmap", 8, "does not fit")]))
  target      workload  method  batch  ms (roofline)  x  GB moved  x  GB held  x  kernels  loops
  gpu:h100:1  mlp       vmap    8      does not fit
  compiled, not run: the roofline is the compiler's work at published peaks, no timing
  """
  head = ["target", "workload", "method", "batch", "ms (roofline)", "x", "GB moved", "x"]
  cells = [[*head, "GB held", "x", "kernels", "loops"]]
  for row, ratio in zip(entries, ratios(entries)):
    start = [row.target, row.workload, row.method, str(row.batch)]
    if row.roofline_s is None:
      cells.append([*start, row.status, *[""] * 7])
      continue
    show = [f"{1e3 * row.roofline_s:.3f}", _times(ratio["roofline_ratio"])]
    show += [f"{(row.memory_bytes or 0) / 1e9:.3f}", _times(ratio["bytes_ratio"])]
    show += [f"{(row.held_bytes or 0) / 1e9:.3f}", _times(ratio["memory_ratio"])]
    cells.append([*start, *show, str(row.kernels), str(row.loops)])
  return "\n".join([aligned(cells), NOTE])


def _times(value: float | None) -> str:
  return "" if value is None else f"{value:.2f}"


def define() -> None:
  """Defines the flags."""
  options.define_names("workloads", workloads.NAMES)
  options.define_names("methods", METHODS)
  flags.DEFINE_list("targets", list(TARGETS), "Machines that need not be here.")


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  names, methods = values.workloads, values.methods
  check(names, methods, values.targets)
  out = None if values.out is None else pathlib.Path(values.out)
  yield "all", measure(names, methods, values.targets, out=out)
