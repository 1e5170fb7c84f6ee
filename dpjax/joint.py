"""Several private mechanisms on the same data, under one budget.

A project often reads the same records more than once: private statistics for preprocessing, a
private quantile, a first and a second phase of training, a noisy evaluation. `JointPlan.calibrated`
finds one scale of the noise for which the COMPOSITION of all mechanisms meets (epsilon, delta).
Composing privacy losses is tighter than splitting epsilon: two parts of epsilon 1 cost less than 2
together.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from dp_accounting import DpEvent

from dpjax import accounting, validate
from dpjax.accounting import matrix, overflow, proved
from dpjax.accounting.calibration import Unreachable
from dpjax.accounting.event_kinds.elements import (
  accountable,
  check_accountant,
  claims,
  with_claims,
)
from dpjax.accounting.ledger import BudgetExceeded, Charge
from dpjax.accounting.proved import ADD, NeighboringRelation
from dpjax.plan import Plan, SpentBudget, change
from dpjax.sampling.samplers import assumption, unproved_error
from dpjax.validate import UserError, Verbatim

# Field with the noise multiplier of a part. `JointPlan.calibrated` multiplies it by one factor, in
# all parts that are not fixed.
_NOISE = "noise_multiplier"


def _assumed(part: Any) -> tuple[str, ...]:
  """Returns the unproved assumptions about a part; empty if its epsilon is proved."""
  if isinstance(part, Plan):
    return part.assumptions
  # A user's mechanism states an event that dpjax has not proved.
  found = assumption(part)
  return (found,) if found else ()


@dataclasses.dataclass(frozen=True)
class JointPlan(overflow.MayAbort):
  """Mechanisms on the same data, by name, whose composition has one epsilon at one delta.

  Args:
    parts: name -> a `dpjax.Plan`, or a mechanism with `event(neighboring_relation)`, such as
      those of `dpjax.mechanisms`. Names are identifiers.
    delta: delta of the guarantee of all parts together.
    times: name of a mechanism -> how often it may be called; 1 for one that is not named. A call
      that answers k queries, such as `GNMax` on k votes, counts as k calls. A plan is not named
      here, as its `num_steps` says how often it runs.
    neighboring_relation: relation of all parts; "" for that of the plans, which must agree.
      Without a plan, "" is that of the first mechanism, or add_or_remove_one if it states none.
    accountant: "pld" or "rdp"; "" for the tightest that knows every part.

  Guarantee: all releases together are (epsilon(), delta)-private for a record that every part
  protects. Each plan must run on its `batches`, each mechanism on the data, and none more often
  than `allowed(name)`. Parts may run in any order, and their steps may alternate. Each may depend
  on what was released before. The parameters of all parts are fixed here, so this is concurrent
  composition (Vadhan and Zhang 2023, arXiv:2207.08335, for f-DP). Parts on different data are
  accounted as if they read the same data, which never makes epsilon smaller.

  Give each plan's `batches` its own seed, or none. Two plans with the same draws do not sample
  independently, which no ledger can detect.

  All plans hide one `unit`. A mechanism hides one example, so it joins no plan of users.

  Quote the epsilon of the joint plan. The epsilon of one plan leaves the other parts out.

  >>> from dpjax import PoissonSampler, mechanisms  # doctest: +SLOW
  >>> train = Plan(sampler=PoissonSampler(sampling_prob=0.1, capacity=200), noise_multiplier=1.0,
  ...   l2_clip_norm=1.0, normalize_by=100, num_steps=50, delta=1e-5)
  >>> mean = mechanisms.Gaussian(noise_multiplier=4.0, l2_sensitivity=1.0)
  >>> joint = JointPlan.calibrated(parts={"mean": mean, "train": train},
  ...   epsilon=2.0, delta=1e-5)
  >>> joint["mean"].noise_multiplier == 4 * joint["train"].noise_multiplier
  True
  >>> 1.99 < joint.epsilon() <= 2.0
  True
  """

  parts: Mapping[str, Any]
  delta: float
  times: Mapping[str, int] = dataclasses.field(default_factory=dict)
  neighboring_relation: NeighboringRelation | str = ""
  accountant: str = ""

  def __post_init__(self) -> None:
    validate.open_unit(delta=self.delta)
    # If delta were a half-precision number, a share of it would round to 0.
    object.__setattr__(self, "delta", float(self.delta))
    if not isinstance(self.parts, Mapping) or not self.parts:
      raise UserError(
        "must be a mapping of names to plans and mechanisms, not empty",
        field="parts",
        value=Verbatim(f"{self.parts!r:.60}"),
      )
    for name, part in self.parts.items():
      self._check_part(name, part)
    for name, count in dict(self.times).items():
      validate.one_of(self.parts, times=name)
      if isinstance(self.parts[name], Plan):
        raise UserError(
          "is a plan, which says by its num_steps how often it runs",
          field="times",
          value=name,
        )
      validate.integer_at_least(1, **{f"times[{name!r}]": count})
    # Read-only copies are kept, so that a caller who changes the dict does not change what was
    # checked.
    freeze = types.MappingProxyType
    object.__setattr__(self, "parts", freeze(dict(self.parts)))
    object.__setattr__(self, "times", freeze(dict(self.times)))
    object.__setattr__(self, "neighboring_relation", self._checked_relation())
    self._check_units()
    object.__setattr__(self, "accountant", self._checked_accountant())

  def _check_part(self, name: Any, part: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier():
      raise UserError("must be an identifier", field="a name of parts", value=name)
    field = f"parts[{name!r}]"
    if isinstance(part, Plan):
      # Without an event there is nothing to compose.
      if part.noise_multiplier and not part.is_private:
        raise unproved_error(part.sampler, field)
    elif isinstance(part, type | JointPlan) or not callable(getattr(part, "event", None)):
      raise UserError(
        "must be a dpjax.Plan, or a mechanism with event(neighboring_relation)",
        field=field,
        value=Verbatim(f"{part!r:.60}"),
      )

  def _checked_relation(self) -> NeighboringRelation:
    """Returns the relation that was asked for. "" stands for that of the plans, or, without a plan,
    that of the first mechanism. Raises UserError if a plan has another relation."""
    stated = {
      name: part.neighboring_relation
      for name, part in self.parts.items()
      if isinstance(part, Plan)
    }
    if not stated:
      stated = {
        name: getattr(part, "neighboring_relation", "") or ADD
        for name, part in list(self.parts.items())[:1]
      }
    relation = self.neighboring_relation or next(iter(stated.values()))
    validate.one_of(proved.RELATIONS, neighboring_relation=relation)
    for name, other in stated.items():
      if isinstance(self.parts[name], Plan) and other != relation:
        raise UserError(
          f"must be one for all parts; that of parts[{name!r}] is {other!r}",
          field="neighboring_relation",
          value=relation,
        )
    return NeighboringRelation(relation)

  def _check_units(self) -> None:
    """Raises UserError if parts protect different units: examples in one, users in another."""
    units = {
      # A mechanism reads rows, and a user may have many rows. So it hides one example.
      name: part.unit if isinstance(part, Plan) else "example"
      for name, part in self.parts.items()
    }
    first = next(iter(units))
    for name, unit in units.items():
      if unit != units[first]:
        raise UserError(
          f"hides one {unit}, and parts[{first!r}] one {units[first]}; they have no common "
          "epsilon",
          field=f"parts[{name!r}]",
          value=Verbatim(type(self.parts[name]).__name__),
        )

  def _checked_accountant(self) -> str:
    """Returns the accountant that was asked for, or the tightest that knows every part.

    Raises UserError if there is none."""
    if self.accountant:
      check_accountant(self.accountant)
    reasons = []
    for accountant in (self.accountant,) if self.accountant else proved.ACCOUNTANTS:
      reason = self._reason_against(accountant)
      if reason is None:
        return accountant
      reasons.append(reason)
    # If both accountants were tried, this is the reason of RDP, which knows more mechanisms.
    raise reasons[-1]

  def _reason_against(self, accountant: str) -> UserError | None:
    """Returns why an accountant has no epsilon for all parts together; None if it has one."""
    relation = self.neighboring_relation
    for name in self.parts:
      try:
        accountable(self._event_of(name, 1), relation, accountant)
      except UserError as error:
        return UserError(str(error), field=f"parts[{name!r}]")
    try:
      # Even if each part has a proof by itself, the parts together may have none.
      accountable(self.event(), relation, accountant)
    except UserError as error:
      return error
    return None

  @classmethod
  def calibrated(
    cls,
    *,
    parts: Mapping[str, Any],
    epsilon: float,
    delta: float,
    fixed: Iterable[str] = (),
    **options: Any,
  ) -> JointPlan:
    """Returns the joint plan with the least noise for which the parts together keep epsilon.

    The noise multipliers given in `parts` set only their ratios: all of them, except those of
    `fixed` parts, are multiplied by one number. A mechanism without a noise multiplier, such as
    one with an epsilon of its own, keeps its noise.

    Args:
      parts: as for the class.
      epsilon: epsilon of the guarantee of all parts together.
      delta: delta of that guarantee.
      fixed: names of parts whose noise stays as it is.
      options: further fields of the class.

    Raises:
      UserError: no part's noise may change; the parts with unchanged noise cost more than epsilon;
        a part whose noise may change has none; or what the class raises.
    """
    validate.positive(epsilon=epsilon)
    names = [fixed] if isinstance(fixed, str) else list(fixed)
    for name in names:
      validate.one_of(parts, fixed=name)
    shares = cls(parts, delta, **options)
    free = [
      name
      for name, part in shares.parts.items()
      if _NOISE in getattr(part, "__dataclass_fields__", {}) and name not in names
    ]
    if not free:
      raise UserError(
        "leaves no part whose noise_multiplier may change",
        field="fixed",
        value=sorted(shares.parts),
      )
    for name in free:
      validate.positive(
        **{f"parts[{name!r}].{_NOISE}": getattr(shares.parts[name], _NOISE)}
      )

    def scaled(scale: float) -> JointPlan:
      parts = dict(shares.parts)
      for name in free:
        # The multiplier is converted to float, since half precision could round the noise down.
        noise = {_NOISE: float(getattr(parts[name], _NOISE)) * scale}
        # Only a mechanism's own checks are of its noise.
        is_plan = isinstance(parts[name], Plan)
        parts[name] = (change if is_plan else dataclasses.replace)(parts[name], **noise)
      return change(shares, parts=types.MappingProxyType(parts))

    # A fixed share of delta is reserved for draws above a capacity. At the end the deltas of the
    # plans are chosen so that such draws cost no more than this share.
    padded = [name for name in shares.parts if shares._can_overflow(name)]
    left = overflow.without_share(delta) if padded else delta
    kept = dict.fromkeys(free, 0)
    least = shares._epsilon_at(shares.event(kept), left)
    if least > epsilon:
      raise Unreachable(
        f"unreachable, the parts whose noise stays cost epsilon={accounting.upper(least)} "
        f"at delta={delta!r}",
        field="epsilon",
        value=epsilon,
      )
    smallest = min(float(getattr(shares.parts[name], _NOISE)) for name in free)
    noise = accounting.calibrate_noise_multiplier(
      # The search variable is the smallest of the free noise multipliers.
      lambda trial: scaled(trial / smallest).event(),
      epsilon=epsilon,
      delta=left,
      neighboring_relation=shares.neighboring_relation,
      accountant=shares.accountant,
    )
    joint = scaled(noise / smallest)
    return joint._with_capacities_for(epsilon, padded) if padded else joint

  def _with_capacities_for(self, epsilon: float, padded: list[str]) -> JointPlan:
    """Returns this joint plan, with plan deltas so small that overflow costs at most its share.

    This share is s * the joint delta, where s is `OVERFLOW_SHARE`. A plan with epsilon e aborts
    with a probability B. Its capacity is so large that (1 + exp(e)) B <= s * the plan's delta. All
    parts together need (1 + exp(epsilon)) sum B <= s * the joint delta. So each plan gets an equal
    part of the joint delta, divided by (1 + exp(epsilon)) / (1 + exp(e)) if this is above 1. A
    smaller delta raises e, which makes B smaller still, so one division is enough.

    Args:
      epsilon: epsilon of all parts together.
      padded: names of the plans whose batches can overflow.
    """
    changed = {}
    for name in padded:
      plan = self.parts[name]
      allowed = self.delta / len(padded)
      plan = dataclasses.replace(plan, delta=allowed)
      excess = math.exp(np.logaddexp(0.0, epsilon) - np.logaddexp(0.0, plan.epsilon()))
      changed[name] = dataclasses.replace(plan, delta=allowed / max(1.0, excess))
    return dataclasses.replace(self, parts={**self.parts, **changed})

  def __reduce__(self) -> tuple[Any, ...]:
    # Python pickles no mapping that nobody can change.
    fields = vars(self) | {"parts": dict(self.parts), "times": dict(self.times)}
    return type(self), tuple(fields[field.name] for field in dataclasses.fields(self))

  def __getitem__(self, name: str) -> Any:
    """Returns a part: the plan or the mechanism to run."""
    validate.one_of(self.parts, part=name)
    return self.parts[name]

  def fitted(self, num_examples: int) -> JointPlan:
    """Returns a joint plan in which each capacity is the smallest that its plan's delta allows.

    Args:
      num_examples: the declared number of examples, as for `Plan.fitted`.
    """
    changed = {
      name: part.fitted(num_examples)
      for name, part in self.parts.items()
      if self._can_overflow(name)
    }
    return dataclasses.replace(self, parts={**self.parts, **changed})

  def keys(self, key: jax.Array) -> dict[str, jax.Array]:
    """Returns name -> random key of the part, all derived from one key that nothing else may use.

    Two parts with the same key would draw the same noise, so the difference of their releases
    would have none.
    """
    return {name: jax.random.fold_in(key, place) for place, name in enumerate(self.parts)}

  def allowed(self, name: str) -> int:
    """Returns how often a part may run: the steps of a plan, the calls of a mechanism."""
    part = self[name]
    return part.num_steps if isinstance(part, Plan) else self.times.get(name, 1)

  @property
  def unit(self) -> str:
    """Returns what the guarantee hides: "example" or "user"."""
    return next((p.unit for p in self.parts.values() if isinstance(p, Plan)), "example")

  def _can_overflow(self, name: str) -> bool:
    part = self.parts[name]
    return isinstance(part, Plan) and part.can_overflow

  def _event_of(self, name: str, count: int) -> DpEvent:
    part = self.parts[name]
    if isinstance(part, Plan):
      event = part.event(count)
    else:
      event = accounting.compose(part.event(self.neighboring_relation), count)
    return self._as_assumed(name, event)

  def _step_event(self, name: str, step: int) -> DpEvent:
    """Returns the event that a charge holds of step, or call, `step` of a part."""
    part = self.parts[name]
    if not isinstance(part, Plan):
      return self._event_of(name, 1)
    return self._as_assumed(name, part.step_event(None if part.steps_alike else step))

  def _as_assumed(self, name: str, event: DpEvent) -> DpEvent:
    # The event of a user's subclass of Plan may not say what it rests on.
    assumed = [line for line in _assumed(self.parts[name]) if line not in claims(event)]
    return with_claims(event, assumed)

  def _counts(self, steps: Mapping[str, int] | None) -> dict[str, int]:
    counts = {name: self.allowed(name) for name in self.parts}
    for name, count in (steps or {}).items():
      validate.one_of(self.parts, steps=name)
      validate.integer_at_least(0, **{f"steps[{name!r}]": count})
      if count > counts[name]:
        raise BudgetExceeded(
          f"must be <= {counts[name]}, how often this part may run",
          field=f"steps[{name!r}]",
          value=count,
        )
      counts[name] = int(count)
    return counts

  def event(self, steps: Mapping[str, int] | None = None) -> DpEvent:
    """Returns the event of all parts together.

    `steps`: name -> how often that part ran; a part that is not named counts in full. The
    statistics of a plan are part of its event, also at 0 steps."""
    return matrix.join(
      [self._event_of(name, count) for name, count in self._counts(steps).items()]
    )

  def accounted_delta(self, delta: float, steps: Mapping[str, int] | None = None) -> float:
    chances = [
      self.parts[name].log_allowed + math.log(count)
      for name, count in self._counts(steps).items()
      if count and self._can_overflow(name)
    ]
    return self._left_by_aborts(delta, steps, chances)

  def charge(
    self,
    ledger: accounting.Ledger,
    name: str,
    *,
    noise_key_id: str,
    num_steps: int = 1,
  ) -> accounting.Ledger:
    """Returns the ledger with `num_steps` more steps, or calls, of a part. Call it before they run.

    Args:
      ledger: a ledger with charges of this joint plan only; `accounting.Ledger()` at first.
      name: name of the part. A plan's first step includes the cost of its statistics.
      noise_key_id: a text that tells the noise keys apart, never the key itself.
      num_steps: number of further steps of a plan; 1 for a mechanism.

    Raises:
      BudgetExceeded: the part would run more often than `allowed(name)`.
      UserError: the key of another part, or one that this mechanism has used, so that noise would
        be drawn twice; a second key of a plan at a step that costs less because of the steps before
        it; or a ledger with charges that do not belong to this plan.
    """
    validate.integer_at_least(1, num_steps=num_steps)
    # The ledger compares keys as text, so it would not recognise an id of another type.
    if not isinstance(noise_key_id, str) or not noise_key_id:
      raise UserError(
        "must be a string, not empty",
        field="noise_key_id",
        # The value is not shown, as it may be the key itself.
        value=Verbatim(type(noise_key_id).__name__),
      )
    part = self[name]
    first = self._ran(ledger)[name]
    if first + num_steps > self.allowed(name):
      raise BudgetExceeded(
        f"ran {first} times, and may run {self.allowed(name)} times in all",
        field=f"parts[{name!r}]",
        value=Verbatim(f"{num_steps} more"),
      )
    key = f"{name}/{noise_key_id}"
    self._check_keys([*(charge.noise_key_id for charge in ledger.charges), key])
    keys = (charge.noise_key_id for charge in reversed(ledger.charges))
    last = next((held for held in keys if held.partition("/")[0] == name), key)
    self._check_goes_on(name, last, key, first)
    if not isinstance(part, Plan):
      # A mechanism takes one key for each call.
      validate.integer_in(1, 1, num_steps=num_steps)
    # Equal steps are charged at once.
    at_once = num_steps if isinstance(part, Plan) and part.steps_alike else 1
    for count in [at_once] * (num_steps // at_once):
      ledger = ledger.charge(
        self._step_event(name, first),
        num_steps=count,
        l2_clip_norm=part.l2_bound if isinstance(part, Plan) else 1.0,
        neighboring_relation=self.neighboring_relation,
        noise_key_id=key,
        first_step=first,
      )
      first += count
    return ledger

  def _check_keys(self, key_ids: Iterable[str]) -> None:
    """Raises UserError if two parts, or two calls of a mechanism, have one key."""
    part_of_key: dict[str, str] = {}
    for key_id in key_ids:
      name, _, key = key_id.partition("/")
      # A plan draws new noise in each step from one key. A mechanism would draw the same again.
      again = key in part_of_key and not isinstance(self.parts[name], Plan)
      if again or part_of_key.setdefault(key, name) != name:
        raise UserError(
          f"parts[{part_of_key[key]!r}] drew its noise from it already; give each part, and each "
          "call of a mechanism, a key of its own, as keys() does",
          field="noise_key_id",
          value=key,
        )

  def _check_goes_on(self, name: str, last: str, key: str, first: int) -> None:
    """Raises UserError if a plan goes on at step `first` under another key than its last one, and
    that step is no whole beginning.

    A new key is a new run of the plan, with draws and noise of its own. Its first steps cost what
    those of a run cost. The rest of a pass, or of correlated noise, costs less than they do.
    """
    part = self.parts[name]
    if last == key or not isinstance(part, Plan):
      return
    if part.period is None or first % part.period:
      raise UserError(
        f"is another run than the one that made the first {first} steps, so its first step costs "
        f"more than step {first} of that one; make a plan of its own for it",
        field="noise_key_id",
        value=key.partition("/")[2],
      )

  def _ran(self, ledger: accounting.Ledger) -> dict[str, int]:
    """Returns name -> how often each part was charged.

    Raises:
      UserError: a charge that no part of this plan makes; a step that ran twice or was left out;
        a key from which the same noise was drawn twice.
    """
    if not isinstance(ledger, accounting.Ledger):
      raise UserError(
        "must be the Ledger that charge returned; the state of one plan's steps goes to its spent",
        field="ledger",
        value=Verbatim(type(ledger).__name__),
      )
    ran = dict.fromkeys(self.parts, 0)
    last: dict[str, str] = {}
    for charge in ledger.charges:
      name = charge.noise_key_id.partition("/")[0]
      # A charge of another joint plan, for example one with other noise, has another event.
      if name not in ran or not self._is_step(name, charge):
        raise UserError(
          "holds charges that are no parts of this joint plan",
          field="ledger",
          value=Verbatim(charge.noise_key_id),
        )
      # Steps may differ in cost. Two first steps can cost more than a first and a second one.
      if charge.first_step != ran[name]:
        raise UserError(
          f"must hold each step of a part once, in order; after {ran[name]} steps it goes on at "
          f"step {charge.first_step}",
          field="ledger",
          value=Verbatim(charge.noise_key_id),
        )
      key = charge.noise_key_id
      with validate.about("ledger"):
        self._check_goes_on(name, last.get(name, key), key, charge.first_step)
      last[name] = key
      ran[name] += charge.num_steps
    with validate.about("ledger"):
      self._check_keys(charge.noise_key_id for charge in ledger.charges)
    return ran

  def _is_step(self, name: str, charge: Charge) -> bool:
    part = self.parts[name]
    if charge.neighboring_relation != self.neighboring_relation:
      return False
    if charge.next_step > self.allowed(name):
      return False
    if charge.event != self._step_event(name, charge.first_step):
      return False
    if not isinstance(part, Plan):
      return charge.num_steps == 1
    if part.steps_alike:
      return True
    # A charge covers equal steps only, so it must end before the next step with another event.
    starts = self._starts_of_runs[name]
    place = bisect.bisect_right(starts, charge.first_step)
    return place == len(starts) or charge.next_step <= starts[place]

  @functools.cached_property
  def _starts_of_runs(self) -> dict[str, list[int]]:
    """Returns plan name -> steps at which a new stretch of equal steps begins. Plans whose steps
    are all alike are left out."""
    starts = {}
    for name, part in self.parts.items():
      if isinstance(part, Plan) and not part.steps_alike:
        runs = itertools.groupby(range(part.num_steps), key=part.step_event)
        starts[name] = [next(steps) for _, steps in runs]
    return starts

  def spent(self, ledger: accounting.Ledger, delta: float | None = None) -> SpentBudget:
    """Returns the cost of what was charged, which may be less than what was planned, and of the
    statistics of all plans, which are released before the first charge.

    If you decided by looking at releases which parts to skip, quote `epsilon()` instead: it covers
    every choice.
    """
    delta = self.delta if delta is None else delta
    ran = self._ran(ledger)
    return SpentBudget(
      steps=sum(ran.values()),
      epsilon=self.epsilon(delta, ran),
      delta=delta,
      statement=self.statement(steps=ran, delta=delta),
    )

  @property
  def assumptions(self) -> tuple[str, ...]:
    """Returns the unproved assumptions about the parts; empty if epsilon is proved."""
    parts = self.parts.items()
    return tuple([f"{name}: {line}" for name, part in parts for line in _assumed(part)])

  def statement(
    self,
    num_examples: int | None = None,
    steps: Mapping[str, int] | None = None,
    *,
    delta: float | None = None,
  ) -> str:
    """Returns the guarantee in words; `num_examples` and `delta` as for `Plan.statement`, `steps`
    as for `event`."""
    delta = self.delta if delta is None else delta
    counts = self._counts(steps)
    event = self.event(steps)

    # The statistics of a plan are released before its first step.
    def before(part: object) -> str:
      return ", its statistics" if isinstance(part, Plan) and part.statistics else ""

    ran = ", ".join(
      f"{name} ({count} of {self.allowed(name)}{before(self.parts[name])})"
      for name, count in counts.items()
    )
    return accounting.privacy_statement(
      event,
      delta=delta,
      neighboring_relation=self.neighboring_relation,
      num_examples=num_examples,
      accountants=(self.accountant,),
      delta_set_aside=delta - self.accounted_delta(delta, steps),
      unit=self.unit,
      statistics=f"Parts, accounted as if all read the same data: {ran}.",
      epsilon_kind="claimed" if self.assumptions else "proved",
    )
