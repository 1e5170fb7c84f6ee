"""Poisson sampling: each example, or each user, joins a step independently."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import dp_accounting
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.noisy_sum import PoissonSampledKind
from dpjax.sampling.draws import generator, successes
from dpjax.sampling.samplers import DpEvent, PaddedSampler

if TYPE_CHECKING:
  from dpjax.sampling.registry import Sizing


@dataclasses.dataclass(frozen=True)
class PoissonSampler(PaddedSampler):
  """Each example takes part independently with probability `sampling_prob`.

  Args:
    sampling_prob: probability that an example takes part in a step, in (0, 1].
    capacity: padded batch size. `Plan.fitted` chooses it.

  >>> sampler = PoissonSampler(sampling_prob=0.5, capacity=8)
  >>> sampler.draw(6, seed=0, step=0).size <= 8
  True
  """

  name: ClassVar[str] = "poisson"
  relations: ClassVar[tuple[str, ...]] = PoissonSampledKind.relations
  small: ClassVar[Any] = ({"sampling_prob": 0.5, "capacity": 5},)

  sampling_prob: float
  capacity: int

  def __post_init__(self):
    validate.probability(sampling_prob=self.sampling_prob)
    validate.integer_at_least(1, capacity=self.capacity)

  @classmethod
  def sized(cls, size: Sizing) -> PoissonSampler:
    return cls(sampling_prob=size.sampling_prob, capacity=size.padded_batch_size)

  def event(self, inner: DpEvent) -> DpEvent:
    return dp_accounting.PoissonSampledDpEvent(self.sampling_prob, inner)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    rows = successes(generator(seed, step), num_examples, self.sampling_prob)
    return self.check_draw(rows, step)
