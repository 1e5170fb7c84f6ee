"""Rows of a class of the user's own: which are read before a run, and what its reads show."""

import numpy as np
import pytest

from dpjax import columns
from dpjax.sampling import indexed
from tests.refuses import refuses

_VALUES = np.random.default_rng(0).normal(size=(10, 2)).astype(np.float32)


class _Rows:
  def __init__(self, read):
    self.read = read
    self.asked = []

  def __len__(self):
    return len(_VALUES)

  def __getitem__(self, indices):
    self.asked += [int(index) for index in indices]
    return self.read(indices)


def test_the_first_and_the_last_row_are_tried_and_none_beside_them():
  data = _Rows(lambda indices: _VALUES[indices])
  read = indexed.reader(data, 10)
  assert {*data.asked} == {0, 9}
  np.testing.assert_array_equal(read(np.array([3, 0, 3])), _VALUES[[3, 0, 3]])


@pytest.mark.parametrize(
  "wrong",
  [
    lambda indices: _VALUES[np.sort(indices)],
    lambda indices: _VALUES[indices] - _VALUES[indices].mean(0),
  ],
  ids=["sorted", "centred"],
)
def test_rows_that_are_sorted_or_depend_on_each_other_are_refused(wrong):
  with refuses("data"):
    indexed.reader(_Rows(wrong), 10)


def test_rows_that_are_drawn_anew_at_each_read_are_refused():
  """A record that comes or goes would shift the draws of all rows that are read after it."""
  rng = np.random.default_rng(1)
  noisy = lambda indices: _VALUES[indices] + rng.normal(size=(len(indices), 2))
  with refuses("data"):
    indexed.reader(_Rows(noisy), 10)


_TABLE = np.arange(30.0).reshape(10, 3)


@pytest.mark.parametrize(
  "array",
  [
    _TABLE,
    _TABLE[:, 0],
    _TABLE[:, :0],
    np.asfortranarray(_TABLE),
    _TABLE[::2],
    _TABLE.astype(">f4"),
  ],
  ids=["rows", "numbers", "no_columns", "columns", "every_second", "swapped"],
)
def test_rows_are_those_of_the_array_itself(array):
  size = len(array)
  for rows in (
    np.array([3, 0, 0, -1]),
    np.zeros(0, int),
    np.arange(size) > 2,
    slice(1, 3),
    2,
  ):
    ours, theirs = columns.rows_at(array, rows), array[rows]
    np.testing.assert_array_equal(ours, theirs)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
  with pytest.raises(IndexError):
    columns.rows_at(array, np.array([size]))
