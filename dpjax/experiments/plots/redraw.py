"""Draws CSV files again: by the recipes beside them, or by columns that a user names."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpjax import pictures, validate
from dpjax.experiments.plots import csv_tables, lines, points, recipes
from dpjax.experiments.plots.csv_tables import CsvTable, Row
from dpjax.experiments.plots.recipes import Recipe
from dpjax.pictures import PAGE, Look
from dpjax.validate import UserError, first_line, join_words

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Column of a line's name, of several files on one picture.
_FILE = "line"
Reference = tuple[str, float, float]


class Asked(NamedTuple):
  """The columns and references that a user asks for in a picture.

  Attributes:
    x: column of x; None: the recipe beside the file decides.
    y: column of y.
    group: column whose values become lines.
    references: (label, x, y) of published results.
  """

  x: str | None = None
  y: str | None = None
  group: str | None = None
  references: tuple[Reference, ...] = ()


# With no columns and no references, files are drawn by their recipes.
NOTHING = Asked()


def plot(
  paths: Sequence[str | os.PathLike],
  out: Sequence[str | os.PathLike],
  *,
  asked: Asked = NOTHING,
  look: Look = PAGE,
) -> list[str]:
  """Draws CSV files on one picture, and writes it.

  Args:
    paths: paths of the CSV files, or of folders with recipes. Several are allowed only for lines,
      or with x and y.
    out: files to write, each .png, .pdf or .svg.
    asked: columns and references.
    look: sizes, fonts, style, title.

  Returns:
    Notes about rows that were not drawn.

  Raises:
    UserError: `paths` or `out` is empty; a file is no CSV file, or has no rows; a column or suffix
      is unknown; a cell cannot be drawn; x or y is needed and missing; or the files, or the
      references, cannot share a picture.
  """
  if not paths:
    raise UserError("must name at least one CSV file", field="csv", value="")
  if not out:
    raise UserError("must name a file to write", field="out", value="")
  for path in out:
    pictures.check_suffix(path, field="out")
    validate.folder(out=str(pathlib.Path(path).parent))
  read = [csv_tables.read(path) for path in itertools.chain(*map(_files, paths))]
  notes: list[str] = []
  try:
    drawn = figure(read, asked, look, notes)
    for path in out:
      pictures.save(drawn, path)
  except UserError:
    raise
  # A recipe that somebody wrote may name what no function draws.
  except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
    reason = first_line(error, with_type=True)
    path = str(read[0].path)
    raise UserError(f"cannot be drawn: {reason}", field="csv", value=path) from error
  return notes


def _files(path: str | os.PathLike) -> list[pathlib.Path]:
  """Returns the CSV files of a path: it, or those with a recipe in a folder."""
  folder = pathlib.Path(path)
  if not folder.is_dir():
    return [folder]
  ends = len(recipes.SUFFIX)
  found = [p.with_name(p.name[:-ends] + ".csv") for p in folder.glob(f"*{recipes.SUFFIX}")]
  if not found:
    raise UserError(
      f"must hold a picture's recipe (*{recipes.SUFFIX})", field="csv", value=str(path)
    )
  return sorted(found)


def figure(read: Sequence[CsvTable], asked: Asked, look: Look, notes: list[str]) -> Figure:
  """Returns the picture that `plot` saves. Appends lines about rows not drawn to `notes`."""
  if asked.x or asked.y or asked.group:
    for name in ("x", "y"):
      if not getattr(asked, name):
        raise UserError("must be given with the other columns", field=name, value=None)
    named = (asked.x or "", asked.y or "")
    recipe = Recipe("lines", (named[0],), (named[1],), asked.group)
    fields: dict[str, str] = {"x": "x", "y": "y", "series": "group"}
  else:
    recipe = _common(read)
    fields = {}
  for table in read:
    _check(table, recipe, fields, alone=len(read) == 1)
    notes += [
      note for column in recipe.numbers() for note in _missing(table, column, recipe)
    ]
  if asked.references and recipe.draw != "lines":
    raise UserError(
      "goes with lines, or with x and y", field="reference", value=str(read[0].path)
    )
  if recipe.references or asked.references:
    references = dict.fromkeys((*recipe.references, *asked.references))
    recipe = dataclasses.replace(recipe, references=tuple(references))
  rows, recipe = _together(read, recipe)
  return draw(rows, recipe, look)


def draw(rows: Sequence[Row], recipe: Recipe, look: Look = PAGE) -> Figure:
  """Returns the picture of rows by a recipe."""
  kept = lambda row: all(row[name] not in recipe.without[name] for name in recipe.without)
  rows = list(filter(kept, rows))
  by_name = {"lines": lines.lines, "points": points.points, "bars": points.bars}
  return by_name[recipe.draw](rows, recipe, look)


def write(path: pathlib.Path, recipe: Recipe, *, also: Iterable[str] = ()) -> None:
  """Draws a CSV file, and writes recipe and picture (.png, and `also`) beside it."""
  recipes.write(path, recipe)
  is_empty = len(path.read_text(encoding="utf-8").splitlines()) < 2
  rows = [] if is_empty else csv_tables.read(path).rows
  pictures.save(draw(rows, recipe), path.with_suffix(".png"), also=also)


def _common(read: Sequence[CsvTable]) -> Recipe:
  """Returns the recipe that lies beside the files; of several files, with all their references."""
  found = []
  for table in read:
    recipe = recipes.read(table.path)
    if recipe is None:
      raise UserError(
        f"has no {recipes.beside(table.path).name}; give --x and --y of its columns: "
        f"{join_words(table.columns, 60)}",
        field="csv",
        value=str(table.path),
      )
    found.append(recipe)
  first = found[0]
  if len(found) == 1:
    return first
  shared = {(recipe.draw, recipe.x, recipe.y, recipe.ends) for recipe in found}
  if len(shared) > 1 or first.draw != "lines" or first.panels:
    shown = "; ".join(
      f"{table.path}: {', '.join(recipe.y)} over {', '.join(recipe.x)}"
      for table, recipe in zip(read, found)
    )
    raise UserError(
      f"files on one picture must be lines with the same axes, not {shown}", field="csv"
    )
  references = dict.fromkeys(entry for recipe in found for entry in recipe.references)
  return dataclasses.replace(first, references=tuple(references), title="")


def _check(
  table: CsvTable, recipe: Recipe, fields: Mapping[str, str], *, alone: bool
) -> None:
  """Raises UserError if the file lacks a column of the recipe, or its numbers."""
  is_curve = bool(recipe.ends) and recipe.draw == "lines"
  for column, place in recipe.columns().items():
    if place == "series" and column not in table.columns and not (fields or alone):
      continue  # a line of this file alone
    table.check_column(column, field=fields.get(place, "csv"))
  for column in recipe.numbers():
    place = recipe.columns()[column]
    # A line with `ends` is not averaged: each of its rows is a point.
    full = is_curve and place != "x"
    table.check_numbers(column, field=fields.get(place, "csv"), full=full)
  for column in {"seeds", "not_finite"} & {*table.columns} if is_curve else ():
    table.check_numbers(column, field="csv", finite=True)


def _together(read: Sequence[CsvTable], recipe: Recipe) -> tuple[list[Row], Recipe]:
  """Returns the rows of all files, of several with a line for each file; and their recipe."""
  if len(read) == 1:
    return read[0].rows, recipe
  paths = [table.path.resolve() for table in read]
  of_stems = len({path.stem for path in paths}) > 1 or recipe.ends == ()
  files = _tell_apart([
    (*path.parent.parts, path.stem) if of_stems else path.parent.parts for path in paths
  ])  # fmt: skip
  rows = []
  for table, file in zip(read, files):
    for row in table.rows:
      value = row.get(recipe.series or "")
      label = f"{value:g}" if isinstance(value, float) else str(value or "")
      rows.append({**row, _FILE: ": ".join(filter(None, (file, label)))})
  return rows, dataclasses.replace(recipe, series=_FILE)


def size(text: str) -> dict[str, float]:
  """Parses "single", "double", "3.3" or "3.3x2.4" into width and, if given, height, in inches.

  Raises:
    UserError: the text has another form.

  >>> size("single"), size("5x2.5")
  ({'width': 3.3}, {'width': 5.0, 'height': 2.5})
  """
  if text in pictures.SIZES:
    return {"width": pictures.SIZES[text]}
  try:
    numbers = [float(part) for part in text.split("x")]
    sides: dict[str, float] = dict(
      zip(("width", "height"), numbers, strict=len(numbers) > 2)
    )
  except ValueError:
    raise UserError(
      "must be single, double, a width in inches or WIDTHxHEIGHT", field="size", value=text
    ) from None
  try:
    Look(width=sides["width"], height=sides.get("height"))
  except UserError as error:
    raise error.of(field="size", value=text) from None
  return sides


def reference(text: str) -> Reference:
  """Parses "label:x:y" into (label, x, y); the label may hold colons.

  Raises:
    UserError: the text has another form.

  >>> reference("Papernot et al. 2021:2.93:0.981")
  ('Papernot et al. 2021', 2.93, 0.981)
  """
  try:
    label, x, y = text.rsplit(":", 2)
    at = float(x), float(y)
  except ValueError:
    at = (math.nan, math.nan)
  # A point that is not finite would not be drawn.
  if not all(map(math.isfinite, at)):
    raise UserError(
      "must be LABEL:X:Y with two finite numbers", field="reference", value=text
    )
  return label, *at


def _missing(table: CsvTable, name: str, recipe: Recipe) -> list[str]:
  """Returns a note on how many rows hold no finite number in a column; [] if all hold one, or if
  such rows are drawn as lines across the axes."""
  if recipe.ends and name != recipe.y[0]:
    return []
  lost = sum(not recipes.is_number(row[name]) for row in table.rows)
  if not lost:
    return []
  return [
    f"{table.path}: {lost} of {len(table.rows)} rows hold no finite {name}: not drawn"
  ]


def _tell_apart(places: Sequence[tuple[str, ...]]) -> list[str]:
  """Returns a name for each path: its last part, or as many of them as tell all the paths apart.

  Paths are tuples of parts. Equal paths have the same name.

  >>> _tell_apart([("runs", "a", "report"), ("runs", "b", "report")])
  ['a/report', 'b/report']
  """
  names: list[str] = []
  for depth in range(1, 1 + max(map(len, places))):
    names = ["/".join(parts[-depth:]) for parts in places]
    if len(set(names)) == len(set(places)):
      break
  return names
