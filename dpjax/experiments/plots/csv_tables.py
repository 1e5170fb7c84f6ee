"""CSV files as rows of numbers and words; any other file is refused with a one-line error."""

from __future__ import annotations

import csv
import io
import math
import os
import pathlib
from typing import Any, NamedTuple

from dpjax import validate
from dpjax.validate import UserError

Row = dict[str, Any]


class CsvTable(NamedTuple):
  """Contents of a CSV file.

  Attributes:
    path: path of the file.
    columns: names of the columns, in the order of the file.
    rows: a dict for each line below the header. An empty cell is None. Other cells are floats if
      all cells of the column are numbers or empty, otherwise text.
  """

  path: pathlib.Path
  columns: list[str]
  rows: list[Row]

  def numeric(self, name: str, *, field: str) -> str:
    """Returns the name unchanged if its column holds only numbers and empty cells.

    Args:
      name: name of a column.
      field: the flag or argument that names the column, for the error.

    Raises:
      UserError: there is no such column, or it holds words.
    """
    self.check_column(name, field=field)
    words = next((row[name] for row in self.rows if isinstance(row[name], str)), None)
    if words is not None:
      raise UserError(
        f"must be a column of numbers; in {self.path} it holds {words!r:.40}",
        field=field,
        value=name,
      )
    return name

  def check_column(self, name: str, *, field: str) -> str:
    """Returns the name unchanged if a column has it.

    Raises:
      UserError: there is no such column; the message lists the columns.
    """
    if name not in self.columns:
      hint = validate.did_you_mean(name, self.columns)
      raise UserError(
        f"must be a column of {self.path}: {validate.join_words(self.columns, 120)}{hint}",
        field=field,
        value=name,
      )
    return name

  def odd_cells(self) -> list[str]:
    """Returns descriptions of the cells that may be the reason why a table cannot be drawn.

    These are empty cells, infinities and NaN, and words among numbers.

    >>> rows = [{"step": "1"}, {"step": "x"}, {"step": None}]
    >>> CsvTable(pathlib.Path("a.csv"), ["step"], rows).odd_cells()
    ["row 3 of 'step' is 'x'", "row 4 of 'step' is empty"]
    """
    columns = [self._odd_cells(name) for name in self.columns]
    # Columns with few odd cells come first: many odd cells in one column are probably intended.
    return [cell for column in sorted(columns, key=len) for cell in column]

  def _odd_cells(self, name: str) -> list[str]:
    cells = [row[name] for row in self.rows]
    numbers = [_is_finite(cell) for cell in cells]
    holds_numbers = any(numbers)
    found = []
    # The header is row 1.
    for place, (cell, is_finite) in enumerate(zip(cells, numbers), start=2):
      if cell is None:
        found.append(f"row {place} of {name!r:.30} is empty")
      elif not is_finite and (holds_numbers or isinstance(cell, float)):
        found.append(f"row {place} of {name!r:.30} is {cell!r:.20}")
    return found


def _is_finite(cell: Any) -> bool:
  """Returns whether a cell is a finite number, or text that spells one."""
  try:
    return math.isfinite(float(cell))
  except (TypeError, ValueError):
    return False


def read(path: str | os.PathLike) -> CsvTable:
  """Reads a CSV file with a header.

  Args:
    path: path of the file.

  Raises:
    UserError: the file is missing, is no text, or has no header or no row; a column has no name,
      or the name of another column; or a line and the header differ in length.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise UserError(
      "must be a CSV file; there is no such file", field="csv", value=str(path)
    )
  try:
    text = path.read_bytes().decode("utf-8-sig")
    # `strict` refuses a quote in the wrong place.
    lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
  except (UnicodeDecodeError, csv.Error) as error:
    raise UserError(f"must be a CSV file: {error}", field="csv", value=str(path)) from error
  lines = [line for line in lines if line]
  if len(lines) < 2:
    raise UserError(
      "must hold a header and rows; it is empty", field="csv", value=str(path)
    )
  header = lines[0]
  twice = [name for index, name in enumerate(header) if name in header[:index]]
  if twice or not all(header):
    raise UserError(
      f"must name each column once; {twice[0] if twice else ''!r} does not",
      field="csv",
      value=str(path),
    )
  for number, line in enumerate(lines[1:], start=2):
    if len(line) != len(header):
      raise UserError(
        f"must be a CSV file: its header has {len(header)} cells, row {number} has "
        f"{len(line)}",
        field="csv",
        value=str(path),
      )
  columns = [_column(cells) for cells in zip(*lines[1:])]
  return CsvTable(path, header, [dict(zip(header, row)) for row in zip(*columns)])


def _column(cells: tuple[str, ...]) -> list[Any]:
  """Returns the cells of a column, with None for an empty cell.

  The other cells become floats if all of them are numbers, otherwise text.
  """
  try:
    return [float(cell) if cell.strip() else None for cell in cells]
  except ValueError:
    return [cell or None for cell in cells]
