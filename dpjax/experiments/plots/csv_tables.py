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

  def check_numbers(
    self, name: str, *, field: str, full: bool = False, finite: bool = False
  ) -> None:
    """Raises UserError unless a column holds only numbers and empty cells.

    Args:
      name: name of a column.
      field: the flag or argument that names the column, for the error.
      full: whether no cell may be empty.
      finite: whether no cell may be empty, infinite or NaN.
    """
    self.check_column(name, field=field)
    # The header is row 1.
    for place, row in enumerate(self.rows, start=2):
      cell = row[name]
      try:
        number = math.nan if cell is None else float(cell)
        is_wrong = (full and cell is None) or (finite and not math.isfinite(number))
      except ValueError:
        is_wrong = True
      if is_wrong:
        shown = "empty" if cell is None else f"{cell!r:.40}"
        raise UserError(
          f"must be a column of numbers; row {place} of {name!r:.30} in {self.path} is {shown}",
          field=field,
          value=name,
        )

  def check_column(self, name: str, *, field: str) -> None:
    """Raises UserError if there is no such column; the message lists the columns."""
    if name not in self.columns:
      hint = validate.did_you_mean(name, self.columns)
      raise UserError(
        f"must be a column of {self.path}: {validate.join_words(self.columns, 120)}{hint}",
        field=field,
        value=name,
      )


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
