"""`--dry_run` of several runs: the guarantees, time and memory of all runs, without running them.

Each run is rehearsed on zeros, as in `experiments/run/dry_run.py`. Runs that differ only in their
seed are rehearsed once. A rehearsal raises every error that the run itself would raise before its
first step.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Iterator

from dpjax.experiments.config import fields
from dpjax.experiments.config.naming import naming
from dpjax.experiments.run import dry_run, guarantee, loop, writers
from dpjax.experiments.run.dry_run import Planned
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.sweeps import cost, engine, tuning
from dpjax.experiments.sweeps.engine import Point
from dpjax.experiments.sweeps.sweep import Runs, Sweep
from dpjax.validate import UserError

Rehearse = Callable[[Point], Planned]


def report(runs: Runs, workdir: pathlib.Path | str, *, only: str | None = None) -> str:
  """Returns the plan of a sweep as text, one line for each fact. For a private selection, it also
  has the cost of the choice.

  Args:
    runs: runs of the sweep.
    only: as in `sweep.run`.

  Raises:
    UserError: an error in the sweep itself. If only the data show an error in one of several runs,
      the plan reports the error for this run.
  """
  load = engine.LastData(lambda run: experiment_of(run).data())

  def rehearse(point: Point) -> Planned:
    return experiment_of(point.config).rehearse(load(point.config))

  def state(point: Point, folder: pathlib.Path) -> str:
    run = experiment_of(point.config)
    run.check()
    return dry_run.state_of(run, load(point.config), folder)

  if isinstance(runs.config, Sweep) and runs.config.selection is not None:
    if only is not None:
      raise UserError("goes with a sweep without selection", field="only", value=only)
    return _of_selection(runs, workdir, rehearse)
  folder = pathlib.Path(workdir)
  return _of_points(engine.part(runs.points, only, folder), folder, rehearse, state)


def _of_points(
  all_points: list[Point],
  workdir: pathlib.Path,
  rehearse: Rehearse,
  state: Callable[[Point, pathlib.Path], str],
) -> str:
  rows = []
  lines = {}
  seconds = 0.0
  over = 0
  seen = {}
  failures: dict[str, UserError] = {}
  for point in _with_bar(engine.in_order(all_points)):
    try:
      with naming(point.config):
        there = state(point, engine.folder(workdir, point.name))
        # Runs that differ only in their seed are rehearsed once: they take equally long, and have
        # the same guarantee. A calibration takes seconds, and does not depend on the seed.
        alike = repr(fields.replace(point.config, "seed", 0))
        if alike not in seen:
          seen[alike] = rehearse(point)
        plan = seen[alike]
    except UserError as error:
      if len(all_points) == 1:
        raise
      failures[str(error)] = error
      lines[point.name] = f"would fail: {error}"
      continue
    done = there == dry_run.FINISHED
    over = over + done
    seconds = seconds + (0.0 if done else plan.seconds)
    rows.append(engine.head(point) | plan.facts)
    lines[point.name] = f"{guarantee.summary(plan.facts)}, {plan.num_steps} steps, " + (
      dry_run.FINISHED if done else f"about {plan.seconds / 60:.2g} minutes"
    )
  failed = len(all_points) - len(rows)
  # An error that stops every run is reported once, and the command ends with exit code 2.
  if not rows and len(failures) == 1:
    (error,) = failures.values()
    raise error.at(f"all {failed} runs would fail")
  head = {
    "runs": f"{len(all_points)}, of which {over} are finished and {failed} would fail",
    **({"together": cost.statement_of_sweep(rows)} if len(all_points) > 1 else {}),
    "time": f"about {seconds / 60:.2g} minutes (estimate, from a few steps on zeros each)",
    "memory": dry_run.memory(),
    "workdir": str(workdir),
  }
  return dry_run.align(head | lines)


def _with_bar(all_points: list[Point]) -> Iterator[Point]:
  """Yields the points under a progress bar, because the rehearsal of a point may take a while."""
  with writers.Progress(len(all_points), 0, "rehearsed") as bar:
    for point in all_points:
      yield point
      bar.update(1)


def _of_selection(runs: Runs, workdir: pathlib.Path | str, rehearse: Rehearse) -> str:
  settings, chosen = tuning.plan_selection(runs, engine.LastData(loop.load))
  seconds = math.fsum(rehearse(point).seconds for point in settings) / len(settings)
  mean = tuning.selection_of(runs).mean_trials
  minutes = mean * seconds / 60
  lines = {
    "settings": f"{len(settings)}, of which a random number of runs is drawn, {mean:g} on average",
    "privacy": chosen.line,
    "time": f"about {minutes:.2g} minutes on average (estimate, from a few steps on zeros)",
    "memory": dry_run.memory(),
    "workdir": str(workdir),
  }
  return dry_run.align(lines)
