"""Cyclic sampling: every pass takes the same batches in the same order."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpjax import validate
from dpjax.accounting.proved import REPLACE, ZERO
from dpjax.sampling.draws import RUN, permutation
from dpjax.sampling.registry import Sizing, steps_per_pass
from dpjax.sampling.samplers import (
  Participation,
  SizedSampler,
  UnamplifiedSampler,
)
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class CyclicSampler(UnamplifiedSampler, SizedSampler):
  """Every pass takes the same batches in the same order; the batches partition the examples.

  All batches are cut from ONE permutation of the examples, drawn once from the seed. The
  permutation may be public, since no amplification is claimed for it. There is no proof under
  add_or_remove_one: with one more example, other examples would move to other steps.

  Args:
    steps_per_pass: number b of batches of a pass. Successive steps of an example are b apart.
    num_examples: size of the data, which is public under replace_one and replace_special.

  >>> sampler = CyclicSampler(steps_per_pass=2, num_examples=4)
  >>> first, second, again = (sampler.draw(4, seed=0, step=t) for t in range(3))
  >>> sorted([*first.tolist(), *second.tolist()]), bool((first == again).all())
  ([0, 1, 2, 3], True)
  """

  name: ClassVar[str] = "cyclic"
  relations: ClassVar[tuple[str, ...]] = (ZERO, REPLACE)
  small: ClassVar[Any] = ({"steps_per_pass": 2, "num_examples": 4},)

  steps_per_pass: int
  num_examples: int

  def __post_init__(self):
    validate.integer_at_least(
      1, steps_per_pass=self.steps_per_pass, num_examples=self.num_examples
    )
    if self.steps_per_pass > self.num_examples:
      raise UserError(
        f"must be <= num_examples={self.num_examples}",
        field="steps_per_pass",
        value=self.steps_per_pass,
      )

  @classmethod
  def sized(cls, size: Sizing) -> CyclicSampler:
    steps = steps_per_pass(size.sampling_prob)
    if steps > size.num_examples:
      raise UserError(
        f"its pass of {steps} steps must be of at most {size.num_examples}, one for "
        f"each {size.unit}; a larger batch makes it shorter",
        field="sampler",
        value=cls.name,
      )
    return cls(steps_per_pass=steps, num_examples=size.num_examples)

  @property
  def padded_batch_size(self) -> int:
    # The size is rounded up: if b does not divide the number of examples, the first batches hold
    # one example more.
    return -(-self.num_examples // self.steps_per_pass)

  @property
  def participation(self) -> Participation:
    return Participation(self.steps_per_pass, cyclic=True)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    self.check_size(num_examples)
    order = permutation(seed, *RUN, num_examples=num_examples)
    # Strides partition the permutation into batches whose sizes differ by at most one.
    rows = np.sort(order[step % self.steps_per_pass :: self.steps_per_pass])
    return rows.astype(np.int64)
