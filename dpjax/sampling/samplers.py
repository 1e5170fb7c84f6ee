"""Base classes of samplers: who takes part in a step, and the event for the accountant.

A sampler's fields are public: they may be printed. The size of the data and the seed are
arguments of its methods, because they belong to the data holder. Every draw is a pure
function of (seed, step), so a resumed run draws what the interrupted one would have.

Each sampler has a file of its own; `dpjax.sampling.registry` lists them. A sampler for
correlated noise keeps what it declares in `participation`: `dpjax.Plan` reads the cost off
that, and refuses one that declares nothing.
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

from dpjax import _moved, validate
from dpjax.accounting.proved import Proved, proved_for
from dpjax.sampling.batch_sizes import check_passes, steps_per_pass, whole_passes
from dpjax.validate import UserError, Verbatim

DpEvent = dp_accounting.DpEvent


class Participation(NamedTuple):
  """Bounds on the sets of steps that one example may take part in: public."""

  min_sep: int  # any two of its steps differ by at least this
  cyclic: bool  # and by a multiple of it
  sampling_prob: float = 1.0  # with which it takes part in a step of its turn


class Sizing(NamedTuple):
  """Public numbers of a run that determine the size of its sampler."""

  sampling_prob: float  # of one example to be in a batch, on average
  num_examples: int  # public
  num_steps: int = 1
  padded_batch_size: int = 1  # that no draw exceeds; a plan fits a smaller one
  capacity: int | None = None  # that the config asks for
  separation: int | None = None  # steps between two of an example, that the config asks for
  num_selected: int | None = None  # steps of a pass for an example, likewise
  neighboring_relation: str = ""  # of the guarantee; "": none is asked for
  unit: str = "example"  # what one row is, for messages
  may_leave: int = 0  # records that the coins of an audit may leave out

  @property
  def slots(self) -> int:
    """The old name of `padded_batch_size`, for one release."""
    return self.padded_batch_size


class _ProofOfScheme:
  """The default proof of a sampler: the row that its `scheme` names."""

  def __get__(self, sampler: Sampler | None, kind: type[Sampler]) -> Proved:
    return proved_for(kind.scheme if sampler is None else sampler.scheme)


class Sampler(abc.ABC):
  """A sampler, as a plan needs it. Methods that are not abstract claim nothing by default.

  Subclasses are frozen dataclasses whose fields are public. One that states an event either
  has a `proof` of its own or names, in `scheme`, the row of `accounting.PROVED` that is its proof.

  Attributes:
    name: name in configs; "" for a user's own sampler.
    used_for: sections of a config that may name it; see `registry.used_for`.
    options: config fields that it reads, out of "capacity", "separation" and "num_selected".
    answers: name in `launch.account`; see `registry.answered`.
    takes_whole_passes: whether a pass must be a whole number of steps; see `check_prob`.
    relation_must_be_named: whether a run must name its relation to have a proof.
    unit: the record whose presence epsilon hides, such as "example" or "user".
    steps_alike: whether every step is the same event.
    can_overflow: whether a draw can exceed `padded_batch_size`. Then it raises.
    small: settings over 4 examples and 2 steps, for its distinguishing games.
  """

  name: ClassVar[str] = ""
  used_for: ClassVar[tuple[str, ...]] = ()
  options: ClassVar[tuple[str, ...]] = ()
  answers: ClassVar[str] = ""
  takes_whole_passes: ClassVar[bool] = False
  relation_must_be_named: ClassVar[bool] = False
  unit: ClassVar[str] = "example"
  steps_alike: ClassVar[bool] = True
  can_overflow: ClassVar[bool] = False
  small: ClassVar[tuple[dict[str, Any], ...]] = ()
  scheme: ClassVar[str] = "unproved"
  # Relations under which the event is true, and accountants that prove it.
  proof: ClassVar[Proved] = _ProofOfScheme()  # type: ignore[assignment]
  # Old names, for one release.
  law: ClassVar[Any] = _moved.OldName("scheme")
  slots: ClassVar[Any] = _moved.OldName("padded_batch_size")

  def __init_subclass__(cls, **options: Any) -> None:
    """Keeps scheme and proof of a class together: a class that states one does not inherit
    the other."""
    super().__init_subclass__(**options)
    _moved.rename_attributes(cls, law="scheme", slots="padded_batch_size")
    # Only the class's own statements count: an inherited proof belongs to another scheme.
    stated = cls.__dict__
    if "scheme" not in stated and ("name" in stated or "proof" in stated):
      cls.scheme = cls.name or cls.__name__
    if "scheme" in stated and "proof" not in stated:
      cls.proof = Sampler.__dict__["proof"]

  @classmethod
  def sized(cls, size: Sizing) -> Sampler:
    """Returns the sampler of a run from the run's numbers.

    Raises:
      UserError: numbers that it cannot have, or a class that no config can name.
    """
    del size
    raise UserError(
      "has no rule for its size; name a function that returns one",
      field="sampler",
      value=Verbatim(cls.__name__),
    )

  @classmethod
  def times_per_pass(cls, size: Sizing) -> int:
    """Returns how often a pass takes each example, for samplers that take whole passes."""
    del size
    return 1

  @classmethod
  def check_prob(
    cls, size: Sizing, *, purpose: str = "", name: str = "sampling_prob"
  ) -> None:
    """Raises UserError where no pass of its has the sampling probability of `size`.

    Args:
      purpose: names the sampler in the message; "": by its class.
      name: name of the probability, for the message.
    """
    if cls.takes_whole_passes:
      purpose = purpose or cls.name.replace("_", " ")
      times = cls.times_per_pass(size)
      check_passes(size.sampling_prob, purpose, name=name, times=times)

  @classmethod
  def steps_apart(cls, size: Sizing) -> int:
    """Returns the least number of steps between two participations of one example: a pass,
    or as requested."""
    if cls.takes_whole_passes:
      return steps_per_pass(size.sampling_prob)
    # 1 / sampling_prob may be just below a whole number by rounding, which the addend
    # corrects.
    return size.separation or max(1, int(1 / size.sampling_prob + 1e-9))

  @classmethod
  def prob_in_turn(cls, size: Sizing) -> float:
    """Returns the probability that an example takes part in a step of its turn."""
    del size
    return 1.0

  @classmethod
  def nearest_prob(cls, prob: float, num_examples: int, times: int = 1) -> float:
    """Returns the closest sampling probability that its batches can have.

    By default any, or where it takes whole passes the closest one on the private side.

    Args:
      times: `times_per_pass`.
    """
    del num_examples
    if not cls.takes_whole_passes:
      return prob
    # A pass that is whole but for rounding stays as it is. A longer one is the private side: it
    # takes each example less often.
    whole = whole_passes(prob, times)
    return times / (steps_per_pass(prob, times) if whole else math.ceil(times / prob))

  @property
  @abc.abstractmethod
  def padded_batch_size(self) -> int:
    """Leading axis of every batch, constant for one compilation."""

  @abc.abstractmethod
  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    """Draws the indices of the examples that take part in `step`; may be empty.

    They are a function of (seed, step).

    Raises:
      UserError: data of another size than it was made for; a draw above the capacity.
    """

  def event(self, inner: DpEvent) -> DpEvent | None:
    """Returns the event for one step that adds `inner`; None: no epsilon is proved."""
    del inner
    return None

  def event_at(self, step: int, inner: DpEvent) -> DpEvent | None:
    """Returns the event that `step` adds. Events of the first t steps compose to their
    cost."""
    del step
    return self.event(inner)

  @property
  def steps_per_event(self) -> int:
    """Number of steps that one `event` covers; more where a pass is accounted as a whole."""
    return 1

  @property
  def participation(self) -> Participation | None:
    """Returns the distance of one example's steps; None: no bound is kept."""
    return None

  @property
  def only_size(self) -> int | None:
    """The only size of data that it accepts, which makes the size public; None: any."""
    return None

  @property
  def least_size(self) -> int:
    """Smallest number of records that it accepts."""
    return self.only_size or 0

  @property
  def rows_of_record(self) -> int:
    """Number of rows of the data that its unit may own."""
    return 1

  def log_overflow_prob(self, num_examples: int) -> float:
    """log P(a draw from num_examples exceeds the padded batch size), or an upper bound;
    -inf if it cannot."""
    del num_examples
    return -math.inf

  def fitted_to(self, num_examples: int, *, log_overflow_prob: float) -> Sampler:
    """Returns this sampler with the smallest padded batch size that is enough.

    It is a multiple of 8. One draw exceeds it with log-probability at most `log_overflow_prob`.
    """
    raise UserError(
      "must be a PoissonSampler or its kin to have a capacity", field="sampler", value=self
    )


def assumption(part: object) -> str:
  """Names the unproved part of a user's sampler, rule or strategy. "" for one of dpjax's:
  the class of that name in dpjax's module, with all of its methods unchanged.

  >>> from dpjax.sampling import PoissonSampler
  >>> assumption(PoissonSampler(prob=0.5, capacity=8)), assumption(generator(0, 0))
  ('', "Generator: its event is its author's word")
  """
  kind = type(part)
  known = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
  # A method, or a proof, set on the object would override that of the class.
  is_dataclass = dataclasses.is_dataclass(kind)
  fields = {field.name for field in dataclasses.fields(kind)} if is_dataclass else set()
  exchanged = [
    name
    for name in getattr(part, "__dict__", {})
    if name not in fields and hasattr(kind, name)
  ]
  if kind.__module__.startswith("dpjax.") and known and not exchanged:
    return ""
  return f"{kind.__name__}: its event is its author's word"


def taken(sampler: Sampler, num_examples: int, *, seed: int, step: int) -> np.ndarray:
  """Calls `sampler.draw`; a user's result must satisfy what a plan relies on.

  Raises:
    UserError: the result is no array of at most `padded_batch_size` distinct indices.
  """
  drawn = sampler.draw(num_examples, seed=seed, step=step)
  if not assumption(sampler):
    return drawn
  # Repeated or foreign indices would give one record more weight than the sensitivity
  # allows.
  rows = np.asarray(drawn)
  right = rows.ndim == 1 and (rows.dtype.kind in "iu" or not rows.size)
  right = right and np.unique(rows).size == rows.size <= sampler.padded_batch_size
  if not right or (rows.size and not 0 <= rows.min() <= rows.max() < num_examples):
    raise UserError(
      f"draw() of step {step} must return distinct indices in [0, "
      f"{num_examples}), at most padded_batch_size={sampler.padded_batch_size} of them, not "
      f"{drawn!r:.60}",
      field="sampler",
      value=Verbatim(type(sampler).__name__),
    )
  return rows.astype(np.int64)


class UnamplifiedSampler(Sampler):
  """A sampler that claims no amplification by its random choice of steps."""

  def event(self, inner: DpEvent) -> DpEvent:
    """Returns the event of a step that contains the example."""
    return inner


class SizedSampler(Sampler):
  """A sampler made for data of one size. Its field `num_examples` is therefore public."""

  num_examples: int

  @property
  def only_size(self) -> int | None:
    return self.num_examples

  def check_size(self, num_examples: int) -> None:
    """Raises UserError for data of another size."""
    if num_examples != self.num_examples:
      raise UserError(
        f"the data have {num_examples}", field="num_examples", value=self.num_examples
      )


class PaddedSampler(Sampler):
  """A sampler of a random number of examples, each independently with probability `rate`.

  Batches are padded to a field `capacity`. A draw above it is never cut: it raises, and
  `dpjax.Plan` refuses to start unless the chance of that fits into delta.
  """

  can_overflow: ClassVar[bool] = True
  capacity: int

  @property
  @abc.abstractmethod
  def rate(self) -> float:
    """Probability that one example is in a batch."""

  @property
  def padded_batch_size(self) -> int:
    return self.capacity

  def log_overflow_prob(self, num_examples: int) -> float:
    """Computes log P(a draw from num_examples exceeds the capacity); -inf if it cannot.

    Where that is too small for a float, it is Chernoff's bound on it.

    >>> from dpjax.sampling import PoissonSampler
    >>> PoissonSampler(prob=0.5, capacity=10).log_overflow_prob(10)
    -inf
    >>> round(PoissonSampler(prob=0.1, capacity=9999).log_overflow_prob(10_000))
    -23026
    """
    n = num_examples
    rate = self.rate
    if n <= self.capacity:
      return -math.inf
    # In logarithms: the chance is compared with a share of delta, and both may be below
    # 1e-300.
    exact = float(stats.binom.logsf(self.capacity, n, rate))
    return exact if math.isfinite(exact) else _log_chernoff(self.capacity + 1, n, rate)

  def fitted_to(self, num_examples: int, *, log_overflow_prob: float) -> Sampler:
    """Returns this sampler with the smallest sufficient padded batch size; see
    `Sampler.fitted_to`.

    >>> from dpjax.sampling import PoissonSampler
    >>> sampler = PoissonSampler(prob=0.01, capacity=1)
    >>> sampler.fitted_to(60_000, log_overflow_prob=-30).capacity
    792
    """

    # Multiples of 8, so that data of similar size share one compiled shape.
    def of(eighths: int) -> Any:
      return dataclasses.replace(self, capacity=8 * eighths)  # type: ignore[type-var]

    low = 0
    high = 1
    # Doubling, then bisection: the chance falls as the capacity grows.
    while of(high).log_overflow_prob(num_examples) > log_overflow_prob:
      low = high
      high = 2 * high
    while high - low > 1:
      middle = (low + high) // 2
      enough = of(middle).log_overflow_prob(num_examples) <= log_overflow_prob
      low, high = (low, middle) if enough else (middle, high)
    return of(high)

  def checked(self, taken: np.ndarray, step: int) -> np.ndarray:
    """Returns the draw of a step; UserError where it exceeds the capacity."""
    if taken.size > self.capacity:
      raise UserError(
        f"the draw of step {step} took more examples; it is never cut silently, "
        "choose a larger capacity and start again",
        field="capacity",
        value=self.capacity,
      )
    return taken


class PassSampler(Sampler):
  """A sampler whose passes are accounted as a whole, each at its first step.

  `event` is that of a whole pass. So a run may stop anywhere in a pass, even by what it has
  released; a pass that has begun costs as much as a finished one. Its length is a field
  `steps_per_pass`, or `steps_per_event` is overridden.
  """

  steps_alike: ClassVar[bool] = False
  steps_per_pass: int

  @property
  def steps_per_event(self) -> int:
    return self.steps_per_pass

  def event_at(self, step: int, inner: DpEvent) -> DpEvent | None:
    """Returns the event that `step` adds: of its whole pass, or nothing within one."""
    validate.integer_at_least(0, step=step)
    whole = self.event(inner)
    # The record is in unknown steps of the pass, so its cost is accounted before all of them.
    is_within = whole is not None and step % self.steps_per_event != 0
    return dp_accounting.NoOpDpEvent() if is_within else whole


def _log_chernoff(count: int, num_examples: int, rate: float) -> float:
  """An upper bound on log P(Bin(n, rate) >= count): -n KL(count / n, rate), above the mean."""
  share = count / num_examples
  n = num_examples
  if share <= rate:
    return 0.0
  absent = (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0
  # The factor makes up for rounding, on the side of a larger bound.
  return min(0.0, -n * (share * math.log(share / rate) + absent) * (1 - 1e-12))


def generator(seed: int, *place: int) -> np.random.Generator:
  """Returns the generator of one step, or for any other purpose.

  Generators of other places or seeds are independent of it.

  >>> generator(0, 5).random() == generator(0, 5).random()
  True
  """
  # A counter-based generator with its own spawn key: step t needs no earlier draws, and a
  # resumed run repeats it.
  sequence = np.random.SeedSequence(seed, spawn_key=place)
  return np.random.Generator(np.random.Philox(sequence))


def once(seed: int) -> np.random.Generator:
  """Returns the generator for draws made once per run, separate from those of the steps."""
  return generator(seed, 0, 0)


@_moved.rename_keywords(slots="padded_batch_size")
def pad(indices: np.ndarray, padded_batch_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Pads indices to `padded_batch_size`; returns (indices, mask). Padding repeats index 0.

  >>> pad(np.array([4, 7]), 3)
  (array([4, 7, 0]), array([ True,  True, False]))
  """
  # Index 0 always exists. The mask removes its contribution.
  padded = np.zeros(padded_batch_size, np.int64)
  padded[: indices.size] = indices
  return padded, np.arange(padded_batch_size) < indices.size
