"""Samplers that bound how often, and how far apart, one example takes part.

Correlated noise is paid for by the columns that one example touches, so its samplers must
keep what they declare in `participation`; `dpjax.Plan` reads the cost off that and refuses
samplers that declare nothing. All draws are pure functions of (seed, step).

| sampler                 | an example takes part in                        |
| ----------------------- | ----------------------------------------------- |
| CyclicSampler           | one fixed step of every pass                    |
| BallsInBinsSampler      | one step of every pass, drawn once, uniformly   |
| RandomAllocationSampler | one step of every pass, drawn anew, uniformly   |
| CyclicPoissonSampler    | its group's turn, with probability `prob`       |
| MinSepSampler           | any step, at least `min_sep` after its last one |

Why CyclicSampler has no add/remove: its batches are cut from an order of ALL examples, so
one example more moves the others to other steps. In the others, every example draws
its own group, bin or times, independently of how many others there are: the two runs can be
coupled so that the others take part in the same steps.

No amplification is claimed for a random position except by CyclicPoissonSampler and, without
correlated noise, RandomAllocationSampler. What balls in bins are proved to cost as a whole run
is `dpjax.accounting.balls_in_bins_event`, by which no run is charged yet; b-min-sep has a
Monte-Carlo bound, `dpjax.accounting.min_sep_epsilon`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import dp_accounting
import numpy as np

from dpjax import validate
from dpjax.passes import RandomAllocationDpEvent
from dpjax.sampling.samplers import (
  DpEvent,
  PaddedSampler,
  Participation,
  Sampler,
  SizedSampler,
  generator,
)
from dpjax.validate import UserError


def _once(seed: int) -> np.random.Generator:
  """A stream for what is drawn once per run, apart from those of the steps."""
  return generator(seed, 0, 0)


class _Unamplified(Sampler):
  """Nothing is claimed for the chance of which steps an example is in."""

  def event(self, inner: DpEvent) -> DpEvent:
    """Returns the event of a step that the example is in."""
    return inner


@dataclasses.dataclass(frozen=True)
class CyclicSampler(_Unamplified, SizedSampler):
  """Every pass takes the same batches in the same order; they partition the examples.

  The order is a permutation drawn once from the seed. No secret: nothing is claimed for it.

  Args:
    steps_per_pass: batches b of a pass; an example's steps are exactly b apart.
    num_examples: size of the data, public under the relations that hold here.

  >>> sampler = CyclicSampler(steps_per_pass=2, num_examples=4)
  >>> first, second, again = (sampler.draw(4, seed=0, step=t) for t in range(3))
  >>> sorted([*first.tolist(), *second.tolist()]), bool((first == again).all())
  ([0, 1, 2, 3], True)
  """

  law: ClassVar[str] = "cyclic"
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

  @property
  def slots(self) -> int:
    return -(-self.num_examples // self.steps_per_pass)

  @property
  def participation(self) -> Participation:
    return Participation(self.steps_per_pass, cyclic=True)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    self.check_size(num_examples)
    order = _once(seed).permutation(num_examples)
    return np.sort(order[step % self.steps_per_pass :: self.steps_per_pass])


@dataclasses.dataclass(frozen=True)
class CyclicPoissonSampler(PaddedSampler):
  """Groups take turns; in its group's turn an example takes part with probability `prob`.

  An example's group is drawn once, uniformly and independently of all other examples. With
  noise of at most `num_groups` bands, a run of n steps is dominated by ceil(n / num_groups)
  Poisson-sampled Gaussians of probability `prob` whose sensitivity is the largest column
  norm (Choquette-Choo et al. 2023, arXiv:2306.08153: then an example's turns
  touch disjoint rows). `prob=1` is balls-in-bins.

  Args:
    prob: probability in (0, 1] to take part in a turn; the expected batch is
      prob / num_groups of the examples.
    num_groups: steps between an example's turns; 1 is Poisson sampling.
    capacity: slots of a batch, as for PoissonSampler.

  >>> sampler = CyclicPoissonSampler(prob=1.0, num_groups=2, capacity=4)
  >>> taken = [sampler.draw(4, seed=0, step=t) for t in range(2)]
  >>> sorted(np.concatenate(taken).tolist())
  [0, 1, 2, 3]
  """

  law: ClassVar[str] = "cyclic_poisson"
  small: ClassVar[Any] = ({"prob": 0.5, "num_groups": 2, "capacity": 5},)

  prob: float
  num_groups: int
  capacity: int

  def __post_init__(self):
    validate.probability(sampling_prob=self.prob)
    validate.integer_at_least(1, num_groups=self.num_groups, capacity=self.capacity)

  @property
  def rate(self) -> float:
    return self.prob / self.num_groups

  @property
  def participation(self) -> Participation:
    return Participation(self.num_groups, cyclic=True, sampling_prob=self.prob)

  def event(self, inner: DpEvent) -> DpEvent:
    """Returns the event of one turn of a group."""
    return dp_accounting.PoissonSampledDpEvent(self.prob, inner)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    groups = _once(seed).integers(self.num_groups, size=num_examples)
    taken = generator(seed, step).random(num_examples) < self.prob
    taken &= groups == step % self.num_groups
    return self.checked(np.flatnonzero(taken), step)


@dataclasses.dataclass(frozen=True)
class BallsInBinsSampler(_Unamplified, PaddedSampler):
  """Each example falls into one of `num_bins` bins, once and uniformly; step t takes bin
  t mod num_bins (Choquette-Choo et al. 2024, arXiv:2410.06266; Chua et al. 2024).

  Args:
    num_bins: steps of a pass.
    capacity: slots of a batch, as for PoissonSampler.

  >>> sampler = BallsInBinsSampler(num_bins=2, capacity=4)
  >>> taken = [sampler.draw(4, seed=0, step=t) for t in range(2)]
  >>> sorted(np.concatenate(taken).tolist())
  [0, 1, 2, 3]
  """

  law: ClassVar[str] = "balls_in_bins"
  small: ClassVar[Any] = ({"num_bins": 2, "capacity": 5},)

  num_bins: int
  capacity: int

  def __post_init__(self):
    validate.integer_at_least(1, num_bins=self.num_bins, capacity=self.capacity)

  @property
  def rate(self) -> float:
    return 1 / self.num_bins

  @property
  def participation(self) -> Participation:
    return Participation(self.num_bins, cyclic=True)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    bins = _once(seed).integers(self.num_bins, size=num_examples)
    return self.checked(np.flatnonzero(bins == step % self.num_bins), step)


@dataclasses.dataclass(frozen=True)
class RandomAllocationSampler(PaddedSampler):
  """Each example is in one step of every pass of `steps_per_pass`, drawn uniformly on its own
  and anew in each pass: every example once a pass, amplified by which step is secret.

  For independent noise. A pass is paid in full at its first step
  (`dpjax.accounting.random_allocation`), so an unfinished one costs as much as a whole one.

  Args:
    steps_per_pass: steps of a pass.
    capacity: slots of a batch, as for PoissonSampler.

  >>> sampler = RandomAllocationSampler(steps_per_pass=2, capacity=4)
  >>> taken = [sampler.draw(4, seed=0, step=t) for t in range(2)]
  >>> sorted(np.concatenate(taken).tolist())
  [0, 1, 2, 3]
  >>> inner = dp_accounting.GaussianDpEvent(1.0)
  >>> [type(sampler.event_at(step, inner)).__name__ for step in range(3)]
  ['RandomAllocationDpEvent', 'NoOpDpEvent', 'RandomAllocationDpEvent']
  """

  law: ClassVar[str] = "random_allocation"
  steps_alike: ClassVar[bool] = False
  small: ClassVar[Any] = ({"steps_per_pass": 2, "capacity": 5},)

  steps_per_pass: int
  capacity: int

  def __post_init__(self):
    validate.integer_at_least(1, steps_per_pass=self.steps_per_pass, capacity=self.capacity)

  @property
  def rate(self) -> float:
    return 1 / self.steps_per_pass

  def event(self, inner: DpEvent) -> DpEvent:
    """Returns the event of one step by itself: the whole pass that it may be the first step of."""
    if not isinstance(inner, dp_accounting.GaussianDpEvent):
      raise UserError(
        "random allocation takes a GaussianDpEvent", field="event", value=inner
      )
    return RandomAllocationDpEvent(self.steps_per_pass, inner.noise_multiplier)

  def event_at(self, step: int, inner: DpEvent) -> DpEvent:
    validate.integer_at_least(0, step=step)
    first = step % self.steps_per_pass == 0
    return self.event(inner) if first else dp_accounting.NoOpDpEvent()

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    turn, place = divmod(step, self.steps_per_pass)
    places = generator(seed, turn).integers(self.steps_per_pass, size=num_examples)
    return self.checked(np.flatnonzero(places == place), step)


def _rate(prob: float, min_sep: int) -> float:
  """How often one takes part in the long run, who rests for min_sep - 1 steps after it."""
  return prob / (1 + (min_sep - 1) * prob)


@functools.lru_cache(maxsize=2)
def _renewals(
  prob: float, min_sep: int, num_steps: int, seed: int, num_examples: int
) -> np.ndarray:
  """Steps of each example, [at most ceil(num_steps / min_sep), num_examples], rising."""
  rng = _once(seed)
  times = -(-num_steps // min_sep)
  waits = rng.geometric(prob, (times, num_examples)) - 1
  rate = _rate(prob, min_sep)
  locked = rng.random(num_examples) < (min_sep - 1) * rate  # as if running for ever
  lock = rng.integers(1, max(min_sep, 2), num_examples)
  first = np.where(locked, lock, 0)
  steps = first + np.cumsum(waits, axis=0) + min_sep * np.arange(times)[:, None]
  steps.flags.writeable = False
  return steps


@dataclasses.dataclass(frozen=True)
class MinSepSampler(_Unamplified, PaddedSampler):
  """Poisson sampling of those who did not take part in the last `min_sep` - 1 steps.

  Started as if it had been running for ever, so that every batch has the same law: an
  example is in it with probability prob / (1 + (min_sep - 1) prob).

  Args:
    prob: probability in (0, 1] of a free example to take part.
    min_sep: least distance between two steps of one example.
    num_steps: steps of the run; a later one raises.
    capacity: slots of a batch, as for PoissonSampler.

  >>> sampler = MinSepSampler(prob=1.0, min_sep=2, num_steps=4, capacity=4)
  >>> taken = [sampler.draw(4, seed=0, step=t).tolist() for t in range(4)]
  >>> taken[0] == taken[2] and sorted(taken[0] + taken[1]) == [0, 1, 2, 3]
  True
  """

  law: ClassVar[str] = "min_sep"
  small: ClassVar[Any] = ({"prob": 1.0, "min_sep": 2, "num_steps": 2, "capacity": 5},)

  prob: float
  min_sep: int
  num_steps: int
  capacity: int

  def __post_init__(self):
    validate.probability(sampling_prob=self.prob)
    validate.integer_at_least(
      1, min_sep=self.min_sep, num_steps=self.num_steps, capacity=self.capacity
    )

  @property
  def rate(self) -> float:
    """Probability of one example to be in a batch."""
    return _rate(self.prob, self.min_sep)

  @staticmethod
  def prob_of(rate: float, min_sep: int) -> float:
    """The `prob` of a sampler of this `rate`, which is at most 1 / min_sep.

    >>> MinSepSampler.prob_of(0.25, min_sep=4), MinSepSampler.prob_of(0.25, min_sep=1)
    (1.0, 0.25)
    """
    return min(1.0, rate / max(1 - (min_sep - 1) * rate, rate))  # rounding may exceed 1

  @property
  def participation(self) -> Participation:
    return Participation(self.min_sep, cyclic=False)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    if step >= self.num_steps:
      raise UserError(f"must be < num_steps={self.num_steps}", field="step", value=step)
    steps = _renewals(self.prob, self.min_sep, self.num_steps, seed, num_examples)
    taken = np.flatnonzero((steps == step).any(axis=0))
    return self.checked(taken, step)
