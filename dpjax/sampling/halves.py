"""A coin decides which half of the examples takes part."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import numpy as np

from dpjax.accounting.proved import REPLACE, ZERO, Proved
from dpjax.sampling.samplers import SizedSampler, Sizing, UnamplifiedSampler, generator


@dataclasses.dataclass(frozen=True)
class HalvesSampler(UnamplifiedSampler, SizedSampler):
  """One half of the examples, by a coin; nothing is claimed for the coin."""

  name: ClassVar[str] = "halves"
  proof: ClassVar[Proved] = Proved((ZERO, REPLACE))
  used_for: ClassVar[tuple[str, ...]] = ("examples", "clients")
  small: ClassVar[Any] = ({"num_examples": 4},)

  num_examples: int

  @classmethod
  def sized(cls, size: Sizing) -> Self:
    return cls(size.num_examples)

  @classmethod
  def nearest_prob(cls, prob: float, num_examples: int) -> float:
    return 0.5

  @property
  def slots(self) -> int:
    return -(-self.num_examples // 2)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    self.check_size(num_examples)
    is_second = generator(seed, step).random() < 0.5
    half = self.slots
    return np.arange(half, num_examples) if is_second else np.arange(half)
