"""The main of every launcher of a kind of run, and its flags. The config says what is run."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from dpjax.experiments.config.naming import naming
from dpjax.experiments.run import loop, writers
from dpjax.experiments.run.experiment import Experiment
from dpjax.experiments.run.kind import KINDS
from dpjax.parallel import made_for
from dpjax.parallel.exchanges import MOST_PROCESSES, is_first
from dpjax.validate import UserError, Verbatim
from launch import app, config_flag

if TYPE_CHECKING:
  from dpjax.experiments.sweeps.sweep import Runs
  from dpjax.parallel.targets import Machine

# The flags are no key flags of this module, so that --help lists them with their launcher.
flags.disclaim_key_flags()

# Flags of a run on many processes (`define_processes`).
_OF_PROCESSES = (
  *("coordinator", "num_processes", "process_id"),
  *("local_devices", "connect_timeout", "peer_timeout"),
)
# Flags that say how a config is carried out.
HOW = (
  *("workdir", "dry_run", "target", "only", "print_commands", "alone", "audit"),
  *_OF_PROCESSES,
)


def define(command: str, *, default: str | None) -> None:
  """Defines the flags of a launcher; call it at import time, like any absl flag.

  All launchers have the same ones. What a kind of run cannot do, its `Experiment` refuses.
  """
  kind = KINDS.get(command)
  config_flag.define(kind=kind, default=default)
  prefix = "" if kind is None else kind.prefix
  flags.DEFINE_string(
    "workdir", None, f"Directory of this run (default: runs/{prefix}<config>)."
  )
  flags.DEFINE_bool(
    "dry_run", False, "Print the plan of the run, and end: nothing is written."
  )
  flags.DEFINE_string(
    "target",
    None,
    "With --dry_run: a machine that is not here, such as tpu:v5e:2x4 or gpu:h100:8. The run's "
    "step is compiled for it (pip install -e '.[targets]').",
  )
  flags.DEFINE_string(
    "only",
    None,
    "Of several runs: pattern of those that are run now; what has run is drawn with them.",
  )
  flags.DEFINE_bool(
    "print_commands", False, "Print one command for each run, and end: nothing is written."
  )
  flags.DEFINE_bool(
    "alone", False, "Run get_config() of the file by itself, not the runs of get_configs()."
  )
  define_processes()


def define_processes() -> None:
  """Defines --coordinator and the other flags of a run on many processes (`launch.peers`)."""
  flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0, reachable by all: run on many processes."
  )
  flags.DEFINE_integer(
    "num_processes",
    None,
    "How many processes there are.",
    lower_bound=1,
    upper_bound=MOST_PROCESSES,
  )
  flags.DEFINE_integer(
    "process_id",
    None,
    "Which one this is: 0 to num_processes - 1.",
    lower_bound=0,
    upper_bound=MOST_PROCESSES - 1,
  )
  flags.DEFINE_list(
    "local_devices",
    None,
    "Ids of this process's accelerators, as 0,1 (default: all of the machine).",
  )
  flags.DEFINE_float("connect_timeout", 60.0, "Seconds to wait for the other processes.")
  flags.DEFINE_float(
    "peer_timeout",
    30.0,
    "Seconds without a sign of life after which a process is given up.",
  )


def main(*words: str) -> None:
  """Carries out what is left of a config's runs, or prints their plan (--dry_run)."""
  if words:
    _name_config(*words)
  target = _target()
  # A mesh must fit the machine of --target, not this one.
  with made_for.compiling_for(target):
    whole, workdir = config_flag.run_and_folder()
  many = None
  if app.flags_given(_OF_PROCESSES):
    from launch import peers  # most runs are of one process

    many = peers.options()
  one = isinstance(whole, Experiment)
  app.prepare_memory([whole.config] if one else [point.config for point in whole.points])
  _check_flags(whole, in_processes=many is not None)
  if not one:
    return _sweep(whole, workdir, target)
  if flags.FLAGS.dry_run:
    with naming(whole.config):
      return print(whole.plan(workdir, target))
  with contextlib.ExitStack() as joined:
    if many is not None:
      from launch import peers

      saved = functools.partial(
        peers.saved_words, workdir, whole.step_is, owner=many.process_id == 0
      )
      joined.enter_context(peers.join(many, same=whole.same(), saved=saved))
    with app.stoppable(workdir):
      finished = (pathlib.Path(workdir) / writers.RESULT).exists()
      result = loop.run(whole, workdir)
    if is_first():
      _end_one(whole, workdir, result, finished=finished)
  return None


def _target() -> Machine | None:
  """Returns the machine of --target; None: this one."""
  text = flags.FLAGS.target
  if text is None:
    return None
  from dpjax.parallel import targets  # few plans are of another machine

  return targets.parse(text)


def _check_flags(whole: Any, *, in_processes: bool) -> None:
  """Raises UserError for a flag that what is run would ignore."""
  dry_run = flags.FLAGS.dry_run
  if dry_run and in_processes:
    raise UserError(
      "must be without --coordinator; it plans for one process", field="dry_run"
    )
  if not dry_run:
    app.refuse_given(("target",), "--dry_run")
  one = isinstance(whole, Experiment)
  if not one and in_processes:
    raise UserError(
      "must be of a config of one run, not of several",
      field="coordinator",
      value=flags.FLAGS.coordinator,
    )
  # Only the runs of a sweep have names.
  if one or whole.alone:
    app.refuse_given(("only", "print_commands"), "several runs")


def _end_one(
  run: Experiment[Any], workdir: str, result: dict[str, Any], *, finished: bool
) -> None:
  """Prints the end of one run: its scores, its files, and what an audit found.

  Args:
    run, workdir, result: the run, its folder, and the content of its result.json.
    finished: whether it had finished before this command, which then computed nothing.
  """
  names = ("result.json", "report.png", "metrics.jsonl", "params.npz")
  written = [name for name in names if (pathlib.Path(workdir) / name).exists()]
  show_end(run.line(result), f"{workdir}/{', '.join(written)}", finished=finished)
  alarm = run.alarm(result)
  if alarm:
    app.fail(alarm, code=1)
  verdict = (result.get("audit") or {}).get("verdict")
  if verdict:
    print(f"audit: {verdict}")


def show_end(line: str, written: str, *, finished: bool) -> None:
  """Prints the line of a run and its files; `finished`: nothing was computed by this command."""
  print(f"{'finished before: ' if finished else ''}{line}")
  print(f"{'kept' if finished else 'wrote'} {written}")


def _name_config(file: str, *more: str) -> None:
  """Makes a word of the command line the file of --config."""
  if more:
    raise UserError("is one word too many: one config file is run", field=more[0])
  if flags.FLAGS["config"].present:
    raise UserError(
      f"must be without {file!r}, one config file is run",
      field="config",
      value=Verbatim(flags.FLAGS.config),
    )
  flags.FLAGS["config"].value = file


def _commands(runs: Runs) -> list[str]:
  """Returns a shell command for each run of a sweep: this one, with its name."""
  if _selects(runs):
    raise UserError(
      "would be ignored, a private selection draws its runs",
      field="print_commands",
      value=True,
    )
  launcher = f"launch.{pathlib.Path(sys.argv[0]).stem}"
  arguments = [arg for arg in sys.argv[1:] if not arg.startswith("--print_commands")]
  head = shlex.join(["python", "-m", launcher, *arguments])
  return [f"{head} {shlex.quote(f'--only={point.name}')}" for point in runs.points]


def _selects(runs: Runs) -> bool:
  # Imported here, as is `tuning`: most commands are one run.
  from dpjax.experiments.sweeps.sweep import Sweep

  return isinstance(runs.config, Sweep) and runs.config.selection is not None


def _sweep(runs: Runs, workdir: str, target: Machine | None) -> None:
  only = flags.FLAGS.only
  if flags.FLAGS.print_commands:
    app.refuse_given(("only", "dry_run"), "--noprint_commands")
    return print("\n".join(_commands(runs)))
  if flags.FLAGS.dry_run:
    return print(runs.plan(workdir, target, only))
  if _selects(runs):
    app.refuse_given(("only",), "a sweep without selection")
    from dpjax.experiments.sweeps import tuning

    with app.stoppable(workdir):
      tuning.run_selection(runs, workdir)
    return print(f"wrote {workdir}/{tuning.BEST}/")
  with app.stoppable(workdir):
    rows = runs.run(workdir, only)
  return _end(runs, workdir, rows)


def _end(whole: Runs, workdir: str, rows: list[dict[str, Any]]) -> None:
  """Prints the end of several runs: their report, an alarm, and what failed.

  Without a row, other processes are at all runs, and write what they find.
  """
  if rows and all(row["status"] != "failed" for row in rows):
    print(whole.report(workdir))
  alarm = whole.table.alarm(rows)
  if alarm:
    app.fail(alarm, code=1)
  app.refuse_failed(rows)
