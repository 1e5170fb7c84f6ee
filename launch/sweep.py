"""Runs a sweep: a curve of accuracy over epsilon from one command.

  python -m launch.sweep --config=configs/sweeps/quickstart.py --workdir=runs/sweep

  # a private selection: a random number of runs, of which the best is released and accounted for
  python -m launch.sweep --config=configs/sweeps/learning_rate.py --workdir=runs/best \\
    --config.selection=best --config.selection.mean_trials=10

Every field of the config (dpjax/experiments/sweeps/grid.py) can be overridden by its dotted name,
such as --config.seeds=[0,1,2] or --config.base.num_steps=300. A base that is a FedConfig
runs over clients, as launch.federate does (configs/sweeps/fed_*.py). Writes to --workdir:
sweep.json, curve.csv, curve.png, table.md, points/; after the last run curve.pdf and curve.svg,
for a paper (launch.plot draws them again). Stop it at any time; the same command goes on where it
stopped. Exit code 1 if one of its runs failed, or if an audit refuted the claim of a run. A
private selection writes best/ (to be released), trials.json and trials/ (both secret).
--processes=2 runs two at a time. It helps runs that leave cores idle, as those of small
convolutional networks do; each process holds the data.
--only='CNN @ *' runs the variants of that name alone; the same command without it goes on.
--dry_run prints the plan and ends: runs, epsilon of each and of all together, minutes and memory
(estimates, from a few steps on zeros); it writes nothing.
--print_commands prints one command for each run, for a job array or xargs; the same sweep without
this flag collects the folders that these commands leave.
"""

from __future__ import annotations

import pathlib
import shlex

from absl import flags

from dpjax.experiments.run import kind, loop
from dpjax.experiments.sweeps import engine, grid, rehearsal, tuning
from dpjax.validate import UserError
from launch import app, config_flag

config_flag.define(kind=kind.KINDS["sweep"])
flags.DEFINE_string("workdir", None, "Directory of this sweep.", required=True)
flags.DEFINE_integer(
  "processes",
  1,
  "How many runs go on at a time, a process each.",
  lower_bound=1,
  upper_bound=1024,
)
flags.DEFINE_string(
  "only",
  None,
  "Pattern of the variants, or runs, to be run now; what has run is drawn with them.",
)
flags.DEFINE_bool(
  "print_commands", False, "Print one command for each run, and end: nothing is written."
)
app.define_dry_run()


def commands(config: grid.SweepConfig, workdir: str) -> list[str]:
  """Returns a shell command for each run of a sweep. Each command writes to the folder where the
  sweep looks for its run.

  Raises:
    UserError: a field of a run can only be written in a config file.
  """
  launcher = kind.command_of(config.base)
  file = {"train": "quickstart", "federate": "fed/quickstart"}[launcher]
  lines = []
  for point in grid.placed(config):
    # Every field gets a flag, so no value of the named config file is used.
    settings = config_flag.command_line(point.config, "config")
    unwritable = [line for line in settings if line.startswith("#")]
    if unwritable:
      raise UserError(
        f"must be without fields that only a config file can hold: {unwritable[0]}",
        field="print_commands",
        value=True,
      )
    folder = shlex.quote(str(engine.folder(pathlib.Path(workdir), point.name)))
    head = f"python -m launch.{launcher} --config=configs/{file}.py --workdir={folder}"
    lines.append(" ".join([head, *settings]))
  return lines


def main() -> None:
  """Runs the points of the sweep that have no result yet, or the private selection."""
  config = config_flag.get()
  workdir = config_flag.workdir()
  app.prepare_memory(point.config for point in grid.points(config))
  if config.selection is not None:
    app.refuse_given(["processes", "only", "print_commands"], "a sweep without selection")
  if flags.FLAGS.print_commands:
    app.refuse_given(["processes", "only", "dry_run"], "--noprint_commands")
    return print("\n".join(commands(config, workdir)))
  asked = {"num_processes": flags.FLAGS.processes, "only": flags.FLAGS.only}
  if flags.FLAGS.dry_run:
    return print(rehearsal.report(config, workdir, **asked))
  with app.stoppable(workdir):
    if config.selection is not None:
      tuning.run_selection(config, workdir, loop.train, loop.load)
      return print(f"wrote {workdir}/{tuning.BEST}/")
    rows = grid.run_sweep(config, workdir, loop.train, loop.load, **asked)
  app.refuse_failed(rows)
  app.refuse_refuted(rows)
  print(f"wrote {workdir}/curve.png (.pdf, .svg), curve.csv, table.md, sweep.json")


if __name__ == "__main__":
  app.run(main)
