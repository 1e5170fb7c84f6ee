"""Tables: what is declared is what is read, and all else ends in one line without a cell."""

import csv
import io
import json
import pathlib
import tempfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dpjax import data
from dpjax.data import table_declaration, table_files, tables
from dpjax.validate import UserError
from dpjax.zoo import datasets
from tests.refuses import refuses

_PEOPLE = "age,sex,job,ill\n30,f,nurse,no\n150,m,,yes\n60,f,smith,no\n-5,m,nurse,yes\n"


def declared(**changes):
  keys = {
    "columns": {
      "age": {"lower": 0, "upper": 120},
      "sex": {"values": ["f", "m"]},
      "job": {"values": ["nurse", "smith"], "missing": "smith"},
    },
    "target": {"column": "ill", "values": ["no", "yes"]},
    "split": {"test_share": 0.5, "salt": 5},
  }
  return {name: value for name, value in (keys | changes).items() if value is not None}


def written(folder, text=_PEOPLE, name="people.csv") -> pathlib.Path:
  path = pathlib.Path(folder) / name
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return path


def refused(path, declaration=None) -> str:
  """The one line with which a table is refused."""
  with pytest.raises(UserError) as caught:
    tables.table(path, declared() if declaration is None else declaration)
  (line,) = str(caught.value).splitlines()
  return line


def whole(pair):
  """Inputs and targets of both splits, as sorted rows: the split itself is another test."""
  rows = [
    (*x.tolist(), *np.ravel(y).tolist()) for part in pair for x, y in zip(part.x, part.y)
  ]
  return sorted(rows)


def test_numbers_are_scaled_by_their_bounds_and_categories_are_one_hot(tmp_path):
  pair = tables.table(written(tmp_path), declared())
  # age / 120, clipped; f, m; nurse, smith (also for the empty cell); ill.
  wanted = [
    (0.25, 1, 0, 1, 0, 0),
    (1.0, 0, 1, 0, 1, 1),
    (0.5, 1, 0, 0, 1, 0),
    (0.0, 0, 1, 1, 0, 1),
  ]
  assert whole(pair) == sorted(wanted)
  assert pair[0].x.dtype == np.float32 and pair[0].num_classes == 2
  assert tables.clipped_cells(tmp_path / "people.csv", declared()) == {"age": 2}


def test_nothing_is_learnt_from_other_rows(tmp_path):
  """What one row becomes is the same whatever stands in the others."""
  rows = _PEOPLE.splitlines()
  alone = written(tmp_path, "\n".join([*rows[:2], *rows[1:2] * 3]), name="alone.csv")
  usual = whole(tables.table(written(tmp_path), declared()))
  assert (
    set(whole(tables.table(alone, declared()))) == {usual[1]} == {(0.25, 1, 0, 1, 0, 0)}
  )


def test_the_split_follows_from_the_numbers_of_rows_alone(tmp_path):
  count = 4000
  text = lambda age: "age,ill\n" + "".join(f"{age},no\n" for _ in range(count))
  keys = declared(
    columns={"age": {"lower": 0, "upper": 9}}, split={"test_share": 0.25, "salt": 7}
  )
  sizes = [len(tables.table(written(tmp_path, text(age)), keys)[1]) for age in (1, 8)]
  assert sizes[0] == sizes[1]
  # Four standard deviations of a binomial of 4000 at 1/4.
  assert abs(sizes[0] - count / 4) < 4 * np.sqrt(count * 3 / 16)
  other = keys | {"split": {"test_share": 0.25, "salt": 8}}
  assert len(tables.table(tmp_path / "people.csv", other)[1]) != sizes[0]


def test_a_hashed_id_moves_no_other_row(tmp_path):
  rows = [f"{age},f,nurse,no,id{age}\n" for age in range(100)]
  keys = declared(split={"test_share": 0.3, "column": "id", "salt": 7})
  header = "age,sex,job,ill,id\n"
  ages = []
  for text in ("".join(rows), "".join(rows[1:]), "".join(rows[::-1])):
    train, test = tables.table(written(tmp_path, header + text), keys)
    assert len(train) + len(test) == text.count("\n") and len(test)
    ages.append(set((train.x[:, 0] * 120).round().astype(int).tolist()))
  assert ages[0] - ages[1] <= {0} and ages[1] <= ages[0] and ages[2] == ages[0]


class _NoPlainCell:
  """Has code of its own where a cell is read."""

  def __float__(self):
    raise RuntimeError("ran")

  __str__ = __float__


@pytest.mark.parametrize("column", ["age", "sex"])
def test_a_cell_that_is_no_plain_one_is_named(column):
  for cell in ([1], {}, 1j, np.ones(2), 10**5000, b"f", _NoPlainCell()):
    _check_named(column, cell)


def _check_named(column, cell):
  columns = {"age": [1, 2], "sex": ["f", "m"], "job": ["nurse"] * 2, "ill": ["no"] * 2}
  cells = np.empty(2, object)
  cells[0] = columns[column][0]
  cells[1] = cell
  with pytest.raises(UserError, match=f"row 2, column '{column}': must be text, a number"):
    tables.table(columns | {column: cells}, declared())


def test_the_hash_is_that_of_the_paper():
  """SplitMix64 of seed 0: the first outputs that its authors' C code prints."""
  outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
  wanted = [(value >> 11) / 2**53 for value in outputs]
  assert tables.hash_rows(np.arange(3), salt=0).tolist() == wanted


def test_splits_by_column_and_by_a_second_file(tmp_path):
  marked = written(tmp_path, "age,fold,ill\n12,a,no\n24,b,yes\n36,a,yes\n")
  columns = {"age": {"lower": 0, "upper": 120}}
  by_column = {"column": "fold", "train": ["a"], "test": ["b"]}
  train, test = tables.table(marked, declared(columns=columns, split=by_column))
  np.testing.assert_allclose(train.x[:, 0], [0.1, 0.3], rtol=1e-6)
  np.testing.assert_allclose(test.x[:, 0], [0.2], rtol=1e-6)
  ignored = declared(columns=columns, split=by_column, ignore=["fold"])
  assert whole(tables.table(marked, ignored)) == whole((train, test))
  first = written(tmp_path, "age,ill\n12,no\n36,yes\n", name="train.csv")
  written(tmp_path, "ill,age\nyes,24\n", name="held.csv")
  keys = declared(columns=columns, split={"test_file": "held.csv"})
  assert whole(tables.table(first, keys)) == whole((train, test))
  assert len(tables.table(first, keys)[1]) == 1


def test_a_declaration_is_a_dict_or_a_path_and_is_named_once(tmp_path):
  with refuses("declaration", value=["age"]):
    tables.table({"age": [1]}, ["age"])
  assert refused(written(tmp_path), {"size": 3}).count("declaration") == 1


def test_a_declaration_lies_beside_the_file_or_where_it_is_named(tmp_path):
  missing = tmp_path / "nowhere.csv"
  with refuses("name", value=str(missing)):
    tables.table(missing)
  with refuses("declaration"):
    tables.table(missing, tmp_path / "nowhere.toml")
  path = written(tmp_path)
  with refuses("name", value=str(path)):  # nobody named a declaration
    tables.table(path)
  (tmp_path / "people.json").write_text(json.dumps(declared(num_examples=3)))
  train, _ = data.load("people.csv", data_dir=tmp_path)
  assert train.nominal_size == 3
  (tmp_path / "other.toml").write_text(
    'target = {column = "ill", values = ["no", "yes"]}\nignore = "*"\n'
    "split = {test_share = 0.5, salt = 5}\n[columns]\nage = {lower = 0, upper = 120}\n"
  )
  train, _ = data.load("people.csv", data_dir=tmp_path, declaration="other.toml")
  assert train.x.shape[1:] == (1,)


def test_numbers_and_several_labels_as_targets(tmp_path):
  path = written(tmp_path, "age,dose,a,b\n30,5,1,0\n60,20,0,0\n90,-4,1,1\n")
  columns = {"age": {"lower": 0, "upper": 120}}
  keys = declared(
    columns=columns, target={"column": "dose", "lower": 0, "upper": 10}, ignore=["a", "b"]
  )
  train, test = tables.table(path, keys)
  assert train.target == data.Interval(0, 10) and train.num_classes == 1
  # Equal bounds have one text, which the digest of a data set covers.
  assert repr(data.Interval(-0.0, 1)) == repr(data.Interval(0, 1))
  assert sorted(np.concatenate([train.y, test.y]).tolist()) == [-1.0, 0.0, 1.0]
  labels = {"columns": ["a", "b"], "values": [0, 1]}
  train, test = tables.table(
    path, declared(columns=columns, target=labels, ignore=["dose"])
  )
  assert train.target == data.Labels(("a", "b")) and train.num_classes == 2
  assert sorted(np.concatenate([train.y, test.y]).tolist()) == [[0, 0], [1, 0], [1, 1]]


@pytest.mark.parametrize(
  "text, says",
  [
    ("", "is empty; its first line must name the columns"),
    ("age,sex,job,ill\n", "holds no rows"),
    ("age,sex,ill\n1,f,no\n", "has no column 'job'"),
    ("age,sex,jbo,ill\n1,f,a,no\n", "has no column 'job' (did you mean 'jbo'?)"),
    ("age,age,sex,job,ill\n1,1,f,nurse,no\n", "has two columns named 'age'"),
    ("age,sex,job,ill,id\n1,f,nurse,no,4\n", "column 'id' is not declared"),
    ("age,sex,job,ill\n1,f,nurse\n", "line 2: has 3 cells, and the first line names 4"),
    ("age,sex,job,ill\n1,f,nurse,no,9\n", "line 2: has 5 cells"),
    (_PEOPLE.replace("30", "nan"), "line 2, column 'age': holds no value"),
    (_PEOPLE.replace("30", "٣"), "line 2, column 'age': is no finite number"),
    (_PEOPLE.replace("60", "inf"), "line 4, column 'age': is no finite number"),
    (_PEOPLE.replace("60", "1e999"), "line 4, column 'age': is no finite number"),
    (_PEOPLE.replace("60", "1_0"), "line 4, column 'age': is no finite number"),
    (_PEOPLE.replace("60", "'sixty'"), "line 4, column 'age': is no finite number"),
    (_PEOPLE.replace("60", ""), "line 4, column 'age': holds no value"),
    (_PEOPLE.replace(",f,", ",x,"), "line 2, column 'sex': is none of the declared"),
    (_PEOPLE.replace(",no", ",maybe"), "'ill': is none of the declared values; add it to `values`"),
    (_PEOPLE.replace(",no", ","), "column 'ill': holds no value, and must have one in each row"),
    (_PEOPLE.replace("60", "old"), "or declare `values` in place of lower and upper"),
    (_PEOPLE.replace("150,m", "150,"), "line 3, column 'sex': holds no value"),
    (_PEOPLE.replace("60,f,smith,no", "\n60,f,smith,no"), "line 4: is blank"),
    (_PEOPLE.replace("30", '"30'), "line 2:"),
    (_PEOPLE.replace("30", '"3"0'), "line 2: "),
    (_PEOPLE.encode("utf-16"), "begins with the mark of UTF-16"),
    (_PEOPLE.replace("smith", "smïth").encode("latin-1"), "is not text in utf-8"),
    (b"PK\x03\x04 and so on", "is an archive"),
    (b"\x00\x01\x02\x03", "has no column 'age'"),
    ("age;sex;job;ill\n1;f;nurse;no\n", "`delimiter`"),
    # Without a header the first line is a row, of which no cell is shown.
    ("4711,4711,nurse,no\n1,f,nurse,no\n", "has no column 'age'"),
  ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_that_shows_no_cell(tmp_path, text, says):
  line = refused(written(tmp_path, text))
  assert says in line and line.startswith(f"name='{tmp_path}/people.csv': ")
  assert not any(cell in line for cell in ("sixty", "nurse", "150", "1e999"))


def test_a_row_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
  monkeypatch.setattr(table_files, "_MOST_OF_ROW", 1000)
  endless = "age,sex,job,ill\n" + "1," * 3000
  assert "a row is longer than 1000 characters" in refused(written(tmp_path, endless))
  # An open quote takes the lines after it into one cell.
  quoted = "age,sex,job,ill\n" + '1,f,"nurse,no\n' + "2,f,nurse,no\n" * 300
  assert "is a quote left open" in refused(written(tmp_path, quoted))


@pytest.mark.parametrize(
  "change, says",
  [
    ({"columns": {}}, "must declare at least one column"),
    (
      {"columns": {"age": {"lower": 9, "upper": 1}}},
      "columns.age.upper=1.0: must be > lower",
    ),
    ({"columns": {"age": {"lower": 0}}}, "columns.age: has no 'upper'"),
    ({"columns": {"age": {}}}, "nothing is estimated from private rows"),
    ({"columns": {"age": {"lower": 0, "upper": "x"}}}, "columns.age.upper='x'"),
    ({"columns": {"age": {"lower": 0, "upper": float("nan")}}}, "columns.age.upper=nan"),
    ({"columns": {"age": {"min": 0}}}, "unknown key 'min'"),
    ({"columns": {"sex": {"values": []}}}, "columns.sex.values=[]"),
    ({"columns": {"sex": {"values": ["f", "f"]}}}, "columns.sex.values: names 'f' twice"),
    ({"columns": {"sex": {"values": [float("nan")]}}}, "columns.sex.values=nan: must be"),
    ({"columns": {"sex": {"values": [1, 1.0]}}}, "columns.sex.values: names '1' twice"),
    ({"columns": {"sex": {"values": [0, False]}}}, "columns.sex.values: names"),
    ({"columns": {"sex": {"values": ["True", "true"]}}}, "names 'true' twice"),
    ({"columns": {"sex": {"values": [1], "other": 2}}}, "columns.sex.other='2'"),
    ({"columns": {"sex": {"values": ["f"], "missing": "m"}}}, "columns.sex.missing='m'"),
    ({"columns": {"age": {"lower": 0, "upper": 1, "missing": 7}}}, "columns.age.missing=7"),
    ({"target": None}, "target: must be a table of keys and values, not nothing"),
    (
      {"target": {"column": "sex", "values": ["f", "m"]}},
      "column='sex': is declared twice",
    ),
    ({"ignore": ["age"]}, "column='age': is declared twice"),
    ({"target": {"columns": ["a", "b"], "values": [1, 2, 3]}}, "two `values`"),
    ({"split": {"test_share": 1.0}}, "split.test_share=1.0"),
    ({"split": {"test_share": 0.1, "test_file": "a.csv"}}, "split: must have one of"),
    ({"split": {"test_file": "a.csv", "salt": 1}}, "split.salt: is not read"),
    ({"split": {"test_share": 0.1, "column": "sex"}}, "column='sex': is declared twice"),
    (
      {"split": {"test_share": 0.1, "column": "id", "train": ["a"]}},
      "split.train: is not read",
    ),
    ({"split": {"column": "f", "train": ["a"], "test": ["a"]}}, "split.test='a'"),
    ({"delimiter": ";;"}, "delimiter=';;': must be one character"),
    ({"encoding": "utf-88"}, "encoding='utf-88': must be an encoding"),
    ({"encoding": "zlib"}, "encoding='zlib'"),
    ({"num_examples": 0}, "num_examples=0"),
    ({"colums": {}}, "did you mean 'columns'"),
  ],
)
def test_a_wrong_declaration_names_its_key(tmp_path, change, says):
  line = refused(written(tmp_path), declared(**change))
  assert line.startswith("declaration: ") and says in line


@pytest.mark.parametrize(
  "name, text, says",
  [("a.toml", "columns = ", "is no TOML"), ("a.json", "{", "is no JSON"),
   ("a.toml", b"\xff\xfe", "is no TOML"), ("a.json", "[" * 5000, "is no JSON"),
   ("a.json", "[]", "must hold an object")],
)  # fmt: skip
def test_a_file_that_is_no_declaration_is_named(tmp_path, name, text, says):
  other = written(tmp_path, text, name=name)
  assert f"declaration='{other}': {says}" in refused(written(tmp_path), other)


def test_a_delimiter_an_encoding_and_a_byte_order_mark(tmp_path):
  usual = whole(tables.table(written(tmp_path), declared()))
  semicolons = written(tmp_path, _PEOPLE.replace(",", " ; "), name="a.csv")
  assert whole(tables.table(semicolons, declared(delimiter=";"))) == usual
  tabs = written(tmp_path, _PEOPLE.replace(",", "\t"), name="a.tsv")
  assert whole(tables.table(tabs, declared())) == usual
  marked = written(tmp_path, b"\xef\xbb\xbf" + _PEOPLE.encode(), name="b.csv")
  assert whole(tables.table(marked, declared())) == usual
  wide = written(tmp_path, _PEOPLE.encode("utf-16"), name="c.csv")
  assert whole(tables.table(wide, declared(encoding="utf-16"))) == usual
  ends = written(tmp_path, _PEOPLE.replace("\n", "\r\n") + "\r\n\r\n", name="d.csv")
  assert whole(tables.table(ends, declared())) == usual


# What is right of every kind of file and frame: test_doors.py.


def _people():
  rows = list(csv.DictReader(io.StringIO(_PEOPLE)))
  columns = {name: [row[name] or None for row in rows] for name in rows[0]}
  return columns | {"age": [float(age) for age in columns["age"]]}


def test_a_wrong_parquet_is_one_line(tmp_path):
  arrow = pytest.importorskip("pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  path, columns = tmp_path / "people.parquet", _people()
  parquet.write_table(arrow.table(columns), path)
  assert whole(tables.table(path, declared())) == whole(
    tables.table(written(tmp_path), declared())
  )
  columns["age"][2] = float("nan")
  parquet.write_table(arrow.table(columns), path)
  assert "row 3, column 'age': holds no value" in refused(path)
  parquet.write_table(arrow.table(columns | {"age": [[1.0]] * 4}), path)
  assert "column 'age': must be text, a number or a boolean, not list" in refused(path)
  path.write_bytes(b"PAR1 and nothing else")
  assert "is no readable Parquet file" in refused(path)


def test_wrong_columns_are_one_line():
  columns = _people()
  columns["age"][1] = np.nan
  for wrong in (columns, columns | {"age": [1.0]}):
    with refuses("table"):
      tables.table(wrong, declared())
  with refuses("source"):
    tables.table([1, 2], declared())
  with refuses("declaration"):
    tables.table(columns)


def test_clients_are_the_values_of_a_column(tmp_path):
  path = written(
    tmp_path,
    "ward,age,ill\n" + "".join(f"{'ab'[i % 2]},{i},no\n" for i in range(40)),
  )
  keys = declared(columns={"age": {"lower": 0, "upper": 40}}, ignore=["ward"])
  pair = datasets.natural_federation(str(path), client_id="ward", declaration=keys)
  assert pair[0].client_ids == ("a", "b")
  ages = pair[0].client("b").x[:, 0] * 40
  assert len(ages) and (np.round(ages) % 2 == 1).all()


# --- whatever is written reads back, or is refused


_TEXT = st.text(
  st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=6
)
_CELL = st.one_of(
  _TEXT,
  st.floats().map(repr),
  st.integers().map(str),
  st.sampled_from(
    ["", " ", "nan", "f", "m", " f", '"', '"f"', "f\nm", "0", "1e3", "\ufeff"]
  ),
)


@hypothesis.settings(max_examples=60, derandomize=True)
@hypothesis.given(rows=st.lists(st.tuples(_CELL, _CELL), min_size=1, max_size=5))
def test_generated_tables_round_trip_or_end_in_one_line(rows):
  """The oracle reads each cell by itself, in Python's own words."""
  stream = io.StringIO()
  writer = csv.writer(stream, lineterminator="\n")
  writer.writerows(
    [("size", "kind", "fold"), *((*row, "a") for row in rows), (1, "f", "b")]
  )
  keys = {
    "columns": {"size": {"lower": -10, "upper": 10}},
    "target": {"column": "kind", "values": ["f", "m"]},
    "split": {"column": "fold", "train": ["a"], "test": ["b"]},
  }

  def of_cell(text):
    number = float(text.strip()) if "_" not in text and text.isascii() else np.nan
    return np.clip((number + 10) / 20, 0, 1) if np.isfinite(number) else None

  wanted = []
  for size, kind in rows:
    try:
      wanted.append((of_cell(size), ["f", "m"].index(kind.strip())))
    except ValueError:
      wanted.append((None, None))
  with tempfile.TemporaryDirectory() as folder:
    path = written(folder, stream.getvalue())
    try:
      train, _ = tables.table(path, keys)
    except UserError as error:
      assert len(str(error).splitlines()) == 1
      assert any(None in row for row in wanted)
      return
  assert not any(None in row for row in wanted)
  np.testing.assert_allclose(train.x[:, 0], [row[0] for row in wanted], atol=1e-6)
  assert train.y.tolist() == [row[1] for row in wanted]


@hypothesis.settings(max_examples=60, derandomize=True)
@hypothesis.given(content=st.binary(max_size=60))
def test_bytes_of_any_kind_end_in_one_line(content):
  with tempfile.TemporaryDirectory() as folder:
    line = refused(written(folder, content))
  assert line


@hypothesis.settings(max_examples=60, derandomize=True)
@hypothesis.given(
  source=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: (
      st.lists(inner, max_size=3)
      | st.dictionaries(
        st.sampled_from(
          ["columns", "target", "split", "values", "lower", "upper", "column"]
        )
        | _TEXT,
        inner,
        max_size=4,
      )
    ),
    max_leaves=12,
  )
)
def test_any_declaration_is_read_or_refused_in_one_line(source):
  try:
    table_declaration.parse(source)
  except UserError as error:
    assert len(str(error).splitlines()) == 1


_VALUE = (
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.decimals()
  | st.dates()
  | _TEXT
  | st.lists(st.integers(), max_size=1)
  | st.sampled_from(
    [10**400, 2**53, "1.0", "True", "nan", b"a", np.int64(1), np.float32(0.1)]
  )
)
_VALUES = st.lists(_VALUE, max_size=3)


@hypothesis.settings(max_examples=200, derandomize=True)
@hypothesis.given(
  values=_VALUES,
  none=_VALUES,
  train=_VALUES,
  other=_VALUE,
  cells=st.lists(_VALUE, min_size=2),
)
def test_any_values_are_read_or_refused_in_one_line(values, none, train, other, cells):
  declaration = {
    "columns": {"a": {"values": values, "other": other, "missing": other}},
    "target": {"column": "y", "values": [0]},
    "split": {"column": "fold", "train": train, "test": ["b"]},
    "missing_values": none,
  }
  columns = {"a": cells, "y": [0] * len(cells), "fold": ["b", *train, *cells][: len(cells)]}
  try:
    train_set, test_set = tables.table(columns, declaration)
  except UserError as error:
    assert len(str(error).splitlines()) == 1
  else:
    assert len(train_set) + len(test_set) == len(cells)


_SEXES = {"column": "sex", "values": ["f", "m"]}


@pytest.mark.parametrize("is_input", [True, False])
def test_test_rows_know_the_group_that_is_declared(is_input):
  columns = {
    "age": [1, 2, 3, 4],
    "sex": list("fmmf"),
    "ill": [0, 1, 0, 1],
    "fold": list("abab"),
  }
  inputs = {"age": {"lower": 0, "upper": 4}}
  declared = {
    "columns": inputs | ({"sex": {"values": ["f", "m"]}} if is_input else {}),
    "group": "sex" if is_input else _SEXES,
    "target": {"column": "ill", "values": [0, 1]},
    "split": {"column": "fold", "train": ["a"], "test": ["b"]},
  }
  train, test = tables.table(columns, declared)
  if not is_input:
    ignoring = tables.table(columns, declared | {"ignore": ["sex", "fold"]})
    assert whole(ignoring) == whole((train, test))
  assert train.groups is None  # nothing needs those of private rows
  assert (test.groups.column, test.groups.names) == ("sex", ("f", "m"))
  assert test.groups.places.tolist() == [1, 0]
  assert test.subset([1]).groups.places.tolist() == [0]
  assert test.x.shape == (2, 3 if is_input else 1)
  # A server reads no group; it may be sent.
  assert (
    tables.inputs(
      {"age": [4], "sex": ["?"]}, declared | {"columns": inputs, "group": _SEXES}
    )
    == 1
  )


@pytest.mark.parametrize(
  ("group", "field"),
  [
    ("age", "group"),
    ("hospital", '{column = "hospital", values = [...]}'),
    ({"column": "sex"}, "group"),
    (_SEXES | {"column": "age"}, "group.column"),
  ],
)
def test_a_group_that_is_no_public_category_is_refused(group, field):
  declared = {
    "columns": {"age": {"lower": 0, "upper": 4}},
    "group": group,
    "target": {"column": "ill", "values": [0, 1]},
    "split": {"test_share": 0.5},
  }
  with refuses("declaration") as caught:
    tables.table({"age": [1], "ill": [0]}, declared)
  assert field in str(caught.value)


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_inputs_are_read_as_the_nearest_inputs(seed):
  """`rows_of` is the inverse of `inputs`, on what cells can have."""
  declared = {
    "columns": {
      "age": {"lower": -7, "upper": 120},
      "city": {"values": ["a", "b, c", "7"]},
      "dose": {"lower": 1e-3, "upper": 2e-3},
    },
    "target": {"column": "ill", "values": ["no", "yes"]},
    "split": {"test_share": 0.5},
  }
  rng = np.random.default_rng(seed)
  x, y = rng.uniform(-0.2, 1.2, (20, 5)), rng.integers(0, 2, 20)
  parsed = table_declaration.parse(declared)
  nearest = tables.nearest_inputs(x, parsed)
  columns = tables.rows_of(x, y, parsed)
  assert list(columns) == ["age", "city", "dose", "ill"]
  assert columns["ill"] == [("no", "yes")[label] for label in y]
  np.testing.assert_allclose(tables.inputs(columns, declared), nearest, atol=1e-6)
  assert (nearest[:, 1:4].sum(axis=1) == 1).all()
  np.testing.assert_array_equal(nearest[:, 1:4].argmax(axis=1), x[:, 1:4].argmax(axis=1))
