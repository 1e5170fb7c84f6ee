"""Slices of the draw of one step, so that a large batch fits into memory piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpjax import validate
from dpjax.sampling.samplers import pad


def rows_of_slice(padded_batch_size: int, count: int) -> int:
  """Returns the number of rows of each of `count` slices of a batch with `padded_batch_size` rows.

  >>> rows_of_slice(10, 4)
  3
  """
  validate.integer_at_least(1, padded_batch_size=padded_batch_size, slices=count)
  # The number is rounded up, so that `count` slices hold every row.
  return -(-padded_batch_size // count)


def slices(
  indices: np.ndarray, padded_batch_size: int, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Splits the draw of ONE step into `count` padded slices, and yields (indices, mask) of each.

  Guarantee: every drawn example is in exactly one slice, so it takes part at most once in a step
  (pitfall P15). Each slice has `rows_of_slice(padded_batch_size, count)` rows. There are always
  `count` slices; some of them may hold padding only.

  >>> [(i.tolist(), m.tolist()) for i, m in slices(np.array([3, 5, 8]), 4, 2)]
  [([3, 5], [True, True]), ([8, 0], [True, False])]
  """
  rows = rows_of_slice(padded_batch_size, count)
  # Empty slices are yielded, too: the number of slices must not reveal the size of the draw.
  for part in range(count):
    yield pad(indices[part * rows : (part + 1) * rows], rows)
