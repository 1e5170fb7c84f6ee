"""Minutes of a whole training run by the fast route and by vmap, from timed steps in turns.

  python -m benchmarks training --configs=configs/mnist_cnn.py,configs/cifar10_cnn.py \\
    --methods=auto,vmap

It writes training.csv.

The step functions of a config are compiled first and then timed step by step in turns, so
that whatever else the machine does falls on them alike. A run's minutes are the median step
times its number of steps: evaluation, compilation and the loading of data come on top.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import entries as entries_file
from benchmarks import federated_speed, options
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.gradients import per_example
from dpjax.gradients.ghost.explain import aligned
from dpjax.types import Batch

METHODS = ("auto", "vmap")


class Entry(NamedTuple):
  """One gradient method on one config."""

  config: str
  method: str
  median_s: float  # of one step
  num_steps: int
  minutes: float  # median_s * num_steps
  ratio: float  # to the first method


def _numbered(batch: Batch, number: int) -> Batch:
  """Returns the batch as that of another number."""
  return batch._replace(origin=jnp.asarray(batch.origin).at[:, 0].set(number))


def _stepper(config: TrainConfig, method: str, loaded: Any) -> Callable[[], float]:
  """Runs one more step of the run; seconds."""
  config = dataclasses.replace(config, grad_method=method)
  phase = build.phase(config, build.assemble(config, loaded))
  state = phase.init()
  # as the run has them: placed on its mesh, all slices of a step
  draws = itertools.cycle([list(slices) for slices in itertools.islice(phase.draws(0), 4)])
  turns = itertools.count()

  def step() -> float:
    nonlocal state
    # Four draws serve all steps. Their numbers are those of a run, else the updates were NaN.
    slices = [_numbered(slice_, next(turns)) for slice_ in next(draws)]
    start = time.perf_counter()
    state, info = phase.step(state, slices)
    jax.block_until_ready((state.params, info))
    return time.perf_counter() - start

  return step


def measure(
  name: str, config: TrainConfig, methods: Sequence[str] = METHODS, *, repeats: int = 5
) -> list[Entry]:
  """One config: a step of each method to compile it, then `repeats` of each in turns, the second of
  two steps: the first one finds its memory given back for that of another method."""
  loaded = build.load_data(config)
  steppers = {method: _stepper(config, method, loaded) for method in methods}
  for step in steppers.values():
    step()
  times: dict[str, list[float]] = {method: [] for method in methods}
  for _ in range(repeats):
    for method, step in steppers.items():
      step()
      times[method].append(step())
  medians = {method: statistics.median(seconds) for method, seconds in times.items()}
  steps = config.num_steps
  first = medians[methods[0]]
  return [
    Entry(name, method, median, steps, median * steps / 60, median / first)
    for method, median in medians.items()
  ]


def table(entries: Sequence[Entry]) -> str:
  """Aligned text, one line per entry.

  >>> print(table([Entry("mnist_cnn", "auto", 0.12, 2000, 4.0, 1.0)]))
  config     method  s / step  steps  minutes  ratio
  mnist_cnn  auto    0.120     2000   4.0      1.00
  """
  header = ("config", "method", "s / step", "steps", "minutes", "ratio")
  forms = ("", "", ".3f", "d", ".1f", ".2f")
  return aligned([header, *([*map(format, entry, forms)] for entry in entries)])


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/training.csv."""
  entries_file.write(out / "training.csv", entries)


def define() -> None:
  """Defines the flags."""
  options.define_configs()
  options.define_names("methods", per_example.METHODS, METHODS)
  options.define_cpu_devices()
  options.define_repeats()


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  methods = options.names("methods", per_example.METHODS)
  configs = options.configs()
  from launch import app

  # launch.train prepares memory in the same way, so its steps are as fast as the timed ones.
  app.prepare_memory(configs.values())
  if values.cpu_devices is not None:
    federated_speed.use_cpu_devices(values.cpu_devices)
  for name, config in configs.items():
    yield name, measure(name, config, methods, repeats=values.repeats)
