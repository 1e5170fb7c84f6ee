"""Clients that the data name: every format that is read, and what can be wrong in each."""

import json
import sqlite3
import types

import numpy as np
import pytest

from dpjax import data
from dpjax.sampling import group_by_user
from dpjax.validate import UserError
from dpjax.zoo import datasets
from dpjax.zoo.datasets import tff
from tests.refuses import refuses
from tests.zoo import client_files


def _dataset(n=4):
  return data.from_arrays(np.arange(1.0 * n)[:, None], np.zeros(n, int), num_classes=1)


def one_line(call, *args, **named) -> str:
  with pytest.raises(UserError) as caught:
    call(*args, **named)
  assert "\n" not in str(caught.value) and str(caught.value)
  return str(caught.value)


# --- ids


@pytest.mark.parametrize(
  "ids",
  [
    ["7", "12", "7", "12"],
    [7, 12, 7, 12],
    [b"7", b"12", b"7", b"12"],
    np.array([7, 12, 7, 12]),
    np.array(["7", "12", "7", "12"]),
    np.array([b"7", b"12", b"7", b"12"]),
    [np.int64(7), np.array(12), "7", b"12"],
  ],
)
def test_one_id_is_one_client_however_it_is_written(ids):
  fed = data.by_client(_dataset(), ids)
  assert fed.client_ids == ("12", "7")  # by id, not by who comes first
  assert [rows.tolist() for rows in fed.indices] == [[1, 3], [0, 2]]


def test_names_are_not_cut_nor_joined():
  """NumPy's own strings drop a NUL at the end, and so would join two users."""
  fed = data.by_client(_dataset(), ["a", "a\0", "A", "é"])
  assert fed.client_ids == ("A", "a", "a\0", "é") and fed.sizes.tolist() == [1] * 4


def test_a_client_has_the_same_rows_whoever_else_is_there():
  """Which are kept of each depends on no other client's records."""
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 9, 200).astype(str)
  whole = data.by_client(_dataset(200), ids, max_examples=5)
  assert whole.sizes.tolist() == [5] * 9 and len(whole.dataset) == 45
  for gone in ("0", "4", "8"):
    left = np.flatnonzero(ids != gone)
    fewer = data.by_client(_dataset(200).subset(left), ids[left], max_examples=5)
    assert set(fewer.client_ids) == set(whole.client_ids) - {gone}
    for client in fewer.client_ids:
      mine = np.flatnonzero(ids == client)[:5]
      np.testing.assert_array_equal(fewer.client(client).x.ravel(), mine)
      np.testing.assert_array_equal(whole.client(client).x.ravel(), mine)


def test_stretches_of_one_client_are_joined_and_an_empty_one_is_a_client():
  fed = data.by_client(_dataset(), ["b", "a", "c", "b"], sizes=[2, 1, 0, 1])
  assert fed.client_ids == ("a", "b", "c")
  assert [rows.tolist() for rows in fed.indices] == [[2], [0, 1, 3], []]


def test_clients_agree_with_the_blocks_of_user_level_sampling():
  ids = ["b", "a", "b", "c"]
  fed = data.by_client(_dataset(), ids)
  blocks = group_by_user(_dataset(), ids, max_examples_per_user=2)
  for rows, members, mask in zip(fed.indices, blocks.members, blocks.mask):
    assert rows.tolist() == members[mask].tolist()


@pytest.mark.parametrize(
  ("ids", "says"),
  [
    (["a", "", "b", "c"], "place 1 is empty"),
    ([b"a", b"", b"b", b"c"], "place 1 is empty"),
    ([b"a", b"\xff", b"b", b"c"], "must be UTF-8"),
    (["a", "\ud800", "b", "c"], "must be UTF-8"),
    ([1.0, 2.0, 3.0, 4.0], "text or integers, got 1.0"),
    ([1, 2, float("nan"), 4], "text or integers, got nan"),
    ([True, False, True, True], "text or integers, got True"),
    ([None, "a", "b", "c"], "got None"),
    (np.array([["a"], ["b"], ["c"], ["d"]]), "text or integers"),
    (["a", "b", "c"], "must be one for each example"),
    ([], "must be one for each example"),
  ],
)
def test_ids_that_are_none(ids, says):
  assert says in one_line(data.by_client, _dataset(), ids)


@pytest.mark.parametrize("most", [0, -1, 1.5])
def test_a_bound_that_is_none(most):
  assert "max_examples" in one_line(
    data.by_client, _dataset(), list("abcd"), max_examples=most
  )


# --- tensorflow-datasets


@pytest.fixture
def tweets(tmp_path, tfds_files):
  """Two users, unsorted, and a third in the test alone; the ids as text and as numbers."""
  features = {
    "text": tfds_files.text_feature(),
    "label": tfds_files.label_feature(2),
    "user": tfds_files.text_feature(),
    "number": tfds_files.label_feature(100),
  }
  rows = [(b"hi", 1, "zoë", 10), (b"no", 0, "ann", 9), (b"ah", 0, "zoë", 10)]
  named = [dict(zip(features, (t, y, u.encode(), n))) for t, y, u, n in rows]
  other = [{"text": b"who", "label": 1, "user": b"new", "number": 99}]
  splits = {"train": named, "test": [*named[:1], *other]}
  tfds_files.write(tmp_path, "tweets", features, splits)
  return tmp_path


@pytest.mark.slow
def test_prepared_data_by_any_field(tweets):
  train, test = datasets.natural_federation(
    "tweets", tweets, client_id="user", max_length=2
  )
  assert train.client_ids == ("ann", "zoë") and test.client_ids == ("new", "zoë")
  assert train.client("zoë").x.tolist() == [[*b"hi"], [*b"ah"]]
  assert train.dataset.vocab_size == 256 and train.dataset.num_classes == 2
  train, _ = datasets.natural_federation(
    "tweets", tweets, client_id="number", max_examples=1
  )
  assert train.client_ids == ("10", "9") and train.client("10").y.tolist() == [1]


def test_a_field_that_is_not_there(tweets):
  message = one_line(datasets.natural_federation, "tweets", tweets, client_id="usr")
  assert (
    "has no field 'usr' (did you mean 'user'?)" in message and "name='tweets'" in message
  )
  assert "client_id=''" in one_line(datasets.natural_federation, "tweets", tweets)
  message = one_line(datasets.natural_federation, "mnist", tweets, client_id="writer")
  assert "python -m launch.prepare --dataset=mnist" in message


# --- .npz and a function of one's own


def _npz(path, **changed):
  arrays = {
    "x_train": np.ones((3, 2), np.float32), "y_train": [0, 1, 1],
    "x_test": np.ones((1, 2), np.float32), "y_test": [0], "num_classes": 2,
    "who_train": ["b", "a", "b"], "who_test": ["c"],
  } | changed  # fmt: skip
  kept = {key: value for key, value in arrays.items() if value is not None}
  np.savez(path, **kept)
  return str(path)


def test_arrays_of_ones_own_with_a_column_of_ids(tmp_path):
  path = _npz(tmp_path / "own.npz")
  train, test = datasets.natural_federation(path, client_id="who")
  assert train.client_ids == ("a", "b") and test.client_ids == ("c",)
  assert train.client("b").y.tolist() == [0, 1]


@pytest.mark.parametrize(
  ("changed", "says"),
  [
    ({"who_test": None}, "has no who_test"),
    ({"who_train": ["a", "b"]}, "must be one for each example"),
    ({"who_train": [1.5, 2, 2]}, "text or integers"),
    ({"y_train": [0, 1, 2]}, "outside [0, num_classes=2)"),
  ],
)
def test_columns_that_do_not_fit(tmp_path, changed, says):
  path = _npz(tmp_path / "own.npz", **changed)
  assert says in one_line(datasets.natural_federation, path, client_id="who")


def _module(monkeypatch, made):
  module = types.ModuleType("my_clients")
  module.load = lambda: made
  monkeypatch.setitem(__import__("sys").modules, "my_clients", module)
  return "my_clients:load"


def test_a_function_of_ones_own(monkeypatch):
  fed = data.by_client(_dataset(), list("abca"))
  path = _module(monkeypatch, (fed, fed))
  assert datasets.natural_federation(path) == (fed, fed)
  assert "client_id='x': would be ignored" in one_line(
    datasets.natural_federation, path, client_id="x"
  )
  path = _module(monkeypatch, (_dataset(), _dataset()))
  assert "two dpjax.data.Federation" in one_line(datasets.natural_federation, path)


# --- LEAF


def _images(n, side=2):
  return [[0.25 * (i + 1)] * side**2 for i in range(n)]


def _leaf(folder, **changed):
  train = {"train": [{"f1": (_images(2), [0, 1]), "f0": (_images(1), [2])},
                     {"f1": (_images(1), [1]), "empty": ([], [])}]}  # fmt: skip
  test = {"test": [{"f9": (_images(1), [2])}]}
  return client_files.leaf(folder, train | test | changed)


@pytest.mark.slow
def test_leaf_joins_a_writer_who_is_in_two_files(tmp_path):
  root = _leaf(tmp_path / "femnist")
  train, test = datasets.leaf_federation(root, num_classes=3, shape=(2, 2, 1))
  assert train.client_ids == ("empty", "f0", "f1") and train.sizes.tolist() == [0, 1, 3]
  assert train.client("f1").y.tolist() == [0, 1, 1] and test.client_ids == ("f9",)
  assert train.dataset.x.shape == (4, 2, 2, 1) and train.dataset.x.dtype == np.float32
  flat, _ = datasets.leaf_federation("femnist", tmp_path, num_classes=3, max_examples=1)
  assert flat.sizes.tolist() == [0, 1, 1] and flat.dataset.x.shape == (2, 4)


def test_leaf_with_ints_for_pixels_is_no_text(tmp_path):
  root = _leaf(tmp_path, train=[{"a": ([[0, 1, 1, 0]], [0])}])
  train, _ = datasets.leaf_federation(root, num_classes=3)
  assert train.dataset.x.dtype == np.float32


def test_leaf_tweets_and_next_characters(tmp_path):
  tweet = lambda words: ["17", "Mon Apr 06", "NO_QUERY", "ann", words, "training"]
  users = {"ann": ([tweet("hi"), tweet("ho")], [1, 0])}
  root = client_files.leaf(tmp_path / "s", {"train": [users], "test": [users]})
  train, _ = datasets.leaf_federation(root, num_classes=2, max_length=3)
  assert train.client("ann").x.tolist() == [[*b"hi", 0], [*b"ho", 0]]
  users = {"HAMLET": (["to be", "o be "], [" ", "o"])}
  root = client_files.leaf(tmp_path / "h", {"train": [users], "test": [users]})
  train, _ = datasets.leaf_federation(root, max_length=5)
  assert train.dataset.y.tolist() == [32, 111] and train.dataset.num_classes == 256
  assert "one of 256" in one_line(datasets.leaf_federation, root, num_classes=2)


def _file(**changed):
  held = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1]], "y": [0]}}}
  return json.dumps(held | changed)


def test_leaf_of_2019_and_a_byte_order_mark(tmp_path):
  """Its splitter wrote an empty entry for each user of the other split."""
  folder = client_files.leaf(tmp_path, {"train": [], "test": [{"a": ([[1]], [0])}]})
  empty = {"x": [], "y": []}
  content = _file(user_data={"a": {"x": [[1]], "y": [0]}, "b": empty})
  (folder / "train" / "all_data_0.json").write_bytes(b"\xef\xbb\xbf" + content.encode())
  train, _ = datasets.leaf_federation(folder, num_classes=2)
  assert train.client_ids == ("a",) and len(train.dataset) == 1


_TWICE = (
  '{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [0]}, "a": {"x": [], "y": []}}}'
)


@pytest.mark.parametrize(
  ("content", "says"),
  [
    (_file()[:40], "is no file of LEAF (JSONDecodeError"),
    ("", "is no file of LEAF"),
    ("[]", "is no file of LEAF (TypeError"),
    ('{"users": ["a"]}', "KeyError: 'user_data'"),
    (_file(users=["a", "b"]), '"users" must name those of "user_data"'),
    (
      _file(user_data={name: {"x": [[1]], "y": [0]} for name in "ab"}),
      '"users" must name those of "user_data" that have samples',
    ),
    (_file(users=["a", "a"]), "each once"),
    (_file(num_samples=[2]), '"num_samples" are not'),
    (_TWICE, "'a' is there twice"),
    (_file(user_data={"a": {"x": [[1]], "y": []}}), "user 'a' has 1 x and 0 y"),
    (_file(user_data={"a": {"x": [[1]]}}), "KeyError: 'y'"),
    (_file(user_data={"a": {"x": [[float("nan")]], "y": [0]}}), "1 are not"),
    (_file(user_data={"a": {"x": [[1e300]], "y": [0]}}), "finite in float32"),
    (_file(user_data={"a": {"x": [[1]], "y": [5]}}), "outside [0, num_classes=2)"),
    (_file(user_data={"a": {"x": [[1]], "y": [0.5]}}), "must hold integer class labels"),
    (_file(user_data={"a": {"x": [["b"]], "y": [0]}}), "x: <U1 of shape"),
    (_file(user_data={"a": {"x": [None], "y": [0]}}), "x: object of shape"),
    (_file(user_data={"a": {"x": [[1], [1, 2]], "y": [0, 1]}}, num_samples=[2]), "ValueError"),
    (_file(user_data={"a": {"x": [], "y": []}}, num_samples=[0]), "found none"),
    (b"\xff\xfe", "is no file of LEAF (UnicodeDecodeError"),
  ],
)  # fmt: skip
def test_files_of_leaf_that_are_none(tmp_path, monkeypatch, content, says):
  folder = client_files.leaf(tmp_path, {"train": [], "test": [{"a": ([[1]], [0])}]})
  raw = content if isinstance(content, bytes) else content.encode()
  (folder / "train" / "all_data_0.json").write_bytes(raw)
  # A long path would be cut in its middle.
  monkeypatch.chdir(tmp_path.parent)
  message = one_line(datasets.leaf_federation, folder.name, num_classes=2)
  assert says in message and message.startswith(f"name='{folder.name}'")


def test_leaf_says_what_makes_its_folder(tmp_path):
  assert "preprocess.sh" in one_line(datasets.leaf_federation, "none", tmp_path)
  root = _leaf(tmp_path / "f")
  assert "num_classes: must be declared" in one_line(datasets.leaf_federation, root)
  options = {"num_classes": 3}
  for shape in ((2, 3), (-2, -2), (2.0, 2)):
    assert "shape=" in one_line(datasets.leaf_federation, root, shape=shape, **options)
  mixed = client_files.leaf(tmp_path / "m", {
    "train": [{"a": ([[1.0]], [0]), "b": ([[1.0, 2.0]], [0])}],
    "test": [{"a": ([[1.0]], [0])}]})  # fmt: skip
  assert "one kind and shape" in one_line(datasets.leaf_federation, mixed, **options)


# --- TensorFlow Federated


def _database(path, **changed):
  return client_files.sqlite(
    path / "emnist_all.sqlite",
    {
      "all_train": [
        ("f1", client_files.emnist(1)[0]),
        ("f0", client_files.emnist(1, label=5, shade=1.0)[0]),
        ("f1", client_files.emnist(1, label=7)[0]),
      ],
      "all_test": [("f0", client_files.emnist(1)[0])],
      "digits_only_train": [("f0", client_files.emnist(1)[0])],
    },
    **changed,
  )


def test_a_database_of_tff_by_writer(tmp_path):
  train, test = datasets.tff_federation(_database(tmp_path), num_classes=62)
  assert train.client_ids == ("f0", "f1") and train.dataset.x.shape == (3, 28, 28, 1)
  assert train.client("f1").y.tolist() == [0, 7] and test.client_ids == ("f0",)
  np.testing.assert_array_equal(train.client("f0").x, 1.0)
  train, _ = datasets.tff_federation(
    "emnist_all.sqlite", tmp_path, num_classes=62, max_examples=1
  )
  assert train.client("f1").y.tolist() == [0] and len(train.dataset) == 2


def test_blocks_of_a_database_do_not_show(tmp_path, monkeypatch):
  whole, _ = datasets.tff_federation(_database(tmp_path), num_classes=62)
  for size in (1, 2):
    monkeypatch.setattr(tff, "_BLOCK", size)
    parts, _ = datasets.tff_federation(tmp_path / "emnist_all.sqlite", num_classes=62)
    assert data.digest(parts) == data.digest(whole)


def test_sentences_have_no_labels(tmp_path):
  say = lambda words: client_files.example(tokens=words, tags=b"c|java", score=3)
  splits = {"train": [("u", say(b"how to")), ("v", say(b"no"))], "test": [("w", say(b"x"))]}
  counts = {("u", "train"): 1, ("v", "train"): 1, ("mute", "train"): 0, ("w", "test"): 1}
  path = client_files.sqlite(tmp_path / "stackoverflow.sqlite", splits, counts)
  train, _ = datasets.tff_federation(path, max_length=4)
  assert train.client("u").x.tolist() == [[*b"how "]] and train.sizes.tolist() == [0, 1, 1]
  assert train.dataset.num_classes == 1 and train.dataset.vocab_size == 256
  assert "no classes" in one_line(datasets.tff_federation, path, num_classes=5)


_OF_F1 = {("f0", "all_train"): 1, ("f0", "all_test"): 1}


@pytest.mark.parametrize(
  ("told", "says"),
  [
    (_OF_F1 | {("f1", "all_train"): 3}, "client 'f1' has 2 examples in all_train, client_"),
    (_OF_F1 | {("f1", "all_train"): 1}, "client_metadata says 1"),
    (_OF_F1, "client_metadata says 0"),
    (_OF_F1 | {("f1", "all_train"): 10**12}, "tells of 1000000000001 examples"),
    (_OF_F1 | {("f1", "all_train"): -1}, "tells of"),
    ({("f0", "all_train"): 1}, "must hold the splits train and test, has ['all_train']"),
  ],
)
def test_a_database_that_contradicts_itself(tmp_path, told, says):
  path = _database(tmp_path, told=told)
  assert says in one_line(datasets.tff_federation, path, num_classes=62)


_ZEROS = np.zeros(784)


@pytest.mark.parametrize(
  ("record", "says"),
  [
    ({"pixels": np.full(784, np.nan), "label": 0}, "x: every value must be finite"),
    ({"pixels": np.zeros(4), "label": 0}, "pixels: must be (28, 28, 1)"),
    ({"pixels": _ZEROS, "label": 62}, "outside [0, num_classes=62)"),
    ({"pixels": _ZEROS, "label": -1}, "outside [0, num_classes=62)"),
    ({"pixels": _ZEROS}, "has no label"),
    ({"label": 0}, "must hold one of pixels"),
    ({"image": np.full(3072, 300), "label": 0}, "must be bytes"),
    (b"\xff\xff", "DecodeError"),
    (b"", "must hold one of pixels"),
    (None, "cannot be read"),
    ("text", "cannot be read"),
  ],
)
def test_records_that_are_none(tmp_path, record, says):
  record = client_files.example(**record) if isinstance(record, dict) else record
  rows = {"train": [("a", record)], "test": [("a", record)]}
  path = client_files.sqlite(tmp_path / "x.sqlite", rows)
  assert says in one_line(datasets.tff_federation, path, num_classes=62)


def test_a_pixel_too_few_and_one_too_many_are_not_two_images(tmp_path):
  make = lambda size: client_files.example(pixels=np.zeros(size), label=0)
  rows = {"train": [("a", make(783)), ("b", make(785))], "test": [("a", make(784))]}
  path = client_files.sqlite(tmp_path / "x.sqlite", rows)
  assert "numbers, got 783" in one_line(datasets.tff_federation, path, num_classes=62)


def test_files_of_tff_that_are_none(tmp_path):
  message = one_line(datasets.tff_federation, "emnist_all.sqlite", tmp_path)
  assert f"launch.prepare --dataset=femnist --data_dir={tmp_path}" in message
  assert "must end in .sqlite" in one_line(datasets.tff_federation, "x.db", tmp_path)
  whole = _database(tmp_path).read_bytes()
  for name, held in {"cut": whole[:5000], "none": b"", "text": b"no database" * 99}.items():
    path = tmp_path / f"{name}.sqlite"
    path.write_bytes(held)
    assert "cannot be read" in one_line(datasets.tff_federation, path, num_classes=62)
  sqlite3.connect(tmp_path / "blank.sqlite").close()
  assert "cannot be read" in one_line(datasets.tff_federation, tmp_path / "blank.sqlite")
  assert "num_classes: must be declared" in one_line(
    datasets.tff_federation, tmp_path / "emnist_all.sqlite"
  )


def _h5(folder, name="fed_emnist", **features):
  h5py = pytest.importorskip("h5py")
  for split in ("train", "test"):
    with h5py.File(folder / f"{name}_{split}.h5", "w") as held:
      for client, count in (("f1_2", 2), ("f0_1", 1), ("f3_0", 0)):
        made = {"pixels": np.full((count, 28, 28), 0.5, np.float32),
                "label": np.arange(count, dtype=np.int32)} | {
                key: one(count) for key, one in features.items()}  # fmt: skip
        for key, value in made.items():
          if value is not None:
            held[f"examples/{client}/{key}"] = value
  return folder / f"{name}_train.h5"


def test_the_older_files_of_tff(tmp_path):
  train, test = datasets.tff_federation(_h5(tmp_path), num_classes=62)
  assert train.client_ids == ("f0_1", "f1_2", "f3_0") == test.client_ids
  assert train.sizes.tolist() == [1, 2, 0] and train.dataset.x.shape == (3, 28, 28, 1)
  assert train.client("f1_2").y.tolist() == [0, 1]
  path = _h5(tmp_path, "so", pixels=lambda n: None, label=lambda n: None,
             tokens=lambda n: np.array([b"ab"] * n, "S2"))  # fmt: skip
  train, _ = datasets.tff_federation(path, max_length=3, max_examples=1)
  assert train.client("f1_2").x.tolist() == [[*b"ab", 0]]


def test_older_files_that_are_none(tmp_path):
  path = _h5(tmp_path, "n", label=lambda n: np.zeros(n + 1, np.int32))
  assert "label: must be one for each example" in one_line(
    datasets.tff_federation, path, num_classes=9
  )
  path = _h5(tmp_path, "u", pixels=lambda n: None)
  assert "must hold one of pixels" in one_line(datasets.tff_federation, path, num_classes=9)
  path = _h5(tmp_path, "l", label=lambda n: None)
  assert "cannot be read" in one_line(datasets.tff_federation, path, num_classes=9)
  path = _h5(tmp_path, "t")
  path.write_bytes(path.read_bytes()[:900])
  assert "cannot be read" in one_line(datasets.tff_federation, path, num_classes=9)
  (tmp_path / "n_test.h5").unlink()
  assert "there is no file" in one_line(datasets.tff_federation, tmp_path / "n_train.h5")


def test_two_spellings_of_one_name_are_one_client():
  """A red team's: "é" as one character and as two."""
  rows = data.from_arrays(np.eye(3, dtype=np.float32), [0, 1, 0], num_classes=2)
  federation = data.by_client(rows, ["\u00e9", "e\u0301", "e"])
  assert federation.num_clients == 2


@pytest.mark.parametrize("name", ["a.npz", "mnist", "tests.zoo.test_natural:nothing"])
def test_a_declaration_of_what_is_no_table_is_refused(name):
  with refuses("declaration"):
    datasets.natural_federation(name, client_id="user", declaration={"columns": {}})
