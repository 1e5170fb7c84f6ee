"""Cyclic Poisson sampling: groups take turns, and in its turn an example joins independently."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from dpjax import validate
from dpjax.accounting.proved import ADD, ZERO
from dpjax.sampling.draws import RUN, assign, generator, successes
from dpjax.sampling.registry import Sizing, check_apart
from dpjax.sampling.samplers import (
  DpEvent,
  PaddedSampler,
  Participation,
)


@dataclasses.dataclass(frozen=True)
class CyclicPoissonSampler(PaddedSampler):
  """Groups take turns; in its group's turn an example takes part with probability `turn_prob`.

  An example's group is drawn once, uniformly and independently of all other examples. Let the
  noise be C^-1 z, where C has at most `num_groups` bands, and let x be the sums of all steps. Then
  two turns of an example change different rows of C x. So n steps cost at most ceil(n / num_groups)
  Poisson-sampled Gaussians of probability `turn_prob`, whose sensitivity is the largest column norm
  of C (Choquette-Choo et al. 2023, arXiv:2306.08153). With turn_prob=1 the draws are those of balls
  in bins.

  Args:
    turn_prob: probability in (0, 1] to take part in a turn; the expected batch is
      turn_prob / num_groups of the examples.
    num_groups: number of steps from one turn of an example to the next. With 1 the sampler is
      Poisson sampling.
    capacity: padded batch size, as for PoissonSampler.

  >>> sampler = CyclicPoissonSampler(turn_prob=1.0, num_groups=2, capacity=4)
  >>> taken = [sampler.draw(4, seed=0, step=t) for t in range(2)]
  >>> sorted(np.concatenate(taken).tolist())
  [0, 1, 2, 3]
  """

  name: ClassVar[str] = "cyclic_poisson"
  relations: ClassVar[tuple[str, ...]] = (ADD, ZERO)
  small: ClassVar[Any] = ({"turn_prob": 0.5, "num_groups": 2, "capacity": 5},)

  turn_prob: float
  num_groups: int
  capacity: int

  def __post_init__(self):
    validate.probability(turn_prob=self.turn_prob)
    validate.integer_at_least(1, num_groups=self.num_groups, capacity=self.capacity)

  @classmethod
  def sized(cls, size: Sizing) -> CyclicPoissonSampler:
    apart = check_apart(size)
    return cls(turn_prob=size.turn_prob, num_groups=apart, capacity=size.padded_batch_size)

  @property
  def sampling_prob(self) -> float:
    return self.turn_prob / self.num_groups

  @property
  def participation(self) -> Participation:
    return Participation(self.num_groups, cyclic=True, turn_prob=self.turn_prob)

  def event(self, inner: DpEvent) -> DpEvent:
    """Returns the event of one turn of a group."""
    return dp_accounting.PoissonSampledDpEvent(self.turn_prob, inner)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    # The proof needs one group per example for the whole run, and independent draws in each step.
    groups = assign(seed, *RUN, count=self.num_groups, num_examples=num_examples)
    group = groups.of(step % self.num_groups)
    rows = group[successes(generator(seed, step), len(group), self.turn_prob)]
    # A draw above the capacity raises, since the proof covers no cut batch. Delta covers the chance
    # of such a draw.
    return self.check_draw(rows, step)
