"""The embedded data set: 1,797 real handwritten digits, in the file digits.npz beside this one.

It is the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak 1998,
UCI Machine Learning Repository, CC BY 4.0), with the same values as `sklearn.datasets.load_digits`.
"""

from __future__ import annotations

import functools
import pathlib

import numpy as np

from dpjax.data.dataset import Dataset, from_arrays

SIZE = 1_797
TEST_SIZE = 360


def split_indices() -> tuple[np.ndarray, np.ndarray]:
  """Returns row numbers (train [1437], test [360]): the two parts of one fixed permutation.

  The permutation depends on nothing but this file. `RandomState` is used because NumPy
  guarantees that its stream never changes, which `default_rng` does not guarantee.

  >>> train, test = split_indices()
  >>> len(train), len(test), len(np.intersect1d(train, test))
  (1437, 360, 0)
  """
  order = np.random.RandomState(0).permutation(SIZE)
  return order[:-TEST_SIZE], order[-TEST_SIZE:]


def load_digits() -> tuple[Dataset, Dataset]:
  """Returns (train, test), x [1437, 8, 8, 1] and [360, 8, 8, 1]: pixels / 16, in ten classes."""
  with np.load(pathlib.Path(__file__).with_name("digits.npz"), allow_pickle=False) as held:
    pixels = held["pixels"]  # [1797, 64] uint8 in 0 .. 16
    labels = held["labels"].astype(np.int64)  # [1797]
  x = (pixels / 16.0).reshape(SIZE, 8, 8, 1)
  train, test = split_indices()
  make = functools.partial(from_arrays, num_classes=10, name="digits")
  return (
    make(x[train], labels[train], split="train"),
    make(x[test], labels[test], split="test"),
  )
