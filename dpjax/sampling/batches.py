"""From a draw to the padded batches of a step: draw, slice, pad, read."""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from dpjax import validate
from dpjax.sampling.samplers import Sampler, assumption
from dpjax.types import Batch
from dpjax.validate import UserError, Verbatim

# Largest number of steps, and of rows, that are drawn ahead of their turn.
_STEPS_AHEAD = 16
_ROWS_AHEAD = 2**16
# How many numbers of runs there are above 0, and below.
_RUNS = 2**31 - 1


class Draws(NamedTuple):
  """Seed of a run's draws, and the number from which its noise follows, too."""

  seed: int
  # Secret. Above 0 for fresh draws. Where the caller gave the seed, and may repeat draws and noise:
  # 0, or below 0 where steps must not be of several draws (`draws_of`).
  run: int


def draws_of(rng: int | None, start: int, sampler: Sampler, num_rows: int) -> Draws:
  """Returns the draws of a run: those of a given seed, or fresh ones for None.

  Nobody can repeat fresh draws, so nobody needs to repeat their noise. So the number of such a run
  is folded into the key of its noise, and two runs with one key share none.

  Some samplers bound how often an example takes part in several steps. A run that goes on with
  another seed, or another number of rows, draws other passes: an example may take part in the first
  half of one and in the second half of the other. So the number of such a run tells them apart.

  Args:
    rng, start: as of `dpjax.Plan.batches`.
    sampler, num_rows: what draws, and from how many rows.

  Raises:
    UserError: no seed for a run that goes on (`start` above 0), or on several processes.
  """
  validate.integer_at_least(0, start=start)
  if rng is not None:
    validate.integer_at_least(0, rng=rng)
    if sampler.participation is None and sampler.period == 1:
      return Draws(rng, 0)
    digits = hashlib.sha256(f"dpjax draws {int(rng)} {num_rows}".encode()).digest()
    return Draws(rng, -1 - int.from_bytes(digits[:4], "big") % _RUNS)
  # Without a seed, an interrupted run cannot repeat its draws.
  if start != 0:
    raise UserError(
      "needs the rng of the run that it goes on with; without rng the draws are fresh",
      field="start",
      value=start,
    )
  # Devices take their rows of a batch from their own process. In two draws a record may be in the
  # rows of both, and would count twice in one sum.
  if jax.process_count() > 1:
    raise UserError(
      f"must be one integer for all {jax.process_count()} processes, which draw one batch "
      "together: each would have fresh draws of its own",
      field="rng",
      value=None,
    )
  return Draws(secrets.randbits(128), 1 + secrets.randbelow(_RUNS))


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
  if indices.size == padded_batch_size:
    return indices.astype(np.int64), np.ones(padded_batch_size, bool)
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


def _draws(
  sampler: Sampler, num_examples: int, seed: int, steps: range
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields (step, drawn rows) of each step, drawn some steps ahead."""
  # Between two steps of training the code of a draw leaves the caches of a CPU. Several draws in a
  # row take a third of the time of single ones.
  ahead = max(1, min(_STEPS_AHEAD, _ROWS_AHEAD // sampler.padded_batch_size))
  draw = sampler.draw
  if assumption(sampler):
    # A user's own sampler may be slow, or count its calls.
    ahead = 1
    draw = functools.partial(draw_rows, sampler)
  while steps:
    drawn = []
    for step in steps[:ahead]:
      try:
        drawn.append(draw(num_examples, seed=seed, step=step))
      except UserError:
        # An abort is charged to its own step, which a run that stops earlier never reaches.
        if not drawn:
          raise
        break
    yield from zip(steps, drawn)
    steps = steps[len(drawn) :]


def batches(
  sampler: Sampler,
  read: Callable[[np.ndarray], Any],
  num_examples: int,
  *,
  draws: Draws,
  steps: range,
  count: int = 1,
  present: Any = None,
  mark: int = 0,
) -> Iterator[Batch]:
  """Yields the padded batches of the steps, `count` slices of each; see `dpjax.Plan.batches`.

  Guarantee: every drawn example is in exactly one slice of its step, so it takes part at most once
  in a step (pitfall P15). Each slice has as many rows as `rows_of_slice` says.

  Args:
    read: function indices -> examples, as `indexed.reader` returns it.
    num_examples: number of rows of the data.
    present: bool array [n], or None; a row whose entry is False contributes zero.
    mark: mark of the plan.
  """
  rows = rows_of_slice(sampler.padded_batch_size, count)
  origin = np.zeros((rows, 4), np.int32)
  origin[:, 1] = np.arange(rows)
  origin[:, 2:] = np.array([mark, draws.run % 2**32], np.uint32).view(np.int32)
  for step, drawn in _draws(sampler, num_examples, draws.seed, steps):
    # Empty slices are yielded, too: the number of slices must not reveal the size of the draw.
    for part in range(count):
      indices, mask = pad(drawn[part * rows : (part + 1) * rows], rows)
      examples = read(indices)
      mask = mask if present is None else mask & present[indices]
      own = origin.copy()
      own[:, 0] = step * count + part
      # No row stands in the place -1: a mask that lets padding count is refused.
      own[~mask, 1] = -1
      yield Batch(examples, mask, own)
