"""What correlated noise costs a step of DP-SGD, in memory and time, by strategy.

  python -m benchmarks correlated --workloads=mlp_10m --methods=bisr_32,lambda_cgd
  python -m benchmarks correlated --workloads=mlp_10m --notimed

It writes correlated.csv.

Memory is that of the compiled step: arguments, results and temporaries, each buffer once. Times are
of single steps in turns. The noise is drawn for each parameter and does not depend on the batch, so
what it costs beside a step depends on the model: that is why there are several.
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
from benchmarks import options
from dpjax import losses, models, sampling, training, trees, validate
from dpjax.gradients.ghost.explain import aligned
from dpjax.noise import NoiseShape, correlated
from dpjax.plan import Plan
from dpjax.training.dp_sgd import TrainState
from dpjax.transforms import guard
from dpjax.types import Batch, Example

_STEPS = 1000
# Steps before those that are timed: the first ones have no earlier noise to draw again.
_DONE = 100
_CLASSES = 10


class Entry(NamedTuple):
  """One strategy on one model."""

  model: str
  parameters: int
  batch: int
  strategy: str
  draws: int  # of white noise, in a step
  copies: int  # of the parameters, that the state keeps
  state_bytes: int  # of the optimizer's state
  step_bytes: int  # of the compiled step, all buffers
  bytes_ratio: float  # to white noise
  step_s: float | None  # median; None: not timed
  time_ratio: float | None  # to white noise


class _Work(NamedTuple):
  """A model and its batches."""

  model: Any
  shape: tuple[int, ...]  # of an example
  batch: int
  microbatch_size: int | None


# From little to much arithmetic for each parameter.
WORKLOADS: dict[str, _Work] = {
  "mlp_10m": _Work(
    models.Mlp(num_classes=_CLASSES, features=(2900, 2650)), (784,), 256, None
  ),
  "mlp_10m_16k": _Work(
    models.Mlp(num_classes=_CLASSES, features=(2900, 2650)), (784,), 16384, 1024
  ),
  "mlp_100k": _Work(models.Mlp(num_classes=_CLASSES), (784,), 1024, None),
  "linear": _Work(models.Linear(num_classes=_CLASSES), (4000,), 4096, None),
  "cnn": _Work(models.Cnn(num_classes=_CLASSES), (28, 28, 1), 512, 128),
}
# The first is what the others are compared with.
METHODS: dict[str, correlated.Correlation] = {
  "white": correlated.Independent(),
  "banded_32": correlated.BandedToeplitz.optimized(num_steps=_STEPS, bands=32),
  "bisr_32_kept": correlated.InverseBanded.square_root(32, redraw=False),
  "bisr_32": correlated.InverseBanded.square_root(32, redraw=True),
  "band_inv_mf_4": correlated.InverseBanded.optimized(
    num_steps=_STEPS, bands=4, steps_apart=100, redraw=True
  ),
  "lambda_cgd": correlated.InverseBanded.optimized(
    num_steps=_STEPS, bands=2, steps_apart=100, redraw=True
  ),
}


class _Compiled(NamedTuple):
  """A step that is ready, with what it holds."""

  run: Callable[[], float]  # one more step; its seconds
  state_bytes: int
  step_bytes: int
  parameters: int


def _advanced(state: TrainState) -> TrainState:
  """Returns the state with `_DONE` draws behind it."""

  def later(part: Any) -> Any:
    if not guard.is_guarded(part):
      return part
    return guard.exchange(part, lambda inner: inner._replace(draws=jnp.int32(_DONE)))

  drawn = jax.tree.map(later, state.opt_state, is_leaf=guard.is_guarded)
  return state._replace(opt_state=drawn)


def _compiled(work: _Work, strategy: correlated.Correlation) -> _Compiled:
  sampler = sampling.CyclicSampler(steps_per_pass=100, num_examples=100 * work.batch)
  plan = Plan(
    sampler=sampler,
    noise_multiplier=1.0,
    l2_clip_norm=0.1,
    normalize_by=work.batch,
    num_steps=_STEPS,
    delta=1e-9,
    noise_shape=NoiseShape(correlation=strategy),
  )
  init, step = training.dp_sgd(
    losses.softmax_cross_entropy(work.model.apply),
    plan,
    optax.sgd(0.1),
    noise_key=jax.random.key(0),
    microbatch_size=work.microbatch_size,
  )
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.random((work.batch, *work.shape), np.float32))
  y = jnp.asarray(rng.integers(0, _CLASSES, work.batch))
  batch = Batch(Example(x, y), jnp.ones(work.batch, bool))
  params = work.model.init(jax.random.key(1), x[:1])
  state = _advanced(init(params))
  program = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
  held: Any = program.memory_analysis()

  def run() -> float:
    nonlocal state
    began = time.perf_counter()
    state, _ = program(state, batch)
    jax.block_until_ready(state.params)
    return time.perf_counter() - began

  return _Compiled(
    run=run,
    state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state)),
    # A donated argument and the result that takes its place are one buffer.
    step_bytes=held.argument_size_in_bytes
    + held.output_size_in_bytes
    + held.temp_size_in_bytes
    - held.alias_size_in_bytes,
    parameters=trees.size(params),
  )


def measure(workload: str, methods: Sequence[str], *, repeats: int = 5) -> list[Entry]:
  """One model: an entry for each strategy.

  Args:
    workload: a name of `WORKLOADS`.
    methods: names of `METHODS`; white noise is measured, too.
    repeats: timed steps of each, in turns, after one that pages its memory in; 0: memory alone.

  Raises:
    UserError: a name that is none.
  """
  validate.one_of(WORKLOADS, workloads=workload)
  for method in methods:
    validate.one_of(METHODS, methods=method)
  validate.integer_at_least(0, repeats=repeats)
  work = WORKLOADS[workload]
  names = list(dict.fromkeys(["white", *methods]))
  compiled = {name: _compiled(work, METHODS[name]) for name in names}
  times: dict[str, list[float]] = {name: [] for name in names}
  for turn in range(repeats + 1 if repeats else 0):
    for name, each in compiled.items():
      seconds = each.run()
      if turn:
        times[name].append(seconds)
  medians = {name: statistics.median(took) for name, took in times.items() if took}
  white = compiled["white"]

  def entry(name: str) -> Entry:
    strategy = METHODS[name]
    inverse = isinstance(strategy, correlated.InverseBanded)
    return Entry(
      model=workload,
      parameters=white.parameters,
      batch=work.batch,
      strategy=name,
      draws=len(strategy.coefficients) if inverse and strategy.redraw else 1,
      copies=strategy.buffers,
      state_bytes=compiled[name].state_bytes,
      step_bytes=compiled[name].step_bytes,
      bytes_ratio=compiled[name].step_bytes / white.step_bytes,
      step_s=medians.get(name),
      time_ratio=medians[name] / medians["white"] if medians else None,
    )

  return [entry(name) for name in names]


def table(entries: Sequence[Entry]) -> str:
  """Aligned text, one line per entry.

  >>> print(table([Entry("cnn", 26010, 512, "bisr_32", 32, 0, 16, 10**8, 1.0, 0.5, 1.01)]))
  model  parameters  batch  strategy  draws  copies  step    of white  s / step  of white
  cnn    26010       512    bisr_32   32     0       100 MB  1.00      0.500     1.01
  """
  header = (
    *("model", "parameters", "batch", "strategy", "draws", "copies", "step", "of white"),
    *("s / step", "of white"),
  )
  rows = [
    (
      e.model,
      f"{e.parameters}",
      f"{e.batch}",
      e.strategy,
      f"{e.draws}",
      f"{e.copies}",
      f"{e.step_bytes / 1e6:.0f} MB",
      f"{e.bytes_ratio:.2f}",
      "-" if e.step_s is None else f"{e.step_s:.3f}",
      "-" if e.time_ratio is None else f"{e.time_ratio:.2f}",
    )
    for e in entries
  ]
  return aligned([header, *rows])


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/correlated.csv."""
  entries_file.write(out / "correlated.csv", entries)


def define() -> None:
  """Defines the flags."""
  options.define_names("workloads", WORKLOADS)
  options.define_names("methods", METHODS)
  options.define_repeats()
  flags.DEFINE_bool("timed", True, "Time the steps, beside their memory.")


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  for name in options.names("workloads", WORKLOADS):
    yield name, measure(name, values.methods, repeats=values.repeats if values.timed else 0)
