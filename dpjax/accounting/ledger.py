"""The ledger: every step that ran, and the cost of all together. Checkpoints store it.

A ledger is never changed: `charge` returns a new one. A ledger holds each step of each noise key
exactly once. A step charged twice would mean that the same noise was drawn twice. A step left out
would mean that a release is not accounted for. Both are refused.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting.epsilon import epsilon as epsilon_of
from dpjax.accounting.event_kinds.elements import compose, parts
from dpjax.accounting.event_kinds.kind import (
  TOO_DEEP,
  DpEvent,
  event_from_json,
  event_to_json,
  plain_number,
)
from dpjax.accounting.proved import RELATIONS
from dpjax.accounting.text import upper
from dpjax.validate import UserError, Verbatim


class BudgetExceeded(UserError):
  """Raised if a run would cost more than its budget."""


@dataclasses.dataclass(frozen=True)
class Budget:
  """Largest `epsilon` at `delta` that a run may cost; inf sets no limit.

  >>> Budget(epsilon=2.0, delta=1e-5)
  Budget(epsilon=2.0, delta=1e-05)
  """

  epsilon: float
  delta: float

  def __post_init__(self) -> None:
    validate.positive_or_inf(epsilon=self.epsilon)
    validate.open_unit(delta=self.delta)


@dataclasses.dataclass(frozen=True)
class Charge:
  """Record of equal steps of one noise key, from first_step to first_step + num_steps - 1."""

  event: DpEvent  # of ONE step, sampling included
  num_steps: int
  l2_clip_norm: float
  neighboring_relation: str  # under which the event is true of what ran; "" for none
  noise_key_id: str  # a fingerprint that tells keys apart, never the key
  first_step: int

  def __post_init__(self) -> None:
    validate.integer_at_least(1, num_steps=self.num_steps)
    validate.integer_at_least(0, first_step=self.first_step)
    validate.positive_or_inf(l2_clip_norm=self.l2_clip_norm)
    if not (isinstance(self.noise_key_id, str) and self.noise_key_id):
      raise UserError(
        "must be a string, not empty", field="noise_key_id", value=self.noise_key_id
      )
    # The charge keeps copies: a sum of NumPy's narrow integers would wrap round, and whoever holds
    # a list of the event could empty it.
    for name in ("num_steps", "first_step", "l2_clip_norm"):
      object.__setattr__(self, name, plain_number(getattr(self, name)))
    # `parts` also refuses events that no accountant knows.
    known = parts(self.event)
    try:
      object.__setattr__(self, "event", copy.deepcopy(self.event))
    except RecursionError:
      kind = Verbatim(type(self.event).__name__)
      raise UserError(TOO_DEEP, field="event", value=kind) from None
    proves = bool(known) and dpa.NonPrivateDpEvent() not in known
    # Without a bound on the norm, noise proves nothing, whatever its multiplier.
    if math.isinf(self.l2_clip_norm) and proves:
      raise UserError(
        f"must be finite for event={self.event!r}",
        field="l2_clip_norm",
        value=self.l2_clip_norm,
      )
    if proves or self.neighboring_relation != "":
      validate.one_of(RELATIONS, neighboring_relation=self.neighboring_relation)

  @property
  def next_step(self) -> int:
    """Returns the number of the first step after this charge."""
    return self.first_step + self.num_steps


@dataclasses.dataclass(frozen=True)
class Ledger:
  """All charges so far, in the order in which they began; immutable.

  >>> step = dpa.GaussianDpEvent(20.0)
  >>> ledger = Ledger()
  >>> for i in range(100):
  ...   ledger = ledger.charge(step, l2_clip_norm=1.0, noise_key_id="a", first_step=i,
  ...     neighboring_relation="add_or_remove_one")
  >>> len(ledger.charges), ledger.num_steps, round(ledger.epsilon(1e-5), 3)
  (1, 100, 1.993)
  >>> ledger.charge(step, l2_clip_norm=1.0, noise_key_id="a", first_step=99,
  ...   neighboring_relation="add_or_remove_one")
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: first_step=99: step 99 of noise_key_id='a' was ...
  """

  charges: tuple[Charge, ...] = ()

  @property
  def num_steps(self) -> int:
    """Returns the number of recorded steps over all keys; 0 for a new ledger."""
    return sum(charge.num_steps for charge in self.charges)

  def charge(
    self,
    event: DpEvent,
    *,
    num_steps: int = 1,
    l2_clip_norm: float,
    neighboring_relation: str,
    noise_key_id: str,
    first_step: int,
  ) -> Ledger:
    """Returns a ledger with `num_steps` more steps. `event` is the event of ONE step, and must
    hold under `neighboring_relation`.

    A key's steps follow each other without gap or repetition. A new key begins at step 0
    (another run on the same data) or where an earlier charge ended (the same run went on).
    Steps equal to those of the key's last charge are added to that charge.
    Raises UserError if a step was already charged to this key, or if a step is left out; or if a
    new key begins with a step that costs nothing, such as one within a pass of another key.
    """
    return self.with_charges([
      Charge(event, num_steps, l2_clip_norm, neighboring_relation, noise_key_id, first_step)
    ])  # fmt: skip

  def with_charges(self, charges: Iterable[Charge]) -> Ledger:
    """Returns a ledger with all these charges, each added as by `charge`, in one pass."""
    held = list(self.charges)
    last_of_key = {charge.noise_key_id: index for index, charge in enumerate(held)}
    facts = lambda c: (c.event, c.l2_clip_norm, c.neighboring_relation)
    for charge in charges:
      index = last_of_key.get(charge.noise_key_id)
      last = None if index is None else held[index]
      # A gap would be a release without accounting. A repeated step would draw one noise twice.
      _check_follows(held, last, charge)
      if index is None or last is None or facts(last) != facts(charge):
        last_of_key[charge.noise_key_id] = len(held)
        held.append(charge)
      else:
        # Equal steps share one entry, so that the checkpoint stays small after millions of steps.
        count = last.num_steps + charge.num_steps
        held[index] = dataclasses.replace(last, num_steps=count)
    return Ledger(tuple(held))

  def steps_by_key(self) -> dict[str, int]:
    """Returns the number of recorded steps of each noise key.

    >>> Ledger().steps_by_key()
    {}
    """
    steps = Counter[str]()
    for charge in self.charges:
      steps[charge.noise_key_id] += charge.num_steps
    return dict(steps)

  def event(self) -> DpEvent:
    """Returns one event for all charged steps; `NoOpDpEvent` if there are none.

    >>> Ledger().event()
    NoOpDpEvent()
    """
    runs = [compose(charge.event, charge.num_steps) for charge in self.charges]
    if len(runs) > 1:
      return dpa.ComposedDpEvent(runs)
    return runs[0] if runs else dpa.NoOpDpEvent()

  def _relation(self, asked: str) -> str:
    """Returns the relation that all charges share; if no charge has a relation, `asked`.

    An empty `asked` then means add_or_remove_one. Raises UserError if a charge has another relation
    than a non-empty `asked`, or if the relations of two charges differ."""
    recorded = dict.fromkeys(c.neighboring_relation for c in self.charges)
    # A charge that proves nothing may have no relation. It fits every relation.
    recorded.pop("", None)
    asked = asked or next(iter(recorded), "add_or_remove_one")
    if set(recorded) - {asked}:
      raise UserError(
        f"steps of this ledger were charged under {' and '.join(recorded)}, where "
        "their events were proved",
        field="neighboring_relation",
        value=asked,
      )
    return asked

  def epsilon(
    self, delta: float, *, neighboring_relation: str = "", accountant: str = "pld"
  ) -> float:
    """Returns epsilon of everything that ran: `epsilon(self.event(), delta=delta)`.

    The ledger holds no aborts. Of a plan whose batches may exceed a capacity, give
    `plan.accounted_delta(delta)`; the rest of delta pays for them.

    Raises:
      UserError: a step was charged under another relation than `neighboring_relation`, which is by
        default the recorded relation.
    """
    return epsilon_of(
      self.event(),
      delta=delta,
      neighboring_relation=self._relation(neighboring_relation),
      accountant=accountant,
    )

  def check(
    self,
    budget: Budget,
    proposed: DpEvent | None = None,
    num_steps: int = 1,
    *,
    neighboring_relation: str = "",
    accountant: str = "pld",
  ) -> float:
    """Returns epsilon after `num_steps` more steps of `proposed`; None proposes no more steps.

    Call this method before the proposed steps run: a release cannot be undone.
    Raises BudgetExceeded if this epsilon is above the budget.

    >>> Ledger().check(Budget(1.9, 1e-5), dpa.GaussianDpEvent(2.0))
    Traceback (most recent call last):
    ...
    dpjax.accounting.ledger.BudgetExceeded: epsilon=1.9: the budget at delta=1e-05 is ...
    """
    more = compose(dpa.NoOpDpEvent() if proposed is None else proposed, num_steps)
    # Past and proposed steps are composed as one event: the sum of their epsilons would hold only
    # at the sum of their deltas.
    spent = epsilon_of(
      dpa.ComposedDpEvent([self.event(), more]),
      delta=budget.delta,
      neighboring_relation=self._relation(neighboring_relation),
      accountant=accountant,
    )
    if spent > budget.epsilon:
      raise BudgetExceeded(
        f"the budget at delta={budget.delta!r} is exceeded, the run would cost "
        f"{upper(spent, digits=6)}",
        field="epsilon",
        value=budget.epsilon,
      )
    return spent

  def to_json(self) -> dict[str, Any]:
    """Returns the ledger as a dict that `json` can write, and `from_json` reads."""
    charges = []
    for charge in self.charges:
      fields = {f.name: getattr(charge, f.name) for f in dataclasses.fields(charge)}
      # Strict JSON has no infinity, so a string stands for it.
      clip = "inf" if math.isinf(charge.l2_clip_norm) else charge.l2_clip_norm
      event = event_to_json(charge.event)
      relation = str(charge.neighboring_relation)  # plain text, as a file gives it back
      plain = {"event": event, "l2_clip_norm": clip, "neighboring_relation": relation}
      charges.append(fields | plain)
    return {"version": 2, "charges": charges}

  @classmethod
  def from_json(cls, data: Mapping[str, Any]) -> Ledger:
    """Returns the ledger that `to_json` wrote; raises UserError if `data` are malformed, or
    repeat or omit a step.

    >>> Ledger.from_json(Ledger().to_json())
    Ledger(charges=())
    """
    if not isinstance(data, Mapping) or data.get("version") != 2:
      raise UserError("must be a mapping with version 2", field="ledger", value=data)
    # A ledger without its charges would cost nothing.
    if set(data) != {"version", "charges"} or not isinstance(
      data["charges"], (list, tuple)
    ):
      raise UserError(
        "must hold a list of charges, and no more", field="ledger", value=data
      )
    # Charges are entered one by one, so that gaps and repeats are refused exactly as in a run.
    return cls().with_charges(map(_charge_from_json, data["charges"]))


def _check_follows(held: Sequence[Charge], last: Charge | None, charge: Charge) -> None:
  """Raises UserError unless a charge follows `last`, the last one of its key among those held."""
  key = charge.noise_key_id
  first = charge.first_step
  if last is None:
    # A new key starts at step 0, or where a charge ended: a run that stopped there may go on.
    if first == 0:
      return
    allowed = {0, *(earlier.next_step for earlier in held)}
    if first not in allowed:
      raise UserError(
        f"noise_key_id={key!r} is new, so it must begin at step "
        f"{' or '.join(map(str, sorted(allowed)))}; steps left out would go "
        "uncharged",
        field="first_step",
        value=first,
      )
    # A pass is charged at its first step, by the run that drew it. A new key is a new run.
    if not parts(charge.event):
      raise UserError(
        f"is new, so its step {first} is the first of a run; charge that run from its step 0, "
        "since a step that costs nothing rests on an earlier one of its own run",
        field="noise_key_id",
        value=key,
      )
  elif first < last.next_step:
    raise UserError(
      f"step {first} of noise_key_id={key!r} was charged already; using a noise "
      "key twice voids the guarantee",
      field="first_step",
      value=first,
    )
  elif first > last.next_step:
    raise UserError(
      f"must be {last.next_step} for noise_key_id={key!r}; steps left "
      "out would go uncharged",
      field="first_step",
      value=first,
    )


def _charge_from_json(data: Any) -> Charge:
  names = {field.name for field in dataclasses.fields(Charge)}
  if not isinstance(data, Mapping) or set(data) != names:
    raise UserError(
      f"must have exactly the fields {sorted(names)}", field="charge", value=data
    )
  clip = math.inf if data["l2_clip_norm"] == "inf" else data["l2_clip_norm"]
  event = event_from_json(data["event"])
  return Charge(**{**data, "event": event, "l2_clip_norm": clip})
