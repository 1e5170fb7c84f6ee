"""Batches of a fixed size, drawn uniformly with replacement."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpjax.accounting.event_kinds.with_replacement import (
  WithReplacementKind,
  with_replacement_event,
)
from dpjax.sampling.draws import generator
from dpjax.sampling.fixed_size import FixedSizeSampler
from dpjax.sampling.samplers import DpEvent


@dataclasses.dataclass(frozen=True)
class WithReplacementSampler(FixedSizeSampler):
  """`batch_size` draws, each uniform among all examples, so an example may come several times.

  Every copy in a batch is clipped by itself. So replacing an example moves the sum by up to
  2 l2_clip_norm for each of its copies. Epsilon is usually above that of `FixedSizeSampler`: choose
  this sampler only if the data are read with replacement anyway.

  The arguments are those of `FixedSizeSampler`.

  >>> WithReplacementSampler(batch_size=3, num_examples=4).draw(4, seed=1, step=0).size
  3
  """

  name: ClassVar[str] = "with_replacement"
  relations: ClassVar[tuple[str, ...]] = WithReplacementKind.relations
  small: ClassVar[Any] = (
    {"batch_size": 3, "num_examples": 4, "size_is_public": True},
    {"batch_size": 1, "num_examples": 4, "size_is_public": False},
  )

  @property
  def proved_with_memory(self) -> bool:
    # Not even as many draws as examples take all examples.
    return False

  def event(self, inner: DpEvent) -> DpEvent:
    return with_replacement_event(
      inner, num_examples=self.num_examples, batch_size=self.batch_size
    )

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    self.check_data(num_examples)
    draws = generator(seed, step).integers(num_examples, size=self.batch_size)
    # The order inside a batch has no meaning. The indices are sorted, as in Poisson batches.
    return np.sort(draws)
