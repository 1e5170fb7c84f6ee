"""k-out-of-t random allocation: each example is in k steps of every pass, all sets alike."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.k_out_of_t import KOutOfTKind, k_out_of_t_event
from dpjax.accounting.proved import Proved
from dpjax.sampling.samplers import DpEvent, PaddedSampler, PassSampler, generator
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class KOutOfTSampler(PassSampler, PaddedSampler):
  """Each example is in `selected` steps of every pass of `steps_per_pass`.

  Its set of steps is uniform among all of that size, independent of the other examples, and drawn
  anew in each pass. So every example takes part equally often, also where the number of steps is
  no multiple of it. With `selected` 1 it is `RandomAllocationSampler`, draw by draw.

  For independent noise. A pass is accounted in full at its first step, as `selected` passes of
  steps_per_pass / selected steps (`dpjax.accounting.event_kinds.k_out_of_t`). So it costs no less
  than those passes; choose `RandomAllocationSampler` where the steps divide, and may stop early.

  Args:
    steps_per_pass: t, steps of a pass.
    selected: k, from 1 to t.
    capacity: padded batch size, as for PoissonSampler.

  >>> sampler = KOutOfTSampler(steps_per_pass=3, selected=2, capacity=4)
  >>> taken = [sampler.draw(4, seed=0, step=t) for t in range(3)]
  >>> np.bincount(np.concatenate(taken)).tolist()
  [2, 2, 2, 2]
  """

  name: ClassVar[str] = "k_out_of_t"
  proof: ClassVar[Proved] = KOutOfTKind.proof
  small: ClassVar[Any] = (
    {"steps_per_pass": 2, "selected": 1, "capacity": 5},
    {"steps_per_pass": 3, "selected": 2, "capacity": 5},
  )

  steps_per_pass: int
  selected: int
  capacity: int

  def __post_init__(self):
    validate.integer_at_least(
      1,
      steps_per_pass=self.steps_per_pass,
      selected=self.selected,
      capacity=self.capacity,
    )
    if self.selected > self.steps_per_pass:
      raise UserError(
        f"must be <= steps_per_pass={self.steps_per_pass}",
        field="selected",
        value=self.selected,
      )

  @property
  def rate(self) -> float:
    return self.selected / self.steps_per_pass

  def event(self, inner: DpEvent) -> DpEvent:
    """Returns the event of a whole pass."""
    return k_out_of_t_event(
      inner, num_steps=self.steps_per_pass, num_selected=self.selected
    )

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    turn, place = divmod(step, self.steps_per_pass)
    if self.selected == 1:
      # The draws of `RandomAllocationSampler`, so that both are one sampler.
      places = generator(seed, turn).integers(self.steps_per_pass, size=num_examples)
      return self.checked(np.flatnonzero(places == place), step)
    sets = _steps_of_pass(self.steps_per_pass, self.selected, num_examples, seed, turn)
    return self.checked(sets[place].copy(), step)


# All steps of a pass read the same sets, so they are drawn once.
@functools.lru_cache(maxsize=1)
def _steps_of_pass(
  steps_per_pass: int, selected: int, num_examples: int, seed: int, turn: int
) -> tuple[np.ndarray, ...]:
  """Returns the examples that each step of a pass takes."""
  rng = generator(seed, turn)
  left = np.full(num_examples, selected)
  steps = []
  # Selection sampling (Knuth, volume 2, algorithm S): a step is taken with probability
  # (steps of the set that are left) / (steps of the pass that are left). Every set is equally
  # likely, by integers alone, so no rounding favours one.
  for step in range(steps_per_pass):
    joins = rng.integers(steps_per_pass - step, size=num_examples) < left
    left -= joins
    steps.append(np.flatnonzero(joins))
  return tuple(steps)
