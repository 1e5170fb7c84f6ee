"""b-min-sep sampling: Poisson sampling of examples that did not take part recently."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from dpjax import validate
from dpjax.accounting.proved import ADD, REPLACE, ZERO
from dpjax.sampling.draws import RUN, Groups, generator, groups
from dpjax.sampling.registry import Sizing, check_apart
from dpjax.sampling.samplers import (
  PaddedSampler,
  Participation,
  UnamplifiedSampler,
)
from dpjax.validate import UserError


def _sampling_prob(turn_prob: float, steps_apart: int) -> float:
  """Returns the long-run share of steps in which an example takes part.

  After each of these steps the example rests for steps_apart - 1 steps."""
  return turn_prob / (1 + (steps_apart - 1) * turn_prob)


# The examples of all steps are drawn at once, and kept: each `draw` of a run reads them.
@functools.lru_cache(maxsize=2)
def _renewals(
  turn_prob: float, steps_apart: int, num_steps: int, seed: int, num_examples: int
) -> Groups:
  """Draws the examples of each step, in groups by step."""
  rng = generator(seed, *RUN)
  # More than `times` participations are impossible, since steps of one example differ by
  # steps_apart or more.
  times = -(-num_steps // steps_apart)
  # A wait for a tiny `turn_prob` may be the largest integer, and a sum of two of these overflows.
  waits = np.minimum(rng.geometric(turn_prob, (times, num_examples)) - 1, num_steps)
  sampling_prob = _sampling_prob(turn_prob, steps_apart)
  # Step 0 is drawn as if sampling had always run. An example rests with chance
  # (steps_apart - 1) * sampling_prob, and every remaining time of rest is equally likely.
  locked = rng.random(num_examples) < (steps_apart - 1) * sampling_prob
  lock = rng.integers(1, max(steps_apart, 2), num_examples)
  first = np.where(locked, lock, 0)
  steps = first + np.cumsum(waits, axis=0) + steps_apart * np.arange(times)[:, None]
  # Columns are examples. Steps from `num_steps` on do not happen, and count as one more group.
  by_example = np.minimum(steps, num_steps).T
  order, starts = groups(by_example.ravel(), num_steps + 1)
  kept = order[: starts[num_steps]] // times
  return Groups(kept, starts[: num_steps + 1])


@dataclasses.dataclass(frozen=True)
class MinSepSampler(UnamplifiedSampler, PaddedSampler):
  """Poisson sampling of examples that did not take part in the last `steps_apart` - 1 steps.

  The first draws are those of a sampler that has run for ever, so every batch has the same
  distribution. A batch holds an example with probability
  turn_prob / (1 + (steps_apart - 1) turn_prob).

  Args:
    turn_prob: probability in (0, 1] to take part in a step, if none of the last `steps_apart` - 1
      was joined.
    steps_apart: smallest distance between two steps of one example.
    num_steps: number of steps of the run; a draw for a later step raises UserError.
    capacity: padded batch size, as for PoissonSampler.

  >>> sampler = MinSepSampler(turn_prob=1.0, steps_apart=2, num_steps=4, capacity=4)
  >>> taken = [sampler.draw(4, seed=0, step=t).tolist() for t in range(4)]
  >>> taken[0] == taken[2] and sorted(taken[0] + taken[1]) == [0, 1, 2, 3]
  True
  """

  name: ClassVar[str] = "min_sep"
  relations: ClassVar[tuple[str, ...]] = (ADD, ZERO, REPLACE)
  small: ClassVar[Any] = (
    {"turn_prob": 1.0, "steps_apart": 2, "num_steps": 2, "capacity": 5},
  )

  turn_prob: float
  steps_apart: int
  num_steps: int
  capacity: int

  def __post_init__(self):
    validate.probability(turn_prob=self.turn_prob)
    validate.integer_at_least(
      1, steps_apart=self.steps_apart, num_steps=self.num_steps, capacity=self.capacity
    )

  @classmethod
  def sized(cls, size: Sizing) -> MinSepSampler:
    apart, q = check_apart(size), size.sampling_prob
    return cls(
      # It solves q = turn_prob / (1 + (apart - 1) turn_prob). Rounding may put 1 - (apart - 1) q
      # below q. Then the quotient would be above 1.
      turn_prob=min(1.0, q / max(1 - (apart - 1) * q, q)),
      steps_apart=apart,
      num_steps=size.num_steps,
      capacity=size.padded_batch_size,
    )

  @property
  def sampling_prob(self) -> float:
    """Returns the probability that one example is in a batch."""
    return _sampling_prob(self.turn_prob, self.steps_apart)

  @property
  def participation(self) -> Participation:
    return Participation(self.steps_apart, cyclic=False)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    # Steps from num_steps on were not drawn. If they were drawn separately, steps of one example
    # could be closer than steps_apart.
    if step >= self.num_steps:
      raise UserError(f"must be < num_steps={self.num_steps}", field="step", value=step)
    steps = _renewals(self.turn_prob, self.steps_apart, self.num_steps, seed, num_examples)
    return self.check_draw(steps.of(step), step)
