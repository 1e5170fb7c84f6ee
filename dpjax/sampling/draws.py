"""Random draws of samplers, each in time that goes with the batch, not with the data.

Step t needs no draw of an earlier step: each place, such as a step or a pass, has a generator of
its own. What a whole pass shares is kept while the pass lasts.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

# Place of what is drawn once in a run. Places of steps and passes have one number.
RUN = (0, 0)
# Two passes are kept, for two runs in turns; each has a number of 4 bytes for each row.
_KEPT = 2


def generator(seed: int, *place: int) -> np.random.Generator:
  """Returns the random generator for a seed and a place, such as the number of a step.

  Generators of different places or seeds are independent of each other.

  >>> generator(0, 5).random() == generator(0, 5).random()
  True
  """
  # Each place has its own spawn key, so step t needs no earlier draws and can be repeated.
  sequence = np.random.SeedSequence(seed, spawn_key=place)
  return np.random.Generator(np.random.Philox(sequence))


def successes(rng: np.random.Generator, num_trials: int, prob: float) -> np.ndarray:
  """Returns which of `num_trials` independent trials succeed, rising; each does with chance `prob`.

  The gap from one success to the next is geometric, so time and memory go with the number of
  successes, not of trials. The first n trials come out alike however many follow.

  >>> successes(np.random.default_rng(0), 5, 1.0).tolist()
  [0, 1, 2, 3, 4]
  """
  parts = [np.zeros(0, np.int64)]
  last = -1
  while last < num_trials:
    expected = prob * (num_trials - last)
    # Nearly always enough for one turn of the loop.
    gaps = rng.geometric(prob, int(expected + 6 * math.sqrt(expected) + 8))
    # A gap of a tiny `prob` may be the largest integer, and a sum of two of these overflows.
    places = last + np.cumsum(np.minimum(gaps, num_trials + 1))
    parts.append(places[: np.searchsorted(places, num_trials)])
    last = int(places[-1])
  return np.concatenate(parts)


class Groups(NamedTuple):
  """Rows sorted by a number of their own, such as the step in which each takes part."""

  order: (
    np.ndarray
  )  # rows with the number 0 first, then those with 1; rising for one number
  starts: np.ndarray  # where the rows of each number begin in `order`

  def of(self, number: int) -> np.ndarray:
    """Returns the rows of a number, rising."""
    # A copy: the caller may write to it, and `order` is kept.
    return self.order[self.starts[number] : self.starts[number + 1]].astype(np.int64)


def _compact(order: np.ndarray) -> np.ndarray:
  """Returns an order of rows as a pass keeps it: in half of the bytes, and read-only, since a write
  would change later steps."""
  kept = order.astype(np.uint32) if len(order) <= 2**32 else order
  kept.flags.writeable = False
  return kept


def groups(numbers: np.ndarray, count: int) -> Groups:
  """Sorts rows by their numbers [n], integers in [0, count).

  >>> groups(np.array([1, 0, 1]), 2).of(1).tolist()
  [0, 2]
  """
  # NumPy sorts integers of 16 bits in linear time.
  order = np.argsort(numbers.astype(np.min_scalar_type(count)), kind="stable")
  sizes = np.bincount(numbers, minlength=count)
  starts = np.concatenate([[0], np.cumsum(sizes)])
  # They are kept, so a write would change later steps.
  starts.flags.writeable = False
  return Groups(_compact(order), starts)


@functools.lru_cache(maxsize=_KEPT)
def assign(seed: int, *place: int, count: int, num_examples: int) -> Groups:
  """Assigns each row a number in [0, count), uniformly and independently.

  >>> both = assign(0, 3, count=2, num_examples=4)
  >>> sorted([*both.of(0).tolist(), *both.of(1).tolist()])
  [0, 1, 2, 3]
  """
  return groups(generator(seed, *place).integers(count, size=num_examples), count)


@functools.lru_cache(maxsize=_KEPT)
def permutation(seed: int, *place: int, num_examples: int) -> np.ndarray:
  """Returns a uniformly random order of the rows, read-only.

  >>> sorted(permutation(0, 3, num_examples=4).tolist())
  [0, 1, 2, 3]
  """
  return _compact(generator(seed, *place).permutation(num_examples))
