"""The cost in delta of a run that aborts on a batch above its capacity, and runs that may abort.

The accountant analyses a run that never aborts. The same run with aborts, of probability at most B
on the data and on their neighbour, is within B of that run in total variation. So (epsilon, d)
becomes (epsilon, d + (1 + e^epsilon) B). The cost grows with epsilon, hence as delta falls.

| question                             | who answers it                                    |
| ------------------------------------ | ------------------------------------------------- |
| How often may a draw be too large?   | `log_allowed`, from the plan's delta and epsilon  |
| How large is the capacity?           | `Plan.fitted`: the smallest that is exceeded no   |
|                                      | more often than that                              |
| Is it enough for these data?         | `check_capacity`, before the first draw           |
| What is left of delta for the noise? | `accounted_delta`: at a plan's own delta or above |
|                                      | it reserves `OVERFLOW_SHARE` of that delta, below |
|                                      | it what `reserve_for_aborts` finds                |
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax import validate
from dpjax.accounting.epsilon import epsilon as epsilon_of
from dpjax.accounting.epsilon import privacy_profile
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.loss_grid import Profile
from dpjax.accounting.proved import ADD
from dpjax.validate import UserError

if TYPE_CHECKING:
  from dpjax.accounting.trade_off import TradeOff

# Share of a plan's delta that is reserved for draws above the capacity. At a delta below that of
# the plan, `reserve_for_aborts` may reserve a larger share.
OVERFLOW_SHARE = 0.05
# Factor between neighbouring amounts of delta on the grid of `reserve_for_aborts`.
LADDER = 1.01


def without_share(delta: float) -> float:
  """Returns the part of a plan's delta at which its noise is accounted; the share is for overflow.

  >>> without_share(1e-5)
  9.5e-06
  """
  return delta - OVERFLOW_SHARE * delta


def log_allowed(delta: float, epsilon: float, num_steps: int) -> float:
  """Returns log of the largest per-draw overflow probability b with
  (1 + e^epsilon) * num_steps * b <= OVERFLOW_SHARE * delta; an infinite epsilon counts as 0.

  >>> round(log_allowed(1e-5, 2.0, 1000))
  -24
  """
  epsilon = epsilon if math.isfinite(epsilon) else 0.0
  share = math.log(OVERFLOW_SHARE) + math.log(delta) - math.log(max(num_steps, 1))
  # logaddexp gives log(1 + e^epsilon) without overflow at a large epsilon.
  return share - np.logaddexp(0.0, epsilon)


def reserve_for_aborts(
  epsilon_at: Callable[[float], float],
  *,
  delta: float,
  log_abort_prob: float,
  least: float,
) -> float | None:
  """Returns the amount x of delta to reserve for aborts: the smallest sufficient one on a grid.

  The grid is least, 1.01 least, 1.01^2 least, .. An amount x covers aborts of a probability up to B
  if x >= (1 + e^epsilon_at(delta - x)) B.

  Guarantee: with the returned x, (epsilon_at(delta - x), delta) holds for the run with its aborts.

  Args:
    epsilon_at: delta -> epsilon of the run without aborts, falling in delta.
    delta: delta of the guarantee, in (0, 1).
    log_abort_prob: log B, where B > 0 is a bound on the chance of an abort.
    least: smallest amount to reserve, > 0.

  Returns:
    The amount x, or None if no x < delta is enough. No sufficient amount is skipped, so that a
    smaller delta never gets a smaller epsilon.

  >>> reserve_for_aborts(lambda left: 0.0, delta=1e-5, log_abort_prob=math.log(1e-7), least=2e-7)
  2e-07
  >>> reserve_for_aborts(lambda left: 9.0, delta=1e-5, log_abort_prob=math.log(1e-7), least=2e-7)
  """
  validate.open_unit(delta=delta)
  validate.positive(least=least)
  rung = 0
  while (aside := least * LADDER**rung) < delta:
    log_cost = log_abort_prob + float(np.logaddexp(0.0, epsilon_at(delta - aside)))
    # The addend covers the rounding of the logarithms where the first amount is exactly enough.
    if log_cost <= math.log(aside) + 1e-12:
      return aside
    # If the cost is infinite, no larger amount can help: epsilon only grows as less delta is left.
    if math.isinf(log_cost):
      return None
    # Amounts below this cost cannot be enough, so no sufficient amount is skipped.
    rung = max(rung + 1, math.floor((log_cost - math.log(least)) / math.log(LADDER)))
  return None


def with_aborts(profile: Profile, *, aside: float, epsilon: float) -> Profile:
  """Returns the privacy profile of a run whose aborts cost `aside` of delta at `epsilon`.

  A run that aborts with probability B adds (1 + e^epsilon) B to delta at every epsilon.

  >>> deltas = with_aborts(lambda epsilons: np.zeros(len(epsilons)), aside=2e-6, epsilon=0.0)
  >>> deltas([0.0])
  array([2.e-06])
  """
  if not aside:
    return profile
  # For an infinite epsilon, B was chosen as if epsilon were 0; see `log_allowed`.
  abort_prob = aside / (1 + math.exp(min(epsilon, 700.0) if epsilon < math.inf else 0.0))

  def deltas(epsilons: Sequence[float] | np.ndarray) -> np.ndarray:
    powers = np.exp(np.minimum(np.asarray(epsilons, float), 700.0))
    return np.minimum(1.0, profile(epsilons) + abort_prob * (1 + powers))

  return deltas


@contextlib.contextmanager
def of_whole(delta: float) -> Iterator[None]:
  """Makes an error about a part of `delta` one about `delta`, which is what the caller gave."""
  try:
    yield
  except UserError as error:
    raise (
      error.of(field="delta", value=delta) if error.field == "delta" else error
    ) from error


def check_capacity(
  run: Any,
  num_examples: int,
  *,
  declared: int | None,
  of_divisor: int | None,
  log_rarer: float = 0.0,
) -> None:
  """Raises UserError if a draw exceeds the capacity too often; see `Plan.check_capacity`.

  Args:
    run: the `Plan` of the run, whose relation says whether the number of examples is secret.
    num_examples: number of examples in the data.
    declared: number that stands for it if the difference is at most one record, or None.
    of_divisor: number of examples whose expected batch size is the divisor, or None.
    log_rarer: log of the factor by which such a draw must be rarer than the run allows.
  """
  # A size that is secret is shown, and decides, only by the declared constant near it.
  shown: int | None = num_examples
  if run.neighboring_relation == ADD:
    near = declared is not None and num_examples <= declared + 1
    shown = declared if near else None
  for size in (num_examples, num_examples if shown is None else shown):
    # The neighbour may have one record more. A batch that holds them all asks for no epsilon.
    chance = run.sampler.log_overflow_prob(size + 1)
    if chance == -math.inf or chance <= run.log_allowed - log_rarer:
      return
  sampler = run.sampler
  capacity = sampler.padded_batch_size
  if of_divisor is not None and num_examples > of_divisor + 1:
    # The message may end up in a log, so it leaves out the true number, which is secret.
    raise UserError(
      "declared, or normalize_by / sampling_prob: must not be below the number of training "
      f"examples, else batches exceed capacity={capacity} too often; declare a larger one",
      field="num_examples",
      value=of_divisor,
    )
  if shown is None:
    raise UserError(
      f"a Poisson draw from the data exceeds it too often for delta={run.delta!r}; "
      "must be larger, or declare a public number of examples that is not below theirs",
      field="capacity",
      value=capacity,
    )
  allowed = run.log_allowed - log_rarer
  needed = sampler.fit_to(shown + 1, log_overflow_prob=allowed).padded_batch_size
  raise UserError(
    f"a Poisson draw from {shown} examples exceeds it with probability "
    f"{math.exp(sampler.log_overflow_prob(shown + 1)):.1e} per step; {needed} are enough "
    f"for delta={run.delta!r}",
    field="capacity",
    value=capacity,
  )


class MayAbort(abc.ABC):
  """A run whose guarantee covers its aborts: what plans, joint plans and silos share.

  A subclass says which event its steps cost, and how much of delta is left for it once their aborts
  are paid for. In all methods `steps` is None for all steps.
  """

  delta: float
  neighboring_relation: str
  accountant: str

  @abc.abstractmethod
  def event(self, steps: Any = None) -> DpEvent:
    """Returns the event of `steps` steps, without aborts."""

  @abc.abstractmethod
  def accounted_delta(self, delta: float, steps: Any = None) -> float:
    """Returns delta minus the part reserved for draws above a capacity in `steps` steps.

    Raises:
      UserError: no epsilon makes the run private at such a small delta.
    """

  def epsilon(self, delta: float | None = None, steps: Any = None) -> float:
    """Returns epsilon at `delta` (default: the plan's) after `steps` (default: all) steps.

    `steps` is a number for a `Plan`, and a mapping of names to numbers for a `JointPlan`.

    Guarantee: it holds for runs on `batches`. It includes the cost of their abort on a draw
    above the capacity, at every delta.

    Raises:
      UserError: no epsilon at such a small delta.
    """
    if delta is None and steps is None:
      return self._own_epsilon
    delta = self.delta if delta is None else delta
    event = self.event(steps)
    with of_whole(delta):
      return self._epsilon_at(event, self.accounted_delta(delta, steps))

  @functools.cached_property
  def _own_epsilon(self) -> float:
    """The epsilon of all steps at the plan's delta. It is asked for often, and cannot change."""
    return self.epsilon(self.delta)

  def _epsilon_at(self, event: DpEvent, left: float) -> float:
    return epsilon_of(
      event,
      delta=left,
      neighboring_relation=self.neighboring_relation,
      accountant=self.accountant,
    )

  def _left_by_aborts(
    self,
    delta: float,
    steps: Any,
    log_chances: Sequence[float],
    *,
    least: float = 0.0,
  ) -> float:
    """Returns what is left of delta where aborts have no more than these chances; all of it where
    there are none.

    Args:
      log_chances: logarithms of the chances, which add up.
      least: smallest amount to reserve, if it is above the share of the smaller delta.
    """
    validate.open_unit(delta=delta)
    delta = float(delta)
    if not log_chances:
      return delta
    least = max(least, OVERFLOW_SHARE * min(delta, self.delta))
    event = self.event(steps)
    aside = reserve_for_aborts(
      lambda left: self._epsilon_at(event, left),
      delta=delta,
      log_abort_prob=float(np.logaddexp.reduce(log_chances)),
      least=least,
    )
    if aside is not None:
      return delta - aside
    if math.isinf(self._epsilon_at(event, delta)):
      # Epsilon is infinite even if nothing is reserved, so any amount will do.
      return delta - delta / 2
    raise UserError(
      f"is too small for capacities that were chosen for delta={self.delta!r}: batch overflow "
      "alone may cost more; make a plan with this delta, or several by JointPlan.calibrated",
      field="delta",
      value=delta,
    )

  def trade_off(self, steps: Any = None) -> TradeOff:
    """Returns pairs (epsilon, delta) at many epsilons, after `steps` (default: all) steps. All
    pairs hold at once. Each includes the cost of the abort on a draw above the capacity."""
    from dpjax.accounting.trade_off import all_pairs_of  # no run needs a curve

    return all_pairs_of(self.privacy_profile(steps))

  def privacy_profile(self, steps: Any = None) -> Profile:
    """Returns a function epsilons -> deltas for the first `steps` (default: all) steps.

    All pairs (epsilon, delta) hold at once. Each includes the cost of the abort on a draw above
    the capacity.

    >>> from dpjax import Plan, PoissonSampler
    >>> plan = Plan(sampler=PoissonSampler(sampling_prob=0.1, capacity=99), l2_clip_norm=1.0,
    ...   noise_multiplier=1.0, normalize_by=10, num_steps=3, delta=1e-5)
    >>> bool(plan.privacy_profile()([plan.epsilon()])[0] <= 1e-5 * (1 + 1e-6))
    True
    """
    profile = privacy_profile(
      self.event(steps),
      neighboring_relation=self.neighboring_relation,
      accountant=self.accountant,
    )
    aside = self.delta - self.accounted_delta(self.delta)
    return with_aborts(profile, aside=aside, epsilon=self.epsilon())
