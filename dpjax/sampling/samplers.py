"""Base classes of samplers, which decide who takes part in a step, and state the step's event.

A sampler's fields are public: they may be printed. The seed and a private size of the data are
arguments of its methods. Besides the fields, a draw depends on (seed, step) and the size alone. So
a resumed run draws what the interrupted run would have drawn.

Each sampler has its own file; `dpjax.sampling.registry` lists them. A sampler for correlated
noise declares in `participation` how far apart an example's steps are, and must keep to this
distance: `dpjax.Plan` computes the cost from it, and refuses a sampler that declares nothing.
"""

from __future__ import annotations

import abc
import bisect
import copy
import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import dp_accounting
import numpy as np
from scipy import stats

from dpjax import validate
from dpjax.accounting.event_kinds.elements import accountants_for
from dpjax.accounting.proved import ACCOUNTANTS, ADD, RELATIONS, NeighboringRelation
from dpjax.validate import UserError, Verbatim

if TYPE_CHECKING:
  from dpjax.sampling.registry import Sizing

DpEvent = dp_accounting.DpEvent


class Participation(NamedTuple):
  """Public bounds on the steps in which one example may take part."""

  steps_apart: int  # any two of its steps differ by at least this
  cyclic: bool  # whether they differ by a multiple of steps_apart
  turn_prob: float = 1.0  # chance that it takes part in its turn; 1: it always does


class Sampler(abc.ABC):
  """Base class of samplers. Methods that are not abstract claim no privacy by default.

  Subclasses are frozen dataclasses whose fields are public. A subclass that states an event says in
  `relations` under which relations the event is true of its draws. Which accountants have an
  analysis follows from the event.

  Attributes:
    name: name in `registry.SCHEMES` and in configs; "" for a user's own sampler.
    unit: the record that a guarantee protects, such as "example" or "user".
    can_overflow: whether a draw can exceed `padded_batch_size`; then `draw` raises.
    small: settings for 4 examples, with which `auditing.games` try to tell neighbours apart.
    relations: relations under which the event is true, default first; see `proved_under`.
  """

  name: ClassVar[str] = ""
  unit: ClassVar[str] = "example"
  can_overflow: ClassVar[bool] = False
  small: ClassVar[tuple[dict[str, Any], ...]] = ()
  relations: ClassVar[tuple[str, ...]] = ()

  @property
  def proved_under(self) -> tuple[str, ...]:
    """Returns the relations under which this object's event is true; () if nothing is proved.

    By default they are those of its class. Some depend on a field, such as `size_is_public`."""
    return self.relations

  def checked_relation(self, asked: str) -> NeighboringRelation:
    """Returns the relation that is asked for, or for "" the default relation.

    Raises:
      UserError: the relation is unknown, or has no proof although other relations have one.

    >>> from dpjax.sampling import FixedSizeSampler
    >>> FixedSizeSampler(batch_size=2, num_examples=4).checked_relation("")
    'replace_one'
    """
    proved = self.proved_under
    relation = asked or (*proved, ADD)[0]
    validate.one_of(RELATIONS, neighboring_relation=relation)
    relation = NeighboringRelation(relation)
    if proved and relation not in proved:
      raise UserError(
        f"{type(self).__name__} is proved only under {', '.join(proved)}",
        field="neighboring_relation",
        value=relation,
      )
    return relation

  def accountants(self, neighboring_relation: str) -> tuple[str, ...]:
    """Returns the accountants that have an analysis of its Gaussian steps, tightest first.

    Without an event it is all of them: a run may name either, and none proves anything.

    Raises:
      UserError: the event is accounted under other relations only, or by no accountant.

    >>> from dpjax.sampling import TruncatedPoissonSampler
    >>> sampler = TruncatedPoissonSampler(sampling_prob=0.5, capacity=8, num_examples=20)
    >>> sampler.accountants("replace_special")
    ('pld',)
    """
    event = self.event_at(0, dp_accounting.GaussianDpEvent(1.0))
    if event is None:
      return ACCOUNTANTS
    if not self.proved_under:
      raise UserError(
        "states an event; its `relations` must say under which relations it is true",
        field="sampler",
        value=Verbatim(type(self).__name__),
      )
    known = accountants_for(event, neighboring_relation)
    if not known:
      raise UserError(
        f"nobody accounts for the event of {type(self).__name__} under it",
        field="neighboring_relation",
        value=neighboring_relation,
      )
    return known

  @classmethod
  def sized(cls, size: Sizing) -> Sampler:
    """Returns the sampler for the numbers of a run; a subclass is sized like its base.

    Raises:
      UserError: numbers that do not fit the sampler, or a class that has no rule for its size.
    """
    raise UserError(
      "has no rule for its size; name a function that returns one",
      field="sampler",
      value=Verbatim(cls.__name__),
    )

  @property
  @abc.abstractmethod
  def padded_batch_size(self) -> int:
    """Returns the number of rows of every batch, with padding; constant, so JAX compiles once."""

  @abc.abstractmethod
  def draw(self, num_examples: int, *, seed: int, step: int) -> np.ndarray:
    """Draws the indices of the examples that take part in `step`, [k]; k may be 0.

    The result must be a function of (num_examples, seed, step) alone.

    Raises:
      UserError: the sampler was made for data of another size; a draw above the capacity.
    """

  def event(self, inner: DpEvent) -> DpEvent | None:
    """Returns the event of one step, or of a pass of `steps_per_event` steps, whose noisy sums have
    the event `inner`; None without a proof."""
    del inner
    return None

  @property
  def steps_per_event(self) -> int:
    """Returns the number of steps that one `event` covers: 1, or all steps of a pass.

    A pass that has begun costs as much as a finished pass. So a run may stop anywhere in a pass,
    even because of what it has released."""
    return 1

  def event_at(self, step: int, inner: DpEvent) -> DpEvent | None:
    """Returns the event that `step` adds. The first t events cover the cost of t steps.

    A record may be in any step of a pass, so its first step has the event of the whole pass, and
    the others have a no-op."""
    validate.integer_at_least(0, step=step)
    whole = self.event(inner)
    is_within = whole is not None and step % self.steps_per_event != 0
    return dp_accounting.NoOpDpEvent() if is_within else whole

  @property
  def period(self) -> int | None:
    """Returns after how many steps the costs repeat, of which the first costs all: 1 if all steps
    cost the same. None for a class that defines `event_at` anew: it is asked for each step."""
    if type(self).event_at is not Sampler.event_at:
      return None
    validate.integer_at_least(1, steps_per_event=self.steps_per_event)
    return self.steps_per_event

  @property
  def participation(self) -> Participation | None:
    """Returns bounds on the steps of one example; None if no bounds are known."""
    return None

  @property
  def proved_with_memory(self) -> bool:
    """Returns whether the event is also true where what a record sends depends on its own earlier
    steps, as that of a federated client with a state may.

    It is if each record's steps are drawn apart from all others', or if no secrecy of steps is
    claimed. If one takes part in another's place, later messages of the other tell on it."""
    return False

  @property
  def only_size(self) -> int | None:
    """Returns the only accepted size of the data, which is then public; None if several are."""
    return None

  @property
  def least_size(self) -> int:
    """Returns the smallest number of records that the sampler accepts; 0 for no limit."""
    return self.only_size or 0

  @property
  def rows_of_record(self) -> int:
    """Returns the largest number of rows that one unit may own."""
    return 1

  def log_overflow_prob(self, num_examples: int) -> float:
    """Returns log P(a draw from num_examples exceeds the padded batch size), or an upper bound;
    -inf if no draw can."""
    del num_examples
    return -math.inf

  def fit_to(self, num_examples: int, *, log_overflow_prob: float) -> Sampler:
    """Returns this sampler with the smallest padded batch size that draws rarely exceed.

    This size is a multiple of 8. A draw exceeds it with log-probability at most
    `log_overflow_prob`. Raises UserError for a sampler whose draws cannot overflow.
    """
    raise UserError(
      "must be a PoissonSampler or its kin to have a capacity", field="sampler", value=self
    )


def unproved_error(sampler: Sampler, field: str) -> UserError:
  """Returns the error about a sampler without an event, with what would give it one."""
  by_size = ""
  if sampler.relations and getattr(sampler, "num_examples", 0) is None:
    by_size = (
      "with num_examples=.., which becomes public, it has one under "
      f"neighboring_relation='{sampler.relations[0]}'; or "
    )
  return UserError(
    "has no event, so no epsilon can be proved for it; "
    f"{by_size}use PoissonSampler or FixedSizeSampler",
    field=field,
    value=Verbatim(type(sampler).__name__),
  )


def assumption(part: object) -> str:
  """Returns what is unproved about a sampler, rule or strategy; "" for an object of dpjax itself.

  An object is of dpjax itself if its class is in a dpjax module, and no method was replaced.

  >>> from dpjax.sampling import PoissonSampler
  >>> sampler = PoissonSampler(sampling_prob=0.5, capacity=8)
  >>> assumption(sampler), assumption(np.random.default_rng(0))
  ('', "Generator: its event is its author's word")
  """
  kind = type(part)
  known = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
  # A method, or `relations`, that is set on the object would override the one of the class.
  exchanged = set(getattr(part, "__dict__", {}))
  if dataclasses.is_dataclass(kind):
    exchanged -= {field.name for field in dataclasses.fields(kind)}
  is_ours = kind.__module__.startswith("dpjax.") and known
  if is_ours and not (exchanged and exchanged.intersection(dir(kind))):
    return ""
  return f"{kind.__name__}: its event is its author's word"


class UnamplifiedSampler(Sampler):
  """A sampler that claims no amplification by its random choice of steps."""

  @property
  def proved_with_memory(self) -> bool:
    return True

  def event(self, inner: DpEvent) -> DpEvent:
    """Returns `inner`: a step that contains the example costs as much as without sampling."""
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
  """Base class of samplers in which examples join a batch independently, each with chance
  `sampling_prob`.

  Batches are padded to `capacity` rows. A draw above the capacity is never cut: it raises an
  error. `dpjax.Plan` refuses to start unless delta covers the chance of this error.
  """

  can_overflow: ClassVar[bool] = True
  capacity: int
  sampling_prob: float  # that one example takes part in a step: a field, or a property

  @property
  def padded_batch_size(self) -> int:
    return self.capacity

  @property
  def proved_with_memory(self) -> bool:
    return True

  def log_overflow_prob(self, num_examples: int) -> float:
    """Computes log P(a draw from num_examples exceeds the capacity); -inf if it cannot.

    If SciPy's result is not finite, Chernoff's bound is returned instead.

    >>> from dpjax.sampling import PoissonSampler
    >>> PoissonSampler(sampling_prob=0.5, capacity=10).log_overflow_prob(10)
    -inf
    >>> round(PoissonSampler(sampling_prob=0.1, capacity=9999).log_overflow_prob(10_000))
    -23026
    """
    n = num_examples
    rate = self.sampling_prob
    if n <= self.capacity:
      return -math.inf
    # SciPy's result is -inf if the chance is below the smallest float64. Then a bound is used.
    exact = float(stats.binom.logsf(self.capacity, n, rate))
    return exact if math.isfinite(exact) else _log_chernoff(self.capacity + 1, n, rate)

  def fit_to(self, num_examples: int, *, log_overflow_prob: float) -> Sampler:
    """Returns this sampler with the smallest sufficient padded batch size; see
    `Sampler.fit_to`.

    >>> from dpjax.sampling import PoissonSampler
    >>> sampler = PoissonSampler(sampling_prob=0.01, capacity=1)
    >>> sampler.fit_to(60_000, log_overflow_prob=-30).capacity
    792
    """

    # Capacities are multiples of 8, so that data of similar size share one compiled shape.
    def suffices(eighths: int) -> bool:
      # A copy is not checked again: only the sampler that is returned is.
      trial = copy.copy(self)
      object.__setattr__(trial, "capacity", 8 * eighths)
      return trial.log_overflow_prob(num_examples) <= log_overflow_prob

    high = 1
    # The chance of overflow falls as the capacity grows. So doubling brackets the smallest
    # sufficient capacity, and bisection narrows the bracket.
    while not suffices(high):
      high = 2 * high
    least = bisect.bisect_left(range(high), True, lo=high // 2 + 1, key=suffices)
    return dataclasses.replace(self, capacity=8 * least)  # type: ignore[type-var]

  def check_draw(self, taken: np.ndarray, step: int) -> np.ndarray:
    """Returns the draw of a step; raises UserError if it exceeds the capacity."""
    if taken.size > self.capacity:
      raise UserError(
        f"the draw of step {step} took more examples; it is never cut silently, "
        "choose a larger capacity and start again",
        field="capacity",
        value=self.capacity,
      )
    return taken


def _log_chernoff(count: int, num_examples: int, rate: float) -> float:
  """Returns an upper bound on log P(Bin(n, rate) >= count), where n is `num_examples`.

  The bound is -n KL(count / n, rate), or 0 if count is not above the mean."""
  share = count / num_examples
  n = num_examples
  if share <= rate:
    return 0.0
  absent = (1 - share) * math.log((1 - share) / (1 - rate)) if share < 1 else 0.0
  # The factor makes the bound larger by more than its rounding error.
  return min(0.0, -n * (share * math.log(share / rate) + absent) * (1 - 1e-12))
