"""Tables of secure computations: the rows of a config, as a grid (`labelled`)."""

from __future__ import annotations

import pathlib

from dpjax.experiments.config.fields import name_of
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.secure import extras, table
from dpjax.experiments.kinds.secure.config import SecureConfig, check
from dpjax.experiments.run import writers
from dpjax.experiments.run.kind import Several
from dpjax.experiments.sweeps import labelled
from dpjax.experiments.sweeps.engine import Point, Row
from dpjax.validate import UserError

UNRELEASED = (
  "All parties of a row ran in one process on known data: these runs measure, and release "
  "nothing."
)


def alone_as(config: SecureConfig) -> str:
  """Returns the label of a config without rows."""
  return f"{name_of(config, 'task')}, as configured"


@bounds.names_fields
def points(config: SecureConfig) -> list[Point]:
  """Returns every run of a table. All runs are checked before the first run begins.

  Raises:
    UserError: an unknown field or value, two rows with the same
      name.

  >>> rows = {"plain sum": {"task.protocol": "plain"}, "encrypted": {"task": "regress"}}
  >>> [point.name for point in points(SecureConfig(rows=rows))]
  ['plain-sum', 'encrypted']
  """
  return labelled.points(
    config,
    alone=alone_as(config),
    check=check,
    row_facts=lambda label, run: {"label": label},
  )


@bounds.names_fields
def run_all(config: SecureConfig, workdir: pathlib.Path | str) -> list[Row]:
  """Runs `labelled.run_all` and returns the rows. Writes files beside sweep.json: secure.md,
  secure.csv (one line for each row) and secure.png (seconds and bytes).

  A row that needs a missing extra is left out, and a note names it before the first row begins. The
  same command runs the row after the extra is installed.

  Raises:
    UserError: a wrong config; no row can run without a missing extra; also the errors of
      `labelled.run_all`.
  """
  all_points = points(config)
  lines = {point.name: extras.missing(point.config) for point in all_points}
  ready = [point for point in all_points if not lines[point.name]]
  if not ready:
    raise UserError(lines[all_points[0].name])
  for line in dict.fromkeys(filter(None, lines.values())):
    names = [name for name, needed in lines.items() if needed == line]
    writers.note(
      f"{len(names)} of {len(all_points)} rows are left out ({', '.join(names)}): {line}"
    )
  return labelled.run_all(
    config,
    ready,
    workdir,
    write=table.write,
    tell=table.summary,
    unreleased=UNRELEASED,
  )


class SecureTable(Several[SecureConfig]):
  """All computations of a config: its rows, or the one that it describes."""

  def check(self) -> None:
    points(self.config)

  def run(self, workdir: str) -> list[Row]:
    return run_all(self.config, workdir)

  def report(self, workdir: str, rows: list[Row]) -> str:
    table = (pathlib.Path(workdir) / "secure.md").read_text()
    return f"{table}wrote {workdir}/secure.md, secure.csv, secure.png"
