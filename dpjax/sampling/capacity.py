"""The smallest batch that a random draw does not exceed."""

from __future__ import annotations

import dataclasses
from typing import Any


def has_capacity(sampler: Any) -> bool:
  """Whether a draw of this sampler can exceed its slots, and raises where it does.

  >>> from dpjax.sampling import PoissonSampler, ShuffledSampler
  >>> has_capacity(PoissonSampler(0.1, 8)), has_capacity(ShuffledSampler(8))
  (True, False)
  """
  return hasattr(sampler, "log_overflow_prob")


def fitted(sampler: Any, *, num_examples: int, log_overflow_prob: float) -> Any:
  """The sampler with the smallest capacity (a multiple of 8) that one draw exceeds with
  log-probability at most `log_overflow_prob`.

  >>> from dpjax.sampling import PoissonSampler
  >>> fitted(PoissonSampler(0.01, 1), num_examples=60_000, log_overflow_prob=-30).capacity
  792
  """

  def of(eighths: int) -> Any:
    return dataclasses.replace(sampler, capacity=8 * eighths)

  low, high = 0, 1
  while of(high).log_overflow_prob(num_examples) > log_overflow_prob:
    low, high = high, 2 * high
  while high - low > 1:
    middle = (low + high) // 2
    enough = of(middle).log_overflow_prob(num_examples) <= log_overflow_prob
    low, high = (low, middle) if enough else (middle, high)
  return of(high)
