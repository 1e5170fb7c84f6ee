"""Balls in bins: each example belongs to one step of the pass, fixed for the whole run."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpjax import validate
from dpjax.accounting.proved import ADD, REPLACE, ZERO
from dpjax.sampling.draws import RUN, assign
from dpjax.sampling.registry import Sizing, steps_per_pass
from dpjax.sampling.samplers import (
  PaddedSampler,
  Participation,
  UnamplifiedSampler,
)


@dataclasses.dataclass(frozen=True)
class BallsInBinsSampler(UnamplifiedSampler, PaddedSampler):
  """Each example belongs to one of `num_bins` bins, drawn once, uniformly and independently.

  Step t takes bin t mod num_bins (Choquette-Choo et al. 2024, arXiv:2410.06266; Chua et al. 2024).

  Args:
    num_bins: number of steps of a pass.
    capacity: padded batch size, as for PoissonSampler.

  >>> sampler = BallsInBinsSampler(num_bins=2, capacity=4)
  >>> taken = [sampler.draw(4, seed=0, step=t) for t in range(2)]
  >>> sorted(np.concatenate(taken).tolist())
  [0, 1, 2, 3]
  """

  name: ClassVar[str] = "balls_in_bins"
  relations: ClassVar[tuple[str, ...]] = (ADD, ZERO, REPLACE)
  small: ClassVar[Any] = ({"num_bins": 2, "capacity": 5},)

  num_bins: int
  capacity: int

  def __post_init__(self):
    validate.integer_at_least(1, num_bins=self.num_bins, capacity=self.capacity)

  @classmethod
  def sized(cls, size: Sizing) -> BallsInBinsSampler:
    bins = steps_per_pass(size.sampling_prob)
    return cls(num_bins=bins, capacity=size.padded_batch_size)

  @property
  def sampling_prob(self) -> float:
    return 1 / self.num_bins

  @property
  def participation(self) -> Participation:
    return Participation(self.num_bins, cyclic=True)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    # All bins come from one draw per run, so step t does not need the steps before it.
    bins = assign(seed, *RUN, count=self.num_bins, num_examples=num_examples)
    # A bin may exceed the capacity. Then `check_draw` raises: a cut batch would be another scheme.
    return self.check_draw(bins.of(step % self.num_bins), step)
