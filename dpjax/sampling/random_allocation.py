"""Random allocation: each example is in one step of every pass, drawn anew and kept secret."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds import random_allocation as event_kind
from dpjax.sampling.draws import assign
from dpjax.sampling.registry import SCHEMES, Sizing, steps_per_pass
from dpjax.sampling.samplers import DpEvent, PaddedSampler


@dataclasses.dataclass(frozen=True)
class RandomAllocationSampler(PaddedSampler):
  """Each example is in one step of every pass of `steps_per_pass` steps.

  The step is drawn uniformly, independently, and anew in each pass. It is kept secret, which lowers
  the privacy cost.

  The proof is for noise that is independent from step to step. A pass is accounted in full at its
  first step (`dpjax.accounting.random_allocation`), so an unfinished pass costs as much as a whole
  pass.

  Args:
    steps_per_pass: number of steps of a pass.
    capacity: padded batch size, as for PoissonSampler.

  >>> sampler = RandomAllocationSampler(steps_per_pass=2, capacity=4)
  >>> taken = [sampler.draw(4, seed=0, step=t) for t in range(2)]
  >>> sorted(np.concatenate(taken).tolist())
  [0, 1, 2, 3]
  >>> from dpjax.accounting import gaussian_event
  >>> inner = gaussian_event(1.0)
  >>> [type(sampler.event_at(step, inner)).__name__ for step in range(3)]
  ['RandomAllocationDpEvent', 'NoOpDpEvent', 'RandomAllocationDpEvent']
  """

  name: ClassVar[str] = "random_allocation"
  relations: ClassVar[tuple[str, ...]] = event_kind.RandomAllocationKind.relations
  small: ClassVar[Any] = ({"steps_per_pass": 2, "capacity": 5},)

  steps_per_pass: int
  capacity: int

  def __post_init__(self):
    validate.integer_at_least(1, steps_per_pass=self.steps_per_pass, capacity=self.capacity)

  @classmethod
  def sized(cls, size: Sizing) -> RandomAllocationSampler:
    SCHEMES["random_allocation"].check_prob(size)
    steps = steps_per_pass(size.sampling_prob)
    return cls(steps_per_pass=steps, capacity=size.padded_batch_size)

  @property
  def steps_per_event(self) -> int:
    return self.steps_per_pass

  @property
  def sampling_prob(self) -> float:
    return 1 / self.steps_per_pass

  def event(self, inner: DpEvent) -> DpEvent:
    """Returns the event of a whole pass."""
    return event_kind.random_allocation_event(inner, num_steps=self.steps_per_pass)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    turn, place = divmod(step, self.steps_per_pass)
    # The generator belongs to the pass, so all steps of the pass read the same allocation.
    rows = assign(seed, turn, count=self.steps_per_pass, num_examples=num_examples)
    return self.check_draw(rows.of(place), step)
