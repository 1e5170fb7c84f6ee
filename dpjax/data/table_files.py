"""Reading of unconverted rows of CSV and Parquet files, several thousand at a time.

Cells are private, so no message shows a cell. Messages name the line and the column instead.
"""

from __future__ import annotations

import collections
import csv
import importlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from dpjax import validate
from dpjax.data.cells import Cell, of_column
from dpjax.validate import UserError

PARQUET_SUFFIX = ".parquet"
# Largest number of characters of one row. Without it, a file without line ends would be read whole
# into memory.
_MOST_OF_ROW = 2**24
_ROWS = 2**14
# Function from the names of all columns to the names of those to read. It may raise UserError.
Wanted = Callable[[Sequence[str]], Sequence[str]]


class RowBlock(NamedTuple):
  """A block of consecutive rows, stored by column."""

  # Cells [k] of each requested column, by name. Cells of a CSV file are text.
  cells: Mapping[str, Sequence[Cell]]
  places: Sequence[int]  # [k] first line of each row in a CSV file, else its number from 1

  def place_of(self, index: int, word: str) -> str:
    """Returns `word` and the line or number of a row, such as "line 7", for a message."""
    return f"{word} {self.places[index]}"


def blocks(
  path: pathlib.Path, wanted: Wanted, *, delimiter: str | None, encoding: str
) -> Iterator[RowBlock]:
  """Yields the rows of a file, at most `_ROWS` at a time.

  Args:
    wanted: function that chooses the columns to read.
    delimiter: delimiter of a CSV file; None: a comma, or a tab in a .tsv file.
    encoding: encoding of a CSV file.

  Raises:
    UserError: a file that cannot be read to its end in its declared format.
  """
  validate.no_pipe(path)
  if path.suffix.lower() == PARQUET_SUFFIX:
    yield from _parquet(path, wanted)
    return
  tab = "\t" if path.suffix.lower() == ".tsv" else ","
  try:
    _check_mark(path, encoding)
    with path.open(encoding=encoding, newline="") as stream:
      yield from _csv(stream, wanted, tab if delimiter is None else delimiter)
  except FileNotFoundError as error:
    raise UserError("there is no such file") from error
  except UnicodeError as error:
    shown = encoding.removesuffix("-sig")
    raise UserError(
      f"is not text in {shown}; declare its `encoding`, such as 'latin-1' or 'utf-16'"
    ) from error
  except OSError as error:
    raise UserError(f"cannot be read ({error.strerror})") from error


def in_memory(columns: Mapping[str, Any], wanted: Wanted) -> Iterator[RowBlock]:
  """Yields the rows of {name: column} in one block, or nothing if there are no rows.

  Args:
    columns: columns by name.
    wanted: function that chooses the columns to read.

  Raises:
    UserError: a column that is no list of text, numbers or booleans; columns of different lengths.
  """
  held = {str(name): column for name, column in columns.items()}
  # Names are checked as given, since two of them may have one text.
  chosen = _choose([str(name) for name in columns], wanted)
  listed = {name: of_column(held[name], name) for name in chosen}
  sizes = {len(column) for column in listed.values()}
  if len(sizes) != 1:
    # The number of rows may be secret.
    raise UserError("its columns must be equally long")
  size = sizes.pop()
  if size:
    yield RowBlock(listed, range(1, size + 1))


def word(path: pathlib.Path) -> str:
  """Returns the word for a row of the file in messages: "row" for Parquet, "line" for CSV.

  >>> word(pathlib.Path("a.csv")), word(pathlib.Path("a.parquet"))
  ('line', 'row')
  """
  return "row" if path.suffix.lower() == PARQUET_SUFFIX else "line"


def _check_mark(path: pathlib.Path, encoding: str) -> None:
  """Raises UserError if a file is an archive, or is UTF-16 but has another declared encoding.

  Without the check, a UTF-16 file that is declared as latin-1 would be read as garbage.
  """
  with path.open("rb") as stream:
    mark = stream.read(4)
  if (
    mark[:2] in (b"\xff\xfe", b"\xfe\xff") and "16" not in encoding and "32" not in encoding
  ):
    raise UserError("begins with the mark of UTF-16; declare encoding = 'utf-16'")
  if mark == b"PK\x03\x04" or mark[:2] == b"\x1f\x8b":
    raise UserError("is an archive; unpack it first")


class _Lines:
  """Iterates over the lines of a stream. Raises UserError for a row longer than `_MOST_OF_ROW`."""

  def __init__(self, stream: TextIO):
    self._stream = stream
    self.number = 0  # number of lines that were read
    # Number of characters read of the current row. A quoted cell may span many lines.
    self.taken = 0

  def __iter__(self) -> _Lines:
    return self

  def __next__(self) -> str:
    line = self._stream.readline(_MOST_OF_ROW + 1)
    if not line:
      raise StopIteration
    self.number += 1
    self.taken += len(line)
    if self.taken > _MOST_OF_ROW:
      raise UserError(
        f"line {self.number}: a row is longer than {_MOST_OF_ROW} characters; is a quote left "
        "open, or does the file have no line ends?"
      )
    return line


def _rows(stream: TextIO, delimiter: str) -> Iterator[tuple[int, list[str]]]:
  """Yields (number of first line, cells) for each row. Blank lines may stand only at the end."""
  lines = _Lines(stream)
  reader = csv.reader(lines, delimiter=delimiter, strict=True)
  blank = 0
  while True:
    first = lines.number + 1
    lines.taken = 0
    try:
      row = next(reader)
    except StopIteration:
      return
    except csv.Error as error:
      raise UserError(f"line {first}: {error}") from error
    if not row:
      blank = blank or first
    elif blank:
      raise UserError(f"line {blank}: is blank, and rows follow it")
    else:
      yield first, [cell.strip() for cell in row]


def _csv(stream: TextIO, wanted: Wanted, delimiter: str) -> Iterator[RowBlock]:
  rows = _rows(stream, delimiter)
  header = next(rows, None)
  if header is None:
    raise UserError("is empty; its first line must name the columns")
  names = header[1]
  chosen = _choose(names, wanted)
  places: list[int] = []
  held: list[list[str]] = []
  for line, row in rows:
    if len(row) != len(names):
      raise UserError(
        f"line {line}: has {len(row)} cells, and the first line names {len(names)} columns"
      )
    places.append(line)
    held.append(row)
    if len(held) == _ROWS:
      yield _block(places, held, chosen)
      places = []
      held = []
  if held:
    yield _block(places, held, chosen)


def _block(places: list[int], rows: list[list[str]], chosen: dict[str, int]) -> RowBlock:
  columns = list(zip(*rows))
  return RowBlock({name: columns[place] for name, place in chosen.items()}, places)


def _choose(names: Sequence[str], wanted: Wanted) -> dict[str, int]:
  """Returns the place of each column to read, by name. Raises UserError if two columns have one
  name."""
  # Missing columns are reported first. In a file without a header, `names` are the private cells of
  # a row, which the next error would show.
  chosen = wanted(names)
  twice = [name for name, count in collections.Counter(names).items() if count > 1]
  if twice:
    raise UserError(f"has two columns named {twice[0]!r:.60}")
  return {name: names.index(name) for name in chosen}


def _parquet(path: pathlib.Path, wanted: Wanted) -> Iterator[RowBlock]:
  try:
    parquet = importlib.import_module("pyarrow.parquet")
  except ImportError as error:
    raise UserError("needs pyarrow: pip install -e '.[tables]' in dpjax's clone") from error
  arrow = importlib.import_module("pyarrow")
  try:
    with path.open("rb") as stream, parquet.ParquetFile(stream) as file:
      chosen = list(_choose(file.schema_arrow.names, wanted))
      count = 0
      for batch in file.iter_batches(_ROWS, columns=chosen):
        listed = {
          name: of_column(batch.column(batch.schema.get_field_index(name)), name, count + 1)
          for name in chosen
        }
        yield RowBlock(listed, range(count + 1, count + 1 + batch.num_rows))
        count += batch.num_rows
  except FileNotFoundError as error:
    raise UserError("there is no such file") from error
  # PyArrow raises errors of these two types for damaged files.
  except (arrow.ArrowException, OSError) as error:
    reason = validate.first_line(error)
    raise UserError(f"is no readable Parquet file ({reason})") from error
