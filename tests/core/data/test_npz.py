"""`.npz` files: a round trip, and one line for each way in which a file can be wrong."""

import os
import pathlib
import tempfile
import zipfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpjax import data
from dpjax.data import npz
from dpjax.validate import UserError
from tests.refuses import refuses


def good(**changes):
  arrays = dict(
    x_train=np.arange(16, dtype=np.uint8).reshape(4, 2, 2),
    y_train=np.array([0, 1, 2, 0]),
    x_test=np.zeros((2, 2, 2), np.uint8),
    y_test=np.array([0, 1], np.uint8),
    num_classes=np.int64(3),
  )
  arrays.update(changes)
  return {key: value for key, value in arrays.items() if value is not None}


def save(folder, **changes) -> pathlib.Path:
  path = folder / "mine.npz"
  np.savez_compressed(path, **good(**changes))
  return path


def test_round_trip(tmp_path):
  train, test = data.load(save(tmp_path))
  assert repr(train) == "Dataset(mine/train: 4 x (2, 2, 1) float32, 3 classes)"
  np.testing.assert_array_equal(
    train.x.ravel(), np.arange(16, dtype=np.float32) / np.float32(255)
  )
  assert test.y.tolist() == [0, 1] and test.num_classes == 3 and test.split == "test"


def test_relative_path_is_looked_up_in_data_dir(tmp_path):
  save(tmp_path)
  assert len(data.load("mine.npz", data_dir=tmp_path)[0]) == 4


def test_the_number_of_classes_is_declared_never_counted(tmp_path):
  """One record with a new label would change the shape of the model that is released."""
  for largest in (2, 5):
    path = save(tmp_path, num_classes=None, y_train=np.array([0, 1, largest, 0]))
    with refuses("num_classes") as caught:
      data.load(path)
    reason = str(caught.value)
    assert caught.value.field == "num_classes" and "'mine'" in reason
    assert "\n" not in reason and not any(map(str.isdigit, reason))
    assert data.load(path, num_classes=6)[0].num_classes == 6


def test_a_number_of_classes_is_declared_once_or_twice_alike(tmp_path):
  path = save(tmp_path, num_classes=np.int64(7))
  assert (
    data.load(path)[1].num_classes == data.load(path, num_classes=7)[0].num_classes == 7
  )
  with refuses("num_classes", value=8):
    data.load(path, num_classes=8)
  with refuses("num_classes", value=9):
    data.load("digits", num_classes=9)
  assert data.load("digits", num_classes=10)[0].num_classes == 10
  with refuses("num_classes", value=0):
    data.load("digits", num_classes=0)


def test_the_vocabulary_of_tokens_is_declared_never_counted(tmp_path):
  tokens = dict(x_train=np.full((4, 3), 6), x_test=np.zeros((2, 3), int))
  assert data.load(save(tmp_path, **tokens))[0].vocab_size is None
  assert data.load(save(tmp_path, **tokens, vocab_size=np.int64(9)))[0].vocab_size == 9
  with refuses("name"):
    data.load(save(tmp_path, **tokens, vocab_size=np.int64(6)))


@hypothesis.given(
  hnp.arrays(np.float64, (3, 2), elements=st.floats(-1e6, 1e6)),
  hnp.arrays(np.int16, 3, elements=st.integers(0, 9)),
)
@hypothesis.settings(max_examples=20)
def test_floats_are_left_alone(x, y):
  with tempfile.TemporaryDirectory() as folder:
    path = save(
      pathlib.Path(folder), x_train=x, y_train=y, x_test=x, y_test=y, num_classes=None
    )
    train, test = data.load(path, num_classes=10)
  np.testing.assert_array_equal(train.x, x.astype(np.float32))
  np.testing.assert_array_equal(test.y, y)
  assert train.num_classes == test.num_classes == 10


@pytest.mark.parametrize(
  ("changes", "says"),
  [
    (
      dict(x_test=None, y_test=None, num_classes=None),
      "has no x_test, y_test (it holds x_train, y_train)",
    ),
    (dict(y_train=np.zeros(3, int)), "train split: y: must have shape (n,)"),
    (dict(x_test=np.zeros((2, 3, 3), np.uint8)), "differ in what one example is"),
    (dict(x_test=np.zeros((2, 2), int)), "float32 (2, 2, 1) and int32 (2,)"),
    (dict(y_test=np.zeros(3, int)), "test split: y: must have shape (n,)"),
    (
      dict(x_train=np.full((4, 2, 2, 1), np.nan)),
      "train split: x: every value must be fin",
    ),
    (
      dict(x_test=np.full((2, 2, 2, 1), np.inf)),
      "test split: x: every value must be finite",
    ),
    (dict(y_train=np.array([0, -1, 1, 2])), "train split: y: holds values from -1 to 2"),
    (dict(y_test=np.array([0.5, 1.0])), "test split: y: must hold integer class labels"),
    (dict(y_test=np.zeros(0, int), x_test=np.zeros((0, 2, 2), np.uint8)), "y: is empty"),
    (dict(y_test=np.array([0, "b"], object)), "not a readable .npz archive (Object arrays"),
    (dict(num_classes=np.array([3])), "its 'num_classes' must be one integer"),
    (dict(num_classes=np.int64(2)), "outside [0, num_classes=2)"),
  ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, changes, says):
  path = save(tmp_path, **changes)
  with pytest.raises(UserError) as caught:
    data.load(path)
  message = str(caught.value)
  assert says in message and message.startswith(f"name='{path}': ") and "\n" not in message


def test_missing_file(tmp_path):
  with refuses("name"):
    data.load(tmp_path / "nowhere.npz")


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04" + bytes(100)])
def test_damaged_file(tmp_path, content):
  path = tmp_path / "bad.npz"
  path.write_bytes(content)
  with refuses("name"):
    data.load(path)


def test_truncated_file(tmp_path):
  path = save(tmp_path)
  path.write_bytes(path.read_bytes()[:-30])
  with refuses("name"):
    data.load(path)


def test_a_bare_npy_array_is_not_an_archive(tmp_path):
  path = tmp_path / "bare.npz"
  with path.open("wb") as stream:
    np.save(stream, np.zeros(3))
  with refuses("name"):
    data.load(path)


# --- headers that guarantee what is not there, and pipes


_HEADERS = [
  "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 4)}",
  "{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,)}",
  "{'descr': '<f4', 'fortran_order': False, 'shape': (-20, 2)}",
  "{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 80,)}",
  "{'descr': '<f4', 'fortran_order': False, 'shape': 'x'}",
  "{'descr': '|O', 'fortran_order': False, 'shape': (4,)}",
  "{'descr': '<f4', 'fortran_order': True, 'shape': (4, 2)}",
  "{'descr': '<f4', 'fortran_order': False, 'shape': ()}",
  "(" * 3000,
  "{}",
  "",
]


def _npy(header: str) -> bytes:
  text = header.encode() + b"\n"
  return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)


@pytest.mark.parametrize("header", _HEADERS)
@pytest.mark.parametrize("key", ["x_train", "y_train"])
@pytest.mark.parametrize("resident", [True, False])
def test_a_header_that_promises_too_much_is_one_line(key, header, resident, tmp_path):
  for name, array in good().items():
    np.save(tmp_path / f"{name}.npy", array)
  (tmp_path / f"{key}.npy").write_bytes(_npy(header))
  with zipfile.ZipFile(tmp_path / "mine.npz", "w") as archive:
    for path in tmp_path.glob("*.npy"):
      archive.write(path, path.name)
  for call in (
    lambda: npz.load_folder(tmp_path, resident=resident),
    lambda: npz.load_npz(tmp_path / "mine.npz"),
  ):
    with refuses("name") as caught:
      call()
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


@pytest.mark.cases(long=["mine.npz"])
@pytest.mark.parametrize("name", ["x_train.npy", "mine.npz"])
def test_a_pipe_is_refused_at_once(name, tmp_path):
  for key, array in good().items():
    np.save(tmp_path / f"{key}.npy", array)
  (tmp_path / name).unlink(missing_ok=True)
  os.mkfifo(tmp_path / name)
  load = npz.load_npz if name.endswith("npz") else npz.load_folder
  with refuses("name"):
    load(tmp_path / name if name.endswith("npz") else tmp_path)


def test_a_file_of_medmnist_is_read_under_its_own_names(tmp_path):
  arrays = {
    "train_images": np.full((3, 4, 4), 255, np.uint8),
    "train_labels": np.array([[0], [2], [1]], np.uint8),
    "val_images": np.zeros((1, 4, 4), np.uint8),
    "val_labels": np.array([[0]], np.uint8),
    "test_images": np.zeros((2, 4, 4), np.uint8),
    "test_labels": np.array([[1], [1]], np.uint8),
  }
  np.savez(tmp_path / "pathmnist.npz", **arrays)
  train, test = data.load(tmp_path / "pathmnist.npz", num_classes=3)
  assert train.x.shape == (3, 4, 4, 1) and float(train.x.max()) == 1.0
  assert train.y.tolist() == [0, 2, 1] and test.y.tolist() == [1, 1]
  with refuses("num_classes"):
    data.load(tmp_path / "pathmnist.npz")
