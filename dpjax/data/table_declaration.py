"""Declaration of a table: its public facts, written by the owner before any row is read.

A declaration is a dict, or a TOML or JSON file. Its keys:

- `columns`: the features by name, in the order of the inputs. A number has `lower` and `upper`, a
  category has `values`: texts, or numbers and booleans (`cells` says how cells are read). `missing`
  is the value that replaces a missing value. `other` is the value of a category that replaces
  values which are not listed.
  A text has `length`, the number of tokens kept. A text must be the only column of inputs.
- `tokenizer`: path of a public `tokenizer.json`, which turns texts into tokens, relative to the
  folder of the table; without it tokens are bytes.
- `target`: `column` with `values` (classes), or with `lower` and `upper` (a number). Several
  labels have `columns`, and two `values`: the text for no, then the text for yes.
- `group`: name of a category of the inputs, or a `column` that is no input, with `values`. The
  test rows of each of its values are scored apart, too.
- `split`: one of three rules for the test rows.
  `column`, with the values in this column that mean `train` and `test`.
  `test_file`, a second file, which holds the test rows.
  `test_share` and `salt`: a hash of the row number decides. If a row is removed, later rows get
  other numbers and may change their split. With `column`, too, a hash of the id in this column
  decides, and later rows keep their split.
- `ignore`: columns that are not read. "*": all columns that are not declared. That of the split, or
  of a group that is no input, may stand here, too: the model never sees it.
- `missing_values`: values that mean no value, beside the empty text, NaN and None.
- `num_examples`: a public number near the number of training rows.
- `delimiter` and `encoding` of a CSV file: by default a comma (a tab in .tsv) and UTF-8.

Nothing here looks at data. Bounds or lists of values that are taken from the rows (their minimum,
their distinct values) would reveal single records, and no epsilon would cover that.
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import json
import os
import pathlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dpjax import validate
from dpjax.data.cells import Values
from dpjax.data.target_kinds import Interval, Labels
from dpjax.validate import NO_VALUE, UserError, Verbatim

_KEYS = (
  "columns", "target", "group", "split", "ignore", "missing_values", "num_examples", "delimiter",
  "encoding", "tokenizer",
)  # fmt: skip
_MOST_TOKENS = 2**20
_NO_VALUES = Values(())
_MOST_BYTES = 2**24
_SAYS = (
  "it says what is public about the data: bounds of numbers, values of categories, the target and "
  "the split (docs/your_data.md)"
)
_Parsed = TypeVar("_Parsed")


@dataclasses.dataclass(frozen=True)
class Number:
  """A column of numbers, clipped to their bounds. Inputs are scaled to [0, 1], targets to [-1, 1].

  Args:
    bounds: public bounds, lower and upper.
    missing: number that replaces a missing value, in the units of the column. None: missing values
      are refused.
  """

  bounds: Interval
  missing: float | None = None


@dataclasses.dataclass(frozen=True)
class Category:
  """A column of values, with one input for each declared value: 1 if the cell has it, else 0.

  As a target it has one class for each declared value.

  Args:
    values: all values that the column may have.
    missing: place of the value that replaces a missing value; None: missing values are refused.
    other: place of the value that replaces values which are not listed; None: unlisted values are
      refused.
  """

  values: Values
  missing: int | None = None
  other: int | None = None


@dataclasses.dataclass(frozen=True)
class Text:
  """A column of texts that become tokens. It must be the only column of inputs.

  Args:
    length: number of tokens that are kept of a text; shorter texts are padded with 0.
  """

  length: int


@dataclasses.dataclass(frozen=True)
class Split:
  """Rule that chooses the test rows: by a column, a second file, or a hash.

  Args:
    column: name of the column that is hashed (with `test_share`) or that says train or test.
    sides: values in `column` that mean train, followed by those that mean test.
    num_train: number of values that mean train.
    test_file: path of the file of test rows, relative to the folder of the table.
    test_share: expected share of test rows, if a hash decides.
    salt: number that the hash depends on.
  """

  column: str | None = None
  sides: Values = _NO_VALUES
  num_train: int = 0
  test_file: str | None = None
  test_share: float | None = None
  salt: int = 0


@dataclasses.dataclass(frozen=True)
class Declaration:
  """Everything that is public about a table. The module describes the keys of a declaration."""

  columns: Mapping[str, Number | Category | Text]
  # The columns that hold the target. All of them are read as `target_kind` says.
  target_columns: tuple[str, ...]
  target_kind: Number | Category
  split: Split
  # The column by whose values test rows are scored apart, and its kind; None: there is none.
  group: tuple[str, Category] | None = None
  ignore: tuple[str, ...] = ()
  missing_values: Values = _NO_VALUES
  num_examples: int | None = None
  delimiter: str | None = None
  encoding: str = "utf-8-sig"
  tokenizer: str | None = None
  content: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what `parse` read

  @property
  def text(self) -> Text | None:
    """The kind of the text column if the inputs are a text; else None."""
    (first, *_) = self.columns.values()
    return first if isinstance(first, Text) else None

  @property
  def target(self) -> Interval | Labels | None:
    """Kind of the targets for a `Dataset`: bounds of numbers, names of labels, or None: classes."""
    if isinstance(self.target_kind, Number):
      return self.target_kind.bounds
    return Labels(self.target_columns) if len(self.target_columns) > 1 else None

  @property
  def classes(self) -> tuple[str, ...]:
    """Names of the classes, in order; () of a number, or of several labels."""
    kind = self.target_kind
    is_one = len(self.target_columns) == 1
    return tuple(kind.values) if is_one and isinstance(kind, Category) else ()

  @property
  def num_classes(self) -> int:
    """Number of outputs of a model: the number of classes or labels, or 1 for a number."""
    if isinstance(self.target_kind, Number):
      return 1
    several = len(self.target_columns)
    return several if several > 1 else len(self.target_kind.values)

  @property
  def width(self) -> int:
    """Number of inputs of a model: one for each number and for each value of a category, or the
    number of tokens of a text."""
    kinds = self.columns.values()
    if self.text is not None:
      return self.text.length
    return sum(len(kind.values) if isinstance(kind, Category) else 1 for kind in kinds)


def parse(source: object) -> Declaration:
  """Returns the declaration that a dict holds.

  Raises:
    UserError: one line that names the wrong key.

  >>> parse({
  ...   "columns": {"age": {"lower": 0, "upper": 120}, "sex": {"values": ["f", "m"]}},
  ...   "target": {"column": "ill", "values": ["no", "yes"]},
  ...   "split": {"test_share": 0.2},
  ... }).width
  3
  """
  keys = mapping(source, "", _KEYS)
  columns = mapping(keys.get("columns"), "columns")
  if not columns:
    raise UserError("must declare at least one column of inputs", field="columns")
  kinds = {name: _column(each, f"columns.{name}") for name, each in columns.items()}
  texts_among = [name for name, kind in kinds.items() if isinstance(kind, Text)]
  if texts_among and len(kinds) > 1:
    raise UserError(
      "must be the one column of inputs, as a text is", field=f"columns.{texts_among[0]}"
    )
  tokenizer = keys.get("tokenizer")
  if tokenizer is not None and not (isinstance(tokenizer, str) and texts_among):
    raise UserError(
      "must be the path of a file, for a column with `length`",
      field="tokenizer",
      value=tokenizer,
    )
  target_columns, target_kind = _target(keys.get("target"))
  split = _split(keys.get("split"))
  group = _group(keys.get("group"), kinds)
  ignore = keys.get("ignore", [])
  ignored = ("*",) if ignore == "*" else texts(ignore, "ignore", least=0)
  no_inputs = [split.column] if split.column else []
  no_inputs += [group[0]] if group and group[0] not in kinds else []
  declared = [*kinds, *target_columns, *no_inputs]
  declared += [name for name in ignored if name not in no_inputs]
  twice = [name for name, count in collections.Counter(declared).items() if count > 1]
  if twice:
    raise UserError(
      "is declared twice; name it once: in columns, target, split.column, group or ignore",
      field="column",
      value=twice[0],
    )
  num_examples = keys.get("num_examples")
  if num_examples is not None:
    validate.integer_at_least(1, num_examples=num_examples)
  return Declaration(
    columns=kinds,
    target_columns=target_columns,
    target_kind=target_kind,
    split=split,
    group=group,
    ignore=ignored,
    missing_values=_missing_values(keys.get("missing_values", [])),
    num_examples=num_examples,
    delimiter=_delimiter(keys.get("delimiter")),
    encoding=_encoding(keys.get("encoding")),
    tokenizer=tokenizer,
    content=keys,
  )


def beside(source: pathlib.Path) -> pathlib.Path:
  """Returns the path of the declaration beside a file: .toml or .json.

  Raises:
    UserError: an error about the file, since nobody named a declaration.
  """
  paths = [source.with_suffix(suffix) for suffix in (".toml", ".json")]
  known = [path for path in paths if path.exists()]
  if known:
    return known[0]
  missing = f"needs {paths[0].name} beside it, or a declaration: {_SAYS}"
  must = missing if source.exists() else "there is no such file"
  raise UserError(must, field="name", value=Verbatim(f"'{source}'"))


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the content of a TOML or JSON file.

  Raises:
    UserError: one line that names the file.
  """
  path = pathlib.Path(path)
  with validate.about("declaration", Verbatim(f"'{path}'")):
    return _read(path)


def _read(path: pathlib.Path) -> dict[str, Any]:
  validate.no_pipe(path)
  try:
    if path.stat().st_size > _MOST_BYTES:
      raise UserError(f"is larger than {_MOST_BYTES} bytes")
    text = path.read_text(encoding="utf-8-sig")
    held = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    if not isinstance(held, dict):
      raise UserError("must hold an object, such as {}")
    return held
  except FileNotFoundError as error:
    raise UserError(f"there is no such file; {_SAYS}") from error
  # Bad UTF-8 and bad syntax raise ValueError, deep nesting raises RecursionError.
  except (OSError, ValueError, RecursionError) as error:
    if isinstance(error, UserError):
      raise
    reason = validate.first_line(error)
    kind = "JSON" if path.suffix == ".json" else "TOML"
    raise UserError(f"is no {kind} ({reason})") from error


def parse_declaration(
  declaration: str | os.PathLike[str] | Mapping[str, Any], parse: Callable[[Any], _Parsed]
) -> _Parsed:
  """Parses a declaration, which is a dict or the path of a file, by the function `parse`.

  Raises:
    UserError: one line that names the file, or the argument `declaration`.
  """
  given: Any = NO_VALUE
  if not isinstance(declaration, str | os.PathLike | Mapping):
    raise UserError(
      "must be a dict or the path of a file", field="declaration", value=declaration
    )
  if not isinstance(declaration, Mapping):
    given = Verbatim(f"'{os.fspath(declaration)}'")
    declaration = read(declaration)
  with validate.about("declaration", given):
    return parse(declaration)


def check_hashed(way: Mapping[str, Any]) -> None:
  """Raises UserError for a wrong `test_share` or `salt` of a split by hashes."""
  validate.open_unit(**{"split.test_share": way.get("test_share")})
  validate.integer_in(0, 2**63 - 1, **{"split.salt": way.get("salt", 0)})


def mapping(value: object, field: str, known: tuple[str, ...] = ()) -> dict[str, Any]:
  """Returns a copy of a dict. Raises UserError if `value` is no dict, if a key is no text, or if
  `known` is not empty and lacks a key."""
  if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
    got = Verbatim("nothing" if value is None else type(value).__name__)
    raise UserError(f"must be a table of keys and values, not {got}", field=field)
  for key in value:
    if known and key not in known:
      hint = validate.did_you_mean(key, known)
      raise UserError(
        f"has an unknown key {key!r:.60}; must be of {', '.join(known)}{hint}", field=field
      )
  return dict(value)


def text_of(value: object, field: str) -> str:
  """Returns a name in a declaration as text; integers and booleans become text. Raises UserError
  for other types, and for text with spaces around it."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, int):
    return str(value)
  if not isinstance(value, str) or value != value.strip():
    raise UserError(
      "must be text without spaces around it, or an integer", field=field, value=value
    )
  return value


def texts(value: object, field: str, least: int = 1) -> tuple[str, ...]:
  """Returns the names in a list. Raises UserError for equal names, or fewer than `least`."""
  seen: dict[str, None] = {}
  for each in _list(value, field, least):
    text = text_of(each, field)
    if text in seen:
      raise UserError(f"names {text!r:.60} twice", field=field)
    seen[text] = None
  return tuple(seen)


def _list(value: Any, field: str, least: int) -> Sequence[Any]:
  if not isinstance(value, (list, tuple)) or len(value) < least:
    raise UserError(f"must be a list of at least {least}", field=field, value=value)
  return value


def _missing_values(value: Any) -> Values:
  # A cell without text has no value in any case. Without it a list of numbers stays one.
  listed = _list(value, "missing_values", 0)
  listed = [each for each in listed if not (isinstance(each, str) and not each)]
  return Values(listed, "missing_values")


def _column(value: object, field: str) -> Number | Category | Text:
  known = ("lower", "upper", "values", "missing", "other", "length")
  keys = mapping(value, field, known)
  if "length" in keys:
    if len(keys) > 1:
      raise UserError(
        "is of a text of the inputs, which has no other key", field=f"{field}.length"
      )
    validate.integer_in(1, _MOST_TOKENS, **{f"{field}.length": keys["length"]})
    return Text(keys["length"])
  of_other = ("lower", "upper") if "values" in keys else ("other",)
  for name in of_other:
    if name in keys:
      raise UserError(
        "numbers have lower and upper, categories values and other", field=f"{field}.{name}"
      )
  return _category(keys, field) if "values" in keys else _number(keys, field)


def _category(keys: dict[str, Any], field: str) -> Category:
  values = Values(_list(keys["values"], f"{field}.values", 1), f"{field}.values")
  places = {}
  for name in ("missing", "other"):
    if name in keys:
      # A list of one value checks the type of this value.
      (each,) = Values([keys[name]], f"{field}.{name}")
      places[name] = values.place(each)
      if places[name] is None:
        validate.one_of(values, **{f"{field}.{name}": each})
  return Category(values, **places)


def _number(keys: dict[str, Any], field: str) -> Number:
  absent = [name for name in ("lower", "upper") if name not in keys]
  if absent:
    raise UserError(
      f"has no {absent[0]!r}: must declare public bounds, lower and upper, or the values of a "
      "category; nothing is estimated from private rows",
      field=field,
    )
  try:
    bounds = Interval(keys["lower"], keys["upper"])
  except UserError as error:
    raise error.within(field) from error
  missing = keys.get("missing")
  if missing is None:
    return Number(bounds)
  is_number = isinstance(missing, (int, float)) and not isinstance(missing, bool)
  # This also refuses NaN, which is in no interval.
  if not is_number or not bounds.lower <= missing <= bounds.upper:
    raise UserError(
      f"must be a number in [{bounds.lower}, {bounds.upper}]",
      field=f"{field}.missing",
      value=missing,
    )
  return Number(bounds, float(missing))


def _target(value: object) -> tuple[tuple[str, ...], Number | Category]:
  keys = mapping(value, "target", ("column", "columns", "values", "lower", "upper"))
  if ("column" in keys) == ("columns" in keys):
    raise UserError("must have `column`, or `columns` of several labels", field="target")
  if "column" in keys:
    columns = (text_of(keys.pop("column"), "target.column"),)
    kind = _column(keys, "target")
    # `mapping` above has refused the key `length`, so the kind cannot be a text.
    assert not isinstance(kind, Text)
    return columns, kind
  columns = texts(keys.pop("columns"), "target.columns", least=2)
  kind = _column(keys, "target")
  if not isinstance(kind, Category) or len(kind.values) != 2:
    raise UserError(
      "must have two `values` for several columns: the text of no, then that of yes",
      field="target",
    )
  return columns, kind


def _group(
  value: object, columns: Mapping[str, Number | Category | Text]
) -> tuple[str, Category] | None:
  if value is None:
    return None
  if isinstance(value, str):
    kind = columns.get(value)
    if not isinstance(kind, Category):
      known = [name for name, each in columns.items() if isinstance(each, Category)]
      among = (
        f"a category of the inputs ({validate.join_words(known)}), or " if known else ""
      )
      raise UserError(
        f"must be {among}{{column = {json.dumps(value)}, values = [...]}} for a column that is no "
        f"input{validate.did_you_mean(value, known)}",
        field="group",
        value=value,
      )
    return value, kind
  keys = mapping(value, "group", ("column", "values", "missing", "other"))
  column = text_of(keys.pop("column", None), "group.column")
  if column in columns:
    raise UserError(
      "is a column of inputs; give its name alone", field="group.column", value=column
    )
  if "values" not in keys:
    raise UserError("must have `values`, which are public", field="group")
  return column, _category(keys, "group")


def _split(value: object) -> Split:
  field = "split"
  keys = mapping(
    value, field, ("column", "train", "test", "test_file", "test_share", "salt")
  )
  ways = [name for name in ("test_share", "column", "test_file") if name in keys]
  if ways == ["test_share", "column"]:
    ways = ["test_share"]
  if len(ways) != 1:
    raise UserError("must have one of `column`, `test_file` and `test_share`", field=field)
  of_way = {"column": ("train", "test"), "test_share": ("salt", "column")}.get(ways[0], ())
  for name in keys:
    if name not in (*ways, *of_way):
      raise UserError(f"is not read with `{ways[0]}`", field=f"{field}.{name}")
  if ways == ["column"]:
    train, test = (
      Values(_list(keys.get(side), f"{field}.{side}", 1), f"{field}.{side}")
      for side in ("train", "test")
    )
    both = sorted(set(train) & set(test))
    if both:
      raise UserError("must not be in `train` too", field=f"{field}.test", value=both[0])
    column = text_of(keys["column"], f"{field}.column")
    sides = Values([*keys["train"], *keys["test"]], f"{field}.test")
    return Split(column=column, sides=sides, num_train=len(train))
  if ways == ["test_file"]:
    return Split(test_file=text_of(keys["test_file"], f"{field}.test_file"))
  check_hashed(keys)
  salt = keys.get("salt", 0)
  column = text_of(keys["column"], "split.column") if "column" in keys else None
  return Split(test_share=float(keys["test_share"]), salt=salt, column=column)


def _delimiter(value: Any) -> str | None:
  if value is None:
    return None
  known = isinstance(value, str) and len(value) == 1 and value not in '"\r\n \0'
  if not known:
    raise UserError("must be one character", field="delimiter", value=value)
  return value


def _encoding(value: Any) -> str:
  if value is None:
    # "utf-8-sig" also accepts the byte order mark that spreadsheet programs write.
    return "utf-8-sig"
  try:
    name = codecs.lookup(value).name
    # `encode` fails for codecs from bytes to bytes (zip, base64), which are no text encodings.
    "".encode(name)
  except (LookupError, TypeError, ValueError) as error:
    raise UserError(
      "must be an encoding that Python knows, as 'utf-8', 'utf-16' or 'latin-1'",
      field="encoding",
      value=value,
    ) from error
  return "utf-8-sig" if name == "utf-8" else name
