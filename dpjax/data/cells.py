"""The value of a table's cell, which depends on this cell and the declaration alone.

Libraries and files write one value in many ways: 3, 3.0 and "3.0", True and "True", None and NaN.
Often one record decides for its whole column: an integer that is missing turns the others into
floats. So cells are compared and hashed by their value, never as they happen to be written.

A declaration decides how a cell is read: by `number` if the declared values are numbers or
booleans, else by `text`. A split by hashes reads ids by `identity`.
"""

from __future__ import annotations

import decimal
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dpjax.validate import UserError, shape_of_rows

# Types of a cell: None, str, bool, int, float or Decimal.
Cell = Any
# Python's own `int` and `float` also read 1_000, digits of other scripts and "infinity".
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
# How libraries write a whole number, or a very large or small one, in a column of floats.
_FLOAT = re.compile(r"-?(?:(?:0|[1-9][0-9]*)\.0+|[0-9](?:\.[0-9]+)?e[+-][0-9]{2,3})")
_TRUTH = {"true": 1, "false": 0}
# From here on, not every integer is a float64.
_EXACT = 2**53
# A larger integer exceeds every float64, and Python refuses to turn a very long one into text.
_MOST_BITS = 1024
_MOST_DIGITS = 310
# Types whose numbers are the shortest decimal that names them, as files hold them: the float32
# nearest to .1 is .1, not .10000000149. pyarrow's names of them come last.
_SHORT: dict[str, Any] = {
  "float32": np.float32,
  "float16": np.float16,
  "float": np.float32,
  "halffloat": np.float16,
}


def number(cell: Cell) -> int | float | None:
  """Returns a cell as a number: an integer if it is whole, else a float64; None: it is no number.

  True and false are 1 and 0. Whole numbers without exponent are exact.

  >>> [number(cell) for cell in (3.0, "3.000", " 007 ", "1e3", True, "-0.0", 2**53 + 1)]
  [3, 3, 7, 1000, 1, 0, 9007199254740993]
  >>> [number(cell) for cell in ("1_000", "1,5", "", "inf", "٣")]
  [None, None, None, None, None]
  """
  # The most frequent types come first.
  if isinstance(cell, float):
    return _of_float(cell)
  if isinstance(cell, str):
    return _number_of_text(cell.strip())
  if isinstance(cell, numbers.Integral):
    whole = int(cell)
    return whole if whole.bit_length() <= _MOST_BITS else None
  if isinstance(cell, decimal.Decimal):
    if not cell.is_finite() or cell.adjusted() >= _MOST_DIGITS:
      return None
    whole = cell == cell.to_integral_value()
    return number(int(cell)) if whole else _of_float(float(cell))
  try:
    return None if cell is None else _of_float(float(cell))
  except OverflowError:
    return None


def _number_of_text(text: str) -> int | float | None:
  form = _NUMBER.fullmatch(text)
  if form is None:
    return _TRUTH.get(text.lower())
  whole, _, rest = text.partition(".")
  if form[1] is None and not rest.strip("0"):
    digits = whole.strip("+-") or "0"
    if len(digits) > _MOST_DIGITS:
      return None
    return number(-int(digits) if whole.startswith("-") else int(digits))
  return _of_float(float(text))


def _of_float(value: float) -> int | float | None:
  if value.is_integer():
    return int(value)
  return value if math.isfinite(value) else None


def text(cell: Cell) -> str:
  """Returns a cell as text; without a value, the empty text.

  The text of a number is that of its value, and "3.0" is the text of the number 3. "007" and "1e3"
  stay as they are. Booleans are true and false, however they are written.

  >>> [text(cell) for cell in (3.0, "3.000", " 007 ", "1e3", "1.50", 2.5, True, "True", None)]
  ['3', '3', '007', '1e3', '1.50', '2.5', 'true', 'true', '']
  """
  if cell is None:
    return ""
  if isinstance(cell, bool):
    return str(cell).lower()
  if isinstance(cell, str):
    plain = cell.strip()
    if plain.lower() in _TRUTH:
      return plain.lower()
    if not _FLOAT.fullmatch(plain):
      return plain
    cell = plain
  value = number(cell)
  return str(cell if value is None else value)


def identity(cell: Cell) -> str:
  """Returns the text of an id that a split hashes: of the number that the cell writes, if any.

  A reader of files may turn ids into numbers as long as all of them are, so that one id decides
  for all others.

  >>> [identity(cell) for cell in ("007", 7, 7.0, "A7")]
  ['7', '7', '7', 'A7']
  """
  value = number(cell)
  return text(cell) if value is None else str(value)


def is_rounded(cell: Cell) -> bool:
  """Returns whether a cell is a float, or is written as one, of a size at which digits are lost.

  Where one integer is missing, pandas and NumPy turn its column into floats.

  >>> [is_rounded(cell) for cell in (2.0**53, "9007199254740992.0", 2**53, "9007199254740992")]
  [True, True, False, False]
  """
  is_float = isinstance(cell, float)
  if isinstance(cell, str):
    is_float = _FLOAT.fullmatch(cell.strip()) is not None
  value = number(cell) if is_float else None
  return value is not None and abs(value) >= _EXACT


def kind(cell: Cell) -> str:
  """Returns what a cell is, in public words.

  >>> [kind(cell) for cell in ("a", "3.0", 2.5, True)]
  ['texts', 'integers', 'decimal numbers', 'booleans']
  """
  if text(cell) in _TRUTH:
    return "booleans"
  value = number(cell)
  if value is None:
    return "texts" if isinstance(cell, str) else "infinite numbers"
  return "integers" if isinstance(value, int) else "decimal numbers"


class Values:
  """The distinct values of a declared list, in their order, and the place of a cell among them.

  Args:
    declared: list of texts, or of numbers and booleans; of both: they are read as texts. Where
      all are true or false, texts are booleans.
    field: name of the list in errors.

  Attributes:
    texts: the values as text.

  Raises:
    UserError: an entry of another type, a text with spaces around it, or a value twice.

  >>> [Values([1, 2, 3]).place(cell) for cell in (3.0, "2.00", "x", None)]
  [2, 1, None, None]
  >>> [Values(["1", "007"]).place(cell) for cell in (1.0, "007", 7)]
  [0, 1, None]
  """

  def __init__(self, declared: Sequence[Any], field: str = "values"):
    cells = [_declared_cell(value, field) for value in declared]
    self.texts = tuple(map(text, cells))
    self.of_numbers = _TRUTH.keys() >= set(self.texts) or not any(
      isinstance(cell, str) for cell in cells
    )
    self._read = number if self.of_numbers else text
    self._places: dict[Any, int] = {}
    for place, cell in enumerate(cells):
      if self._places.setdefault(self._read(cell), place) != place:
        raise UserError(f"names {self.texts[place]!r:.60} twice", field=field)
    kinds = sorted(set(map(kind, cells))) if self.of_numbers else ["texts"]
    self.kind = " and ".join(kinds)

  def place(self, cell: Cell) -> int | None:
    """Returns the place of a cell's value; None: it is none of these values."""
    return None if cell is None else self._places.get(self._read(cell))

  def __len__(self) -> int:
    return len(self.texts)

  def __iter__(self) -> Iterator[str]:
    return iter(self.texts)


def _declared_cell(value: Any, field: str) -> Cell:
  """Returns an entry of a declared list as a cell. Raises UserError for other types."""
  try:
    cell = _plain(value)
  except TypeError:
    cell = None
  if isinstance(cell, str) and cell == cell.strip():
    return cell
  if cell is None or isinstance(cell, str) or number(cell) is None:
    raise UserError(
      "must be text without spaces around it, a finite number, or true or false",
      field=field,
      value=value,
    )
  return cell


def of_column(column: Any, name: str, first: int = 1) -> list[Cell]:
  """Returns the cells of a column in memory; None where there is no value.

  Args:
    column: a list, or an array or column of NumPy, pandas, polars or Arrow.
    name: name of the column in errors.
    first: number of its first row in errors.

  Raises:
    UserError: it is no list of text, numbers or booleans. The message shows no cell.
  """
  dtype = getattr(column, "dtype", getattr(column, "type", ""))
  of_array = getattr(dtype, "kind", "O") if isinstance(column, np.ndarray) else "O"
  is_list = hasattr(column, "__getitem__") and not isinstance(column, str | bytes | Mapping)
  # Dates of NumPy would become integers.
  if not is_list or getattr(column, "ndim", 1) != 1 or of_array in "mMcSV":
    raise UserError(
      f"column {name!r:.60}: must be a list of text, numbers or booleans, got "
      f"{dtype or type(column).__name__} of shape {shape_of_rows(getattr(column, 'shape', ()))}"
    )
  # A list goes no way through an array, which would turn all of its cells into one type.
  ways = (getattr(column, way, None) for way in ("to_pylist", "to_list", "tolist"))
  cells = list(next((way for way in ways if way is not None), lambda: column)())
  short = _SHORT.get(str(dtype).removesuffix("[pyarrow]").lower())
  if short is not None:
    cells = [short(cell) if isinstance(cell, float) else cell for cell in cells]
  for place, cell in enumerate(cells):
    if type(cell) is str or (type(cell) is float and cell == cell):
      continue
    try:
      cells[place] = _plain(cell)
    except TypeError as error:
      raise UserError(
        f"row {first + place}, column {name!r:.60}: must be text, a number or a boolean, "
        f"not {error}"
      ) from None
  return cells


def _plain(cell: Any) -> Cell:
  """Returns a cell as a Python object, or None if it holds no value.

  Raises TypeError, whose text is the name of the type, for a cell of another type: it could run
  code of a user's class, or has no text.
  """
  # The missing values of pandas are known by type, since a comparison with NA returns NA.
  if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
    return None
  if isinstance(cell, np.floating) and not isinstance(cell, float):
    cell = float(str(cell))
  elif isinstance(cell, np.bool_ | np.integer):
    cell = cell.item()
  if isinstance(cell, decimal.Decimal):
    return None if cell.is_nan() else cell
  is_long = isinstance(cell, int) and cell.bit_length() > _MOST_BITS
  if is_long or not isinstance(cell, str | numbers.Real):
    raise TypeError("so long an integer" if is_long else type(cell).__name__)
  # NaN is the only value that differs from itself.
  return None if cell != cell else cell
