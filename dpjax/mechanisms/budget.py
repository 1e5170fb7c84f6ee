"""A budget of epsilon and delta, and the charges against it, under basic composition.

Charges on the same records add up. For disjoint shards only the largest charge counts. Amounts are
added as decimals: 0.1 three times is exactly 0.3. No accountant is needed. If charges have events,
`dpjax.accounting.epsilon(ledger.event(), ...)` may prove a much smaller epsilon.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import dp_accounting

from dpjax import validate
from dpjax.mechanisms import stated
from dpjax.validate import UserError


class Overspent(UserError):
  """Raised for a charge that would exceed the budget; the ledger stays as it was."""


class OverlappingShards(UserError):
  """Raised if a record is in two shards, since parallel composition needs disjoint shards."""


@dataclasses.dataclass(frozen=True)
class ShardCharge:
  """A charge for the records of one shard.

  Args:
    records: range or other collection of integers, the indices of the shard's records. They must
      not depend on the contents of other records; see `BudgetLedger.spend_parallel`.
  """

  records: Iterable[int]
  epsilon: float
  delta: float = 0.0
  event: stated.DpEvent | None = None

  def __post_init__(self) -> None:
    _check_amounts(self.epsilon, self.delta)
    if not isinstance(self.records, Iterable) or isinstance(self.records, Iterator):
      raise UserError(
        "must be a collection of integers that can be read again",
        field="records",
        value=self.records,
      )


@dataclasses.dataclass(frozen=True)
class BudgetCharge:
  """An entry of a `BudgetLedger`: the cost of a mechanism, and its event if known."""

  name: str
  epsilon: float
  delta: float
  event: stated.DpEvent | None  # what ran, where known


@dataclasses.dataclass(frozen=True)
class BudgetLedger:
  """A budget (epsilon, delta) and the charges against it. `spend` returns a new, changed ledger.

  Guarantee: all charged mechanisms together are (epsilon, delta)-DP, if each of them has the cost
  that was charged under `neighboring_relation`. Earlier results may decide which mechanism comes
  next (sequential composition: Dwork and Roth 2014, theorem 3.16; parallel composition: McSherry
  2009).

  >>> ledger = BudgetLedger(epsilon=1.0)
  >>> for name, share in zip(("q1", "q2", "q3"), ledger.split(0.3, 0.3, 0.4)):
  ...   ledger = ledger.spend(name, epsilon=share)
  >>> ledger.spent, ledger.remaining
  ((1.0, 0.0), (0.0, 0.0))
  >>> ledger.spend("q4", epsilon=0.01)
  Traceback (most recent call last):
  ...
  dpjax.mechanisms.budget.Overspent: epsilon=0.01: 'q4' would exceed the budget, of which ...
  """

  epsilon: float
  delta: float = 0.0
  neighboring_relation: str = "add_or_remove_one"
  charges: tuple[BudgetCharge, ...] = ()

  def __post_init__(self) -> None:
    stated.positive(epsilon=self.epsilon)
    _check_amounts(self.epsilon, self.delta)
    validate.one_of(stated.RELATIONS, neighboring_relation=self.neighboring_relation)

  @property
  def spent(self) -> tuple[float, float]:
    """Returns (epsilon, delta) of all charges so far."""
    return tuple(float(_total(self.charges, name)) for name in ("epsilon", "delta"))  # type: ignore[return-value]

  @property
  def remaining(self) -> tuple[float, float]:
    """Returns (epsilon, delta) that may still be spent."""
    left = lambda name: float(_exact(getattr(self, name)) - _total(self.charges, name))
    return left("epsilon"), left("delta")

  def split(self, *shares: float) -> tuple[float, ...]:
    """Splits the TOTAL epsilon in proportion to `shares`, which must sum to 1.

    >>> BudgetLedger(epsilon=2.0).split(0.3, 0.3, 0.4)
    (0.6, 0.6, 0.8)
    """
    stated.positive(**validate.entries(shares=shares))
    if sum(map(_exact, shares)) != 1:
      raise UserError("must sum to 1", field="shares", value=shares)
    return tuple(float(_exact(share) * _exact(self.epsilon)) for share in shares)

  def spend(
    self,
    name: str,
    *,
    epsilon: float,
    delta: float = 0.0,
    event: stated.DpEvent | None = None,
  ) -> BudgetLedger:
    """Returns the ledger with one more charge, on all records; it adds to the earlier charges.

    Args:
      event: event of the mechanism that ran, `mechanism.event(relation)`, for an accountant; None
        if it has no event.

    Raises Overspent if the charge would exceed the budget.
    """
    _check_amounts(epsilon, delta)
    charge = BudgetCharge(name, epsilon, delta, event)
    self._check_fits(charge)
    return dataclasses.replace(self, charges=(*self.charges, charge))

  def spend_parallel(
    self, name: str, shards: Sequence[ShardCharge], *, records_may_move: bool = False
  ) -> BudgetLedger:
    """Returns the ledger with one more charge: the largest epsilon and delta of disjoint shards.

    Args:
      records_may_move: False if a record's place in the data decides its shard, by a public rule.
        True if the record's contents or identity alone decide its shard (for example a hash of its
        user, or its country).

    | relation            | by its place (False)        | by itself (True)                 |
    | ------------------- | --------------------------- | -------------------------------- |
    | add_or_remove_one   | refused: without one record | the largest charge               |
    |                     | those after it move up      |                                  |
    | replace_one,        | the largest charge          | refused: a record that leaves    |
    | replace_special     |                             | its shard changes the shard's    |
    |                     |                             | size, which is public there      |

    Raises Overspent if the charge would exceed the budget, OverlappingShards for a record in two
    shards, and UserError for what the table refuses. If records decide their shards by themselves,
    account under add_or_remove_one: there exchanging a record is one removal and one addition.

    >>> halves = [ShardCharge(range(0, 50), 0.3), ShardCharge(range(50, 100), 0.5)]
    >>> ledger = BudgetLedger(epsilon=1.0, neighboring_relation="replace_one")
    >>> ledger.spend_parallel("halves", halves).spent
    (0.5, 0.0)
    >>> ledger.spend_parallel(
    ...   "halves", [ShardCharge(range(0, 51), 0.3), ShardCharge(range(50, 100), 0.5)])
    Traceback (most recent call last):
    ...
    dpjax.mechanisms.budget.OverlappingShards: shards[1]: record 50 lies in an earlier ...
    """
    if not shards:
      raise UserError("must hold at least one shard", field="shards")
    _check_disjoint([shard.records for shard in shards])
    self._check_placed(records_may_move)
    largest = lambda name: max((getattr(shard, name) for shard in shards), key=_exact)
    # If shards have different events, only epsilon and delta are kept.
    event = shards[0].event
    event = event if all(shard.event == event for shard in shards) else None
    return self.spend(name, epsilon=largest("epsilon"), delta=largest("delta"), event=event)

  def _check_placed(self, by_itself: bool) -> None:
    validate.flag(records_may_move=by_itself)
    if not by_itself and self.neighboring_relation == "add_or_remove_one":
      raise UserError(
        "under 'add_or_remove_one' removing a record moves those after it into "
        "other shards; use 'replace_one' or 'replace_special', or shards that each "
        "record decides by itself (records_may_move=True)",
        field="records_may_move",
        value=False,
      )
    if by_itself and self.neighboring_relation != "add_or_remove_one":
      raise UserError(
        f"under {self.neighboring_relation!r} a shard's size is public, and a "
        "record that leaves it changes it; use 'add_or_remove_one' (exchanging a "
        "record costs two such hops)",
        field="records_may_move",
        value=True,
      )

  def event(self) -> stated.DpEvent:
    """Returns all charges as one event, for `dpjax.accounting` under the ledger's relation.

    A charge without an event counts as the worst mechanism that is (epsilon, 0)-DP.
    Raises UserError for a charge with delta > 0 and no event.

    >>> ledger = BudgetLedger(epsilon=1.0).spend("a", epsilon=0.5)
    >>> ledger.event().events[0].event.num_buckets
    2
    """
    return dp_accounting.ComposedDpEvent([self._event(charge) for charge in self.charges])

  def _event(self, charge: BudgetCharge) -> stated.DpEvent:
    if charge.event is not None:
      return charge.event
    if charge.delta > 0:
      raise UserError(
        f"{charge.name!r} has no event; give one to be composed",
        field="delta",
        value=charge.delta,
      )
    relation = self.neighboring_relation
    return stated.pure_event(charge.epsilon, relation, relation)

  def _check_fits(self, charge: BudgetCharge) -> None:
    for field in ("epsilon", "delta"):
      # Totals are exact fractions, since rounding could admit a charge that is too large.
      total = _total((*self.charges, charge), field)
      if total > _exact(getattr(self, field)):
        left = self.remaining[field == "delta"]
        raise Overspent(
          f"{charge.name!r} would exceed the budget, of which {left:.6g} of "
          f"{getattr(self, field):.6g} is left",
          field=field,
          value=getattr(charge, field),
        )


def _exact(amount: float) -> Fraction:
  # Reads the decimal as written, not its binary approximation, so that .1 + .2 is .3.
  return Fraction(repr(float(amount)))


def _total(charges: Iterable[BudgetCharge], name: str) -> Fraction:
  return sum((_exact(getattr(charge, name)) for charge in charges), Fraction(0))


def _check_amounts(epsilon: float, delta: float) -> None:
  validate.non_negative(epsilon=epsilon)
  validate.share(delta=delta)


def _check_disjoint(shards: Sequence[Iterable[int]]) -> None:
  # Plain ranges are compared by their ends, so large shards need no set of records.
  ranges = [
    shard
    for shard in shards
    if isinstance(shard, range) and shard.step == 1 and shard.start >= 0
  ]
  if len(ranges) == len(shards):
    order = sorted((s.start, s.stop, index) for index, s in enumerate(ranges) if s)
    for (_, stop, name), (start, _, other) in itertools.pairwise(order):
      if start < stop:
        raise _overlap(max(name, other), start)
    return
  seen: set[int] = set()
  for index, shard in enumerate(shards):
    records: set[int] = set()
    for record in shard:
      whole = isinstance(record, numbers.Integral) and not isinstance(record, bool)
      # -1 would be a second name for the last record.
      if not whole or record < 0:
        raise UserError(f"must be integers >= 0, not {record!r}", field="records")
      records.add(int(record))
    if not seen.isdisjoint(records):
      raise _overlap(index, min(seen & records))
    seen |= records


def _overlap(index: int, record: int) -> OverlappingShards:
  return OverlappingShards(
    f"record {record} lies in an earlier shard too; parallel composition needs disjoint shards, "
    "else charge them one after the other",
    field=f"shards[{index}]",
  )
