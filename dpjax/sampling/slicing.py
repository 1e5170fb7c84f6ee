"""Physical slices of one draw, so that a large logical batch fits into memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dpjax import validate
from dpjax.sampling.samplers import pad


def slice_slots(padded_batch_size: int, count: int) -> int:
  """Returns the rows of each of `count` slices of a batch with `padded_batch_size` rows.

  >>> slice_slots(10, 4)
  3
  """
  validate.integer_at_least(1, padded_batch_size=padded_batch_size, slices=count)
  # Rounded up, so that `count` slices hold every row.
  return -(-padded_batch_size // count)


def slices(
  indices: np.ndarray, padded_batch_size: int, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Splits the draw of ONE logical step into `count` padded slices, (indices, mask) each.

  Guarantee: every drawn example is in exactly one slice, so in a logical step it takes part
  at most once (pitfall P15). Each slice has `slice_slots(slots, count)` rows; slices may be
  empty, and there are always `count` of them.

  >>> [(i.tolist(), m.tolist()) for i, m in slices(np.array([3, 5, 8]), 4, 2)]
  [([3, 5], [True, True]), ([8, 0], [True, False])]
  """
  rows = slice_slots(padded_batch_size, count)
  # Always `count` slices, even empty ones: their number would reveal the size of the draw.
  for part in range(count):
    yield pad(indices[part * rows : (part + 1) * rows], rows)
