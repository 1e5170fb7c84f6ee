"""Tables: CSV and Parquet files with declared columns, as two `Dataset`s.

Inputs are float32 [n, width]. A number is scaled from its public bounds to [0, 1]. A category has
one input for each of its public values. A column of texts becomes int32 tokens [n, length].
`table_declaration` describes the declaration. Each row is converted independently of the others.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax import validate
from dpjax.data import cells, table_declaration, table_files, tokenizer_files
from dpjax.data.cells import Cell
from dpjax.data.dataset import Dataset, Groups
from dpjax.data.table_declaration import Category, Declaration, Number, Text
from dpjax.validate import UserError, Verbatim

# Path of a file, an object with columns by name, such as a dict or a frame, or a list of dicts.
Source = Any
_Held = pathlib.Path | Mapping[str, Any]
# Path of the file of a declaration, or its content. None: the declaration file beside the table.
Declared = str | os.PathLike[str] | Mapping[str, Any] | None
Pair = tuple[Dataset, Dataset]
# Largest number of column names that are compared with the name of a missing column.
_COMPARED = 1000


class _Counts:
  """What became of cells that are not as declared, in the columns of inputs. It is as private as
  the rows."""

  def __init__(self, declared: Declaration):
    kinds = declared.columns.items()
    # By column: the number of numbers beyond their bounds, or of cells that became `other`.
    self.changed = {
      name: 0
      for name, kind in kinds
      if isinstance(kind, Number) or (isinstance(kind, Category) and kind.other is not None)
    }
    # Columns in which a cell is a declared value; of the others, the kinds of the cells so far.
    self._matched: set[str] = set()
    self._found: dict[str, set[str]] = {}

  def add(self, column: str, *, matched: bool, others: list[Cell]) -> None:
    """Adds the cells of a category that became `other`."""
    self.changed[column] += len(others)
    if matched:
      self._matched.add(column)
    if column not in self._matched:
      self._found.setdefault(column, set()).update(map(cells.kind, others))

  def check(self, declared: Declaration) -> None:
    """Raises UserError for a column of which no cell is a declared value."""
    for name, found in self._found.items():
      kind = declared.columns[name]
      if found and name not in self._matched and isinstance(kind, Category):
        raise UserError(
          f"column {name!r:.60}: none of its cells is a declared value: "
          f"{' and '.join(sorted(found))}; declared: {kind.values.kind}"
        )


class _Part(NamedTuple):
  """Rows of a table, from one or two files or from memory. They are as private as their source."""

  x: np.ndarray  # [n, width] float32, or int32 of a text
  y: np.ndarray  # [n], or [n, labels]
  is_test: np.ndarray  # [n] bool
  fields: list[str]  # [n] texts of one more column, if it was asked for, else []
  groups: np.ndarray  # [n] place of the group's value, int32; [0] without a group


def table(source: Source, declaration: Declared = None, *, name: str | None = None) -> Pair:
  """Loads (train, test) of a table: inputs in [0, 1], or tokens of a text, and targets.

  Args:
    source: path of a .csv, .tsv or .parquet file (Parquet needs `pip install -e '.[tables]'`).
      The first line of a CSV file names the columns; spaces around cells do not count.
      Or the columns: a dict of columns by name, or a frame of pandas, polars, PyArrow or Hugging
      Face's `datasets`. Or the rows: a list of dicts. The same values are read from all of them
      (`cells`).
    declaration: public facts about the table (`table_declaration`): a dict, or the path of a TOML
      or JSON file. None: the file beside the table, people.toml or people.json for people.csv.
    name: name of the data set; None: the name of the file.

  Numbers beyond their bounds are clipped. `Dataset.clipped_cells` has their number by column, and
  the number of cells that became `other`. Both are as private as the rows.

  Raises:
    UserError: one line that names the file, and the line and column of a wrong row. It never shows
      a cell. A column of a category with `other`, of which no cell is a declared value.

  >>> train, test = table(
  ...   {"age": [30, 90, 60], "sex": ["f", "m", "f"], "ill": ["no", "yes", "no"]},
  ...   {
  ...     "columns": {"age": {"lower": 0, "upper": 120}, "sex": {"values": ["f", "m"]}},
  ...     "target": {"column": "ill", "values": ["no", "yes"]},
  ...     "split": {"test_share": 0.5, "salt": 3},
  ...   },
  ... )
  >>> train.x.tolist(), train.y.tolist(), test.x.tolist()
  ([[0.75, 0.0, 1.0], [0.5, 1.0, 0.0]], [1, 0], [[0.25, 1.0, 0.0]])
  """
  return table_fields(source, None, declaration, name=name)[0]


def table_fields(
  source: Source,
  field: str | None,
  declaration: Declared = None,
  *,
  name: str | None = None,
) -> tuple[Pair, tuple[list[str], list[str]]]:
  """Returns ((train, test), (texts, texts)): the splits of `table`, and the texts of the column
  `field` in each split. With field=None, both lists of texts are empty."""
  held = _path_or_columns(source)
  declared = _declaration(held, declaration)
  counts = _Counts(declared)
  parts = _parts(held, declared, field, counts)
  try:
    counts.check(declared)
  except UserError as error:
    raise _about(held, str(error)) from error
  if name is None:
    name = "table" if isinstance(held, Mapping) else held.stem
  tokenizer = _tokenizer(held, declared) if declared.text else None
  pair = []
  fields = []
  for split in ("train", "test"):
    of_test = split == "test"
    rows = np.flatnonzero(parts.is_test == of_test)
    if not len(rows):
      raise _about(held, f"has no row for {split}; see `split` of its declaration")
    dataset = Dataset(
      x=parts.x[rows],
      y=parts.y[rows],
      name=name,
      num_classes=declared.num_classes,
      split=split,
      vocab_size=tokenizer and tokenizer.vocab_size,
      nominal_size=declared.num_examples if split == "train" else None,
      target=declared.target,
      clipped_cells=counts.changed,
      groups=_groups(declared, parts.groups, rows) if of_test else None,
      declaration=declared,
      classes=declared.classes,
      tokenizer=tokenizer and tokenizer.facts,
    )
    pair.append(dataset)
    fields.append([parts.fields[row] for row in rows] if field is not None else [])
  return (pair[0], pair[1]), (fields[0], fields[1])


def _groups(declared: Declaration, places: np.ndarray, rows: np.ndarray) -> Groups | None:
  if declared.group is None:
    return None
  column, kind = declared.group
  return Groups(column, tuple(kind.values), places[rows])


def clipped_cells(source: Source, declaration: Declared = None) -> dict[str, int]:
  """Counts the cells that are not as declared in each column of inputs, in all rows, without
  privacy: numbers beyond their bounds, and cells of a category that became `other`.

  One record changes each count by at most one. So either keep the counts secret, or release them
  through a mechanism of `dpjax.mechanisms`, with sensitivity 1 for each column.

  Args:
    source, declaration: as in `table`.

  >>> clipped_cells({"age": [30, 130], "fold": ["a", "b"], "ill": ["no", "yes"]}, {
  ...   "columns": {"age": {"lower": 0, "upper": 120}},
  ...   "target": {"column": "ill", "values": ["no", "yes"]},
  ...   "split": {"column": "fold", "train": ["a"], "test": ["b"]},
  ... })
  {'age': 1}
  """
  held = _path_or_columns(source)
  declared = _declaration(held, declaration)
  counts = _Counts(declared)
  _parts(held, declared, None, counts)
  return counts.changed


def _path_or_columns(source: Source) -> _Held:
  """Returns the path, or the columns by name, of any object that holds a table."""
  if isinstance(source, str | os.PathLike):
    return pathlib.Path(source)
  columns = columns_of(source)
  if columns is None:
    raise UserError(
      "must be a path, a dict of columns, a list of dicts or a frame, not "
      f"{type(source).__name__}; of anything else, such as a torch Dataset or a grain source, "
      "make arrays for dpjax.data.from_arrays, or a class for in_files (docs/your_data.md)",
      field="source",
    )
  return columns


def columns_of(source: Any) -> Mapping[str, Any] | None:
  """Returns the columns by name of a dict, a frame or a list of dicts; None for other objects.

  Raises:
    UserError: a frame that is not in memory; rows with different columns.
  """
  if isinstance(source, Mapping):
    return source
  if isinstance(source, list | tuple):
    by_name = bool(source) and all(isinstance(row, Mapping) for row in source)
    return _of_rows(source) if by_name else None
  if callable(getattr(source, "collect", None)):
    raise UserError(
      f"is a {type(source).__name__}, whose rows are not in memory; give its .collect()",
      field="source",
    )
  # `columns` (pandas, polars) or `column_names` (Arrow, Hugging Face) hold names. Arrow's
  # `columns` are arrays.
  names = getattr(source, "column_names", None)
  names = getattr(source, "columns", None) if names is None else names
  return None if names is None else {str(name): source[name] for name in names}


def _of_rows(rows: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
  for place, row in enumerate(rows, start=1):
    if row.keys() != rows[0].keys():
      raise UserError(f"row {place} has other columns than row 1", field="rows")
  return {name: [row[name] for row in rows] for name in rows[0]}


def _about(source: _Held, must: str) -> UserError:
  if isinstance(source, Mapping):
    return UserError(must, field="table")
  return UserError(must, field="name", value=Verbatim(f"'{source}'"))


def _declaration(source: _Held, declaration: Declared) -> Declaration:
  """Returns the declaration of a table. Errors name the file of the declaration, or the argument
  `declaration`."""
  if declaration is None:
    if isinstance(source, Mapping):
      raise UserError("must say what is public about the columns", field="declaration")
    declaration = table_declaration.beside(source)
  return table_declaration.parse_declaration(declaration, table_declaration.parse)


def inputs(columns: Mapping[str, Any], declaration: Mapping[str, Any]) -> np.ndarray:
  """Returns inputs [n, width] of rows without targets, by the code that reads training rows.

  Args:
    columns: columns by name. Beside those of the inputs, they may hold the target, the column of
      the split and those that `ignore` names, which are not read.
    declaration: declaration of the training table, as a dict.

  Raises:
    UserError: one line that names row and column, and never shows a cell.

  >>> inputs({"age": [30, None], "ill": ["no", None]}, {
  ...   "columns": {"age": {"lower": 0, "upper": 120, "missing": 60}},
  ...   "target": {"column": "ill", "values": ["no", "yes"]},
  ...   "split": {"test_share": 0.5},
  ... }).tolist()
  [[0.25], [0.5]]
  """
  declared = table_declaration.parse_declaration(declaration, table_declaration.parse)
  if declared.tokenizer is not None:
    # No tokenizer is read here: a file at this path may be another tokenizer than in training.
    raise UserError(
      "is read by a tokenizer, which is not here; give its tokens in place of the text",
      field="columns",
      value=next(iter(declared.columns)),
    )
  wanted = functools.partial(_needed_names, of_inputs=True, declared=declared, field=None)
  blocks = table_files.in_memory(columns, wanted)
  # The counts are dropped, since they are private to the sender of the rows.
  counts = _Counts(declared)
  tokens = tokenizer_files.BYTES
  parts = [_Cells(block, declared, "row", tokens).inputs(counts) for block in blocks]
  dtype = np.float32 if declared.text is None else np.int32
  return np.concatenate(parts) if parts else np.zeros((0, declared.width), dtype)


def categories(declared: Declaration) -> tuple[tuple[int, int], ...]:
  """Returns the first and the end of the inputs of each column that is a category."""
  return tuple(
    (places.start, places.stop)
    for _, kind, places in _places(declared)
    if isinstance(kind, Category)
  )


def nearest_inputs(x: np.ndarray, declared: Declaration) -> np.ndarray:
  """Returns inputs [n, width] that cells can have: a category has its largest value alone.

  >>> columns = {"age": {"lower": 0, "upper": 120}, "sex": {"values": ["f", "m"]}}
  >>> declared = table_declaration.parse({"columns": columns, "split": {"test_share": 0.5},
  ...   "target": {"column": "ill", "values": ["no", "yes"]}})
  >>> nearest_inputs(np.array([[0.25, 0.4, 0.3]]), declared).tolist()
  [[0.25, 1.0, 0.0]]
  """
  nearest = np.clip(x, 0, 1)
  for first, end in categories(declared):
    nearest[:, first:end] = np.eye(end - first)[np.argmax(x[:, first:end], axis=1)]
  return nearest


def rows_of(
  x: np.ndarray, classes: np.ndarray, declared: Declaration
) -> dict[str, list[Any]]:
  """Returns the columns, the target last, of inputs [n, width] and classes [n].

  Numbers are rounded to a step between 1e-8 and 1e-7 of their range, as float32 inputs are.

  >>> columns = {"age": {"lower": 0, "upper": 120}, "sex": {"values": ["f", "m"]}}
  >>> declared = table_declaration.parse({"columns": columns, "split": {"test_share": 0.5},
  ...   "target": {"column": "ill", "values": ["no", "yes"]}})
  >>> rows_of(np.array([[0.25, 0.4, 0.3]]), np.array([1]), declared)
  {'age': [30.0], 'sex': ['f'], 'ill': ['yes']}
  """
  columns: dict[str, list[Any]] = {}
  for name, kind, places in _places(declared):
    if isinstance(kind, Category):
      values = list(kind.values)
      columns[name] = [values[place] for place in np.argmax(x[:, places], axis=1)]
      continue
    bounds = kind.bounds
    share = np.clip(x[:, places.start].astype(np.float64), 0, 1)
    values = bounds.lower * (1 - share) + bounds.upper * share
    # Digits count from the range, not from the value: a range may be narrow and far from 0.
    digits = 7 - math.floor(math.log10(bounds.upper - bounds.lower))
    values = np.clip(np.round(values, digits), bounds.lower, bounds.upper)
    columns[name] = values.tolist()
  (target,) = declared.target_columns
  assert isinstance(declared.target_kind, Category)
  values = list(declared.target_kind.values)
  return columns | {target: [values[place] for place in classes]}


def _places(declared: Declaration) -> Iterator[tuple[str, Number | Category, slice]]:
  """Yields (name, kind, its places among the inputs) of each column."""
  start = 0
  for name, kind in declared.columns.items():
    assert not isinstance(kind, Text)
    width = len(kind.values) if isinstance(kind, Category) else 1
    yield name, kind, slice(start, start + width)
    start += width


def _tokenizer(source: _Held, declared: Declaration) -> tokenizer_files.Tokenizer:
  """Returns the tokenizer of a table's texts; its path is relative to the table's folder."""
  if declared.tokenizer is None:
    return tokenizer_files.BYTES
  folder = pathlib.Path() if isinstance(source, Mapping) else source.parent
  return tokenizer_files.read(folder / declared.tokenizer)


def _parts(
  source: _Held, declared: Declaration, field: str | None, counts: _Counts
) -> _Part:
  """Returns the rows of the table, followed by those of `test_file` if it is declared."""
  part = _read(source, declared, field, counts)
  second = declared.split.test_file
  if second is None:
    return part
  if isinstance(source, Mapping):
    raise UserError("is of files, and the columns are given", field="split.test_file")
  other = _read(source.parent / second, declared, field, counts)
  return _Part(
    x=np.concatenate([part.x, other.x]),
    y=np.concatenate([part.y, other.y]),
    is_test=np.concatenate([part.is_test, np.ones(len(other.x), bool)]),
    fields=part.fields + other.fields,
    groups=np.concatenate([part.groups, other.groups]),
  )


def _needed_names(
  names: Sequence[str],
  declared: Declaration,
  field: str | None,
  of_inputs: bool = False,
) -> list[str]:
  """Returns the names of the columns to read: of inputs alone, or of all that is declared. Raises
  UserError for a missing column, or for a column that is neither declared nor ignored."""
  marked = () if declared.split.column is None else (declared.split.column,)
  beside = [] if field is None else [field]
  beside += [] if declared.group is None else [declared.group[0]]
  known = dict.fromkeys((*declared.columns, *declared.target_columns, *marked, *beside))
  needed = declared.columns if of_inputs else known
  for name in needed:
    if name not in names:
      # Only some names are compared, because each takes time and a file may have a million columns.
      hint = validate.did_you_mean(name, names[:_COMPARED])
      if len(names) == 1:
        # The name is not shown: in a file without a header it is a record.
        hint = ": it has one column; are its columns separated by another `delimiter`?"
      raise UserError(f"has no column {name!r:.60}{hint}")
  if declared.ignore != ("*",):
    declared_names = {*known, *declared.ignore}
    unknown = next((name for name in names if name not in declared_names), None)
    if unknown is not None and of_inputs:
      hint = validate.did_you_mean(unknown, list(declared.columns))
      raise UserError(f"column {unknown!r:.60} is no input of the model{hint}")
    if unknown is not None:
      raise UserError(
        f"column {unknown!r:.60} is not declared; add it to `columns`, or to `ignore`"
      )
  return list(needed)


def _read(
  source: _Held, declared: Declaration, field: str | None, counts: _Counts
) -> _Part:
  wanted = functools.partial(_needed_names, declared=declared, field=field)
  if isinstance(source, Mapping):
    word = "row"
    blocks = table_files.in_memory(source, wanted)
  else:
    word = table_files.word(source)
    blocks = table_files.blocks(
      source, wanted, delimiter=declared.delimiter, encoding=declared.encoding
    )
  tokens = _tokenizer(source, declared)
  xs = []
  ys = []
  masks = []
  groups = [np.zeros(0, np.int32)]
  fields: list[str] = []
  count = 0
  try:
    for block in blocks:
      held = _Cells(block, declared, word, tokens)
      xs.append(held.inputs(counts))
      ys.append(held.targets())
      masks.append(held.is_test(count))
      fields += [] if field is None else held.ids(field, cells.text)
      groups += [] if declared.group is None else [held.places(*declared.group)]
      count += len(block.places)
  except UserError as error:
    raise _about(source, str(error)) from error
  if not count:
    raise _about(source, "holds no rows below the names of its columns")
  x, y, is_test = map(np.concatenate, (xs, ys, masks))
  return _Part(x, y, is_test, fields, np.concatenate(groups))


class _Cells:
  """Converts the cells of a block as the declaration says."""

  def __init__(
    self,
    block: table_files.RowBlock,
    declared: Declaration,
    word: str,
    tokens: tokenizer_files.Tokenizer,
  ):
    self._block = block
    self._tokens = tokens
    self._declared = declared
    self._word = word

  def _wrong(self, index: int, column: str, what: str) -> UserError:
    # The message does not show the cell: cells are private, and messages end in logs.
    return UserError(
      f"{self._block.place_of(index, self._word)}, column {column!r:.60}: {what}"
    )

  def _has_no_value(self, cell: Cell, of_numbers: bool = False) -> bool:
    empty = ("", "nan") if of_numbers else ("",)
    if cell is None or (isinstance(cell, str) and cell.strip().lower() in empty):
      return True
    return self._declared.missing_values.place(cell) is not None

  # Neither a target nor a split takes `missing` or `other`.
  def _adding(self, column: str) -> str:
    if column in self._declared.target_columns:
      return " to `values`"
    return (
      " to `train` or `test`" if self._is_split(column) else ", or declare other = VALUE"
    )

  def _filling(self, column: str, what: str) -> str:
    if column in self._declared.target_columns or self._is_split(column):
      return ", and must have one in each row"
    return f"; declare what stands for it: missing = {what}"

  def _is_split(self, column: str) -> bool:
    return column == self._declared.split.column

  def ids(self, column: str, text: Callable[[Cell], str]) -> list[str]:
    """Returns the cells of a column of ids as `text` writes them; without a value, the empty
    text."""
    ids = []
    for index, cell in enumerate(self._block.cells[column]):
      if cells.is_rounded(cell):
        raise self._wrong(
          index,
          column,
          "is an integer above 2^53 as a float, so digits are lost; give text",
        )
      ids.append("" if self._has_no_value(cell) else text(cell))
    return ids

  def numbers(self, column: str, kind: Number) -> np.ndarray:
    """Returns the numbers of a column, finite float64 [k], in the units of the column."""
    out = np.empty(len(self._block.places), np.float64)
    none = len(self._declared.missing_values)
    for index, cell in enumerate(self._block.cells[column]):
      number = cells.number(cell)
      if (number is None or none) and self._has_no_value(cell, True):
        number = kind.missing
        if number is None:
          raise self._wrong(
            index, column, f"holds no value{self._filling(column, 'NUMBER')}"
          )
      try:
        out[index] = math.nan if number is None else number
      # An integer may be larger than any float64.
      except OverflowError:
        number = None
      if number is None:
        raise self._wrong(
          index,
          column,
          "is no finite number; write 3.5, without units or separators, or declare `values` in "
          "place of lower and upper if the column holds texts",
        )
    return out

  def places(
    self, column: str, kind: Category, counts: _Counts | None = None
  ) -> np.ndarray:
    """Returns the place of each cell's value in the declared values, int32 [k].

    Adds to `counts` the cells that became `other`.
    """
    out = np.empty(len(self._block.places), np.int32)
    others = []
    matched = False
    for index, cell in enumerate(self._block.cells[column]):
      # Declared values come first: a declared value may also be one of `missing_values`.
      place = kind.values.place("" if cell is None else cell)
      matched = matched or place is not None
      if place is None and self._has_no_value(cell, kind.values.of_numbers):
        place = kind.missing
        if place is None:
          raise self._wrong(
            index, column, f"holds no value{self._filling(column, 'VALUE')}"
          )
      elif place is None:
        place = kind.other
        others.append(cell)
        if place is None:
          known, seen = kind.values.kind, cells.kind(cell)
          # The cell itself is private, so the message shows only what kind it is of.
          kinds = "" if seen in known else f", which are {known}, but of the kind {seen}"
          where = self._adding(column)
          raise self._wrong(
            index, column, f"is none of the declared values{kinds}; add it{where}"
          )
      out[index] = place
    if counts is not None and kind.other is not None:
      counts.add(column, matched=matched, others=others)
    return out

  def inputs(self, counts: _Counts) -> np.ndarray:
    """Returns inputs float32 [k, width], or int32 tokens [k, length] of a text.

    Adds to `counts` the cells that are not as declared.
    """
    if self._declared.text is not None:
      (column,) = self._declared.columns
      return self._tokens.rows(self._readable(column), self._declared.text.length)
    columns = []
    for name, kind in self._declared.columns.items():
      if isinstance(kind, Category):
        places = self.places(name, kind, counts)
        columns.append(np.eye(len(kind.values), dtype=np.float32)[places])
        continue
      # A text would be the only column of inputs, and is handled above.
      assert isinstance(kind, Number)
      numbers = self.numbers(name, kind)
      bounds = kind.bounds
      beyond = (numbers < bounds.lower) | (numbers > bounds.upper)
      counts.changed[name] += int(np.sum(beyond))
      # Numbers are first scaled to [-1, 1]: `Interval` subtracts half bounds, whose difference
      # cannot overflow.
      columns.append((bounds.scale(numbers)[:, None] + 1) / 2)
    return np.concatenate(columns, axis=1, dtype=np.float32)

  def _readable(self, column: str) -> list[str]:
    """Returns the texts of a column. Raises UserError for a cell that is no text."""
    texts = []
    for index, cell in enumerate(self._block.cells[column]):
      if not isinstance(cell, str) or self._has_no_value(cell):
        raise self._wrong(index, column, "holds no text")
      line = cell.strip()
      # A zero byte would be read as padding, and a lone surrogate cannot be encoded as UTF-8.
      if "\0" in line or any("\ud800" <= letter <= "\udfff" for letter in line):
        raise self._wrong(index, column, "holds a zero byte, or half a character")
      texts.append(line)
    return texts

  def targets(self) -> np.ndarray:
    """Returns targets: int32 classes [k], float32 numbers [k] in [-1, 1], or int32 labels [k,
    labels]."""
    columns = self._declared.target_columns
    kind = self._declared.target_kind
    if isinstance(kind, Number):
      return kind.bounds.scale(self.numbers(columns[0], kind))
    targets = [self.places(name, kind) for name in columns]
    return targets[0] if len(targets) == 1 else np.stack(targets, axis=1)

  def is_test(self, before: int) -> np.ndarray:
    """Returns whether each row is for the test, bool [k].

    Args:
      before: number of rows of the file before this block.
    """
    split = self._declared.split
    size = len(self._block.places)
    if split.test_share is not None and split.column is not None:
      ids = self.ids(split.column, cells.identity)
      return np.array([hashed_text(text, split.salt) for text in ids]) < split.test_share
    if split.test_share is not None:
      return hash_rows(np.arange(before, before + size), split.salt) < split.test_share
    if split.column is None:
      return np.zeros(size, bool)
    return self.places(split.column, Category(split.sides)) >= split.num_train


def hashed_text(text: str, salt: int) -> float:
  """Returns a hash of a text and a salt, as a number in [0, 1).

  If the hash decides the split of a record, the split does not depend on other records.

  >>> round(hashed_text("ward/7.png", salt=0), 3)
  0.813
  """
  salted = f"{salt} {text}".encode(errors="surrogateescape")
  # 53 bits are kept, because a float64 holds no more.
  return (int.from_bytes(hashlib.sha256(salted).digest()[:8]) >> 11) / 2**53


def hash_rows(rows: np.ndarray, salt: int) -> np.ndarray:
  """Returns hashes of row numbers [n] and a salt, as numbers [n] in [0, 1).

  Row numbers and salt are public, so the split says nothing about the content of a row. The
  function is SplitMix64 (Steele, Lea and Flood 2014), and never changes.

  >>> hash_rows(np.arange(3), salt=0).round(3).tolist()
  [0.883, 0.432, 0.026]
  """
  # uint64 arithmetic of NumPy arrays wraps around, which the generator requires.
  start = np.array([salt], np.uint64) * np.uint64(0xD1342543DE82EF95)
  z = start + (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  z = z ^ (z >> np.uint64(31))
  return (z >> np.uint64(11)).astype(np.float64) / 2**53
