"""The plan of a private run: sampler, clipping, noise and accounting in one object.

A Plan makes both the transform that runs and the event that is accounted, so the two cannot
disagree.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np
import optax
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent
from jax import core

from dpjax import (
  accounting,
  columns,
  gradients,
  noise,
  sampling,
  transforms,
  trees,
  validate,
)
from dpjax.accounting import calibration, matrix, overflow
from dpjax.accounting.attack_bounds import AttackBound
from dpjax.accounting.event_kinds.elements import (
  check_accountant,
  mechanism_of,
  parts,
  with_claims,
)
from dpjax.accounting.event_kinds.kind import event_to_json
from dpjax.accounting.matrix import correlated_events
from dpjax.accounting.overflow import OVERFLOW_SHARE
from dpjax.accounting.proved import NeighboringRelation
from dpjax.accounting.statement import NOTHING, delta_warning
from dpjax.gradients.per_example import ClippedGrad
from dpjax.noise import source
from dpjax.noise.shape import WHITE, check_levels
from dpjax.sampling import batches as batches_lib
from dpjax.sampling import indexed
from dpjax.sampling.batches import rows_of_slice
from dpjax.sampling.samplers import PaddedSampler, assumption, unproved_error
from dpjax.transforms import together
from dpjax.transforms.group_noise import group_stds, group_weights, noise_std
from dpjax.transforms.words import noise_in_words
from dpjax.types import ArrayTree, Batch, Example, Indexed, LossFn
from dpjax.validate import UserError, Verbatim

if TYPE_CHECKING:
  from dpjax.mechanisms.noisy_means import NoisyMeans

# Largest number of steps that the state of a transform can count.
_MOST_STEPS = 2**31 - 1
# `Plan.for_data` warns above this number of steps: calibrating the noise then takes a quarter of a
# minute or more.
_MANY_STEPS = 2 * 10**6
# Largest number of examples that an int64 index of NumPy can tell apart.
_MOST_EXAMPLES = 2**63 - 1
# `batches` warns if the divisor and the expected batch size differ by more than this factor.
_FAR_OFF = 4.0


# A Plan, or a JointPlan.
_Plan = TypeVar("_Plan", bound=Any)


def _no_option(name: str) -> str:
  """Returns why `name` is no option of a plan, and where it belongs."""
  if name == "noise_multiplier":
    return (
      "is no option here: it follows from epsilon; for a noise of your own make "
      "dpjax.Plan(sampler=..., noise_multiplier=...)"
    )
  if name in inspect.signature(gradients.clipped_grad).parameters:
    return (
      "is no option here, since a plan does not depend on it; give it to "
      f"plan.clipped_grad(loss_fn, {name}=..) or training.dp_sgd"
    )
  return "is no option here; must be a field of dpjax.Plan"


def _unit_of(part: Any) -> str:
  """Returns the unit that data state for a row, as blocks of users do; "" if none is stated."""
  unit = getattr(part, "unit", "")
  # A frame may have a column of this name.
  return unit if isinstance(unit, str) else ""


def _steps_of(epochs: float, size: int, batch_size: int) -> int:
  """Returns the number of steps of `Plan.for_data`, rounded, but at least 1.

  It warns about more than two million steps, for which finding the noise takes long.

  Raises:
    UserError: more steps than a transform can count.
  """
  steps = epochs * size / batch_size
  sentence = f"are {steps:.3g} steps of batch_size={batch_size}"
  if steps > _MOST_STEPS:
    raise UserError(
      f"{sentence}, of which there may be {_MOST_STEPS}", field="epochs", value=epochs
    )
  if steps > _MANY_STEPS:
    warnings.warn(
      f"epochs={epochs!r}: {sentence}; the noise for so many takes long to find, "
      "were they meant?",
      stacklevel=3,
    )
  return max(1, round(steps))


def change(plan: _Plan, **fields: Any) -> _Plan:
  """Returns a plan or joint plan with other values of some fields, which are known to be right."""
  kind = type(plan)
  # A user's subclass may check more.
  if not kind.__module__.startswith("dpjax."):
    return dataclasses.replace(plan, **fields)
  changed = object.__new__(kind)
  for field in dataclasses.fields(plan):
    value = fields.get(field.name, getattr(plan, field.name))
    object.__setattr__(changed, field.name, value)
  return changed


def _facts(part: Any) -> list[Any]:
  """Returns the type of a sampler or a correlation, and the numbers and words that define it.

  Capacities are left out, as they decide nothing. What else a user's own class holds may have no
  equal in another process.
  """
  # NumPy's numbers count as Python's, of which most of them are no subclass.
  is_plain = lambda value: not np.ndim(value) and np.asarray(value).dtype.kind in "biufU"
  numbers = {}
  for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
    value = getattr(part, field.name)
    several = value if isinstance(value, tuple) else (value,)
    if field.name != "capacity" and all(map(is_plain, several)):
      numbers[field.name] = value
  return [type(part).__name__, numbers]


class SpentBudget(NamedTuple):
  """The cost of the updates that ran, as `Plan.spent` returns it."""

  steps: int  # updates with noise
  epsilon: float
  delta: float
  statement: str  # the guarantee in words

  def __repr__(self) -> str:
    # A cell of a notebook shows this. The statement is pages long: print it by itself.
    numbers = f"steps={self.steps}, epsilon={self.epsilon}, delta={self.delta}"
    return f"SpentBudget({numbers}, statement={self.statement[:17]!r}...)"


@dataclasses.dataclass(frozen=True)
class Plan(overflow.MayAbort):
  """A private run: how to sample, clip and add noise, how often, and the cost.

  Args:
    sampler: decides which examples take part in a step, and states the event of the step.
    noise_multiplier: standard deviation of the noise on the sum / l2_clip_norm.
    l2_clip_norm: bound on the L2 norm of one example's gradient, a prefix tree of bounds, or a
      `dpjax.Clip`, which adds a clipping rule and a schedule; the plan stores it as a `Clip`.
      The cost of every step includes what an adaptive rule releases.
    normalize_by: public divisor of the noisy sum: the expected batch size, or 1 for the sum.
      `batches` warns if it is far from the expected batch size.
    num_steps: largest number of updates, all of which the guarantee covers.
    delta: delta of the guarantee; `OVERFLOW_SHARE` of it is reserved if draws can be too large.
    neighboring_relation: relation of the guarantee; "" for the sampler's default.
    accountant: "pld" (tight) or "rdp"; "" for the tightest that knows the sampler.
    slices: number of physical batches that make up one step; see `accumulated`.
    noise_shape: public factors of the noise multiplier, correlation between steps (DP-FTRL), and
      shares of groups. Correlation needs a sampler that bounds the participation of one
      example (`dpjax.sampling.samplers.Participation`), since the cost depends on that bound.
    statistics: private statistics, computed once on the same data before the first step. What
      a run costs includes them, also at 0 steps: `epsilon(steps=0)` is their cost alone. In the
      events of single steps they are part of the first one. They may use the key of `transform`,
      or another one.
    scaling: a `transforms.CoordinateScaling`, which scales coordinates by earlier private outputs
      before the clip, at no cost (`transforms/scale_then_privatize.py`); None for no scaling.
    unit: whom the guarantee hides, which is what one row of the data is: "example", or "user" for
      all that one user contributes, as of a client of a federation. "" for the sampler's unit.

  `dpjax/transforms/together.py` lists the combinations of options that are refused.

  Guarantee: let a run use `transform` on the batches of `batches` for at most `steps` updates. It
  is (epsilon(delta, steps), delta)-differentially private for one `unit` under
  `neighboring_relation`. All numbers of the plan must be constants. Under add_or_remove_one the
  number of examples is secret, so no number of the plan may be computed from it. A number of
  examples declared without looking at the data may be used.

  >>> plan = Plan(sampler=sampling.PoissonSampler(sampling_prob=0.01, capacity=768),
  ...   noise_multiplier=1.2, l2_clip_norm=1.0, normalize_by=600, num_steps=2000, delta=1e-5)
  >>> 1.8 < plan.epsilon() < 1.9 and plan.epsilon(steps=0) == 0
  True
  """

  sampler: sampling.Sampler
  noise_multiplier: float
  l2_clip_norm: Any
  normalize_by: float
  num_steps: int
  delta: float
  neighboring_relation: NeighboringRelation | str = ""
  accountant: str = ""
  slices: int = 1
  noise_shape: noise.NoiseShape = WHITE
  statistics: NoisyMeans | None = None
  scaling: transforms.CoordinateScaling | None = None
  unit: str = ""

  def __post_init__(self):
    validate.non_negative(noise_multiplier=self.noise_multiplier)
    validate.positive(normalize_by=self.normalize_by)
    validate.integer_at_least(1, slices=self.slices)
    validate.integer_in(1, _MOST_STEPS, num_steps=self.num_steps)
    validate.open_unit(delta=self.delta)
    # If delta were a half-precision number, the share of it for overflow would round to 0.
    object.__setattr__(self, "delta", float(self.delta))
    object.__setattr__(self, "l2_clip_norm", gradients.Clip.of(self.l2_clip_norm))
    if not isinstance(self.sampler, sampling.Sampler):
      raise UserError(
        "must be a sampler, such as dpjax.PoissonSampler(sampling_prob=..., capacity=...)",
        field="sampler",
        value=Verbatim(f"{self.sampler!r:.60}"),
      )
    # Only a sampler of plain rows leaves open what a row is.
    of_rows = self.sampler.unit
    units = ("example", "user") if of_rows == "example" else (of_rows,)
    object.__setattr__(self, "unit", self.unit or of_rows)
    validate.one_of(units, unit=self.unit)
    # A plan without statistics imports none of their mechanisms.
    if self.statistics is not None:
      from dpjax.mechanisms.noisy_means import NoisyMeans

      if not isinstance(self.statistics, NoisyMeans):
        raise UserError(
          "must be a dpjax.mechanisms.ChannelStatistics, a Whitening, or None",
          field="statistics",
          value=Verbatim(f"{self.statistics!r:.60}"),
        )
    # A plan without scaling does not import its transform.
    if self.scaling is not None and not isinstance(
      self.scaling, transforms.CoordinateScaling
    ):
      raise UserError(
        "must be a dpjax.transforms.CoordinateScaling, or None",
        field="scaling",
        value=self.scaling,
      )
    present = together.features(
      self.l2_clip_norm,
      self.noise_shape,
      sampler=self.sampler,
      slices=self.slices,
      statistics=self.statistics,
      scaling=self.scaling,
      unit=self.unit,
    )
    together.check(present)
    relation = self.sampler.checked_relation(self.neighboring_relation)
    object.__setattr__(self, "neighboring_relation", relation)
    known = self.sampler.accountants(relation)
    object.__setattr__(self, "accountant", self.accountant or known[0])
    check_accountant(self.accountant)
    if self.accountant not in known:
      raise UserError(
        f"has no analysis of {type(self.sampler).__name__}; use "
        f"accountant={' or '.join(map(repr, known))}",
        field="accountant",
        value=self.accountant,
      )
    self._check_shape()

  def _check_shape(self) -> None:
    shape = self.noise_shape
    participation = self.sampler.participation
    if self.statistics is not None:
      # Statistics are private under one relation, and raise for another one.
      self.statistics.event(self.neighboring_relation)
    shape.check_steps(self.num_steps)
    self.l2_clip_norm.check_steps(self.num_steps)
    noise_std(self.l2_clip_norm, self.noise_multiplier)
    if shape.shares is not None:
      group_weights(self.l2_clip_norm, shape.shares)
    if shape.correlation is not None:
      matrix.check_entries(shape.correlation, self.num_steps)
    if participation is not None:
      # The events are computed now, to raise UserError for combinations without an analysis.
      _ = self._correlated_events
    if participation is None or participation.turn_prob < 1:
      check_levels(shape.schedule, self.accountant)

  @functools.cached_property
  def _correlated_events(self) -> tuple[DpEvent, ...]:
    """Returns the event of each step. Read it only if the sampler bounds participation."""
    participation = self.sampler.participation
    assert participation is not None
    return correlated_events(
      self.noise_shape.strategy,
      noise_multiplier=self.noise_multiplier,
      num_steps=self.num_steps,
      factors=self.noise_shape.schedule,
      **participation._asdict(),
    )

  @classmethod
  def calibrated(
    cls,
    *,
    epsilon: float | None = None,
    attack: AttackBound | None = None,
    delta: float,
    sampler: sampling.Sampler,
    num_steps: int,
    l2_clip_norm: gradients.Clip | ArrayTree,
    normalize_by: float,
    **options: Any,
  ) -> Plan:
    """Returns the plan with the least noise for which `num_steps` steps meet a guarantee.

    Args:
      epsilon: epsilon of the guarantee (epsilon, delta). Give this or `attack`.
      attack: the most that an attacker may achieve, such as
        `accounting.TruePositiveRate(tpr=0.1, fpr=0.01)`. Then delta is the slack of a
        `GaussianDp` bound, and the delta at which the plan states its epsilon.
      options: further fields of the plan.

    Raises:
      UserError: both or none of epsilon and attack; epsilon <= 0; a guarantee that no noise
        meets; an unknown option; or a sampler that has no event.
    """
    # Options are checked first. A caller who gives a noise multiplier gives no epsilon, and must
    # not be told that epsilon is missing.
    known = inspect.signature(cls).parameters.keys() - {"noise_multiplier"}
    for name in options.keys() - known:
      raise UserError(_no_option(name), field=name)
    if attack is None:
      validate.positive(epsilon=epsilon)
    elif epsilon is not None:
      raise UserError(
        "give it or epsilon, not both", field="attack", value=Verbatim(repr(attack))
      )
    # A plan with an arbitrary noise runs all checks before the slow search for the noise.
    unit = cls(sampler, 1.0, l2_clip_norm, normalize_by, num_steps, delta=delta, **options)
    if not unit.is_private:
      raise unproved_error(sampler, "sampler")
    if attack is not None:
      profile = lambda z: change(unit, noise_multiplier=z).privacy_profile()
      noise_multiplier = calibration.noise_of_profile(profile, attack, delta=unit.delta)
      return change(unit, noise_multiplier=noise_multiplier)
    with overflow.of_whole(delta):
      noise_multiplier = accounting.calibrate_noise_multiplier(
        lambda z: change(unit, noise_multiplier=z).event(),
        epsilon=epsilon or 0.0,
        delta=unit.accounted_delta(delta),
        neighboring_relation=unit.neighboring_relation,
        accountant=unit.accountant,
      )
    return change(unit, noise_multiplier=noise_multiplier)

  @classmethod
  def for_data(
    cls,
    data: Indexed,
    *,
    batch_size: int,
    epochs: float,
    epsilon: float | None = None,
    attack: AttackBound | None = None,
    delta: float,
    l2_clip_norm: gradients.Clip | ArrayTree,
    num_examples: int | None = None,
    **options: Any,
  ) -> Plan:
    """Returns the plan of a Poisson-sampled run, from its expected batch size and number of epochs.

    With a size n, these two numbers give the sampling probability (batch_size / n), the divisor
    (batch_size) and the number of steps (epochs * n / batch_size, rounded, at least 1). The
    capacity is the smallest that delta allows.

    n is `num_examples` where given. Otherwise, under add_or_remove_one the size of the data is
    private, and n is the `nominal_size` that a `dpjax.data.Dataset` declares. Under the other
    relations neighbours have equal sizes, and n is len(data).

    A UserWarning is issued if delta is not below 1 / n. Another one is issued above two million
    steps: finding the noise then takes a quarter of a minute or more.

    Args:
      data: the data that `batches` will draw from. For blocks of users (`sampling.group_by_user`)
        the plan hides users, and an example below is a user.
      batch_size: expected number of examples in a step.
      epochs: expected number of steps in which each example takes part.
      epsilon, delta: the guarantee. The plan gets the least noise that keeps it.
      attack: in place of epsilon, the most that an attacker may achieve, as for `calibrated`.
      l2_clip_norm: bound on one example's gradient, as for the plan.
      num_examples: n, a number declared without looking at the data; None for the default of n
        above.
      options: further fields of the plan, such as `neighboring_relation` and `slices`.

    Raises:
      UserError: no declared size under add-or-remove-one; a batch size above n; a sampler, a
        divisor or a number of steps among the options; epsilon or another number out of its range.

    >>> plan = Plan.for_data(np.zeros((1_000, 2)), batch_size=100, epochs=3, epsilon=2.0,
    ...   delta=1e-5, l2_clip_norm=1.0, num_examples=1_000)
    >>> plan.sampler.sampling_prob, plan.normalize_by, plan.num_steps, plan.epsilon() <= 2
    (0.1, 100, 30, True)
    """
    validate.integer_at_least(1, batch_size=batch_size)
    validate.positive(epochs=epochs)
    if isinstance(data, int | str | list | Example | Batch) or type(data) is tuple:
      raise UserError(
        f"is {type(data).__name__}, must be a data set: dpjax.data.from_arrays(x, y, "
        "num_classes=..), or a part of one, train.subset(slice(700)); without data a plan is "
        "made by Plan.calibrated, from a sampler",
        field="data",
      )
    relation = options.get("neighboring_relation") or NeighboringRelation.ADD_OR_REMOVE_ONE
    size = num_examples
    if size is None and relation != NeighboringRelation.ADD_OR_REMOVE_ONE:
      size = indexed.size_of(data)
    if size is None:
      size = getattr(data, "nominal_size", None)
    if size is None:
      raise UserError(
        "must be declared, a constant that no record changes, because "
        "add_or_remove_one hides len(data); or "
        "neighboring_relation='replace_special'",
        field="num_examples",
        value=None,
      )
    validate.integer_in(1, _MOST_EXAMPLES, num_examples=size)
    if batch_size > size:
      raise UserError(
        f"must be <= num_examples={size}", field="batch_size", value=batch_size
      )
    if "sampler" in options or "normalize_by" in options or "num_steps" in options:
      raise UserError(
        "sampler, normalize_by and num_steps follow from batch_size and epochs; to "
        "choose them use Plan.calibrated",
        field="for_data",
      )
    steps = _steps_of(epochs, size, batch_size)
    options.setdefault("unit", _unit_of(data))
    plan = cls.calibrated(
      epsilon=epsilon,
      attack=attack,
      delta=delta,
      # The noise does not depend on the capacity, which is chosen below.
      sampler=sampling.PoissonSampler(sampling_prob=batch_size / size, capacity=size),
      num_steps=steps,
      l2_clip_norm=l2_clip_norm,
      normalize_by=batch_size,
      **options,
    )
    warning = delta_warning(delta, size)
    if warning:
      warnings.warn(warning, stacklevel=2)
    return plan.fitted(size)

  @functools.cached_property
  def is_private(self) -> bool:
    """Whether the plan has an epsilon: there is noise, and the sampler has an event."""
    return not isinstance(self.sum_event(0), NonPrivateDpEvent)

  @property
  def can_overflow(self) -> bool:
    """Whether a draw can exceed the capacity, for which a share of delta is reserved."""
    return self.sampler.can_overflow and self.is_private

  @property
  def period(self) -> int | None:
    """After how many steps the costs repeat, where the first of a period costs all of it: 1 if all
    steps are alike, the steps of a pass that is accounted as a whole. None if steps differ."""
    differ = self.sampler.participation or self.noise_shape.schedule or self.statistics
    return None if differ else self.sampler.period

  @property
  def steps_alike(self) -> bool:
    """Whether no setting can make the event of one step differ from that of another."""
    return self.period == 1

  def step_event(self, step: int | None = None) -> DpEvent:
    """Returns the event that step `step`, counted from 0, adds to the cost.

    The events of the first t steps compose to the cost of t steps, for every t. `step` may be
    None if all steps are alike.

    Raises:
      UserError: step None although the steps differ, or a step beyond the plan's last.
    """
    if step is None and not self.steps_alike:
      raise UserError(
        "the steps of this plan differ in cost, name one of them", field="step", value=None
      )
    if step is not None:
      validate.integer_at_least(0, step=step)
      if step >= self.num_steps:
        raise UserError(
          f"must be < num_steps={self.num_steps} of the plan", field="step", value=step
        )
    event = self.sum_event(step or 0)
    return event if step else self._with_statistics(event)

  def _with_statistics(self, sums: DpEvent) -> DpEvent:
    """Returns `sums`, an event of noisy sums, joined with that of the statistics if there are any.

    Each noisy sum depends only on the data and on earlier releases, so all events compose.
    """
    if self.statistics is None or isinstance(sums, NonPrivateDpEvent):
      return sums
    return matrix.join([self._statistics_event(), sums])

  def _statistics_event(self) -> DpEvent:
    assert self.statistics is not None
    return with_claims(self.statistics.event(self.neighboring_relation), self.assumptions)

  def sum_event(self, step: int) -> DpEvent:
    """Returns the event of the noisy sum of step `step`, without the cost of the statistics."""
    if self.noise_multiplier == 0:
      return NonPrivateDpEvent()
    if self.sampler.participation is not None:
      return with_claims(self._correlated_events[step], self.assumptions)
    multiplier = self.noise_multiplier
    rule = self.l2_clip_norm.rule
    if self.noise_shape.schedule:
      multiplier *= self.noise_shape.schedule[step]
    # An adaptive rule also releases a noisy count. The noisy sum and the noisy count cost as much
    # as one Gaussian release with the combined multiplier.
    if rule.adapts:
      multiplier = rule.combined_noise_multiplier(multiplier, self.normalize_by)
    event = self.sampler.event_at(step, GaussianDpEvent(float(multiplier)))
    return NonPrivateDpEvent() if event is None else with_claims(event, self.assumptions)

  def event(self, steps: int | None = None) -> DpEvent:
    """Returns the event of `steps` steps (default: all), and of the statistics before them."""
    steps = self._steps(steps)
    if not steps and self.statistics is not None:
      return self._statistics_event()
    return self._event_of(range(steps))

  def _event_of(self, steps: range) -> DpEvent:
    period = self.period
    if period is None:
      return matrix.join([self.step_event(step) for step in steps])
    # Without privacy every step is a release without noise.
    period = period if self.is_private else 1
    begun = len(range(-(-steps.start // period), -(-steps.stop // period)))
    return accounting.compose(self.sum_event(0), begun)

  def _total(self, steps: int | None) -> DpEvent:
    """Returns `event(steps)`, or an event of equal cost, up to rounding, that is faster to account.

    If participation is bounded and has probability 1, all noisy sums cost as much as one Gaussian
    release."""
    steps = self._steps(steps)
    participation = self.sampler.participation
    if participation is None or not steps or not self.noise_multiplier:
      return self.event(steps)
    if participation.turn_prob < 1:
      return self.event(steps)
    costs = matrix.participation_costs(
      self.noise_shape.strategy,
      num_steps=self.num_steps,
      steps_apart=participation.steps_apart,
      cyclic=participation.cyclic,
      factors=self.noise_shape.schedule,
    )
    sums = accounting.gaussian_event(self.noise_multiplier / math.sqrt(costs[steps - 1]))
    return self._with_statistics(with_claims(sums, self.assumptions))

  def remaining_event(self, start: int) -> DpEvent:
    """Returns the event of the steps from `start` to the last."""
    return self._event_of(range(start, self.num_steps))

  def _steps(self, steps: int | None) -> int:
    if steps is None:
      return self.num_steps
    validate.integer_at_least(0, steps=steps)
    if steps > self.num_steps:
      raise UserError(
        f"must be <= num_steps={self.num_steps} of the plan", field="steps", value=steps
      )
    return int(steps)

  def accounted_delta(self, delta: float, steps: int | None = None) -> float:
    """Returns delta minus the part reserved for draws above the capacity in `steps` steps.

    A run that aborts with probability B costs (1 + e^epsilon) B of delta. Capacities are chosen so
    that `OVERFLOW_SHARE` of the plan's delta is enough for this. At a smaller delta epsilon is
    larger, and this share may not be enough. Then the least amount x on a grid of amounts with
    x >= (1 + e^epsilon(delta - x)) B is reserved.

    Raises:
      UserError: no epsilon makes the run private at such a small delta.
    """
    validate.open_unit(delta=delta)
    delta = float(delta)
    steps = self._steps(steps)
    if not steps or not self.can_overflow:
      return delta
    share = OVERFLOW_SHARE * self.delta
    own = steps == self.num_steps and delta == self.delta
    # At a larger delta epsilon is smaller, so the share of the plan's delta is enough. Where the
    # plan's own epsilon is infinite, its share was chosen as if it were 0.
    if own or (delta >= self.delta and math.isfinite(self._own_epsilon)):
      return delta - share
    chance = self.log_allowed + math.log(steps)
    return self._left_by_aborts(delta, steps, [chance], least=share)

  @property
  def log_allowed(self) -> float:
    """Returns log of the largest chance with which one draw may exceed the capacity."""
    # The capacity is chosen for this epsilon. It leaves out the share of delta for overflow.
    return overflow.log_allowed(self.delta, self._own_epsilon, self.num_steps)

  def epsilon_curve(self, steps: Iterable[int], delta: float | None = None) -> np.ndarray:
    """Returns epsilon after each of the given step counts, each as `epsilon(delta, steps)`."""
    delta = self.delta if delta is None else delta
    curve = []
    for count in map(int, steps):
      left = self.accounted_delta(delta, count)
      curve.append(self._epsilon_at(self._total(count), left))
    return np.array(curve)

  def transform(self, key: jax.Array) -> optax.GradientTransformationExtraArgs:
    """Returns the private Optax transform: `dpjax.clip_and_noise`, or the variant that the plan's
    clip and noise need.

    Put it first in `optax.chain`, inside no wrapper. A transform before it would see all examples
    of a batch, and one example could change the gradients of the others. An Optax transform before
    it raises a one-line error. With slices > 1 give the chain to `accumulated`.

    `update(grads, state, params, mask=batch.mask)` takes a `ClippedSum` of `clipped_grad`, which
    already holds its mask, or gradients of `dpjax.per_example_grads`. Wrap bare arrays in
    `dpjax.wrap_grads`. The state counts the updates (`spent`). An update raises, or gives NaN under
    jit, if it is beyond `num_steps`; if its state was changed by `optax.tree.set`, `jax.tree.map`
    or similar; if its state is that of a plan with another noise, bound, sampling or statistics;
    if it gets more examples than the sampler ever draws; or a batch of `batches` out of turn, or of
    another plan.

    Under `jax.vmap` or `jax.shard_map`, an update of several sums with one state raises: they would
    get the same noise, which cancels in their difference. Under `jax.pmap` every update raises.

    Three mistakes cannot be detected. Each update needs the state that the last one returned: an
    earlier state, whether kept, copied or restored, draws the same noise twice. Epsilon holds for
    rows of `batches`, not for your own rows with mask=True. And all batches must be of one call of
    `batches`, or of calls with one `rng`.

    Args:
      key: key of the noise, for ONE run on ONE data set: `dpjax.new_key()`, or a seed that no other
        run has. The noise follows from it, and from the fresh draws of `batches`. So two runs with
        one key share no noise, unless both take the same batches, `batches` got an `rng`, or the
        rows are your own: then it cancels in the difference of their releases. No transform sees
        the whole data, so that cannot be checked here.
    """
    # A plan alone imports no mechanism, and a transform its own.
    from dpjax.transforms import guard

    trees.check_key(key=key)
    source.check_generator(key)
    shape = self.noise_shape
    numbers: Any = {
      "noise_multiplier": self.noise_multiplier,
      "normalize_by": self.normalize_by,
      "key": key,
      "num_steps": self.num_steps,
    }
    if self.l2_clip_norm.rule.adapts:
      from dpjax.transforms.adaptive_clipping import adaptive_noise

      mechanism = adaptive_noise(self.l2_clip_norm, **numbers)
    elif shape.by_step:
      from dpjax.transforms.correlated import correlated_noise

      mechanism = correlated_noise(self.l2_clip_norm, shape=shape, **numbers)
    else:
      from dpjax.transforms.clip_and_noise import white_noise

      mechanism = white_noise(self.l2_clip_norm, shares=shape.shares, **numbers)
    if self.scaling is not None:
      from dpjax.transforms.scale_then_privatize import scaled_noise

      mechanism = scaled_noise(mechanism, self.scaling, takes_scaled_sums=True)
    return guard.with_guard(
      mechanism,
      mark=self._mark,
      rows=self.sampler.padded_batch_size,
      slices=self.slices,
    )

  @functools.cached_property
  def _mark(self) -> int:
    """Returns 32 bits that identify the mechanism of a step. The transform's states hold them."""
    from dpjax.transforms import guard

    clip = self.l2_clip_norm
    shape = self.noise_shape
    participation = self.sampler.participation
    # The first steps of two correlations may cost the same, so all steps are compared.
    event = self.sum_event(0) if participation is None else self._total(None)
    try:
      cost: Any = [[event_to_json(part), times] for part, times in parts(event).items()]
    # A user's own event has no JSON form.
    except UserError:
      cost = type(mechanism_of(event)).__name__
    correlated = {} if participation is None else participation._asdict()
    scaling = None if self.scaling is None else dataclasses.asdict(self.scaling)
    released = self.statistics
    return guard.mark_of(
      {
        # Two samplers may bound participation alike. But an example whose turn comes under one,
        # and then under the other, takes part more often than either allows.
        "sampler": _facts(self.sampler),
        # Batches without slices would count an example in each slice of a step.
        "slices": self.slices,
        "noise_multiplier": self.noise_multiplier,
        "norms": jax.tree.leaves(clip.norms),
        "rule": type(clip.rule).__name__,
        "clip_schedule": clip.schedule,
        "noise_schedule": shape.schedule,
        "shares": jax.tree.leaves(shape.shares),
        "correlation": _facts(shape.strategy),
        "steps": self.num_steps if correlated else 0,
        "participation": correlated,
        "event": cost,
        "steps_per_event": self.sampler.steps_per_event if self.is_private else 0,
        "unit": self.unit,
        "statistics": None if released is None else released.total_noise_multiplier,
        "scaling": scaling,
      }
    )

  def spent(
    self,
    opt_state: optax.OptState,
    *,
    delta: float | None = None,
    num_examples: int | None = None,
  ) -> SpentBudget:
    """Returns the cost of the updates that an optimizer state has counted so far.

    Args:
      opt_state: state of the chain that begins with `transform`, or a tree that holds this state,
        such as the state of `training.dp_sgd`, or of a federated algorithm. It may come from a
        checkpoint.
      delta: delta of the guarantee; None for the plan's.
      num_examples: a public size for the statement, as in `statement`.

    Guarantee: holds for a run on `batches` from step 0, in which each update was given the state
    that the last one returned. If what was released decided when to stop, such as a score, quote
    `epsilon()` instead, which covers every stop: the epsilon of a stop that was chosen on the way
    may fail more often than delta.

    Raises:
      UserError: a state that does not hold exactly one private transform's state; one that other
        code has changed, or that belongs to a plan with other noise; more steps than the plan
        has; a call under jit.

    >>> import optax  # doctest: +SLOW
    >>> plan = Plan(sampler=sampling.PoissonSampler(sampling_prob=0.5, capacity=4),
    ...   l2_clip_norm=1.0, noise_multiplier=1.0, normalize_by=2, num_steps=3, delta=1e-5)
    >>> tx = optax.chain(plan.transform(jax.random.key(0)), optax.adam(0.1))
    >>> params = jax.numpy.zeros(2)
    >>> grads = gradients.wrap_grads(jax.numpy.ones((4, 2)), mask=True)
    >>> _, opt_state = tx.update(grads, tx.init(params), params)
    >>> spent = plan.spent(opt_state)
    >>> spent.steps, spent.epsilon == plan.epsilon(steps=1) < plan.epsilon()
    (1, True)
    """
    from dpjax.transforms import accumulation, guard

    states = accumulation.private_states(opt_state)
    if len(states) != 1:
      raise UserError(
        f"must hold the state of one plan.transform, found {len(states)}; give "
        "the state that tx.init and tx.update return, of one run",
        field="opt_state",
      )
    draws = guard.next_batch(states[0].inner)
    if isinstance(draws, core.Tracer):
      raise UserError("is traced; call plan.spent outside of jit", field="opt_state")
    count = np.asarray(draws)
    # Copies of one state on several devices look like states of several models under vmap, so both
    # are refused.
    if count.shape or count.dtype.kind not in "iu" or count < 0:
      raise UserError(
        f"counts steps by {count.dtype}{list(count.shape)}: must be one integer "
        ">= 0; of several models or devices give the state of one",
        field="opt_state",
      )
    guard.changed_bits(states[0], self._mark)
    steps = int(count)
    if steps > self.num_steps:
      raise UserError(
        f"counts {steps} steps: must be <= num_steps={self.num_steps} of the plan",
        field="opt_state",
      )
    delta = self.delta if delta is None else delta
    return SpentBudget(
      steps=steps,
      epsilon=self.epsilon(delta, steps),
      delta=delta,
      # A plan made for this delta would have another capacity, and so other aborts.
      statement=self.statement(num_examples, steps, delta=delta),
    )

  def clipped_grad(self, loss_fn: LossFn, **options: Any) -> ClippedGrad:
    """Returns `dpjax.clipped_grad` with this plan's clip norm; give its result to `transform`.

    If the clip norm changes from step to step, `loss_fn` must be the loss divided by
    `clip_scale(state)` of the transform's state, as in `training.dp_sgd`. In a plan with `scaling`,
    `loss_fn` must be a `transforms.ScaledLoss`, and the result takes `loss_fn.start` in place of
    the parameters.

    On a CPU and under jit, a padded batch is cut into microbatches where that is faster, since
    those of padding alone are skipped (`gradients.microbatch.faster_size`). With a
    `microbatch_size` of all rows it is one piece.

    Raises:
      UserError: a loss that is no `ScaledLoss` in a plan with scaling. The result raises for blocks
        of users in a plan that hides examples.
    """
    if self.scaling is not None and not isinstance(loss_fn, transforms.ScaledLoss):
      raise UserError(
        "must be a dpjax.transforms.ScaledLoss for a plan with scaling; training.dp_sgd makes "
        "it, or give plan.transform the gradients of dpjax.per_example_grads",
        field="loss_fn",
        value=Verbatim(f"{loss_fn!r:.60}"),
      )
    grad = gradients.clipped_grad(loss_fn, l2_clip_norm=self.l2_clip_norm, **options)
    filled = self.normalize_by / self.sampler.padded_batch_size
    return dataclasses.replace(
      grad,
      # Rows of one's own did not come by `batches`, which checks their unit.
      check_rows=self._unit_of_rows,
      # The divisor is the expected number of examples, unless it is 1 and asks for the sum.
      filled=1.0 if self.normalize_by == 1 else min(filled, 1.0),
    )

  def accumulated(self, tx: optax.GradientTransformation, *, rows: int = 0) -> Any:
    """Wraps `tx`, such as `optax.chain(plan.transform(key), optimizer)`, for this plan's slices.

    With slices > 1 the result takes the `slices` batches of one step one after the other. Only at
    the last batch it adds the noise, divides and updates the optimizer's own state. With slices = 1
    the result is `tx`.

    Args:
      rows: number of rows of a slice, if several devices need more than the plan's; 0 for the
        plan's number.
    """
    if self.slices == 1:
      return tx
    padded_batch_size = rows or rows_of_slice(self.sampler.padded_batch_size, self.slices)
    clip = self.l2_clip_norm
    every = self.slices
    return transforms.accumulate(
      tx,
      every=every,
      l2_clip_norm=clip,
      padded_batch_size=padded_batch_size,
      mark=self._mark,
    )

  @property
  def mean_noise_std(self) -> Any:
    """Returns the standard deviation of the noise on the private MEAN gradient, if it is equal at
    every step. It is a number, or a prefix tree of numbers if groups of parameters differ.

    Raises:
      UserError: the standard deviation changes from step to step.
    """
    names = ("adaptive clipping", "a clip schedule", "a noise schedule", "correlated noise")
    names += ("scaled coordinates",)
    features = together.features(self.l2_clip_norm, self.noise_shape, scaling=self.scaling)
    for name in [name for name in names if name in features]:
      raise UserError("makes mean_noise_std differ by step", **features[name])
    shares = self.noise_shape.shares
    stds = group_stds(self.l2_clip_norm, self.noise_multiplier, shares)
    stds = jax.tree.map(lambda std: std / self.normalize_by, stds)
    return jax.tree.leaves(stds)[0] if len(set(jax.tree.leaves(stds))) == 1 else stds

  def fitted(self, num_examples: int) -> Plan:
    """Returns the plan with the smallest capacity that the share of delta for overflow allows.

    The capacity is enough for `num_examples` + 1 records, too. Raises UserError for a sampler
    without a capacity."""
    allowed = self.log_allowed
    sampler = self.sampler.fit_to(num_examples + 1, log_overflow_prob=allowed)
    plan = change(self, sampler=sampler)
    # The capacity does not enter the event, so both plans have this epsilon.
    vars(plan)["_own_epsilon"] = self._own_epsilon
    return plan

  def check_capacity(self, num_examples: int, declared: int | None = None) -> None:
    """Raises UserError unless the share of delta covers the chance of a draw above the capacity.

    Args:
      num_examples: number of examples in the data.
      declared: declared number of examples, a constant; None for the number whose expected batch
        size is `normalize_by`. Under add_or_remove_one, a capacity that is enough for the
        declared number counts as enough for all data of at most one example more. So neighbouring
        data sets of such sizes get the same answer. Larger data are checked by their own size.
    """
    # The number of examples whose expected batch size is `normalize_by`, if there is one.
    rate = getattr(self.sampler, "sampling_prob", None)
    size = self.normalize_by / rate if rate else math.inf
    of_divisor = round(size) if 0.5 < size <= _MOST_EXAMPLES else None
    overflow.check_capacity(
      self,
      num_examples,
      declared=of_divisor if declared is None else declared,
      of_divisor=of_divisor,
    )

  def batches(
    self, data: Indexed, rng: int | None = None, start: int = 0
  ) -> Iterator[Batch]:
    """Yields the padded, masked batches of all steps, from batch `start` on. With slices > 1, the
    draw of a step is split into that many consecutive batches, and each drawn example is in one.

    A UserWarning is issued if `normalize_by` is far from the expected batch size. That costs no
    privacy, but makes updates too small or too large. Under add_or_remove_one the warning follows
    from public numbers alone: the declared number of examples, or else the capacity.

    Args:
      data: anything with `len()` whose `data[indices]` is a tree of arrays, each with a
        leading axis of len(indices), in their order: an array, a `dpjax.data.Dataset`, a torch
        TensorDataset, a Hugging Face data set `.with_format("numpy")`, a class of your own,
        whose arrays are copied. Or a dict of arrays [n, ...]: an example is then a dict, too. Or
        blocks of `sampling.group_by_user`, whose rows are users: a plan of users takes no others.
        If the data have a bool array `present` [n], rows whose entry is False may be drawn, and
        contribute zero. If the data have a `nominal_size`, it is `declared` of `check_capacity`.
      rng: integer seed of the sampler; 128 bits or more for a release. None takes 128 fresh bits
        of the operating system, which nobody can draw again, and `transform` draws noise of its own
        for them; with several processes it must be given, the same to each. Like the key of
        `transform`, it is for one run on one data set: costs of runs compose only if they sample
        independently. Take all steps of a run, of all epochs, from one iterator: a second one
        yields the first batches again, which a private transform then refuses.
        Which rows a step draws depends on the sampler, (rng, step) and the number of rows alone.
      start: number of batches that a resumed run took before, of which each step has `slices`, so
        that it goes on within a step, too; above 0 only with an `rng`.

    Raises:
      UserError: `start` is beyond the last batch; the sampler's capacity is too small for these
        data; or they have no rows, or cannot be read by index, now or at a later step. The message
        does not show the draw.
    """
    validate.integer_in(0, self.num_steps * self.slices, start=start)
    data = columns.by_place(data)
    num_examples = indexed.size_of(data)
    draws = batches_lib.draws_of(rng, start, self.sampler, num_examples)
    present = indexed.present_in(data, num_examples)
    declared = getattr(data, "nominal_size", None)
    if declared is not None:
      validate.integer_at_least(1, **{"data.nominal_size": declared})
    self.check_capacity(num_examples, declared)
    # This reads a row already, so that unreadable data are reported before any draw.
    read = indexed.reader(data, num_examples)
    self.check_unit(data, read(np.zeros(1, np.int64)))
    self._warn_of_divisor(num_examples, declared)

    step, taken = divmod(start, self.slices)
    left = batches_lib.batches(
      self.sampler,
      read,
      num_examples,
      draws=draws,
      steps=range(step, self.num_steps),
      count=self.slices,
      present=present,
      mark=self._mark,
    )
    return itertools.islice(left, taken, None)

  def check_unit(self, data: Indexed, rows: Any = None) -> None:
    """Raises UserError if a row of the data is another unit than the guarantee's.

    A block of a user is clipped as a whole. One record that leaves it may turn its gradient round,
    and so move the sum by two clip norms.

    Args:
      data: as of `batches`; blocks of users state their unit.
      rows: some of their rows. A container of a user's own states no unit, but blocks in it are
        each a `Batch`.
    """
    unit = self._unit_of_rows(rows, data)
    # Of plain rows the statement would say "user", and hide single examples.
    if not unit and self.unit != self.sampler.unit:
      raise UserError(
        f"must be blocks of dpjax.sampling.group_by_user, or data whose `unit` is {self.unit!r}, "
        f"for a plan with that unit: each row holds all that one {self.unit} contributes",
        field="data",
        value=Verbatim(type(data).__name__),
      )

  def _unit_of_rows(self, rows: Any, data: Any = None) -> str:
    """Returns the unit that rows, or their data, state; "" if none is stated. Raises UserError if
    it is another one than the guarantee's."""
    is_block = lambda part: isinstance(part, Batch)
    holds_blocks = any(map(is_block, jax.tree.leaves(rows, is_leaf=is_block)))
    unit = _unit_of(data) or ("user" if holds_blocks else "")
    if unit and unit != self.unit:
      raise UserError(
        f"must be {unit!r}, which a row of data is, and whose records move a sum twice as far",
        field="unit",
        value=self.unit,
      )
    return unit

  def _warn_of_divisor(self, num_examples: int, declared: int | None) -> None:
    """Warns if the divisor is far from the expected batch size, which the data, their declared
    number of examples or the capacity determines. A divisor of 1 asks for the sum itself, so it is
    never warned about."""
    sampler = self.sampler
    if self.normalize_by == 1:
      return
    # All batches of a sampler with this field have this size.
    if hasattr(sampler, "batch_size"):
      least = most = sampler.padded_batch_size
    elif not isinstance(sampler, PaddedSampler):
      return
    elif self.neighboring_relation != NeighboringRelation.ADD_OR_REMOVE_ONE:
      # The divisor may fit the size of a subset, or that of the whole, which is declared.
      sizes = (num_examples, num_examples if declared is None else declared)
      least, most = sampler.sampling_prob * min(sizes), sampler.sampling_prob * max(sizes)
    elif declared is not None:
      least = most = sampler.sampling_prob * declared
    else:
      # The number of examples is secret, and the warning must not follow from it. What is known is
      # that no batch is above the capacity.
      least, most = 0.0, float(sampler.padded_batch_size)
    factor = self.normalize_by / min(max(self.normalize_by, least), most)
    if not 1 / _FAR_OFF <= factor <= _FAR_OFF:
      word = "small" if factor > 1 else "large"
      warnings.warn(
        f"normalize_by={self.normalize_by!r}: is {factor:.2g} times the expected batch size of "
        f"{type(sampler).__name__}, so updates are that much too {word}; Plan.for_data chooses the "
        "divisor",
        stacklevel=3,
      )

  @property
  def l2_bound(self) -> float:
    """Returns the largest L2 norm of one example's contribution to the sum."""
    return self.l2_clip_norm.l2_bound

  def statement(
    self,
    num_examples: int | None = None,
    steps: int | None = None,
    *,
    unit: str = "",
    delta: float | None = None,
    epsilon_kind: str = "proved",
  ) -> str:
    """Returns the guarantee in words, with its assumptions; see `accounting.privacy_statement`.

    `unit` names what counts as one record; "" for the plan's own unit. `delta` is that of the
    guarantee; None for the plan's. `epsilon_kind` is "claimed" if the run assumes more than the
    plan does.
    """
    unit = unit or self.unit
    delta = self.delta if delta is None else delta
    if not self.is_private:
      return NOTHING
    return accounting.privacy_statement(
      self._total(steps),
      delta=delta,
      neighboring_relation=self.neighboring_relation,
      num_examples=num_examples,
      accountants=self.sampler.accountants(self.neighboring_relation),
      delta_set_aside=delta - self.accounted_delta(delta, steps),
      unit=unit,
      noise=noise_in_words(
        self.l2_clip_norm,
        self.noise_shape,
        self.sampler,
        unit,
        self.noise_multiplier,
        self.normalize_by,
        self.num_steps,
        scaling=self.scaling,
      ),
      statistics=self.statistics.statement(unit) if self.statistics else "",
      epsilon_kind="claimed" if self.assumptions else epsilon_kind,
    )

  @functools.cached_property
  def assumptions(self) -> tuple[str, ...]:
    """Returns the unproved assumptions of the plan's epsilon, one line each; empty if epsilon is
    proved. The event of a part that is not from dpjax is the claim of its author."""
    clip = self.l2_clip_norm
    shape = self.noise_shape
    rule = clip.rule if clip.rule.adapts else None
    found = []
    for part in (self.sampler, clip, rule, shape, shape.correlation, self.statistics):
      if part is not None:
        found.append(assumption(part))
    # A user's subclass may state an event that dpjax has not proved.
    if not type(self).__module__.startswith("dpjax."):
      found.append(f"the event of {type(self).__name__} is its author's word")
    return tuple(filter(None, found))
