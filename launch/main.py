"""The main of every launcher of a kind of run, and its flags. The config says what is run."""

from __future__ import annotations

import pathlib
from typing import Any

from absl import flags

from dpjax.experiments.run import kind, loop
from dpjax.experiments.run.kind import KINDS, Several
from dpjax.parallel.exchanges import is_first
from dpjax.validate import UserError
from launch import app, config_flag, peers

# The flags are no key flags of this module, so that --help lists them with their launcher.
flags.disclaim_key_flags()


def define(command: str, *, default: str) -> None:
  """Defines --config and --workdir of a launcher; call it at import time, like any absl flag."""
  config_flag.define(kind=KINDS.get(command), default=default)
  prefix = config_flag.PREFIXES.get(command, "")
  flags.DEFINE_string(
    "workdir", None, f"Directory of this run (default: runs/{prefix}<config>)."
  )


def define_shared() -> None:
  """Defines the flags of runs that several machines may share, and that are planned for another."""
  app.define_dry_run()
  app.define_target()
  peers.define()


def main(*words: str) -> None:
  """Carries out what is left of a config's runs, or prints their plan (--dry_run)."""
  if words:
    _name_config(*words)
  with app.as_targeted():
    config, workdir = config_flag.asked()
  many = peers.options() if "coordinator" in flags.FLAGS else None
  whole = kind.of(config).whole(config)
  app.prepare_memory([config])
  if "dry_run" in flags.FLAGS and flags.FLAGS["dry_run"].value:
    if many is not None:
      raise UserError("--dry_run: must be without --coordinator; it plans for one process")
    return print(whole.plan(workdir, app.target()))
  if "target" in flags.FLAGS:
    app.refuse_given(("target",), "--dry_run")
  if isinstance(whole, Several):
    if many is not None:
      raise UserError("--coordinator: must be of a config of one run, not of several")
    return _several(whole, workdir)

  def work() -> None:
    with app.stoppable(workdir):
      result = loop.run(whole, workdir)
    if is_first():
      print(whole.line(result))
      names = ("result.json", "report.png", "metrics.jsonl", "params.npz")
      written = [name for name in names if (pathlib.Path(workdir) / name).exists()]
      print(f"wrote {workdir}/{', '.join(written)}")
      app.report_audit(result)

  if many is None:
    return work()

  def newest() -> str:
    return peers.saved(workdir, whole.step_is, owner=many.process_id == 0)

  return peers.run(work, many, same=whole.same(), saved=newest)


def _name_config(file: str, *more: str) -> None:
  """Makes a word of the command line the file of --config."""
  if more:
    raise UserError(f"unexpected argument {more[0]!r}: one config file is run")
  if flags.FLAGS["config"].present:
    raise UserError(
      f"--config={flags.FLAGS.config}: without {file!r}, one config file is run"
    )
  flags.FLAGS["config"].value = file


def _several(whole: Several[Any], workdir: str) -> None:
  with app.stoppable(workdir):
    rows = whole.run(workdir)
  if all(row["status"] != "failed" for row in rows):
    print(whole.report(workdir, rows))
  alarm = whole.alarm(rows)
  if alarm:
    app.fail(alarm, code=1)
  app.refuse_failed(rows)
