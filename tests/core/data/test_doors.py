"""A cell has one value, whatever it came through and whatever stands in other records."""

import collections
import csv
import datetime
import decimal
import fractions
import importlib

import numpy as np
import pytest

from dpjax import data
from dpjax.data import cells, tables
from dpjax.validate import UserError

_DECLARED = {
  "columns": {
    # Tells the records apart, and is never changed.
    "key": {"lower": 0, "upper": 64},
    "size": {"lower": -10, "upper": 10, "missing": 0},
    "code": {"values": [1, 2, 3], "missing": 3, "other": 3},
    "share": {"values": [0.5, 1.0, 2], "missing": 2, "other": 2},
    "flag": {"values": [False, True], "missing": True, "other": True},
    "sure": {"values": ["False", "True"], "missing": "True", "other": "True"},
    "word": {"values": ["a", "b", "3"], "missing": "b", "other": "3"},
  },
  "target": {"column": "y", "values": [0, 1]},
  "split": {"test_share": 0.4, "column": "id"},
}


def _records(rng, count):
  """Records whose columns have one type each, as a program makes them."""
  kinds = {
    "id": [int, float, str, lambda i: f"{i:04d}", lambda i: 2**53 + int(i), "p{}".format],
    "code": [int, float, str],
    "share": [float, lambda share: decimal.Decimal(str(share))],
    "flag": [bool, int, float, str],
    "sure": [bool, str],
    "word": [str],
  }
  of = {name: kinds[name][rng.integers(len(kinds[name]))] for name in kinds}
  return [
    {
      "key": int(place),
      "id": of["id"](int(rng.integers(1, 1000))),
      "size": float(rng.integers(-12, 13)) / 4,
      "code": of["code"](int(rng.integers(1, 5))),
      "share": of["share"](float(rng.choice([0.5, 1, 2, 4]))),
      "flag": of["flag"](bool(rng.integers(2))),
      "sure": of["sure"](bool(rng.integers(2))),
      "word": of["word"](rng.choice(["a", "b", "3", "c"])),
      "y": int(rng.integers(2)),
    }
    for place in range(count)
  ]


# What may happen to a value of one record.
_CHANGES = {
  "missing": lambda value: None,
  "nan": lambda value: float("nan"),
  "text": str,
  "another text": lambda value: "zzz",
  "empty text": lambda value: " ",
  "float": lambda value: float(cells.number(value) or 0),
  "fraction": lambda value: 0.25,
  "integer": lambda value: int(cells.number(value) or 0),
  "large integer": lambda value: 2**70 + 1,
  "boolean": lambda value: True,
  "padded": lambda value: f" {value} ",
  "decimals": lambda value: f"{float(cells.number(value) or 0):.3f}",
  "exponent": lambda value: f"{float(cells.number(value) or 0):e}",
}
_REMOVED = "removed"
_ALL = (*_CHANGES, _REMOVED)
_NAMES = ("id", "size", "code", "share", "flag", "sure", "word")


def _as_columns(records):
  return {name: [record[name] for record in records] for name in records[0]}


def _as_numpy(records):
  """Columns as NumPy infers them, and with NaN for None in numbers, as pandas does."""
  columns = {}
  for name, column in _as_columns(records).items():
    kept = [cell for cell in column if cell is not None]
    of_numbers = all(type(cell) in (int, float) for cell in kept) and len(kept) < len(
      column
    )
    filled = [np.nan if cell is None and of_numbers else cell for cell in column]
    # Text beside numbers: an array of text.
    columns[name] = np.array(filled, object if None in filled else None)
  return columns


def _as_csv(records, folder):
  path = folder / "a.csv"
  with path.open("w", newline="") as stream:
    writer = csv.writer(stream)
    writer.writerows([records[0], *(record.values() for record in records)])
  return path


def _as_parquet(records, folder):
  parquet = importlib.import_module("pyarrow.parquet")
  parquet.write_table(_as_arrow(records), folder / "a.parquet")
  return folder / "a.parquet"


def _as_arrow(records):
  arrow = importlib.import_module("pyarrow")
  return arrow.table(
    {
      name: arrow.array(column, from_pandas=True)
      for name, column in _as_columns(records).items()
    }
  )


def _by_pandas(turn):
  def door(records, folder):
    pandas = importlib.import_module("pandas")
    return turn(pandas.DataFrame(records), folder)

  return door


def _pandas_csv(frame, folder):
  frame.to_csv(folder / "b.csv", index=False)
  return folder / "b.csv"


def _as_nullable(records, folder):
  # Without `object`, integers would pass through floats first.
  frame = importlib.import_module("pandas").DataFrame(records, dtype=object)
  return frame.convert_dtypes()


def _read_by_pandas(records, folder):
  return importlib.import_module("pandas").read_csv(_as_csv(records, folder))


def _as_polars(records, folder):
  return importlib.import_module("polars").DataFrame(records, strict=False)


def _polars_csv(records, folder):
  _as_polars(records, folder).write_csv(folder / "c.csv")
  return folder / "c.csv"


# By name: the library that it needs, and the function from records to a table.
_DOORS = {
  "records": ("", lambda records, _: records),
  "lists": ("", lambda records, _: _as_columns(records)),
  "numpy": ("", lambda records, _: _as_numpy(records)),
  "csv": ("", _as_csv),
  "arrow": ("pyarrow", lambda records, _: _as_arrow(records)),
  "parquet": ("pyarrow", _as_parquet),
  "pandas": ("pandas", _by_pandas(lambda frame, _: frame)),
  "pandas nullable": ("pandas", _as_nullable),
  "pandas object": ("pandas", _by_pandas(lambda frame, _: frame.astype(object))),
  "pandas category": ("pandas", _by_pandas(lambda frame, _: frame.astype("category"))),
  "pandas csv": ("pandas", _by_pandas(_pandas_csv)),
  "pandas read_csv": ("pandas", _read_by_pandas),
  "polars": ("polars", _as_polars),
  "polars csv": ("polars", _polars_csv),
}


def _known(door):
  library = _DOORS[door][0]
  if library:
    pytest.importorskip(library)
  return _DOORS[door][1]


def _by_record(source, declaration=None):
  """{key: (split, inputs, target)} of a table; None if it is refused."""
  try:
    pair = tables.table(source, _DECLARED if declaration is None else declaration)
  except UserError as error:
    assert len(str(error).splitlines()) == 1
    return None
  return {
    round(float(x[0]) * 64): (part.split, x.tobytes(), int(y))
    for part in pair
    for x, y in zip(part.x, part.y)
  }


def _play(door, seed, num_tables, count, folder, changes=_ALL, names=_NAMES):
  """Changes each record of generated tables in each way: no other may move. Returns how many others
  were compared, and how many tables were not held or refused."""
  make = _known(door)
  rng = np.random.default_rng(seed)
  seen = collections.Counter()
  for _ in range(num_tables):
    records = _records(rng, count)
    before = _by_record(make(records, folder))
    assert before is None or len(before) == count
    for place in range(count):
      for change in changes:
        others = [*records[:place], *records[place + 1 :]]
        if change != _REMOVED:
          name = str(rng.choice(names))
          changed = {**records[place], name: _CHANGES[change](records[place][name])}
          others.insert(place, changed)
        try:
          table = make(others, folder)
        # pyarrow and polars hold no column of several types, and say so in own errors.
        except Exception:
          seen["not held"] += 1
          continue
        after = _by_record(table)
        if before is None or after is None:
          seen["refused"] += 1
          continue
        keys = before.keys() - {records[place]["key"]}
        assert keys <= after.keys()
        seen["compared"] += len(keys)
        moved = [key for key in keys if before[key] != after[key]]
        assert not moved, (door, change, name, changed, records[moved[0]])
  return seen


@pytest.mark.parametrize("door", _DOORS)
def test_a_change_of_one_record_moves_no_other(tmp_path, door):
  seen = _play(door, 0, num_tables=1, count=6, folder=tmp_path)
  assert seen["compared"] > 100


@pytest.mark.long
@pytest.mark.parametrize("door", _DOORS)
def test_changes_of_2000_records_move_no_other(tmp_path, door):
  seen = _play(door, 1, num_tables=200, count=10, folder=tmp_path)
  print(f"{door}: {dict(seen)}")
  assert seen["compared"] > 50_000


def test_the_game_finds_cells_that_are_read_by_their_texts(tmp_path, monkeypatch):
  monkeypatch.setattr(cells, "identity", str)
  with pytest.raises(AssertionError, match="numpy"):
    _play("numpy", 0, 20, 10, tmp_path, changes=["missing"], names=["id"])


def _one_table():
  """Records with a value of each kind, and none missing."""
  rng = np.random.default_rng(5)
  return [
    {
      "key": i,
      "id": int(rng.integers(1, 10**6)),
      "size": float(rng.normal()),
      "code": int(rng.integers(1, 5)),
      "share": float(rng.choice([0.5, 1, 2, 4])),
      "flag": bool(rng.integers(2)),
      "sure": bool(rng.integers(2)),
      "word": str(rng.choice(["a", "b", "3", "c"])),
      "y": int(rng.integers(2)),
    }
    for i in range(40)
  ]


@pytest.mark.parametrize("door", _DOORS)
def test_all_doors_give_equal_arrays(tmp_path, door):
  records = _one_table()
  wanted = _by_record(records)
  assert wanted is not None and len(wanted) == 40
  assert _by_record(_known(door)(records, tmp_path)) == wanted
  some = [
    {**record, "code": None} if record["key"] % 7 == 0 else record for record in records
  ]
  some[3] = {**some[3], "size": None, "flag": None, "word": None}
  assert _by_record(_known(door)(some, tmp_path)) == _by_record(some) != wanted


def _pandas_columns():
  pandas = pytest.importorskip("pandas")
  return {
    "Int64": pandas.array([1, 2, None, 4], "Int64"),
    "Int8": pandas.array([1, 2, None, 4], "Int8"),
    "Float64": pandas.array([1, 2, None, 4], "Float64"),
    "Float32": pandas.array([1, 2, None, 4], "Float32"),
    "float": pandas.Series([1, 2, None, 4]),
    "string": pandas.array(["1", "2", None, "4"], "string"),
    "str": pandas.Series(["1", "2.0", None, "4"]),
    "category": pandas.Categorical([1, 2, None, 4]),
    "object": pandas.Series([1, "2", pandas.NaT, 4.0], dtype=object),
    "arrow": pandas.Series([1, 2, None, 4], dtype="int64[pyarrow]"),
    "index": pandas.Series([1, 2, None, 4], index=[9, 9, 3, 1]),
  }


def _polars_columns():
  polars = pytest.importorskip("polars")
  words = ["1", "2", None, "4"]
  return {
    "Int16": polars.Series([1, 2, None, 4], dtype=polars.Int16),
    "Float32": polars.Series([1, 2, float("nan"), 4], dtype=polars.Float32),
    "Decimal": polars.Series([decimal.Decimal(i) if i else None for i in (1, 2, 0, 4)]),
    "Decimal(2)": polars.Series([1, 2, None, 4], dtype=polars.Decimal(10, 2)),
    "Categorical": polars.Series(words, dtype=polars.Categorical),
    "Enum": polars.Series(words, dtype=polars.Enum(["1", "2", "4"])),
    "String": polars.Series(words),
  }


def _arrow_columns():
  arrow = pytest.importorskip("pyarrow")
  array = arrow.array(["1", "2", None, "4"])
  return {
    "string": array,
    "large": array.cast(arrow.large_string()),
    "view": array.cast(arrow.string_view()),
    "dictionary": array.dictionary_encode(),
    "decimal": arrow.array([1, 2, None, 4]).cast(arrow.decimal128(30, 3)),
    "float32": arrow.array([1, 2, None, 4], arrow.float32()),
    "chunks": arrow.chunked_array([array[:1], array[1:]]),
  }


def _numpy_columns():
  return {
    "float16": np.array([1, 2, np.nan, 4], np.float16),
    "object": np.array([1, np.float32(2), None, "4"], object),
    "masked": np.ma.array([1, 2, 3, 4], mask=[False, False, True, False]),
    "text": np.array(["1", "2", "", "4.000"]),
    "list": [1, np.int8(2), np.float16("nan"), fractions.Fraction(4)],
    "tuple": (True, 2.0, float("nan"), decimal.Decimal("4.0")),
  }


@pytest.mark.parametrize(
  "columns", [_pandas_columns, _polars_columns, _arrow_columns, _numpy_columns]
)
def test_columns_of_every_type_are_read_alike(columns):
  declaration = {
    "columns": {"a": {"values": [1, 2], "missing": 1, "other": 2}},
    "target": {"column": "y", "values": [0]},
    "split": {"column": "fold", "train": ["a"], "test": ["b"]},
  }
  beside = {"y": [0] * 5, "fold": ["a"] * 4 + ["b"]}
  made = columns()
  for name, column in made.items():
    four = cells.of_column(column, "a")
    train, _ = tables.table({"a": [*four, 1], **beside}, declaration)
    assert train.x.tolist() == [[1, 0], [0, 1], [1, 0], [0, 1]], name
  assert len(made) >= 6


@pytest.mark.parametrize(
  ("column", "kind"),
  [
    ([[1.0], [2.0]], "list"),
    ([datetime.date(2020, 1, 1)] * 2, "date"),
    (np.array(["2020-01-01", "2021-01-01"], "datetime64[ns]"), "datetime64"),
    ([b"a", b"b"], "bytes"),
    (np.zeros((2, 2)), "shape"),
    (np.float64(1), "shape"),
    ("ab", "str"),
    (np.array([1j, 2]), "complex"),
  ],
)
def test_a_column_of_other_things_is_one_line(column, kind):
  with pytest.raises(UserError) as raised:
    cells.of_column(column, "a")
  assert "column 'a'" in str(raised.value) and kind in str(raised.value)


@pytest.mark.parametrize(
  "declared", [[False, True], ["False", "True"], ["false", "true"], [0, 1], [0.0, 1.0]]
)
def test_booleans_and_zero_one_match_in_every_writing(declared):
  values = cells.Values(declared)
  for no, yes in ((False, True), ("False", "True"), ("false", "true"), ("FALSE", "TRUE")):
    assert [values.place(no), values.place(yes)] == [0, 1]
  for no, yes in ((0, 1), (0.0, 1.0), ("0.0", "1.0"), ("-0", "1e0"), (-0.0, "1.000000")):
    assert [values.place(no), values.place(yes)] == [0, 1]


def test_numbers_are_exact():
  large = 2**53
  values = cells.Values([large, large + 1, 0.1, 10**30])
  assert [values.place(cell) for cell in (large, str(large + 1), f"{large + 1}.0")] == [
    0,
    1,
    1,
  ]
  assert values.place(float(large)) == 0 and values.place(decimal.Decimal(10**30)) == 3
  single = cells.of_column(np.array([0.1], np.float32), "a")
  short = [*single, "0.10", decimal.Decimal("0.1")]
  assert [values.place(cell) for cell in short] == [2, 2, 2]
  for cell in (
    "1_0",
    "١",
    "1 0",
    "0x1",
    "inf",
    "nan",
    "--1",
    "1e",
    ".",
    "",
    "+",
    "1" * 5000,
  ):
    assert cells.number(cell) is None, cell
  for cell in (float("inf"), 2**2000, decimal.Decimal("1e9999999"), "1e999"):
    assert cells.number(cell) is None, cell


@pytest.mark.parametrize(
  "cell", ["007", "1e3", "1.50", "a b", "+1", "1_0", "0x1", "٣", "2024"]
)
def test_a_text_stays_what_it_is(cell):
  assert cells.text(f" {cell} ") == cell
  other = cells.Values(["7", "1000", "1.5", "10", "1", "3"])
  assert other.place(cell) is None


def test_texts_are_those_of_their_texts():
  rng = np.random.default_rng(3)
  drawn = [
    float(f) * 10.0 ** int(e)
    for f, e in zip(rng.normal(size=300), rng.integers(-30, 30, 300))
  ]
  for cell in [*drawn, *map(round, drawn), True, "x", "TRUE", "3.00", "-0.0"]:
    text = cells.text(cell)
    assert cells.text(text) == text
    # As Python writes the cell, which is what CSV files hold.
    assert cells.text(str(cell)) == text and cells.number(str(cell)) == cells.number(cell)
    assert cells.identity(cell) == cells.identity(str(cell))


def test_a_column_in_which_nothing_matches_is_refused_by_kind():
  declaration = {
    "columns": {"a": {"values": [1, 2], "other": 2}},
    "target": {"column": "y", "values": ["n"]},
    "split": {"column": "fold", "train": ["a"], "test": ["b"]},
  }
  beside = {"y": ["n"] * 3, "fold": ["a", "a", "b"]}
  for column, kind in (
    ([0.25, "0.75", 7.5], "decimal numbers"),
    (["q", "r", "s"], "texts"),
    (["q", 7, False], "booleans and integers and texts"),
  ):
    with pytest.raises(UserError) as raised:
      tables.table({"a": column, **beside}, declaration)
    line = str(raised.value)
    assert "column 'a'" in line and f"{kind}; declared: integers" in line
    assert not any(str(cell) in line for cell in ("0.25", "0.75", "7.5"))
  columns = {"a": [0.25, 1, 7.5], **beside}
  assert len(tables.table(columns, declaration)[0]) == 2
  assert data.clipped_cells(columns, declaration) == {"a": 2}
  # One request may hold none of the values.
  assert tables.inputs({"a": ["q"]}, declaration).tolist() == [[0, 1]]
  with pytest.raises(UserError) as raised:
    tables.table({"a": [1, 2, 1], **beside, "y": ["n", "n", 12.25]}, declaration)
  assert "texts" in str(raised.value) and "decimal numbers" in str(raised.value)
  assert "12.25" not in str(raised.value)


def test_missing_values_are_values():
  columns = {"a": {"lower": 0, "upper": 10, "missing": 5}}
  declaration = _DECLARED | {"columns": columns, "missing_values": [-1, 999]}
  declaration["split"] = {"test_share": 0.5}
  for cell in (999, 999.0, "999", "999.00", -1, "-1", None, "", "nan", float("nan")):
    assert tables.inputs({"a": [cell]}, declaration).tolist() == [[0.5]], cell
  texts = declaration | {"missing_values": ["NA", ""]}
  assert tables.inputs({"a": ["NA", "", 1]}, texts).tolist()[:2] == [[0.5], [0.5]]


def test_ids_whose_digits_are_lost_are_refused():
  records = _one_table()
  lost = [{**record, "id": float(2**53 + record["key"])} for record in records]
  with pytest.raises(UserError) as raised:
    tables.table(lost, _DECLARED)
  assert "column 'id'" in str(raised.value) and "row 1" in str(raised.value)
  kept = [{**record, "id": 2**53 + record["key"]} for record in records]
  assert _by_record(kept) is not None


def test_a_frame_that_is_not_in_memory_is_one_line():
  class LazyFrame:
    def collect(self):
      raise AssertionError

    @property
    def columns(self):
      raise AssertionError("asking for the names runs the plan")

  with pytest.raises(UserError) as raised:
    tables.table(LazyFrame(), _DECLARED)
  assert "LazyFrame" in str(raised.value) and "collect()" in str(raised.value)
  polars = pytest.importorskip("polars")
  with pytest.raises(UserError) as raised:
    tables.table(polars.DataFrame(_one_table()).lazy(), _DECLARED)
  assert "LazyFrame" in str(raised.value)
  assert _by_record(polars.DataFrame(_one_table()).lazy().collect()) is not None


def test_rows_of_different_columns_are_one_line():
  for rows in ([{"a": 1}, {"b": 1}], [{"a": 1}, {}]):
    with pytest.raises(UserError) as raised:
      tables.table(rows, _DECLARED)
    assert "row 2 has other columns" in str(raised.value)
