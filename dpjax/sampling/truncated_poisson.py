"""Truncated Poisson sampling: a hard limit on the batch, with its own event."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.truncated_poisson import TruncatedPoissonKind
from dpjax.sampling.draws import generator, successes
from dpjax.sampling.registry import Sizing
from dpjax.sampling.samplers import DpEvent, SizedSampler
from dpjax.validate import UserError, Verbatim


@dataclasses.dataclass(frozen=True)
class TruncatedPoissonSampler(SizedSampler):
  """Each example joins with probability `sampling_prob`, and at most `capacity` examples are kept.

  If more examples join, a uniformly random subset of size `capacity` is kept. So a batch never
  overflows, no share of delta is set aside, and the capacity may be small. But in a batch that was
  cut, each record took the place of another record. So one record moves the sum by up to two clip
  norms. This is NOT Poisson sampling (pitfall P12). The event is proved under replace_special (an
  emptied record keeps its place), by PLD, and only for Gaussian noise. The proof is in
  `dpjax.accounting.event_kinds.truncated_poisson`.

  Args:
    sampling_prob: sampling probability in (0, 1].
    capacity: padded batch size, and largest number of examples in a step.
    num_examples: size of the data, which is public, since both neighbours have this size.

  >>> sampler = TruncatedPoissonSampler(sampling_prob=0.9, capacity=3, num_examples=8)
  >>> sampler.draw(8, seed=0, step=0).size
  3
  """

  name: ClassVar[str] = "truncated_poisson"
  relations: ClassVar[tuple[str, ...]] = TruncatedPoissonKind.relations
  small: ClassVar[Any] = (
    {"sampling_prob": 0.5, "capacity": 3, "num_examples": 4},
    {"sampling_prob": 0.7, "capacity": 1, "num_examples": 4},
  )

  sampling_prob: float
  capacity: int
  num_examples: int

  def __post_init__(self):
    validate.probability(sampling_prob=self.sampling_prob)
    validate.integer_at_least(1, capacity=self.capacity, num_examples=self.num_examples)

  @classmethod
  def sized(cls, size: Sizing) -> TruncatedPoissonSampler:
    """Returns the sampler, by default with a capacity three standard deviations above the mean
    batch size, so that about one step in a thousand is cut."""
    prob, num_examples = size.sampling_prob, size.num_examples
    deviation = math.sqrt(prob * (1 - prob) * num_examples)
    # The default is a multiple of 8, as in `PaddedSampler.fit_to`.
    capacity = size.capacity or 8 * math.ceil((prob * num_examples + 3 * deviation) / 8)
    return cls(sampling_prob=prob, capacity=capacity, num_examples=num_examples)

  @property
  def padded_batch_size(self) -> int:
    return self.capacity

  def event(self, inner: DpEvent) -> DpEvent:
    """Returns the event of one step; `inner` must be one Gaussian.

    Raises:
      UserError: other noise, for which nothing is proved.
    """
    if not isinstance(inner, dp_accounting.GaussianDpEvent):
      raise UserError(
        f"is proved for Gaussian noise only, not {inner!r}",
        field="sampler",
        value=Verbatim("truncated_poisson"),
      )
    return dp_accounting.TruncatedSubsampledGaussianDpEvent(
      self.num_examples, self.sampling_prob, self.capacity, inner.noise_multiplier
    )

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    self.check_size(num_examples)
    rng = generator(seed, step)
    rows = successes(rng, num_examples, self.sampling_prob)
    if rows.size <= self.capacity:
      return rows
    # The proof needs a uniform choice that does not depend on the data.
    return np.sort(rng.choice(rows, self.capacity, replace=False, shuffle=False))
