"""What a draw of Gaussian noise costs: memory, seconds, and seconds to compile.

  python -m benchmarks draws --workloads=leaf_10m --methods=fused,release

It writes draws.csv.

Ours, under each kind of key, is compared with `jax.random.normal` under JAX's default key, whose
tails end at 5.42 standard deviations. All add the noise to a tree, as a step
does. For a machine that is not here the program is compiled and read; it has no seconds.
"""

from __future__ import annotations

import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import entries as entries_file
from benchmarks import options
from dpjax import trees, validate
from dpjax.gradients.ghost.explain import aligned
from dpjax.noise import source
from dpjax.noise.correlated import InverseBanded
from dpjax.parallel import targets

# Names of trees, with the shapes of their leaves.
WORKLOADS: dict[str, tuple[tuple[int, ...], ...]] = {
  "leaf_1m": ((1000, 1000),),
  "leaf_10m": ((4000, 2500),),
  "leaves_20": tuple((64, 8 + place) for place in range(20)),
}


class Entry(NamedTuple):
  """One way to draw, for one tree."""

  tree: str
  parameters: int
  method: str
  target: str  # "": this machine
  temporary_bytes: int  # of the compiled program
  compile_s: float  # tracing included, in seconds of the processor
  moved_bytes: float | None  # memory read and written; None: not counted
  draw_s: float | None  # median; None: not run
  time_ratio: float | None  # to jax.random.normal


def _ours(key: jax.Array, tree: Any) -> Any:
  return trees.add(tree, source.gaussian(key, tree, 1.0))


def _jax_normal(key: jax.Array, tree: Any) -> Any:
  leaves, structure = jax.tree.flatten(tree)
  keys = jax.random.split(key, len(leaves))
  drawn = [leaf + jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves)]
  return jax.tree.unflatten(structure, drawn)


def _redrawn(key: jax.Array, tree: Any) -> Any:
  """Correlated noise of four draws, three of them of earlier steps."""
  strategy = InverseBanded.square_root(4, redraw=True)
  # A step that the compiler does not know.
  step = 7 + jnp.ravel(jax.tree.leaves(tree)[0])[0].astype(jnp.int32)
  white = lambda age: source.gaussian(jax.random.fold_in(key, age), tree, 1.0)
  memory: Any = strategy.init(tree)
  return strategy.redrawn(white, step, memory, tree)


# The first is what the others are compared with.
METHODS: dict[str, Callable[[jax.Array, Any], Any]] = {
  "jax_normal": _jax_normal,
  "ordinary": _ours,
  "threefry2x32": _ours,
  "release": _ours,
  "redrawn_4": _redrawn,
}


def _key(method: str) -> jax.Array:
  if method in ("jax_normal", "threefry2x32"):
    return jax.random.key(0)
  return source.new_key(release=method == "release")


def measure(workload: str, methods: Sequence[str], *, repeats: int = 5) -> list[Entry]:
  """One tree: an entry for each way to draw.

  Args:
    workload: a name of `WORKLOADS`.
    methods: names of `METHODS`; `jax_normal` is measured, too.
    repeats: timed draws of each, in turns, after one that pages its memory in.

  Raises:
    UserError: a name that is none.
  """
  validate.one_of(WORKLOADS, workloads=workload)
  for method in methods:
    validate.one_of(METHODS, methods=method)
  validate.integer_at_least(1, repeats=repeats)
  names = list(dict.fromkeys(["jax_normal", *methods]))
  tree = [jnp.zeros(shape) for shape in WORKLOADS[workload]]
  programs = {}
  compile_s = {}
  for name in names:
    key = _key(name)
    began = time.process_time()
    program = jax.jit(METHODS[name]).lower(key, tree).compile()
    compile_s[name] = time.process_time() - began
    programs[name] = (program, key)
  times: dict[str, list[float]] = {name: [] for name in names}
  for turn in range(repeats + 1):
    for name, (program, key) in programs.items():
      began = time.perf_counter()
      jax.block_until_ready(program(key, tree))
      if turn:
        times[name].append(time.perf_counter() - began)
  medians = {name: statistics.median(took) for name, took in times.items()}

  def entry(name: str) -> Entry:
    held: Any = programs[name][0].memory_analysis()
    return Entry(
      tree=workload,
      parameters=trees.size(tree),
      method=name,
      target="",
      temporary_bytes=held.temp_size_in_bytes,
      compile_s=compile_s[name],
      moved_bytes=None,
      draw_s=medians[name],
      time_ratio=medians[name] / medians["jax_normal"],
    )

  return [entry(name) for name in names]


def compiled_for(target: str, workload: str, methods: Sequence[str]) -> list[Entry]:
  """One tree for a machine that is not here: an entry for each way to draw.

  Args:
    target: such as tpu:v5e:1x1 or gpu:h100:1.
    workload, methods: as in `measure`.

  Raises:
    UserError: a name that is none; the compiler for the target is not installed.
  """
  machine = targets.parse(target)
  validate.one_of(WORKLOADS, workloads=workload)

  def entry(name: str) -> Entry:
    validate.one_of(METHODS, methods=name)
    key = _key(name)
    tree = [jnp.zeros(shape) for shape in WORKLOADS[workload]]
    with targets.compiling_for(machine):
      shapes = targets.on_device((key, tree))
      began = time.process_time()
      # A function of its own: JAX keeps the trace that was made for another machine.
      draw = functools.partial(METHODS[name])
      program = targets.compile_for(jax.jit(draw).lower(*shapes), machine)
    return Entry(
      tree=workload,
      parameters=trees.size(tree),
      method=name,
      target=target,
      temporary_bytes=program.temporaries,
      compile_s=time.process_time() - began,
      moved_bytes=program.counts.memory_bytes,
      draw_s=None,
      time_ratio=None,
    )

  return [entry(name) for name in methods]


def table(entries: Sequence[Entry]) -> str:
  """Aligned text, one line per entry.

  >>> print(table([Entry("leaf_1m", 10**6, "ordinary", "", 0, 0.4, None, 0.02, 0.9)]))
  tree     machine  method    temporaries  compile s  bytes each  s / draw  of normal
  leaf_1m  here     ordinary  0.0 MB       0.4        -           0.0200    0.90
  """
  header = (
    *("tree", "machine", "method", "temporaries", "compile s", "bytes each"),
    *("s / draw", "of normal"),
  )
  rows = [
    (
      e.tree,
      e.target or "here",
      e.method,
      f"{e.temporary_bytes / 1e6:.1f} MB",
      f"{e.compile_s:.1f}",
      "-" if e.moved_bytes is None else f"{e.moved_bytes / e.parameters:.0f}",
      "-" if e.draw_s is None else f"{e.draw_s:.4f}",
      "-" if e.time_ratio is None else f"{e.time_ratio:.2f}",
    )
    for e in entries
  ]
  return aligned([header, *rows])


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/draws.csv."""
  entries_file.write(out / "draws.csv", entries)


def define() -> None:
  """Defines the flags."""
  options.define_names("workloads", WORKLOADS)
  options.define_names("methods", METHODS)
  flags.DEFINE_list(
    "targets", [], "Machines that need not be here: compile for these, run nothing."
  )
  options.define_repeats()


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  for name in options.names("workloads", WORKLOADS):
    if values.targets:
      entries = []
      for machine in values.targets:
        entries += compiled_for(machine, name, values.methods)
    else:
      entries = measure(name, values.methods, repeats=values.repeats)
    yield name, entries
