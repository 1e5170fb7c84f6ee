"""Tables of attacks: every attack against every defence of a config, as a grid.

A row of the config is a run of its own, in a folder of its own, so that the table goes on
where it was cut off and may get more rows. Runs that attack the same data read them once.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from dpjax.runs import bounds, loop, unused
from dpjax.runs.attack import build, table
from dpjax.runs.attack.config import AttackConfig, check, other, room
from dpjax.schema import fields
from dpjax.schema.fields import name_of
from dpjax.sweeps import cost, engine
from dpjax.sweeps.engine import Grid, Point, Row
from dpjax.validate import UserError

_OF_TABLE = {"rows": {}, "beside": {}, "title": ""}  # of the whole, not of a run
_LONGEST = 200  # bytes of a folder's name


@bounds.names_fields
def points(config: AttackConfig) -> list[Point]:
  """Every run of a table, checked before the first one begins.

  Raises:
    UserError: an unknown field or value, a setting that no row reads, two rows of one name.

  >>> rows = {"membership, none": {"train.privacy.method": "sgd", "train.privacy.epsilon": 2.0}}
  >>> [(point.name, point.overrides["defence"]) for point in points(AttackConfig(rows=rows))]
  [('membership-none', 'none')]
  """
  bounds.typed(config)
  labels = config.rows or {f"{name_of(config, 'attack')}, as configured": {}}
  strange = [label for label in config.beside if label not in labels]
  if strange:
    raise UserError(f"beside[{strange[0]!r}]: is no row; rows are {', '.join(labels)}")
  found = [_point(config, label, changes) for label, changes in labels.items()]
  names = [point.name for point in found]
  if len(set(names)) < len(names):
    raise UserError("rows: two labels give runs of the same name")
  attacked = {point.config.attack.room for point in found}
  unread = {"train", "federate"} - attacked
  unused.refuse(config, dict.fromkeys(unread, "a row that attacks it"))
  return found


def _point(config: AttackConfig, label: str, changes: dict[str, Any]) -> Point:
  where = f"rows[{label!r}]"
  for name in _OF_TABLE:
    if name in changes:
      raise UserError(f"{where}.{name}: would be ignored, it is of the whole table")
  run = fields.replace_all(config, {**_OF_TABLE, **changes}, name=where)
  for name, value in changes.items():  # which would be told as its defence
    if name.partition(".")[0] == other(run):
      raise UserError(
        f"{where}.{name}={value!r}: would be ignored, this row attacks {run.attack.room}; "
        "leave it out"
      )
  setattr(run, other(run), type(getattr(run, other(run)))())
  try:
    check(run)
  except UserError as error:
    raise UserError(f"{where}: {error}" if config.rows else str(error)) from error
  attack, _, defence = label.rpartition(", ")
  named = {"attack": attack or name_of(run, "attack"), "defence": defence}
  slug = "-".join("".join(c if c.isalnum() else " " for c in label.lower()).split())
  if not slug or len(slug.encode()) > _LONGEST or not label.isprintable():
    raise UserError(
      f"rows[{label!r:.60}]: names a row and its folder: must be words on one line, of at most "
      f"{_LONGEST} bytes"
    )
  return Point(slug, run, named | {"beside": config.beside.get(label, "")})


@bounds.names_fields
def run_all(config: AttackConfig, workdir: pathlib.Path | str) -> list[Row]:
  """Every run of a table, or what is left of them; their rows, which hold their results.

  Each lives in `workdir`/points/NAME. Beside them: sweep.json, attacks.md and attacks.csv (one
  line for every method and defence), attacks.png (the curves beside the lines that no attack
  may cross, and how often inversions succeed).

  Raises:
    UserError: a wrong config, a folder of another one; nothing is overwritten. What is wrong
      with one run of several is recorded in its row, and the others go on.
  """
  found, last = points(config), engine.LastData(_loaded)

  def train(point: Point, folder: pathlib.Path, shared: object) -> Row:
    del shared
    data = build.named(point.config, last, room(point.config))
    return loop.run(build.build(point.config, data), folder)

  draw: Callable[[pathlib.Path, list[Row]], None] = lambda folder, rows: table.write(
    folder, rows, title=config.title
  )
  grid = Grid(
    config=config,
    points=found,
    train=train,
    load=lambda config: None,
    kept=lambda point, result: result,
    draw=draw,
    tell=table.told,
    unreleased=cost.NOT_RELEASED,
  )
  return engine.run(grid, pathlib.Path(workdir))


def _loaded(attacked: Any) -> Any:
  load = build.LOADERS["federate" if hasattr(attacked, "partition") else "train"]
  return load(attacked)


def is_above(row: Row) -> bool:
  """Whether an attack of a finished run exceeds what its promise allows."""
  found = row.get("attacks", {}).values()
  return any(one["against_line"] == "above" for one in found)
