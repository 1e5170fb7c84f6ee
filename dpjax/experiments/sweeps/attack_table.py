"""Tables of attacks. Each row of a config is an attack against a defence; `labelled` runs the rows.

Consecutive rows that attack the same data read the data once.
"""

from __future__ import annotations

import pathlib
from typing import Any

from dpjax.experiments.config.fields import name_of
from dpjax.experiments.kinds import bounds
from dpjax.experiments.kinds.attack import build, table
from dpjax.experiments.kinds.attack.config import AttackConfig, check
from dpjax.experiments.run.kind import Several
from dpjax.experiments.sweeps import cost, engine, labelled
from dpjax.experiments.sweeps.engine import Point, Row
from dpjax.validate import UserError, join_words


def alone_as(config: AttackConfig) -> str:
  """Returns the label of a config without rows."""
  return f"{name_of(config, 'attack')}, as configured"


@bounds.names_fields
def points(config: AttackConfig) -> list[Point]:
  """Returns every run of a table. All runs are checked before the first run begins.

  Raises:
    UserError: an unknown field or value, two rows with the same name.

  >>> rows = {"membership, none": {"target.privacy": "sgd", "target.num_steps": 20}}
  >>> [(point.name, point.overrides["defence"]) for point in points(AttackConfig(rows=rows))]
  [('membership-none', 'none')]
  """
  alone = alone_as(config)

  def row_facts(label: str, run: AttackConfig) -> dict[str, Any]:
    attack, _, defence = label.rpartition(", ")
    named = {"attack": attack or name_of(run, "attack"), "defence": defence}
    return named | {"beside": config.beside.get(label, "")}

  all_points = labelled.points(config, alone=alone, check=check, row_facts=row_facts)
  labels = config.rows or [alone]
  strange = [label for label in config.beside if label not in labels]
  if strange:
    raise UserError(
      f"is no row; rows are {join_words(labels)}", field=f"beside[{strange[0]!r:.60}]"
    )
  return all_points


@bounds.names_fields
def run_all(config: AttackConfig, workdir: pathlib.Path | str) -> list[Row]:
  """Runs `labelled.run_all`, writes files beside sweep.json, and returns the rows.

  attacks.md and attacks.csv have one line for every method and defence. attacks.png shows ROC
  curves (curves.csv) beside the lines that the guarantees allow, and how often other attacks
  succeed.

  Raises:
    UserError: a wrong config; also the errors of `labelled.run_all`.
  """
  # Central and federated runs share one cache, so that it holds only one data set at a time.
  last = engine.LastData(build.load_attacked)

  return labelled.run_all(
    config,
    points(config),
    workdir,
    load=lambda run: build.named(run, last, run.target),
    write=table.write,
    tell=table.summary,
    unreleased=cost.NOT_RELEASED,
  )


def is_above(row: Row) -> bool:
  """Returns whether an attack of a finished run exceeds the guarantee of the attacked run."""
  attacks = row.get("attacks", {}).values()
  return any(judged["against_line"] == "above" for judged in attacks)


class AttackTable(Several[AttackConfig]):
  """All attacks of a config: its rows, or the one that it describes."""

  def check(self) -> None:
    points(self.config)

  def run(self, workdir: str) -> list[Row]:
    return run_all(self.config, workdir)

  def report(self, workdir: str, rows: list[Row]) -> str:
    table = (pathlib.Path(workdir) / "attacks.md").read_text()
    return f"{table}wrote {workdir}/attacks.md, attacks.csv, attacks.png"

  def alarm(self, rows: list[Row]) -> str:
    above = [row["name"] for row in rows if is_above(row)]
    names = ", ".join(above)
    return f"above the line that a guarantee allows: {names}" if above else ""
