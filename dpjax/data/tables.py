"""Tables: CSV and Parquet files whose columns somebody declared, as two `Dataset`s.

Inputs are float32 [n, width]: numbers scaled from their public bounds to [0, 1], a category as
one input for each of its public values. `table_declaration` says what is declared. Each row
becomes inputs by itself, whatever the others hold.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpjax import validate
from dpjax.data import table_declaration, table_files
from dpjax.data.dataset import Dataset
from dpjax.data.table_declaration import Category, Declaration, Number
from dpjax.validate import UserError, Verbatim

Source = str | os.PathLike[str] | Mapping[str, Any] | None
Pair = tuple[Dataset, Dataset]


class _Part(NamedTuple):
  """What was read of one file; its arrays are as private as the file."""

  x: np.ndarray  # [n, width] float32
  y: np.ndarray  # [n], or [n, labels]
  is_test: np.ndarray  # [n] bool
  fields: list[str]  # [n] of the column that was asked for beside them
  clipped: dict[str, int]  # by column: numbers beyond their bounds


def is_table(name: str) -> bool:
  """Returns whether a name of data is the path of a table.

  >>> is_table("people.csv"), is_table("people.npz")
  (True, False)
  """
  return name.lower().endswith(table_files.SUFFIXES)


def table(path: str | os.PathLike[str], declaration: Source = None) -> Pair:
  """(train, test) of a table in a file, as inputs in [0, 1] and targets.

  Args:
    path: of a .csv, .tsv or .parquet file (the last needs `pip install 'dpjax[tables]'`).
      The first line of a CSV file names the columns; spaces around cells do not count.
    declaration: what is public about it (`table_declaration`): a dict, or the path of a TOML
      or JSON file of one. None: the file beside it of the same name, people.toml or
      people.json for people.csv.

  Numbers beyond their bounds are clipped. How many were is private, and nobody is told:
  `clipped_cells` counts them for a release under noise.

  Raises:
    UserError: one line that names the file, and the line and column where a row is wrong. It
      never shows a cell.

  >>> import tempfile
  >>> folder = pathlib.Path(tempfile.mkdtemp())
  >>> _ = (folder / "people.csv").write_text("age,sex,ill\\n30,f,no\\n90,m,yes\\n60,f,no\\n")
  >>> train, test = table(folder / "people.csv", {
  ...   "columns": {"age": {"lower": 0, "upper": 120}, "sex": {"values": ["f", "m"]}},
  ...   "target": {"column": "ill", "values": ["no", "yes"]},
  ...   "split": {"test_share": 0.5, "salt": 3},
  ... })
  >>> train.x.tolist(), train.y.tolist(), test.x.tolist()
  ([[0.25, 1.0, 0.0], [0.5, 1.0, 0.0]], [0, 0], [[0.75, 0.0, 1.0]])
  """
  return table_fields(path, None, declaration)[0]


def table_fields(
  path: str | os.PathLike[str], field: str | None, declaration: Source = None
) -> tuple[Pair, tuple[list[str], list[str]]]:
  """((train, test), the texts of the column `field` of each): `table` with one more column."""
  path = pathlib.Path(path)
  declared = _declared(path, declaration)
  parts = _parts(path, declared, field)
  pair = []
  fields = []
  for split in ("train", "test"):
    rows = np.flatnonzero(parts.is_test == (split == "test"))
    if not len(rows):
      raise _about(path, f"has no row for {split}; see `split` of its declaration")
    dataset = Dataset(
      x=parts.x[rows],
      y=parts.y[rows],
      name=path.stem,
      num_classes=declared.num_classes,
      split=split,
      nominal_size=declared.num_examples if split == "train" else None,
      target=declared.target,
    )
    pair.append(dataset)
    fields.append([parts.fields[row] for row in rows] if field is not None else [])
  return (pair[0], pair[1]), (fields[0], fields[1])


def clipped_cells(
  path: str | os.PathLike[str], declaration: Source = None
) -> dict[str, int]:
  """NOT private: how many numbers of each column lie beyond its bounds, over all rows.

  One record moves each count by one at most. So release it through a mechanism of
  `dpjax.mechanisms` with sensitivity 1 for each column, or look at it and tell nobody.

  >>> import tempfile
  >>> folder = pathlib.Path(tempfile.mkdtemp())
  >>> _ = (folder / "ages.csv").write_text("age,fold,ill\\n30,a,no\\n130,b,yes\\n")
  >>> clipped_cells(folder / "ages.csv", {
  ...   "columns": {"age": {"lower": 0, "upper": 120}},
  ...   "target": {"column": "ill", "values": ["no", "yes"]},
  ...   "split": {"column": "fold", "train": ["a"], "test": ["b"]},
  ... })
  {'age': 1}
  """
  path = pathlib.Path(path)
  return _parts(path, _declared(path, declaration), None).clipped


def _about(path: pathlib.Path, must: str) -> UserError:
  return UserError(must, field="name", value=Verbatim(f"'{path}'"))


def _declared(path: pathlib.Path, source: Source) -> Declaration:
  """The declaration of a table; its errors name the file that holds it, or the argument."""
  at = "declaration"
  if source is None:
    beside = [path.with_suffix(suffix) for suffix in (".toml", ".json")]
    source = next((each for each in beside if each.exists()), beside[0])
  if not isinstance(source, Mapping):
    at = f"declaration='{os.fspath(source)}'"
    source = table_declaration.read(source)
  try:
    return table_declaration.parse(source)
  except UserError as error:
    raise UserError(f"{at}: {error}") from error


def _parts(path: pathlib.Path, declared: Declaration, field: str | None) -> _Part:
  """The rows of the file, and of the second one where the declaration names it."""
  part = _read(path, declared, field)
  second = declared.split.test_file
  if second is None:
    return part
  other = _read(path.parent / second, declared, field)
  clipped = {name: count + other.clipped[name] for name, count in part.clipped.items()}
  return _Part(
    x=np.concatenate([part.x, other.x]),
    y=np.concatenate([part.y, other.y]),
    is_test=np.concatenate([part.is_test, np.ones(len(other.x), bool)]),
    fields=part.fields + other.fields,
    clipped=clipped,
  )


def _read(path: pathlib.Path, declared: Declaration, field: str | None) -> _Part:
  split = declared.split
  marked = () if split.column is None else (split.column,)
  beside = () if field is None else (field,)
  needed = (*declared.columns, *declared.target_columns, *marked)

  def wanted(names: Sequence[str]) -> list[str]:
    for name in (*needed, *beside):
      if name not in names:
        hint = validate.did_you_mean(name, names)
        raise UserError(f"has no column {name!r:.60}{hint}")
    extra = [name for name in names if name not in (*needed, *beside)]
    unknown = [name for name in extra if name not in declared.ignore]
    if unknown and declared.ignore != ("*",):
      raise UserError(
        f"column {unknown[0]!r:.60} is not declared; add it to `columns`, or to `ignore`"
      )
    return list(dict.fromkeys((*needed, *beside)))

  clipped = {name: 0 for name, kind in declared.columns.items() if isinstance(kind, Number)}
  xs = []
  ys = []
  masks = []
  fields: list[str] = []
  count = 0
  try:
    for block in table_files.blocks(
      path, wanted, delimiter=declared.delimiter, encoding=declared.encoding
    ):
      cells = _Cells(block, declared, table_files.word(path))
      xs.append(cells.inputs(clipped))
      ys.append(cells.targets())
      masks.append(cells.is_test(count))
      if field is not None:
        fields += cells.texts(field)
      count += len(block.places)
  except UserError as error:
    raise _about(path, str(error)) from error
  if not count:
    raise _about(path, "holds no rows below its first line")
  return _Part(
    np.concatenate(xs), np.concatenate(ys), np.concatenate(masks), fields, clipped
  )


class _Cells:
  """The cells of a block, read as a declaration says."""

  def __init__(self, block: table_files.Block, declared: Declaration, word: str):
    self._block = block
    self._declared = declared
    self._word = word
    self._none = frozenset(declared.missing_values)

  def _wrong(self, index: int, column: str, what: str) -> UserError:
    # The cell itself is private, and messages end in logs.
    return UserError(
      f"{self._block.told(index, self._word)}, column {column!r:.60}: {what}"
    )

  def texts(self, column: str) -> list[str]:
    """The cells of a column as text; a missing one is the empty text."""
    found = []
    for cell in self._block.cells[column]:
      text = str(cell).lower() if isinstance(cell, bool) else str(cell)
      found.append("" if cell is None else text.strip())
    return found

  def numbers(self, column: str, kind: Number) -> np.ndarray:
    """[k] float64, finite, in the units of the column."""
    out = np.empty(len(self._block.places), np.float64)
    for index, cell in enumerate(self._block.cells[column]):
      if cell is None or cell in self._none:
        if kind.missing is None:
          raise self._wrong(
            index, column, "holds no value; declare what stands for it: missing = NUMBER"
          )
        out[index] = kind.missing
        continue
      try:
        # Python reads 1_000 as a number, and no table means it.
        number = float(cell) if not isinstance(cell, str) or "_" not in cell else np.nan
      # OverflowError: an integer of Parquet is never that large, one of JSON might be.
      except (ValueError, OverflowError):
        number = np.nan
      if not np.isfinite(number):
        raise self._wrong(
          index, column, "is no finite number; write 3.5, without units or separators"
        )
      out[index] = number
    return out

  def places(self, column: str, kind: Category) -> np.ndarray:
    """[k] the place of each cell among the values of a category."""
    place = {value: index for index, value in enumerate(kind.values)}
    other = None if kind.other is None else place[kind.other]
    out = np.empty(len(self._block.places), np.int32)
    for index, text in enumerate(self.texts(column)):
      known = place.get(text)
      # A value may be declared that is spelled as a missing one, such as the empty text.
      if known is None and text in self._none:
        if kind.missing is None:
          raise self._wrong(
            index, column, "holds no value; declare what stands for it: missing = VALUE"
          )
        known = place[kind.missing]
      known = other if known is None else known
      if known is None:
        raise self._wrong(
          index, column, "is none of the declared values; add it, or declare other = VALUE"
        )
      out[index] = known
    return out

  def inputs(self, clipped: dict[str, int]) -> np.ndarray:
    """[k, width] float32; counts in `clipped` what lay beyond its bounds."""
    columns = []
    for name, kind in self._declared.columns.items():
      if isinstance(kind, Category):
        places = self.places(name, kind)
        columns.append(np.eye(len(kind.values), dtype=np.float32)[places])
        continue
      numbers = self.numbers(name, kind)
      bounds = kind.bounds
      clipped[name] += int(np.sum((numbers < bounds.lower) | (numbers > bounds.upper)))
      # From [-1, 1], in which a difference of two large bounds does not overflow.
      columns.append((bounds.scaled(numbers)[:, None] + 1) / 2)
    return np.concatenate(columns, axis=1, dtype=np.float32)

  def targets(self) -> np.ndarray:
    """[k] int32 classes, float32 numbers scaled to [-1, 1], or int32 labels [k, labels]."""
    columns = self._declared.target_columns
    kind = self._declared.target_kind
    if isinstance(kind, Number):
      return kind.bounds.scaled(self.numbers(columns[0], kind))
    found = [self.places(name, kind) for name in columns]
    return found[0] if len(found) == 1 else np.stack(found, axis=1)

  def is_test(self, before: int) -> np.ndarray:
    """[k] bool: whether a row is for the test. `before`: rows of the file above these."""
    split = self._declared.split
    size = len(self._block.places)
    if split.test_share is not None:
      return hashed(np.arange(before, before + size), split.salt) < split.test_share
    if split.column is None:
      return np.zeros(size, bool)
    both = Category((*split.train, *split.test))
    return self.places(split.column, both) >= len(split.train)


def hashed(rows: np.ndarray, salt: int) -> np.ndarray:
  """[n] numbers in [0, 1) that follow from the numbers of rows and a salt alone.

  Both are public, so who is in the test says nothing about what a row holds. The function is
  SplitMix64 (Steele, Lea and Flood 2014), fixed for ever.

  >>> hashed(np.arange(3), salt=0).round(3).tolist()
  [0.883, 0.432, 0.026]
  """
  # uint64 arithmetic of NumPy arrays wraps around, as the generator wants it.
  start = np.array([salt], np.uint64) * np.uint64(0xD1342543DE82EF95)
  z = start + (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  z = z ^ (z >> np.uint64(31))
  return (z >> np.uint64(11)).astype(np.float64) / 2**53
