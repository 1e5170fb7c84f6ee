"""The recipe of a picture: what of a CSV file is drawn, and how. It lies beside the file as JSON.

A picture is drawn from rows and a recipe alone, by one of three functions: `lines`, `points` or
`bars`. Nothing is guessed from the names of columns.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from dpjax import files, pictures, validate
from dpjax.accounting.text import by_name
from dpjax.validate import UserError

SUFFIX = ".picture.json"
DRAWN = ("lines", "points", "bars")
# Columns that tell what the epsilon of a row means. Rows that differ in one are never averaged.
WHAT_EPSILON_MEANS = ("epsilon_kind", "delta", "neighboring_relation", "unit")


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What of a table is drawn, and how.

  Attributes:
    draw: name of the function that draws: "lines", "points" or "bars".
    x: columns on the horizontal axis; of several, each has panels of its own.
    y: columns on the vertical axis. For "points" and "bars" their texts together name a row.
    series: column whose values become lines or colours; None: all is one.
    panels: columns whose values get panels of their own.
    ends: columns of the lower and the upper end of a bar or an interval; (): rows at one place are
      averaged, and the ends are their extremes.
    references: (label, x, y) of published results. None as x or y: a line across the axes. "lines"
      over an epsilon draws x = 0, a model that saw no private data, as such a line, too.
    log: columns whose axes are logarithmic.
    error: whether "lines" draws accuracies as error rates in per cent.
    stairs: columns of y that hold until the next x, so that they are staircases.
    curves: column of y -> points [x, y] of its line, beside those of the file; of "lines". Another
      name: a further line, in every panel.
    words: text in the file -> text in the picture: of columns, series and rows.
    titles: text above the panels of a column of y.
    outcomes: (beginning of a value of `series`, its words), for series that hold sentences.
    units: column of numbers -> unit with which they stand beside their points; "B": bytes.
    without: column -> values whose rows are not drawn.
    together: whether "lines" draws the columns of y as lines of one panel.
    title: title of the picture.
    note: what stands below the title.

  Raises:
    UserError: an unknown function; x or y is missing; ends are not two.
  """

  draw: str
  x: tuple[str, ...]
  y: tuple[str, ...]
  series: str | None = None
  panels: tuple[str, ...] = ()
  ends: tuple[str, ...] = ()
  references: tuple[tuple[str, float | None, float | None], ...] = ()
  log: tuple[str, ...] = ()
  error: bool = False
  stairs: tuple[str, ...] = ()
  curves: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  words: Mapping[str, str] = dataclasses.field(default_factory=dict)
  titles: Mapping[str, str] = dataclasses.field(default_factory=dict)
  outcomes: tuple[tuple[str, str], ...] = ()
  units: Mapping[str, str] = dataclasses.field(default_factory=dict)
  without: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  together: bool = False
  title: str = ""
  note: str = ""

  def __post_init__(self) -> None:
    validate.one_of(DRAWN, draw=self.draw)
    for name in ("x", "y"):
      if not getattr(self, name):
        raise UserError("must name a column", field=name, value=())
    if len(self.ends) not in (0, 2):
      raise UserError("must be two columns, or none", field="ends", value=self.ends)

  def columns(self) -> dict[str, str]:
    """Returns column -> the field that names it, of the columns that must be in the file."""
    named = {column: "panels" for column in self.panels}
    named |= {column: "without" for column in self.without}
    named |= {column: "ends" for column in self.ends}
    # Bars are drawn where a row stands for several runs.
    named |= {"seeds": "ends"} if self.ends and self.draw == "lines" else {}
    named |= {self.series: "series"} if self.series else {}
    return {column: "x" for column in self.x} | {column: "y" for column in self.y} | named

  def name_of(self, column: str) -> str:
    """Returns what the picture calls a column."""
    return self.words.get(column) or pictures.in_words(column)

  def text(self, column: str, value: Any) -> str:
    """Returns what the picture calls a value of a column."""
    number = isinstance(value, float)
    text = by_name(column, value, digits=9) if number else str(value or "")
    return self.words.get(text) or pictures.proper_name(text)

  def numbers(self) -> tuple[str, ...]:
    """Returns the columns that must hold numbers."""
    names = self.y if self.draw == "lines" else ()
    return (*self.x, *names, *self.ends)


def is_number(value: Any) -> bool:
  """Returns whether a value of a row is a finite number. A cell of a file is read as a float or a
  text; rows that were never in a file may hold integers.

  >>> is_number(1.0), is_number(2), is_number(None), is_number(math.nan), is_number("1")
  (True, True, False, False, False)
  """
  return isinstance(value, int | float) and math.isfinite(value)


def beside(path: str | os.PathLike) -> pathlib.Path:
  """Returns the path of a CSV file's recipe.

  >>> beside("runs/curve.csv").name
  'curve.picture.json'
  """
  path = pathlib.Path(path)
  return path.with_name(path.stem + SUFFIX)


def write(path: str | os.PathLike, recipe: Recipe) -> None:
  """Writes the recipe of a CSV file beside it. Fields at their defaults are left out."""
  usual = Recipe("lines", ("",), ("",))
  held = {
    name: value
    for name, value in vars(recipe).items()
    if name in ("draw", "x", "y") or value != getattr(usual, name)
  }
  text = json.dumps(held, indent=2, ensure_ascii=False) + "\n"
  files.replace_file(beside(path), text.encode())


def read(path: str | os.PathLike) -> Recipe | None:
  """Returns the recipe beside a CSV file; None if there is none.

  Raises:
    UserError: the file beside it is no recipe.
  """
  place = beside(path)
  if not place.is_file():
    return None
  try:
    held = json.loads(place.read_text(encoding="utf-8"))
    recipe = Recipe(**{name: _to_tuple(value) for name, value in held.items()})
    _check_types(recipe)
    return recipe
  except (TypeError, ValueError, AttributeError) as error:
    line = " ".join(str(error).split())
    raise UserError(f"must hold the recipe of a picture: {line:.200}", field="csv",
                    value=str(place)) from error  # fmt: skip


def _check_types(recipe: Recipe) -> None:
  """Raises TypeError for a field of another type than its default, such as text for a list."""
  usual = Recipe("lines", ("",), ("",), "")
  names = {str: "text", tuple: "a list", dict: "an object", bool: "true or false"}
  for field in dataclasses.fields(recipe):
    kind = type(getattr(usual, field.name))
    value = getattr(recipe, field.name)
    if not isinstance(value, kind) and (field.name, value) != ("series", None):
      raise TypeError(f"{field.name}={value!r} must be {names[kind]}")
  if any(len(entry) != 3 for entry in recipe.references):
    raise TypeError(f"references={recipe.references!r} must be (label, x, y) each")


def _to_tuple(value: Any) -> Any:
  return tuple(map(_to_tuple, value)) if isinstance(value, list) else value
