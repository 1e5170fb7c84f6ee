"""Who takes part in a step, and what event that is to the accountant.

A sampler's fields are public: they may be printed. The size of the data and the seed are
arguments of its methods, because they belong to the data holder. Every draw is a pure
function of (seed, step), so a resumed run draws what the interrupted one would have.

| sampler           | law                              | event                              |
| ----------------- | -------------------------------- | ---------------------------------- |
| PoissonSampler    | each example, independently      | PoissonSampled, add/remove or zero |
| FixedSizeSampler  | uniform subset of fixed size     | SampledWithoutReplacement, replace |
| ShuffledSampler   | permutation cut into batches     | a whole epoch, replace or zero;    |
|                   |                                  | none where the size is not public  |

Elsewhere in this room: `truncated.TruncatedPoissonSampler` (zero) and `users.UserSampler`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import dp_accounting
import numpy as np
from scipy import stats

from dpjax import validate
from dpjax.types import NeighboringRelation
from dpjax.validate import UserError

_ADD_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE = NeighboringRelation.REPLACE_ONE
_ZERO_OUT = NeighboringRelation.REPLACE_SPECIAL


class Sampler(Protocol):
  """What a plan needs of a sampler."""

  @property
  def slots(self) -> int: ...  # leading axis of every batch: one compilation
  @property
  def relations(self) -> tuple[NeighboringRelation, ...]: ...  # under which event() is true
  def event(self, inner: dp_accounting.DpEvent) -> dp_accounting.DpEvent | None: ...
  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray: ...


def generator(seed: int, step: int) -> np.random.Generator:
  """The stream of one step; streams of different steps or seeds are independent.

  >>> generator(0, 5).random() == generator(0, 5).random()
  True
  """
  return np.random.Generator(
    np.random.Philox(np.random.SeedSequence(seed, spawn_key=(step,)))
  )


@dataclasses.dataclass(frozen=True)
class PoissonSampler:
  """Each example takes part independently with probability `prob`.

  Batches are padded to `capacity` slots. A draw above the capacity is never cut: it
  raises, and `dpjax.Plan` refuses to start unless the chance of that fits into delta.

  Args:
    prob: sampling probability in (0, 1].
    capacity: slots of a batch. See `PoissonSampler.fitted` to have it chosen.

  >>> sampler = PoissonSampler(prob=0.5, capacity=8)
  >>> sampler.draw(6, seed=0, step=0).size <= 8
  True
  """

  prob: float
  capacity: int

  def __post_init__(self):
    validate.probability(sampling_prob=self.prob)
    validate.integer_at_least(1, capacity=self.capacity)

  @classmethod
  def fitted(
    cls, *, prob: float, num_examples: int, log_overflow_prob: float
  ) -> PoissonSampler:
    """The smallest capacity (a multiple of 8) that one draw exceeds with log-probability
    at most `log_overflow_prob`.

    >>> PoissonSampler.fitted(prob=0.01, num_examples=60_000, log_overflow_prob=-30).capacity
    792
    """
    validate.probability(sampling_prob=prob)
    capacity = max(8, math.ceil(prob * num_examples / 8) * 8)
    while cls(prob, capacity).log_overflow_prob(num_examples) > log_overflow_prob:
      capacity += 8
    return cls(prob, capacity)

  @property
  def slots(self) -> int:
    return self.capacity

  @property
  def relations(self) -> tuple[NeighboringRelation, ...]:
    return (_ADD_REMOVE, _ZERO_OUT)

  def event(self, inner: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """The accountant's name for one step."""
    return dp_accounting.PoissonSampledDpEvent(self.prob, inner)

  def log_overflow_prob(self, num_examples: int) -> float:
    """log P(a draw from num_examples exceeds the capacity); -inf if it cannot.

    >>> PoissonSampler(prob=0.5, capacity=10).log_overflow_prob(10)
    -inf
    """
    if num_examples <= self.capacity:
      return -math.inf
    return float(stats.binom.logsf(self.capacity, num_examples, self.prob))

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    """Indices of the examples that take part in `step`, sorted; may be empty.

    Raises:
      UserError: the draw exceeds the capacity.
    """
    taken = np.flatnonzero(generator(seed, step).random(num_examples) < self.prob)
    if taken.size > self.capacity:
      raise UserError(
        f"capacity={self.capacity}: the Poisson draw of step {step} took more examples; "
        "it is never cut silently, choose a larger capacity and start again"
      )
    return taken


@dataclasses.dataclass(frozen=True)
class FixedSizeSampler:
  """`batch_size` distinct examples, uniformly among all subsets of that size.

  Args:
    batch_size: examples per step.
    num_examples: size of the data, which replace-one adjacency makes public.

  >>> FixedSizeSampler(batch_size=2, num_examples=4).draw(4, seed=0, step=0).size
  2
  """

  batch_size: int
  num_examples: int

  def __post_init__(self):
    validate.integer_at_least(1, batch_size=self.batch_size, num_examples=self.num_examples)
    if self.batch_size > self.num_examples:
      raise UserError(
        f"batch_size={self.batch_size}: must be <= num_examples={self.num_examples}"
      )

  @property
  def slots(self) -> int:
    return self.batch_size

  @property
  def relations(self) -> tuple[NeighboringRelation, ...]:
    return (_REPLACE,)

  def event(self, inner: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """The accountant's name for one step."""
    return dp_accounting.SampledWithoutReplacementDpEvent(
      self.num_examples, self.batch_size, inner
    )

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    """Indices of the examples that take part in `step`, sorted."""
    if num_examples != self.num_examples:
      raise UserError(f"num_examples={self.num_examples}: the data have {num_examples}")
    rng = generator(seed, step)
    return np.sort(rng.choice(num_examples, self.batch_size, replace=False, shuffle=False))


@dataclasses.dataclass(frozen=True)
class ShuffledSampler:
  """Batches cut from a fresh permutation in every epoch; the remainder is dropped.

  What most non-private code does. Accounting it as Poisson would be wrong (pitfall P13).
  What is proved, when `num_examples` is given: an epoch costs at most ONE step on all data,
  without any amplification. Proof: the permutation does not depend on the data, so let it
  be known. The batches of an epoch are then fixed and disjoint, and the one record in which
  two neighbours differ is in at most one of them. Every other step of the epoch, though it
  may depend on all earlier outputs, is the same mechanism for both neighbours and loses
  nothing; that one step is a Gaussian of sensitivity at most 2 C (replace_one) or C
  (replace_special), whatever came before. Under add_or_remove_one the permutation itself
  would change, and nothing is proved.

  Args:
    batch_size: examples per step.
    num_examples: size of the data, which makes it public; None: no epsilon is proved.

  >>> sampler = ShuffledSampler(batch_size=2)
  >>> taken = [sampler.draw(4, seed=0, step=t) for t in range(2)]
  >>> sorted(np.concatenate(taken).tolist())
  [0, 1, 2, 3]
  >>> inner = dp_accounting.GaussianDpEvent(1.0)
  >>> sampler = ShuffledSampler(batch_size=2, num_examples=4)
  >>> [type(sampler.event_at(step, inner)).__name__ for step in range(3)]
  ['GaussianDpEvent', 'NoOpDpEvent', 'GaussianDpEvent']
  """

  batch_size: int
  num_examples: int | None = None

  def __post_init__(self):
    validate.integer_at_least(1, batch_size=self.batch_size)
    if self.num_examples is not None:
      validate.integer_at_least(1, num_examples=self.num_examples)
      self._check_size(self.num_examples)

  def _check_size(self, num_examples: int) -> None:
    if num_examples < self.batch_size:
      raise UserError(
        f"batch_size={self.batch_size}: the data have only {num_examples} examples"
      )
    if self.num_examples not in (None, num_examples):
      raise UserError(f"num_examples={self.num_examples}: the data have {num_examples}")

  @property
  def slots(self) -> int:
    return self.batch_size

  @property
  def relations(self) -> tuple[NeighboringRelation, ...]:
    return () if self.num_examples is None else (_REPLACE, _ZERO_OUT)

  @property
  def steps_per_epoch(self) -> int:
    """Whole batches in the data, at least one."""
    if self.num_examples is None:
      raise UserError("num_examples=None: must be given to know how long an epoch is")
    return self.num_examples // self.batch_size

  def event(self, inner: dp_accounting.DpEvent) -> dp_accounting.DpEvent | None:
    """One step charged by itself: as if every step saw the record. An upper bound that
    `event_at` improves on; None where no size is public."""
    return None if self.num_examples is None else inner

  def event_at(
    self, step: int, inner: dp_accounting.DpEvent
  ) -> dp_accounting.DpEvent | None:
    """What `step` adds to the bill: an epoch is paid in full at its first step, so that an
    unfinished one costs as much as a whole one."""
    validate.integer_at_least(0, step=step)
    if self.num_examples is None:
      return None
    first = step % self.steps_per_epoch == 0
    return inner if first else dp_accounting.NoOpDpEvent()

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    """Indices of the examples that take part in `step`."""
    self._check_size(num_examples)
    epoch, position = divmod(step, num_examples // self.batch_size)
    order = generator(seed, epoch).permutation(num_examples)
    return order[position * self.batch_size : (position + 1) * self.batch_size]


def whole_batch_size(sampling_prob: float, num_examples: int) -> int:
  """The batch of fixed size that a sampling probability stands for: sampling_prob * n,
  rounded, at least 1. The ONE place that decides it, for what runs and for what is charged.

  >>> whole_batch_size(0.015, 100), whole_batch_size(1e-6, 100)
  (2, 1)
  """
  validate.probability(sampling_prob=sampling_prob)
  validate.integer_at_least(1, num_examples=num_examples)
  return max(1, round(sampling_prob * num_examples))


def pad(indices: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
  """Pads indices to `slots`; returns (indices, mask). Padding repeats index 0.

  >>> pad(np.array([4, 7]), 3)
  (array([4, 7, 0]), array([ True,  True, False]))
  """
  padded = np.zeros(slots, np.int64)
  padded[: indices.size] = indices
  return padded, np.arange(slots) < indices.size
