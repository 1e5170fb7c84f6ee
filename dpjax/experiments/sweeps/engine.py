"""The grid engine: points from variants and axes, and their runs, one after another or side
by side in several processes.

A grid can be killed at any moment and started again. Finished runs are kept, the interrupted run
resumes, and the files about all runs are written again after each run.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from dpjax import validate
from dpjax.accounting.text import by_name
from dpjax.experiments.config import fields, rules
from dpjax.experiments.run import checkpoint, guarantee, provenance, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.sweeps import cost, curve, side_by_side
from dpjax.parallel import allocator
from dpjax.validate import UserError

if TYPE_CHECKING:
  from _typeshed import DataclassInstance

Row = dict[str, Any]
LoadFn = Callable[[Any], Any]  # (config) -> what all runs on the same data and model share
Axes = Mapping[str, Sequence[Any]]  # dotted field -> its values
FILE = "sweep.json"


class Point(NamedTuple):
  """A run of a grid: its folder name, config, and differences from other runs."""

  name: str  # folder name: readable, unique, the same in every process
  config: Any
  overrides: dict[str, Any]  # values that tell this run from the others; also in its row


class Grid(NamedTuple):
  """The runs of a grid, and functions that train and report them. A grid must be picklable if
  several processes train its runs."""

  config: Any  # dataclass: config of the whole grid, for sweep.json
  points: list[Point]
  # Function (point, folder of the point, result of `load`) -> content of result.json. It resumes an
  # interrupted run.
  train: Callable[[Point, pathlib.Path, Any], Row]
  load: LoadFn
  kept: Callable[[Point, Row], Row]  # (point, result) -> entries of the point's row
  draw: Callable[[pathlib.Path, list[Row]], None]  # writes files about the finished runs
  y: str = "test_accuracy"  # key of a result, for the progress lines
  tell: Callable[[Row], str] | None = (
    None  # describes a finished run in one line; None: by y
  )
  # Reason why the runs are not released, so that their costs are not summed; "": they are released.
  unreleased: str = ""
  only: str | None = None  # pattern of the points that are run now, as in `part`
  # Whether there is one run, and no table: its error is then raised, as that of any single run.
  alone: bool = False


class Changed(NamedTuple):
  """A run of a grid, before its fields are checked."""

  variant: str
  changes: dict[str, Any]  # the fields that the variant and the axes set
  axes: dict[str, Any]  # the fields that the axes set
  config: Any


def spread(
  base: DataclassInstance,
  variants: Mapping[str, Mapping[str, Any]],
  axes_of: Callable[[Any], Axes],
  *,
  name: str,
  where: str,
) -> list[Changed]:
  """Expands variants and axes into runs; see `expand` for the arguments."""
  bases = {
    variant: fields.replace_all(base, fixed, name=f"{where}[{variant!r}]")
    for variant, fixed in variants.items()
  }
  axes = {variant: axes_of(config) for variant, config in bases.items()}
  # Runs are counted before they are made: a mistyped axis may ask for billions of runs.
  count = sum(math.prod(map(len, values.values())) for values in axes.values())
  if count > rules.MOST_RUNS:
    raise UserError(f"has {count} runs; must be at most {rules.MOST_RUNS}", field=name)
  runs = []
  for variant, config in bases.items():
    for values in itertools.product(*axes[variant].values()):
      chosen = dict(zip(axes[variant], values))
      run = fields.replace_all(config, chosen, name=name)
      runs.append(Changed(variant, {**variants[variant], **chosen}, chosen, run))
  return runs


def expand(
  base: DataclassInstance,
  variants: Mapping[str, Mapping[str, Any]],
  axes_of: Callable[[Any], Axes],
  point: Callable[[str, Any, dict[str, Any]], Point],
  *,
  check: Callable[[Any], object],
  name: str,
  where: str,
) -> list[Point]:
  """Returns the runs: each variant of a config at each combination of its axes.

  The last axis varies fastest. Every run is checked before the first run begins: an impossible
  value of the last run must not be found after hours.

  Args:
    base: config from which the variants differ.
    variants: fields that each variant sets together, by the variant's name.
    axes_of: function from a variant's config to its axes, whose values replace values of the
      config.
    point: function (name of the variant, config of the run, values of the axes) -> the run.
    check: function that raises UserError for a run's config, as far as it can be judged without
      data.
    name: name of the config field in errors about the runs.
    where: name of the config field in errors about a variant.

  Raises:
    UserError: an unknown field, an ill-typed value, more than `rules.MOST_RUNS` runs; an error of
      `check`, after the name of the run.
  """
  points = []
  for run in spread(base, variants, axes_of, name=name, where=where):
    made = point(run.variant, run.config, run.axes)
    # An error names its run, since a grid has many runs.
    try:
      check(made.config)
    except UserError as error:
      raise error.at(made.name) from error
    points.append(made)
  return points


def slug(label: str) -> str:
  """Converts a label to a part of a folder name.

  >>> slug("DLG, top-k")
  'dlg-top-k'
  """
  return "-".join("".join(c if c.isalnum() else " " for c in label.lower()).split())


def folder(workdir: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the folder of one run, `workdir`/points/`name`."""
  return workdir / "points" / name


def part(points: list[Point], only: str | None, workdir: pathlib.Path) -> list[Point]:
  """Returns the requested points and the points that have finished: tables show all results.

  Args:
    only: name of a variant or a run, or a pattern of names, as for files in a shell; None: all.

  Raises:
    UserError: the pattern fits no variant and no run.
  """
  if only is None:
    return points
  names_of = lambda point: (point.name, str(point.overrides.get("variant", point.name)))
  meant = lambda name: name == only or fnmatch.fnmatchcase(name, only)
  wanted = {point.name for point in points if any(map(meant, names_of(point)))}
  if not wanted:
    known = list(dict.fromkeys(names_of(point)[1] for point in points))
    some = ", ".join([*known[:3], "..."] if len(known) > 3 else known)
    raise UserError(f"must be a pattern of one of {some}", field="only", value=only)
  # Finished points are drawn with the requested points, so that a table never loses rows.
  there = lambda point: _result_of(point, workdir).exists()
  return [point for point in points if point.name in wanted or there(point)]


def run(grid: Grid, workdir: pathlib.Path, *, num_processes: int = 1) -> list[Row]:
  """Runs the remaining points of a grid. Writes sweep.json and calls `grid.draw` after each run.

  Args:
    num_processes: number of runs at a time. With more than 1, several processes of this machine
      train the runs, and each process loads the data (`side_by_side`).

  Returns:
    One row for each point, in the order of the points: name, status ("done" or "failed"), error,
    population (`cost.population`), the point's overrides and, if it is done, the entries of
    `grid.kept`. With `grid.only`, there are rows only for that part (`part`); sweep.json also keeps
    the failed runs of other parts.

  Raises:
    UserError: `grid.only` fits no point; `side_by_side.check` refuses `num_processes`; JAX runs in
      several processes; the folder holds a single run, or another process is at work in it. A
      UserError of one of several runs is recorded in its row, and the other runs go on.
  """
  validate.folder(workdir=workdir)
  side_by_side.check(num_processes)
  if jax.process_count() > 1:
    raise UserError(
      f"must be run by one process, not {jax.process_count()}; several may "
      "share one run (launch.train, launch.federate)",
      field="sweep",
    )
  if owner.remembered(workdir) is not None:
    raise UserError(
      "holds a single run; choose another directory, nothing was changed",
      field="workdir",
      value=workdir,
    )
  now = grid._replace(points=part(grid.points, grid.only, workdir))
  fresh = not workdir.exists()
  workdir.mkdir(parents=True, exist_ok=True)
  with (
    writers.alone_in(workdir) as lock,
    _removed_if_refused(workdir, fresh=fresh),
    contextlib.closing(_rows(now, workdir, num_processes, lock)) as outcomes,
  ):
    left_out = _failed_of_the_rest(grid, now, workdir)
    rows = {}
    for count, (point, (row, ran)) in enumerate(outcomes, start=1):
      rows[point.name] = row
      line = summary(row, grid.y)
      if grid.tell is not None and row["status"] != "failed":
        line = f"{row['name']}: {grid.tell(row)}{writers.took(row)}"
      writers.say(f"[{count}/{len(now.points)}] {line}")
      # The files already contain runs that an earlier call finished. So they are written only after
      # a run of this call, and after the last point.
      if ran or count == len(now.points):
        _save(grid, workdir, _in_order(grid, left_out | rows))
    print(writers.read_json(workdir / FILE)["statement"], flush=True)
    return _in_order(grid, rows)


@contextlib.contextmanager
def _removed_if_refused(workdir: pathlib.Path, *, fresh: bool) -> Iterator[None]:
  """Removes a new folder that holds nothing but its lock if the block raises UserError."""
  try:
    yield
  except UserError:
    if fresh and [path.name for path in workdir.iterdir()] == [writers.LOCK]:
      shutil.rmtree(workdir, ignore_errors=True)
    raise


def _failed_of_the_rest(grid: Grid, now: Grid, workdir: pathlib.Path) -> dict[str, Row]:
  """Reads from sweep.json the rows of failed points that this call does not run."""
  others = {point.name for point in grid.points} - {point.name for point in now.points}
  if not others or not (workdir / FILE).exists():
    return {}
  try:
    known = {row["name"]: row for row in writers.read_json(workdir / FILE)["rows"]}
    return {n: known[n] for n in others & set(known) if known[n]["status"] == "failed"}
  except (KeyError, TypeError):
    raise UserError(
      f"{FILE} there is not that of a sweep", field="workdir", value=workdir
    ) from None


def _in_order(grid: Grid, rows: dict[str, Row]) -> list[Row]:
  return [rows[point.name] for point in grid.points if point.name in rows]


def _result_of(point: Point, workdir: pathlib.Path) -> pathlib.Path:
  return folder(workdir, point.name) / writers.RESULT


def _rows(
  grid: Grid, workdir: pathlib.Path, num_processes: int, lock: int
) -> Generator[tuple[Point, tuple[Row, bool]]]:
  """Yields (point, result of `_Work`) when a run ends."""
  work = _Work(grid, workdir)
  points = grouped(grid.points)
  left = sum(not _result_of(point, workdir).exists() for point in points)
  if min(num_processes, left) > 1:
    return side_by_side.outcomes(work, points, min(num_processes, left), lock=lock)
  return ((point, work(point)) for point in points)


class _Work:
  """Runs a point, and returns (its row, whether this call ran it). Caches the data of the last
  point."""

  def __init__(self, grid: Grid, workdir: pathlib.Path):
    self._grid = grid
    self._workdir = workdir
    self._load = LastData(grid.load)

  def __call__(self, point: Point) -> tuple[Row, bool]:
    ran = not _result_of(point, self._workdir).exists()
    if ran:
      writers.begins(point.name)
    row = _row(self._grid, point, folder(self._workdir, point.name), self._load)
    # Freed memory is given back to the system. Otherwise the memory of one run would add to the
    # peak of the next run.
    allocator.give_back()
    return row, ran


def grouped(points: Iterable[Point]) -> list[Point]:
  """Returns the points, ordered so that equal data are prepared once."""
  groups: dict[str, list[Point]] = {}
  for point in points:
    groups.setdefault(_data_key(point.config), []).append(point)
  return [point for group in groups.values() for point in group]


def _data_key(config: Any) -> str:
  held = fields.to_dict(config)
  parts = [held[name] for name in ("data", "model", "partition") if name in held]
  # The normalization decides whether the features of each example are standardised, or stay
  # unscaled for statistics over all examples.
  parts.append(held.get("privacy", {}).get("normalization", {}).get("name"))
  return json.dumps(writers.plain(parts))


class LastData:
  """Wraps `load_fn`, and keeps the data of the last config for a config on the same data."""

  def __init__(self, load_fn: LoadFn):
    self._load_fn = load_fn
    self._key = ""
    self._data = None

  def __call__(self, config: Any) -> Any:
    if self._key != _data_key(config):
      # The old data are freed before the new data are loaded.
      self._key = ""
      self._data = None
      self._data = self._load_fn(config)
      self._key = _data_key(config)
    return self._data


def head(point: Point) -> Row:
  """Returns the first entries of a finished run's row: name, status, error and population."""
  population = cost.population(point.config)
  return {"name": point.name, "status": "done", "error": None, "population": population}


def _row(grid: Grid, point: Point, at: pathlib.Path, load: LoadFn) -> Row:
  row = head(point)
  try:
    result = None
    # A finished run of this very config is read, not run again.
    if (at / owner.CONFIG).exists():
      owner.known(at, point.config)
      result = owner.finished(at, point.config)
    # A run with checkpoints stores a digest of its data. It is started even if it has finished, so
    # that it compares its data with the digest.
    if result is None or (at / checkpoint.FOLDER).is_dir():
      result = _train(grid, point, at, load)
  except UserError as error:
    if grid.alone:
      raise
    line = " ".join(str(error).split())
    return {**row, **point.overrides, "status": "failed", "error": line}
  return {**row, **grid.kept(point, result), **point.overrides}


def _train(grid: Grid, point: Point, at: pathlib.Path, load: LoadFn) -> Row:
  result = grid.train(point, at, load(point.config))
  # Some `train` functions leave writing the result to the grid.
  if not (at / writers.RESULT).exists():
    owner.claim(at, point.config)
    owner.write_result(at, point.config, result)
  # The result is read back, so that it is as a later start reads it: with lists for tuples, and
  # text for infinity.
  return writers.read_json(at / writers.RESULT)


def _save(grid: Grid, workdir: pathlib.Path, rows: list[Row]) -> None:
  names = {point.name for point in grid.points}
  results = folder(workdir, "").glob(f"*/{writers.RESULT}")
  others = sum(path.parent.name not in names for path in results)
  data = {
    "title": grid.config.title,
    "config": fields.to_dict(grid.config),
    "points": len(grid.points),
    "statement": grid.unreleased or cost.statement(rows, others),
    "all_runs_together": None if grid.unreleased else cost.charge(rows),
    "versions": provenance.versions(),
    "device": provenance.device(),
    "rows": rows,
  }
  writers.write_json(workdir / FILE, data)
  grid.draw(workdir, [row for row in rows if row["status"] == "done"])


def summary(row: Row, y: str) -> str:
  """Summarises a run in one line. For a claim, the line names the assumptions that fail."""
  if row["status"] == "failed":
    return f"{row['name']}: failed: {row['error']}"
  value = by_name(y, curve.numeric(row, y))
  return f"{row['name']}: {y} = {value}, {guarantee.summary(row)}{writers.took(row)}"
