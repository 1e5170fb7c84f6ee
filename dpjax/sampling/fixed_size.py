"""Batches of a fixed size, drawn uniformly without replacement."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import dp_accounting
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.fixed_size import FixedSizeKind
from dpjax.accounting.proved import Proved
from dpjax.sampling.batch_sizes import whole_batch_size
from dpjax.sampling.samplers import DpEvent, SizedSampler, Sizing, generator
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class FixedSizeSampler(SizedSampler):
  """`batch_size` distinct examples, drawn uniformly among all subsets of that size.

  Args:
    batch_size: examples per step.
    num_examples: size of the data, which replace-one adjacency makes public.

  >>> FixedSizeSampler(batch_size=2, num_examples=4).draw(4, seed=0, step=0).size
  2
  """

  name: ClassVar[str] = "fixed_size"
  proof: ClassVar[Proved] = FixedSizeKind.proof
  used_for: ClassVar[tuple[str, ...]] = ("examples", "clients")
  answers: ClassVar[str] = "exact"
  small: ClassVar[Any] = (
    {"batch_size": 4, "num_examples": 4},
    {"batch_size": 1, "num_examples": 4},
  )

  batch_size: int
  num_examples: int

  def __post_init__(self):
    validate.integer_at_least(1, batch_size=self.batch_size, num_examples=self.num_examples)
    if self.batch_size > self.num_examples:
      raise UserError(
        f"must be <= num_examples={self.num_examples}",
        field="batch_size",
        value=self.batch_size,
      )

  @classmethod
  def sized(cls, size: Sizing) -> Self:
    batch_size = whole_batch_size(size.sampling_prob, size.num_examples)
    return cls(batch_size=batch_size, num_examples=size.num_examples)

  @classmethod
  def nearest_prob(cls, prob: float, num_examples: int) -> float:
    # Only whole batches exist, so only their shares can be run and accounted.
    return whole_batch_size(prob, num_examples) / num_examples

  @property
  def slots(self) -> int:
    return self.batch_size

  def event(self, inner: DpEvent) -> DpEvent:
    return dp_accounting.SampledWithoutReplacementDpEvent(
      self.num_examples, self.batch_size, inner
    )

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    # The event contains the size of the data, so other data would have another event.
    self.check_size(num_examples)
    rng = generator(seed, step)
    # The order inside a batch has no meaning. Sorted, it matches that of Poisson batches.
    return np.sort(rng.choice(num_examples, self.batch_size, replace=False, shuffle=False))
