"""Tables of secure computations: the rows of a config, as a grid.

A row is a run of its own, in a folder of its own, so that the table goes on where it was cut
off and may get more rows.
"""

from __future__ import annotations

import pathlib
from typing import Any

from dpjax.runs import bounds, loop
from dpjax.runs.secure import build, table
from dpjax.runs.secure.config import SecureConfig, check, task_name
from dpjax.schema import fields
from dpjax.sweeps import engine
from dpjax.sweeps.engine import Grid, Point, Row
from dpjax.validate import UserError

_OF_TABLE = {"rows": {}, "title": ""}  # of the whole, not of a run
_LONGEST = 200  # bytes of a folder's name
UNRELEASED = (
  "All parties of a row ran in one process on known data: these runs measure, and release "
  "nothing."
)


@bounds.names_fields
def points(config: SecureConfig) -> list[Point]:
  """Every run of a table, checked before the first one begins.

  Raises:
    UserError: an unknown field or value, a setting that a row would ignore, two rows of one
      name.

  >>> rows = {"plain sum": {"protocol": "plain"}, "encrypted": {"task": "regress"}}
  >>> [point.name for point in points(SecureConfig(rows=rows))]
  ['plain-sum', 'encrypted']
  """
  bounds.typed(config)
  labels = config.rows or {f"{task_name(config)}, as configured": {}}
  found = [_point(config, label, changes) for label, changes in labels.items()]
  names = [point.name for point in found]
  if len(set(names)) < len(names):
    raise UserError("rows: two labels give runs of the same name")
  return found


def _point(config: SecureConfig, label: str, changes: dict[str, Any]) -> Point:
  where = f"rows[{label!r}]"
  for name in _OF_TABLE:
    if name in changes:
      raise UserError(f"{where}.{name}: would be ignored, it is of the whole table")
  run = fields.replace_all(config, {**_OF_TABLE, **changes}, name=where)
  try:
    check(run)
  except UserError as error:
    raise UserError(f"{where}: {error}" if config.rows else str(error)) from error
  slug = "-".join("".join(c if c.isalnum() else " " for c in label.lower()).split())
  if not slug or len(slug.encode()) > _LONGEST or not label.isprintable():
    raise UserError(
      f"rows[{label!r:.60}]: names a row and its folder: must be words on one line, of at most "
      f"{_LONGEST} bytes"
    )
  return Point(slug, run, {"label": label})


@bounds.names_fields
def run_all(config: SecureConfig, workdir: pathlib.Path | str) -> list[Row]:
  """Every run of a table, or what is left of them; their rows, which hold their results.

  Each lives in `workdir`/points/NAME. Beside them: sweep.json, secure.md, secure.csv (one line
  for each row) and secure.png (seconds and bytes).

  Raises:
    UserError: a wrong config, a folder of another one; nothing is overwritten. What is wrong
      with one run of several is recorded in its row, and the others go on.
  """

  def draw(folder: pathlib.Path, rows: list[Row]) -> None:
    table.write(folder, rows, title=config.title)

  grid = Grid(
    config=config,
    points=points(config),
    train=lambda point, folder, shared: loop.run(build.build(point.config), folder),
    load=lambda config: None,
    kept=lambda point, result: result,
    draw=draw,
    tell=table.told,
    unreleased=UNRELEASED,
  )
  return engine.run(grid, pathlib.Path(workdir))
