"""A sweep of one run over seeds by the number of processes that share its runs: seconds.

  python -m benchmarks sweeps --configs=configs/mnist_cnn.py --processes=1,2

It writes sweeps.csv. A sweep has four seeds of a config, of 100 steps each.

Whole sweeps, as users wait for them: start of the processes, data, compilation, calibration and
evaluation included.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from absl import flags

from benchmarks import entries as entries_file
from benchmarks import options
from dpjax import validate
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import writers
from dpjax.experiments.sweeps import sweep
from dpjax.gradients.ghost.explain import aligned
from dpjax.validate import UserError

STEPS = 100  # of a run
RUNS = 4  # of a sweep


class Entry(NamedTuple):
  """One number of processes on one config."""

  config: str
  processes: int
  median_s: float  # of a sweep
  runs: int
  steps: int  # of a run
  ratio: float  # to the first


def measure(
  name: str, config: TrainConfig, processes: Sequence[int], *, repeats: int = 1
) -> list[Entry]:
  """One config: sweeps of `RUNS` seeds and `STEPS` steps, `repeats` by each number in turns.

  Raises:
    UserError: more processes than cores, or a run that fails.
  """
  for count in processes:
    validate.integer_in(1, os.cpu_count() or 1, processes=count)
  short = {"num_steps": STEPS, "eval_every": STEPS, "checkpoint_every": STEPS}
  base = fields.replace_all(config, short)
  times: dict[int, list[float]] = {count: [] for count in processes}
  for _ in range(repeats):
    for count in times:
      times[count].append(_seconds(base, count))
  medians = {count: statistics.median(seconds) for count, seconds in times.items()}
  first = medians[processes[0]]
  return [
    Entry(name, count, median, RUNS, STEPS, median / first)
    for count, median in medians.items()
  ]


def _run(base: TrainConfig, folder: str) -> None:
  """Works off the sweep, as one of its processes."""
  settings = sweep.Sweep(seeds=list(range(RUNS)), x="num_steps")
  with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    sweep.run([("run", base)], folder, settings)


def _seconds(base: TrainConfig, count: int) -> float:
  with tempfile.TemporaryDirectory() as folder:
    began = time.perf_counter()
    # A fork may hang: it lacks the threads of JAX, but has the locks that these threads hold.
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_run, args=(base, folder)) for _ in range(count)]
    for process in processes:
      process.start()
    for process in processes:
      process.join()
    seconds = time.perf_counter() - began
    rows = writers.read_json(pathlib.Path(folder) / "sweep.json")["rows"]
  failed = [row["error"] for row in rows if row["status"] == "failed"]
  if failed:
    raise UserError(failed[0])
  return seconds


def table(entries: Sequence[Entry]) -> str:
  """Aligned text, one line per entry.

  >>> print(table([Entry("mnist_cnn", 2, 50.0, 4, 100, 0.5)]))
  config     processes  s / sweep  runs  steps  ratio
  mnist_cnn  2          50.0       4     100    0.50
  """
  header = ("config", "processes", "s / sweep", "runs", "steps", "ratio")
  forms = ("", "d", ".1f", "d", "d", ".2f")
  return aligned([header, *([*map(format, entry, forms)] for entry in entries)])


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/sweeps.csv."""
  entries_file.write(out / "sweeps.csv", entries)


def define() -> None:
  """Defines the flags."""
  options.define_configs()
  flags.DEFINE_list("processes", ["1", "2"], "How many share the runs.")
  options.define_repeats()


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  counts = options.some_counts("processes")
  for name, config in options.configs().items():
    yield name, measure(name, config, counts, repeats=values.repeats)
