"""The engine of every sweep and table: runs in folders of their own, one after another.

A sweep can be killed at any moment and started again. Finished runs are kept, the interrupted run
resumes, and the files about all runs are written again after each run. Several processes may work
off one sweep: each takes the next run that no other is at, and the last one writes the whole.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from dpjax import validate
from dpjax.experiments.config import choices
from dpjax.experiments.config.naming import naming
from dpjax.experiments.run import checkpoint, kind, loop, provenance, writers
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.sweeps import cost
from dpjax.parallel import allocator
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.experiments.run.kind import Table
  from dpjax.experiments.sweeps.sweep import Runs

Row = dict[str, Any]
FILE = "sweep.json"
# Entries of a result from which the cost of all runs follows. A row has them if its run finished,
# also if something failed after that: what the run trained is on the disk.
_GUARANTEE = ("epsilon", "delta", "epsilon_kind", "neighboring_relation", "unit")
_GUARANTEE += ("unit_owns_records", "failed_assumptions")
_AGAIN_SECONDS = 0.1


class Point(NamedTuple):
  """One run of a sweep."""

  name: str  # of its folder: readable, unique, the same in every process
  config: Any
  facts: Row  # entries of its row that tell it from other runs

  @property
  def label(self) -> str:
    """Returns the name that the config file gave the run."""
    return str(self.facts.get("label", self.facts.get("variant", self.name)))


class WholeSweep(UserError):
  """An error of the sweep itself, which is no run's: it ends the sweep."""


def slug(label: str) -> str:
  """Converts a label to a part of a folder name.

  >>> slug("DLG, top-k"), slug("noise .01 @ 0.5")
  ('dlg-top-k', 'noise-.01-0.5')
  """
  words = "".join(c if c.isalnum() or c in ".=" else " " for c in label.lower()).split()
  return "-".join(words).strip(".")


def folder(workdir: pathlib.Path, name: str) -> pathlib.Path:
  """Returns the folder of one run, `workdir`/points/`name`."""
  return workdir / "points" / name


def part(points: list[Point], only: str | None, workdir: pathlib.Path) -> list[Point]:
  """Returns the requested points and the points that have finished: tables show all results.

  Args:
    only: name of a run, or of its folder, or a pattern of names, as for files in a shell; None:
      all.

  Raises:
    UserError: the pattern fits no run.
  """
  if only is None:
    return points
  meant = lambda name: name == only or fnmatch.fnmatchcase(name, only)
  wanted = {point.name for point in points if meant(point.name) or meant(point.label)}
  if not wanted:
    known = list(dict.fromkeys(point.label for point in points))
    some = ", ".join([*known[:3], "..."] if len(known) > 3 else known)
    raise UserError(f"must be a pattern of one of {some}", field="only", value=only)
  # Finished points are drawn with the requested points, so that a table never loses rows.
  there = lambda point: (folder(workdir, point.name) / writers.RESULT).exists()
  return [point for point in points if point.name in wanted or there(point)]


def run(runs: Runs, workdir: pathlib.Path, only: str | None = None) -> list[Row]:
  """Carries out the runs of a sweep that have no result yet, but for those at which another process
  works. Writes sweep.json, and the files of `table` after each run.

  Args:
    runs: the runs, and what they write together. The error of one that is `alone` is raised, as
      that of any single run.
    only: pattern of the points that are run now (`part`).

  Returns:
    One row for each point that this call ran or found finished: name, status ("done" or "failed"),
    error, population (`cost.population`), the point's facts and, if it is done, the entries of
    `table.keep`. sweep.json also holds the failed runs of earlier calls.

  Raises:
    UserError: `only` fits no point; JAX runs in several processes; the folder holds something else,
      or a run of that name of another config; what all runs need is not installed; `table` cannot
      draw such runs; a full disk. Any other error of one of several runs is recorded in its row,
      and the others go on.
  """
  validate.folder(workdir=workdir)
  if jax.process_count() > 1:
    raise UserError(
      f"must be run by one process, not {jax.process_count()}; several may "
      "share one run (launch.train, launch.federate)",
      field="sweep",
    )
  owner.check_own(workdir, FILE, "points")
  table = runs.table
  now = in_order(_ready(part(runs.points, only, workdir), table))
  for point in now:
    # A run of another config is refused before the first run, and before sweep.json is written.
    owner.recall_for(folder(workdir, point.name), point.config)
  whole = _Files(runs, workdir)
  # A file of somebody else is refused now, not after the first run.
  whole.earlier_failures()
  fresh = not workdir.exists()
  workdir.mkdir(parents=True, exist_ok=True)
  rows: dict[str, Row] = {}
  saved = lambda: f"{len(rows)} of {len(now)} runs have ended"
  with writers.space_on_disk(workdir, saved), _remove_if_refused(workdir, fresh=fresh):
    work = _Work(runs, workdir)
    ran_any = False
    for point, row, ran in _outcomes(now, work):
      rows[point.name] = row
      ran_any = ran_any or ran
      writers.say(f"[{len(rows)}/{len(now)}] {summary(row, table)}")
      # The files already contain runs that an earlier call finished.
      if ran or work.undrawn is not None:
        whole.write(rows)
      # If no run so far can be drawn, as by a mistyped name, the others are not started.
      if work.undrawn is not None and not any(
        each["status"] == "done" for each in rows.values()
      ):
        raise work.undrawn
    if not ran_any:
      whole.write(rows)
  busy = [point.name for point in now if point.name not in rows]
  if busy:
    writers.note(
      f"{len(busy)} runs are at work in other processes, the last of which writes them all: "
      f"{', '.join(busy[:3])}{', ...' if len(busy) > 3 else ''}"
    )
  print(writers.read_json(workdir / FILE)["statement"], flush=True)
  return [rows[point.name] for point in runs.points if point.name in rows]


def _ready(points: list[Point], table: Table) -> list[Point]:
  """Returns the points that nothing is missing for, after a note on the others."""
  lines = {point.name: table.missing(point.config) for point in points}
  ready = [point for point in points if not lines[point.name]]
  if not ready:
    raise UserError(lines[points[0].name])
  for line in dict.fromkeys(filter(None, lines.values())):
    names = [name for name, needed in lines.items() if needed == line]
    writers.note(
      f"{len(names)} of {len(points)} rows are left out ({', '.join(names)}): {line}"
    )
  return ready


@contextlib.contextmanager
def _remove_if_refused(workdir: pathlib.Path, *, fresh: bool) -> Iterator[None]:
  """Removes a new folder in which nothing was written if the block raises UserError."""
  try:
    yield
  except UserError:
    if fresh and not [path for path in workdir.rglob("*") if path.is_file()]:
      shutil.rmtree(workdir, ignore_errors=True)
    raise


def _outcomes(points: list[Point], work: _Work) -> Iterator[tuple[Point, Row, bool]]:
  """Yields (point, its row, whether this call ran it), but for points at which other processes
  are. Those are looked at again as long as there is something to do beside them."""
  waiting = points
  while waiting:
    busy = []
    for point in waiting:
      outcome = work(point)
      if outcome is None:
        busy.append(point)
      else:
        yield point, *outcome
    if len(busy) == len(waiting):
      return
    waiting = busy


class _Work:
  """Runs a point, and returns (its row, whether this call ran it); None if another process is at
  it. Keeps the data of the last point."""

  def __init__(self, runs: Runs, workdir: pathlib.Path):
    self._table = runs.table
    self._workdir = workdir
    self._load = LastData(loop.load)
    self._alone = runs.alone
    self._checked = False
    # Error of the last run that has finished, but whose result cannot be drawn.
    self.undrawn: UserError | None = None

  def __call__(self, point: Point) -> tuple[Row, bool] | None:
    at = folder(self._workdir, point.name)
    ran = not (at / writers.RESULT).exists()
    try:
      # The lock stands beside the folder, which holds nothing but the run. No run has such a name.
      with writers.alone_in(at.parent, name=f".{point.name}.lock", kept=False):
        if ran:
          writers.begins(point.name)
        row = self._row(point, at)
    except writers.Busy:
      if self._alone:
        raise
      return None
    # Freed memory is given back to the system. Otherwise the memory of one run would add to the
    # peak of the next run.
    allocator.give_back()
    return row, ran

  def _row(self, point: Point, at: pathlib.Path) -> Row:
    try:
      result = finished_result(point, at)
      # A run with checkpoints stores a digest of its data. It is started even if it has finished,
      # so that it compares its data with the digest.
      if result is None or (at / checkpoint.FOLDER).is_dir():
        result = self._result(point, at, new=result is None)
    except UserError as error:
      # The others would meet the same disk, or begin in another folder.
      of_all = WholeSweep | writers.Busy | writers.Gone | writers.Unwritable
      if self._alone or isinstance(error, of_all):
        raise
      return _failed_row(point, at, error)
    try:
      return row_of(point, self._table, result)
    except UserError as error:
      if self._alone:
        raise
      self.undrawn = error
      return _failed_row(point, at, error)

  def _result(self, point: Point, at: pathlib.Path, *, new: bool) -> Row:
    data = self._load(point.config)
    if new and not self._checked:
      try:
        with naming(point.config):
          self._table.check_data(point.config, data)
      except UserError as error:
        raise WholeSweep(
          error.must, field=error.field, value=error.value, hint=error.hint
        ) from error
      self._checked = True
    loop.train(point.config, at, data=data)
    # The result is read back, so that it is as a later start reads it: with lists for tuples, and
    # text for infinity.
    return writers.read_json(at / writers.RESULT)


def finished_result(point: Point, at: pathlib.Path) -> Row | None:
  """Returns the result of a point whose run has finished; None if it has not.

  Raises:
    UserError: the folder holds another run.
  """
  if not (at / owner.CONFIG).exists():
    return None
  owner.recall_for(at, point.config)
  return owner.finished_result(at, point.config)


def _failed_row(point: Point, at: pathlib.Path, error: UserError) -> Row:
  """Returns the row of a failed run. If it has finished, the row has what the run guarantees."""
  try:
    result = finished_result(point, at) or {}
  except UserError:
    result = {}
  row = {**head(point), **point.facts, "status": "failed", "error": str(error)}
  row["refusal"] = error.facts()
  return row | _guarantee(result)


def _guarantee(result: Row) -> Row:
  return {name: result[name] for name in _GUARANTEE if name in result}


def head(point: Point) -> Row:
  """Returns the first entries of a finished run's row: name, status, error and population."""
  population = cost.population(point.config)
  return {"name": point.name, "status": "done", "error": None, "population": population}


def row_of(point: Point, table: Table, result: Row) -> Row:
  """Returns the row of a finished run. What it guarantees is what its result says, though a config
  of some kind may have a field of that name."""
  kept = table.keep(point.config, result)
  return {**head(point), **kept, **point.facts, **_guarantee(result)}


def _is_open(row: Row | None) -> bool:
  """Returns whether another process may have finished a run since this one looked at it: it failed
  here, or was not looked at."""
  return row is None or (row["status"] == "failed" and "epsilon_kind" not in row)


class _Files:
  """Writes the files about all runs, which several processes may write."""

  def __init__(self, runs: Runs, workdir: pathlib.Path):
    self._runs = runs
    self._points = runs.points
    self._table = runs.table
    self._workdir = workdir

  def write(self, rows: dict[str, Row]) -> None:
    """Writes sweep.json and the files of the table, with what other calls have finished or found to
    fail."""
    with self._alone():
      others = {
        point.name: row
        for point in self._points
        if _is_open(rows.get(point.name)) and (row := self._read(point)) is not None
      }
      rows = self.earlier_failures() | rows | others
      self._save([rows[point.name] for point in self._points if point.name in rows])

  @contextlib.contextmanager
  def _alone(self) -> Iterator[None]:
    """Waits for other processes that write these files."""
    with contextlib.ExitStack() as held:
      while True:
        try:
          held.enter_context(writers.alone_in(self._workdir))
          break
        except writers.Busy:
          time.sleep(_AGAIN_SECONDS)
      yield

  def _read(self, point: Point) -> Row | None:
    """Returns the row of a point that has finished; None if it has not, or is of another config."""
    try:
      result = finished_result(point, folder(self._workdir, point.name))
      return None if result is None else row_of(point, self._table, result)
    except UserError:
      return None

  def earlier_failures(self) -> dict[str, Row]:
    """Reads the failed runs of earlier calls from sweep.json."""
    path = self._workdir / FILE
    if not path.exists():
      return {}
    try:
      return {
        row["name"]: row
        for row in writers.read_json(path)["rows"]
        if row["status"] == "failed" and row["refusal"]
      }
    except (KeyError, TypeError):
      raise UserError(
        f"{FILE} there is not that of a sweep", field="workdir", value=self._workdir
      ) from None

  def _save(self, rows: list[Row]) -> None:
    unreleased = self._table.unreleased
    names = {point.name for point in self._points}
    results = folder(self._workdir, "").glob(f"*/{writers.RESULT}")
    others = sum(path.parent.name not in names for path in results)
    settings = self._runs.config
    data = {
      "title": self._runs.title,
      "config": {} if settings is None else choices.to_dict(settings),
      "points": len(self._points),
      "statement": unreleased or cost.statement_of_sweep(rows, others),
      "all_runs_together": None if unreleased else cost.charge(rows),
      "versions": provenance.versions(),
      "device": provenance.device(),
      "rows": rows,
    }
    writers.write_json(self._workdir / FILE, data)
    finished_rows = [row for row in rows if row["status"] == "done"]
    last = len(rows) == len(self._points)
    self._table.write(self._workdir, finished_rows, title=self._runs.title, last=last)


def in_order(points: Iterable[Point]) -> list[Point]:
  """Returns the points, ordered so that equal data are prepared once."""
  groups: dict[str, list[Point]] = {}
  for point in points:
    groups.setdefault(_data_key(point.config), []).append(point)
  return [point for group in groups.values() for point in group]


def _data_key(config: Any) -> str:
  """Returns a text that is equal for runs that may share what is loaded."""
  key = [kind.command_of(config), kind.experiment_of(config).data_key()]
  return json.dumps(writers.plain(key), sort_keys=True, default=str)


class LastData:
  """Wraps a function that loads what all runs on the same data and model share. It keeps what it
  loaded for the last config."""

  def __init__(self, load_fn: Callable[[Any], Any]):
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


def summary(row: Row, table: Table) -> str:
  """Summarises a run in one line. For a claim, the line names the assumptions that fail."""
  if row["status"] == "failed":
    return f"{row['name']}: failed: {row['error']}"
  return f"{row['name']}: {table.tell(row)}{writers.took(row)}"
