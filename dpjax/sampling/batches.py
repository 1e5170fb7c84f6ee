"""From a draw to the padded batches of a step: draw, slice, pad, read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dpjax import validate
from dpjax.sampling.samplers import Sampler, assumption
from dpjax.types import Batch
from dpjax.validate import UserError, Verbatim


def draw_rows(sampler: Sampler, num_examples: int, *, seed: int, step: int) -> np.ndarray:
  """Returns what `sampler.draw` returns; the draw of a user's own sampler is checked.

  Raises:
    UserError: the result is no array of at most `padded_batch_size` distinct indices.
  """
  drawn = sampler.draw(num_examples, seed=seed, step=step)
  if not assumption(sampler):
    return drawn
  # A repeated index would give one record more weight than the sensitivity allows.
  rows = np.asarray(drawn)
  right = rows.ndim == 1 and (rows.dtype.kind in "iu" or not rows.size)
  right = right and np.unique(rows).size == rows.size <= sampler.padded_batch_size
  if not right or (rows.size and not 0 <= rows.min() <= rows.max() < num_examples):
    raise UserError(
      # Neither the number of examples nor who was drawn may be shown.
      f"draw() of step {step} must return a vector of distinct integers in [0, num_examples), at "
      f"most padded_batch_size={sampler.padded_batch_size} of them",
      field="sampler",
      value=Verbatim(type(sampler).__name__),
    )
  return rows.astype(np.int64)


def pad(indices: np.ndarray, padded_batch_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Pads indices to `padded_batch_size`; returns (indices, mask). Padding repeats index 0.

  >>> pad(np.array([4, 7]), 3)
  (array([4, 7, 0]), array([ True,  True, False]))
  """
  # Index 0 always exists. The mask removes the contribution of padding.
  padded = np.zeros(padded_batch_size, np.int64)
  padded[: indices.size] = indices
  return padded, np.arange(padded_batch_size) < indices.size


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


def batches(
  sampler: Sampler,
  read: Callable[[np.ndarray], Any],
  num_examples: int,
  *,
  seed: int,
  steps: range,
  count: int = 1,
  present: Any = None,
  origin: tuple[int, int] = (0, 0),
) -> Iterator[Batch]:
  """Yields the padded batches of the steps, `count` of each; see `dpjax.Plan.batches`.

  Args:
    read: function indices -> examples, as `indexed.reader` returns it.
    num_examples: number of rows of the data.
    present: bool array [n], or None; a row whose entry is False contributes zero.
    origin: mark of the plan, 32 bits, and number of the run.
  """
  for step in steps:
    drawn = draw_rows(sampler, num_examples, seed=seed, step=step)
    parts = slices(drawn, sampler.padded_batch_size, count)
    for number, (indices, mask) in enumerate(parts, start=step * count):
      examples = read(indices)
      mask = mask if present is None else mask & present[indices]
      rows = len(mask)
      of_rows = np.tile(np.array(origin, np.uint32).view(np.int32), (rows, 1))
      yield Batch(examples, mask, np.full(rows, number, np.int32), of_rows)
