"""The embedded data set and its fixed split."""

import hashlib

import numpy as np
from sklearn import datasets

from dpjax import data
from dpjax.zoo.datasets import digits


def test_split_is_a_partition_of_all_1797():
  train, test = digits.split_indices()
  assert (len(train), len(test)) == (1_437, 360)
  np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(1_797))


def test_split_is_the_published_one():
  """Results of different versions can only be compared on the same test set."""
  order = np.concatenate(digits.split_indices()).astype("<i4")
  assert hashlib.sha256(order.tobytes()).hexdigest() == (
    "1dbf184adbd2bc1aea883a7ed0c708a4a077c9920a2d7665fc64cfd5f14cba08"
  )


def test_load_gives_the_real_pixels_in_the_unit_interval():
  train, test = data.load("digits")
  assert train.x.shape == (1_437, 8, 8, 1) and test.x.shape == (360, 8, 8, 1)
  assert train.x.dtype == np.float32 and train.y.dtype == np.int32
  assert (train.split, test.split, train.num_classes) == ("train", "test", 10)
  for part, rows in zip((train, test), digits.split_indices()):
    assert part.x.min() == 0 and part.x.max() == 1
    np.testing.assert_array_equal(part.x[..., 0] * 16, datasets.load_digits().images[rows])
    np.testing.assert_array_equal(part.y, datasets.load_digits().target[rows])


def test_every_class_is_in_both_splits():
  for part in data.load("digits"):
    counts = np.bincount(part.y, minlength=10)
    assert (counts > 0.06 * len(part)).all() and (counts < 0.14 * len(part)).all()


def test_two_loads_are_equal():
  first, second = data.load("digits"), data.load("digits")
  for a, b in zip(first, second):
    np.testing.assert_array_equal(a.x, b.x)
    np.testing.assert_array_equal(a.y, b.y)
