"""A sweep of one run over seeds by the number of processes that share its runs: seconds.

Whole sweeps, as users wait for them: start of the processes, data, compilation, calibration and
evaluation included.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import loop, report
from dpjax.experiments.sweeps import grid, side_by_side
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
    side_by_side.check(count)
  short = {"num_steps": STEPS, "eval_every": STEPS, "checkpoint_every": STEPS}
  base = fields.replace_all(config, short)
  seeds = list(range(RUNS))
  sweep = grid.SweepConfig(base=base, variants={"run": {}}, seeds=seeds, x="num_steps")
  times: dict[int, list[float]] = {count: [] for count in processes}
  for _ in range(repeats):
    for count in times:
      times[count].append(_seconds(sweep, count))
  medians = {count: statistics.median(seconds) for count, seconds in times.items()}
  first = medians[processes[0]]
  return [
    Entry(name, count, median, RUNS, STEPS, median / first)
    for count, median in medians.items()
  ]


def _seconds(sweep: grid.SweepConfig, count: int) -> float:
  with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
    began = time.perf_counter()
    with contextlib.redirect_stdout(nowhere):
      rows = grid.run_sweep(sweep, folder, loop.train, build.load_data, num_processes=count)
    seconds = time.perf_counter() - began
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
  report.write_entries(out / "sweeps.csv", entries)
