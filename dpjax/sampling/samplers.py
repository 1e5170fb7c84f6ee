"""Samplers: who takes part in a step, and what event that is to the accountant.

A sampler's fields are public: they may be printed. The size of the data and the seed are
arguments of its methods, because they belong to the data holder. Every draw is a pure
function of (seed, step), so a resumed run draws what the interrupted one would have.

| sampler           | who takes part                   | event                              |
| ----------------- | -------------------------------- | ---------------------------------- |
| PoissonSampler    | each example, independently      | PoissonSampled                     |
| FixedSizeSampler  | uniform subset of fixed size     | SampledWithoutReplacement          |
| ShuffledSampler   | permutation cut into batches     | a whole epoch; none where the size |
|                   |                                  | is not public                      |

Under which relations an event is true is said in `dpjax.accounting.proved`, in the row that
the sampler names. Elsewhere in this room: `truncated`, `users` and `participation`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
import sys
from typing import Any, ClassVar, NamedTuple

import dp_accounting
import numpy as np
from scipy import stats

from dpjax import validate
from dpjax.validate import UserError, Verbatim

DpEvent = dp_accounting.DpEvent
_LEAST_PROB = 1e-15  # below it the steps of a pass are no whole number of float64


class Participation(NamedTuple):
  """Bounds on the sets of steps that one example may take part in: public."""

  min_sep: int  # any two of its steps differ by at least this
  cyclic: bool  # and by a multiple of it
  sampling_prob: float = 1.0  # with which it takes part in a step of its turn


class Sampler(abc.ABC):
  """A sampler, as a plan needs it. Methods that are not abstract claim nothing by default.

  Subclasses are frozen dataclasses whose fields are public.
  """

  law: ClassVar[str] = "unproved"  # the sampler's row in `dpjax.accounting.proved`
  unit: ClassVar[str] = "example"  # whose presence the epsilon hides
  steps_alike: ClassVar[bool] = True  # whether every step is the same event
  can_overflow: ClassVar[bool] = False  # whether a draw can exceed `slots`: then it raises
  # settings over 4 examples and 2 steps, by which games play it
  small: ClassVar[tuple[dict[str, Any], ...]] = ()

  @property
  @abc.abstractmethod
  def slots(self) -> int:
    """Leading axis of every batch: one compilation."""

  @abc.abstractmethod
  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    """Indices of the examples that take part in `step`, a function of (seed, step); there may
    be none.

    Raises:
      UserError: data of another size than it was made for; a draw above the capacity.
    """

  def event(self, inner: DpEvent) -> DpEvent | None:
    """The accountant's name for one step that adds `inner`; None: no epsilon is proved."""
    del inner
    return None

  def event_at(self, step: int, inner: DpEvent) -> DpEvent | None:
    """Returns the event that `step` adds; the events of the first t steps compose to what t steps
    cost."""
    del step
    return self.event(inner)

  @property
  def participation(self) -> Participation | None:
    """How far apart one example's steps are; None: nothing is kept."""
    return None

  @property
  def only_size(self) -> int | None:
    """The size of the data that it was made for, which makes it public; None: any."""
    return None

  def log_overflow_prob(self, num_examples: int) -> float:
    """log P(a draw from num_examples exceeds the slots), or an upper bound; -inf if it
    cannot."""
    del num_examples
    return -math.inf

  def fitted_to(self, num_examples: int, *, log_overflow_prob: float) -> Sampler:
    """This sampler with the fewest slots (a multiple of 8) that one draw exceeds with
    log-probability at most `log_overflow_prob`."""
    raise UserError(
      "must be a PoissonSampler or its kin to have a capacity", field="sampler", value=self
    )


def assumption(part: object) -> str:
  """Names what nobody has proved of an own sampler, rule or strategy; "" for one of dpjax's, which
  is what stands under its name in dpjax's module, none of its methods exchanged.

  >>> assumption(PoissonSampler(prob=0.5, capacity=8)), assumption(generator(0, 0))
  ('', "Generator: its event is its author's word")
  """
  kind = type(part)
  known = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
  exchanged = [n for n in getattr(part, "__dict__", {}) if callable(getattr(kind, n, None))]
  if kind.__module__.startswith("dpjax.") and known and not exchanged:
    return ""
  return f"{kind.__name__}: its event is its author's word"


def taken(sampler: Sampler, num_examples: int, *, seed: int, step: int) -> np.ndarray:
  """`sampler.draw`; of an own sampler held to what a plan must rely on.

  Raises:
    UserError: it is no array of distinct indices, of which there are at most `slots`.
  """
  drawn = sampler.draw(num_examples, seed=seed, step=step)
  if not assumption(sampler):
    return drawn
  found = np.asarray(drawn)
  right = found.ndim == 1 and (found.dtype.kind in "iu" or not found.size)
  right = right and np.unique(found).size == found.size <= sampler.slots
  if not right or (found.size and not 0 <= found.min() <= found.max() < num_examples):
    raise UserError(
      f"draw() of step {step} must return distinct indices in [0, "
      f"{num_examples}), at most slots={sampler.slots} of them, not "
      f"{drawn!r:.60}",
      field="sampler",
      value=Verbatim(type(sampler).__name__),
    )
  return found.astype(np.int64)


class SizedSampler(Sampler):
  """A sampler made for data of one size, a field `num_examples`, which is therefore public."""

  num_examples: int

  @property
  def only_size(self) -> int:
    return self.num_examples

  def check_size(self, num_examples: int) -> None:
    """UserError: data of another size."""
    if num_examples != self.num_examples:
      raise UserError(
        f"the data have {num_examples}", field="num_examples", value=self.num_examples
      )


class PaddedSampler(Sampler):
  """A sampler of a random number of examples: each with probability `rate`, on its own.

  Batches are padded to a field `capacity`. A draw above it is never cut: it raises, and
  `dpjax.Plan` refuses to start unless the chance of that fits into delta.
  """

  can_overflow: ClassVar[bool] = True
  capacity: int

  @property
  @abc.abstractmethod
  def rate(self) -> float:
    """Probability of one example to be in a batch."""

  @property
  def slots(self) -> int:
    return self.capacity

  def log_overflow_prob(self, num_examples: int) -> float:
    """log P(a draw from num_examples exceeds the capacity); -inf if it cannot. Where that is
    too small for a float, Chernoff's bound on it.

    >>> PoissonSampler(prob=0.5, capacity=10).log_overflow_prob(10)
    -inf
    >>> round(PoissonSampler(prob=0.1, capacity=9999).log_overflow_prob(10_000))
    -23026
    """
    n = num_examples
    rate = self.rate
    if n <= self.capacity:
      return -math.inf
    exact = float(stats.binom.logsf(self.capacity, n, rate))
    return exact if math.isfinite(exact) else _log_chernoff(self.capacity + 1, n, rate)

  def fitted_to(self, num_examples: int, *, log_overflow_prob: float) -> Sampler:
    """
    >>> sampler = PoissonSampler(prob=0.01, capacity=1)
    >>> sampler.fitted_to(60_000, log_overflow_prob=-30).capacity
    792
    """

    def of(eighths: int) -> Any:
      return dataclasses.replace(self, capacity=8 * eighths)  # type: ignore[type-var]

    low = 0
    high = 1
    while of(high).log_overflow_prob(num_examples) > log_overflow_prob:
      low = high
      high = 2 * high
    while high - low > 1:
      middle = (low + high) // 2
      enough = of(middle).log_overflow_prob(num_examples) <= log_overflow_prob
      low, high = (low, middle) if enough else (middle, high)
    return of(high)

  def checked(self, taken: np.ndarray, step: int) -> np.ndarray:
    """The draw of a step; UserError where it exceeds the capacity."""
    if taken.size > self.capacity:
      raise UserError(
        f"the draw of step {step} took more examples; it is never cut silently, "
        "choose a larger capacity and start again",
        field="capacity",
        value=self.capacity,
      )
    return taken


def _log_chernoff(count: int, num_examples: int, rate: float) -> float:
  """An upper bound on log P(Bin(n, rate) >= count): -n KL(count / n, rate), above the mean."""
  share = count / num_examples
  n = num_examples
  if share <= rate:
    return 0.0
  rest = (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0
  return min(0.0, -n * (share * math.log(share / rate) + rest) * (1 - 1e-12))


def generator(seed: int, *place: int) -> np.random.Generator:
  """The stream of one step, or of any other place; those of other places or seeds are
  independent of it.

  >>> generator(0, 5).random() == generator(0, 5).random()
  True
  """
  sequence = np.random.SeedSequence(seed, spawn_key=place)
  return np.random.Generator(np.random.Philox(sequence))


@dataclasses.dataclass(frozen=True)
class PoissonSampler(PaddedSampler):
  """Each example takes part independently with probability `prob`.

  Args:
    prob: sampling probability in (0, 1].
    capacity: slots of a batch. `Plan.fitted_sampler` chooses it.

  >>> sampler = PoissonSampler(prob=0.5, capacity=8)
  >>> sampler.draw(6, seed=0, step=0).size <= 8
  True
  """

  law: ClassVar[str] = "poisson"
  small: ClassVar[Any] = ({"prob": 0.5, "capacity": 5},)

  prob: float
  capacity: int

  def __post_init__(self):
    validate.probability(sampling_prob=self.prob)
    validate.integer_at_least(1, capacity=self.capacity)

  @property
  def rate(self) -> float:
    return self.prob

  def event(self, inner: DpEvent) -> DpEvent:
    return dp_accounting.PoissonSampledDpEvent(self.prob, inner)

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    taken = np.flatnonzero(generator(seed, step).random(num_examples) < self.prob)
    return self.checked(taken, step)


@dataclasses.dataclass(frozen=True)
class FixedSizeSampler(SizedSampler):
  """`batch_size` distinct examples, uniformly among all subsets of that size.

  Args:
    batch_size: examples per step.
    num_examples: size of the data, which replace-one adjacency makes public.

  >>> FixedSizeSampler(batch_size=2, num_examples=4).draw(4, seed=0, step=0).size
  2
  """

  law: ClassVar[str] = "fixed_size"
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

  @property
  def slots(self) -> int:
    return self.batch_size

  def event(self, inner: DpEvent) -> DpEvent:
    return dp_accounting.SampledWithoutReplacementDpEvent(
      self.num_examples, self.batch_size, inner
    )

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    self.check_size(num_examples)
    rng = generator(seed, step)
    return np.sort(rng.choice(num_examples, self.batch_size, replace=False, shuffle=False))


@dataclasses.dataclass(frozen=True)
class ShuffledSampler(Sampler):
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

  steps_alike: ClassVar[bool] = False
  small: ClassVar[Any] = ({"batch_size": 2, "num_examples": 4},)

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
        f"the data have only {num_examples} examples",
        field="batch_size",
        value=self.batch_size,
      )
    if self.num_examples not in (None, num_examples):
      raise UserError(
        f"the data have {num_examples}", field="num_examples", value=self.num_examples
      )

  @property
  def slots(self) -> int:
    return self.batch_size

  @property
  def law(self) -> str:
    return "unproved" if self.num_examples is None else "shuffled"

  @property
  def only_size(self) -> int | None:
    return self.num_examples

  @property
  def steps_per_epoch(self) -> int:
    """Whole batches in the data, at least one."""
    if self.num_examples is None:
      raise UserError(
        "must be given to know how long an epoch is", field="num_examples", value=None
      )
    return self.num_examples // self.batch_size

  def event(self, inner: DpEvent) -> DpEvent | None:
    """Returns the event of one step by itself, as if every step saw the record: a bound that
    `event_at` improves on; None where no size is public."""
    return None if self.num_examples is None else inner

  def event_at(self, step: int, inner: DpEvent) -> DpEvent | None:
    """Returns the event that `step` adds: an epoch is paid in full at its first step, so that an
    unfinished one costs as much as a whole one."""
    validate.integer_at_least(0, step=step)
    if self.num_examples is None:
      return None
    first = step % self.steps_per_epoch == 0
    return inner if first else dp_accounting.NoOpDpEvent()

  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
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


def steps_per_pass(sampling_prob: float) -> int:
  """Steps of a pass that takes every record once: 1 / sampling_prob, rounded.

  >>> steps_per_pass(0.25)
  4
  """
  return max(1, round(1 / sampling_prob))


def whole_passes(sampling_prob: float) -> bool:
  """Whether a pass is a whole number of steps.

  >>> whole_passes(0.25), whole_passes(0.3)
  (True, False)
  """
  return math.isclose(steps_per_pass(sampling_prob) * sampling_prob, 1, rel_tol=1e-9)


def check_passes(sampling_prob: float, told: str, *, name: str = "sampling_prob") -> None:
  """Raises UserError, for a sampler that is `told`, unless a pass is a whole number of steps. The
  ONE place that decides it, for what runs and for what is charged."""
  validate.probability(**{name: sampling_prob})
  if sampling_prob < _LEAST_PROB:
    raise UserError(
      f"must be at least {_LEAST_PROB}, for {told}", field=name, value=sampling_prob
    )
  if not whole_passes(sampling_prob):
    raise UserError(
      f"must be 1 / a whole number, the steps of a pass, for {told}; "
      f"{1 / steps_per_pass(sampling_prob)!r} is near",
      field=name,
      value=sampling_prob,
    )


def pad(indices: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
  """Pads indices to `slots`; returns (indices, mask). Padding repeats index 0.

  >>> pad(np.array([4, 7]), 3)
  (array([4, 7, 0]), array([ True,  True, False]))
  """
  padded = np.zeros(slots, np.int64)
  padded[: indices.size] = indices
  return padded, np.arange(slots) < indices.size
