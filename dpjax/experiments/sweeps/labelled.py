"""Tables of runs in one config. A row has a label, and fields that replace those of the config.

Each row is a separate run in its own folder. So an interrupted table resumes where it ended, and
more rows may be added to a table.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from dpjax.experiments.config import common, fields
from dpjax.experiments.run import loop
from dpjax.experiments.sweeps import engine
from dpjax.experiments.sweeps.engine import Grid, Point, Row
from dpjax.validate import UserError

# Longest folder name in bytes; most file systems allow 255.
_LONGEST = 200


class Table(Protocol):
  """A config of one run, or of a table of several runs."""

  rows: dict[str, dict[str, Any]]
  title: str
  of_table: ClassVar[tuple[str, ...]]  # fields of the whole table, not of a run


Config = TypeVar("Config", bound=Table)


def points(
  config: Config,
  *,
  alone: str,
  check: Callable[[Config], None],
  row_facts: Callable[[str, Config], dict[str, Any]],
) -> list[Point]:
  """Returns every run of a table. All runs are checked before the first run begins.

  Args:
    alone: label of the run if the config has no rows.
    check: function that raises UserError if a run is refused.
    row_facts: function (label, run) -> values that distinguish the run from the other runs.

  Raises:
    UserError: an unknown field or value, a field of the whole table in a row, two rows with the
      same name; an error of `check`, after the label of the row.
  """
  common.typed(config)
  all_points = []
  for label, run in _runs_of(config, alone):
    try:
      check(run)
    except UserError as error:
      raise (error.at(f"rows[{label!r}]") if config.rows else error) from error
    all_points.append(Point(_folder(label), run, row_facts(label, run)))
  if len({point.name for point in all_points}) < len(all_points):
    raise UserError("two labels give runs of the same name", field="rows")
  return all_points


def _runs_of(config: Config, alone: str) -> list[tuple[str, Config]]:
  """Returns (label, run) of every row, before its fields are checked.

  Raises:
    UserError: an unknown field or value, or a field of the whole table in a row.
  """
  whole = {name: getattr(type(config)(), name) for name in config.of_table}
  runs = []
  for label, changes in (config.rows or {alone: {}}).items():
    where = f"rows[{label!r}]"
    for name in whole:
      if name in changes:
        raise UserError("is of the whole table", field=f"{where}.{name}")
    runs.append((label, fields.replace_all(config, {**whole, **changes}, name=where)))
  return runs


def _folder(label: str) -> str:
  slug = engine.slug(label)
  if not slug or len(slug.encode()) > _LONGEST or not label.isprintable():
    raise UserError(
      f"rows[{label!r:.60}]: names a row and its folder: must be words on one line, of at most "
      f"{_LONGEST} bytes"
    )
  return slug


def run_all(
  config: Table,
  all_points: list[Point],
  workdir: pathlib.Path | str,
  *,
  write: Callable[..., None],
  tell: Callable[[Row], str],
  unreleased: str,
  load: Callable[[Any], Any] = lambda config: None,
) -> list[Row]:
  """Runs the remaining rows of a table and returns all rows, which hold their results.

  Each run lies in `workdir`/points/NAME; sweep.json is in `workdir`.

  Args:
    all_points: result of `points`.
    load: function from the config of a run to its data; None: each run loads its own.
    write: function `write(folder, rows, title=..., picture=...)` that writes files about the
      finished runs, with their picture or without.
    tell, unreleased: fields of `engine.Grid`.

  Raises:
    UserError: `workdir` holds a single run, or another process is at work in it; nothing is
      overwritten. An error of the only run of a config without rows; that of one of several rows
      is recorded in its row, and the other runs go on.
  """
  grid = Grid(
    config=config,
    points=all_points,
    train=lambda point, folder, shared: loop.train(
      point.config, folder, data=load(point.config)
    ),
    load=lambda config: None,
    kept=lambda point, result: result,
    draw=lambda folder, rows: write(folder, rows, title=config.title, picture=False),
    tell=tell,
    unreleased=unreleased,
    alone=not config.rows,
  )
  rows = engine.run(grid, pathlib.Path(workdir))
  # A picture of many panels takes seconds, so it is drawn once, after the last run.
  done = [row for row in rows if row["status"] == "done"]
  write(pathlib.Path(workdir), done, title=config.title, picture=True)
  return rows
