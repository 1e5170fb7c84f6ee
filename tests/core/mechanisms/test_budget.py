"""The budget: sums, maxima over disjoint shards, overspending, and composition by PLD."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax import accounting, mechanisms
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.mechanisms import BudgetLedger, ShardCharge, stated
from dpjax.mechanisms.budget import OverlappingShards, Overspent
from tests.refuses import refuses

_amount = st.integers(1, 400).map(lambda i: i / 1000)


def test_the_documents_split_of_one_fits_exactly():
  ledger = BudgetLedger(epsilon=1.0)
  assert ledger.split(0.3, 0.3, 0.4) == (0.3, 0.3, 0.4)
  for share in (0.3, 0.3, 0.4):
    ledger = ledger.spend("query", epsilon=share)
  assert ledger.spent == (1.0, 0.0)
  for more in (1e-12, 0.3):
    with refuses("epsilon", error=Overspent):
      ledger.spend("one more", epsilon=more)
  with refuses("shares"):
    ledger.split(0.3, 0.3, 0.5)


def test_amounts_add_as_the_decimals_they_were_written_as():
  assert 0.1 + 0.1 + 0.1 > 0.3  # what a sum of floats would refuse
  ledger = BudgetLedger(epsilon=0.3)
  for _ in range(3):
    ledger = ledger.spend("query", epsilon=0.1)
  assert ledger.remaining == (0.0, 0.0)


@given(amounts=st.lists(_amount, max_size=12), total=st.integers(1, 2000))
def test_sequential_is_the_sum_and_never_above_the_total(amounts, total):
  ledger, spent = BudgetLedger(epsilon=total / 1000), Fraction(0)
  for amount in amounts:
    fits = spent + Fraction(str(amount)) <= Fraction(total, 1000)
    if fits:
      ledger, spent = ledger.spend("a", epsilon=amount), spent + Fraction(str(amount))
    else:
      with pytest.raises(Overspent):
        ledger.spend("a", epsilon=amount)
  assert ledger.spent[0] == pytest.approx(float(spent))
  assert ledger.spent[0] + ledger.remaining[0] == pytest.approx(ledger.epsilon)


@given(amounts=st.lists(_amount, min_size=1, max_size=8))
def test_t17_disjoint_shards_cost_the_maximum_and_the_same_records_the_sum(amounts):
  ledger = BudgetLedger(epsilon=10.0, neighboring_relation="replace_one")
  shards = [
    ShardCharge(range(10 * i, 10 * i + 10), amount) for i, amount in enumerate(amounts)
  ]
  assert ledger.spend_parallel("split", shards).spent[0] == max(amounts)
  for amount in amounts:
    ledger = ledger.spend("unsplit", epsilon=amount)
  assert ledger.spent[0] == pytest.approx(math.fsum(amounts))


@pytest.mark.parametrize(
  "one, other",
  [
    (range(0, 11), range(10, 20)),
    (range(0, 20), range(5, 6)),
    ([0, 1, 2], {2, 3}),
    ([0, 5], range(3, 9)),
    (range(0, 10, 2), range(0, 10, 4)),
  ],
)
def test_overlapping_shards_are_refused(one, other):
  ledger = BudgetLedger(epsilon=1.0)
  with refuses("shards[1]", error=OverlappingShards):
    ledger.spend_parallel("a", [ShardCharge(one, 0.1), ShardCharge(other, 0.1)])


@given(
  st.lists(st.sets(st.integers(0, 12), max_size=5), min_size=1, max_size=4), st.booleans()
)
def test_shards_are_refused_exactly_when_some_record_is_in_two(shards, as_lists):
  total = sum(map(len, shards))
  charges = [ShardCharge(sorted(s) if as_lists else s, 0.1) for s in shards]
  ledger = BudgetLedger(epsilon=1.0, neighboring_relation="replace_one")
  if total == len(set().union(*shards)):
    assert ledger.spend_parallel("a", charges).spent == (0.1, 0.0)
  else:
    with pytest.raises(OverlappingShards):
      ledger.spend_parallel("a", charges)


def test_huge_ranges_are_compared_by_their_ends():
  big = [ShardCharge(range(0, 10**15), 0.1), ShardCharge(range(10**15, 10**16), 0.2)]
  ledger = BudgetLedger(epsilon=1.0, neighboring_relation="replace_one")
  assert ledger.spend_parallel("a", big).spent == (0.2, 0.0)


def test_a_record_that_can_change_shards_needs_add_or_remove_one():
  """Under replace_one a shard's size is public and costs nothing, yet here it would tell."""
  shards = [ShardCharge([0], 0.3), ShardCharge([1], 0.1), ShardCharge([2], 0.4)]
  for relation in ("replace_one", "replace_special"):
    ledger = BudgetLedger(epsilon=1.0, neighboring_relation=relation)
    assert ledger.spend_parallel("a", shards).spent == (0.4, 0.0)
    with refuses("records_may_move", value=True):
      ledger.spend_parallel("a", shards, records_may_move=True)
  ledger = BudgetLedger(epsilon=1.0)
  assert ledger.spend_parallel("a", shards, records_may_move=True).spent == (0.4, 0.0)


def test_records_that_could_hide_an_overlap_are_refused():
  both = iter(range(9))
  for records in (both, 5, map(int, "12")):
    with refuses("records"):
      ShardCharge(records, 0.1)
  ledger = BudgetLedger(epsilon=1.0, neighboring_relation="replace_one")
  for records in ([-1], range(-5, 0), range(-2, 3)):
    with refuses("records"):
      ledger.spend_parallel("a", [ShardCharge(records, 0.1), ShardCharge([99], 0.1)])


def _worst_release(data, neighbour, shard_of):
  """How many shards' contents differ: as many as one record's exchange is charged for."""
  cut = lambda rows: [
    [r for i, r in enumerate(rows) if shard_of(i, r) == s] for s in range(3)
  ]
  return sum(one != other for one, other in zip(cut(data), cut(neighbour)))


def test_one_record_fewer_moves_all_shards_by_place_which_is_refused():
  """The counter-example: three shards by place all change when the first record leaves."""
  data = list(range(12))
  by_place, by_itself = lambda i, r: i // 4, lambda i, r: r % 3
  assert _worst_release(data, data[1:], by_place) == 3
  assert _worst_release(data, data[1:], by_itself) == 1
  assert _worst_release(data, [99, *data[1:]], by_place) == 1  # replaced, not removed
  assert _worst_release(data, [2, *data[1:]], by_itself) == 2  # leaves one, enters another
  shards = [ShardCharge(range(4 * i, 4 * i + 4), 0.2) for i in range(3)]
  ledger = BudgetLedger(epsilon=1.0)  # add_or_remove_one
  with refuses("records_may_move", value=False) as info:
    ledger.spend_parallel("a", shards)
  assert "\n" not in str(info.value)
  assert ledger.spend_parallel("a", shards, records_may_move=True).spent == (0.2, 0.0)
  for relation in ("replace_one", "replace_special"):
    ledger = BudgetLedger(epsilon=1.0, neighboring_relation=relation)
    assert ledger.spend_parallel("a", shards).spent == (0.2, 0.0)
  with refuses("records_may_move"):
    ledger.spend_parallel("a", shards, records_may_move="no")


def test_delta_has_its_own_budget():
  ledger = BudgetLedger(epsilon=1.0, delta=1e-5).spend("a", epsilon=0.5, delta=1e-5)
  assert ledger.remaining == (0.5, 0.0)
  with refuses("delta", error=Overspent):
    ledger.spend("b", epsilon=0.1, delta=1e-9)
  with refuses("delta", error=Overspent):
    BudgetLedger(epsilon=1.0).spend("b", epsilon=0.1, delta=1e-9)
  assert ledger.spend("c", epsilon=0.5).spent == (1.0, 1e-5)


def test_spending_returns_a_new_ledger():
  ledger = BudgetLedger(epsilon=1.0)
  after = ledger.spend("a", epsilon=0.25)
  assert (ledger.spent[0], after.spent[0]) == (0.0, 0.25)
  assert after.charges[0].name == "a"


def test_row_10_composition_by_pld_is_the_sum_at_most_and_far_less_for_many():
  """Fifty Laplace queries of 0.1: 5 by the sum, about 2.5 by PLD at delta 1e-5."""
  query = mechanisms.Laplace(epsilon=0.1, l1_sensitivity=1.0)
  known = unknown = BudgetLedger(epsilon=5.0)
  for _ in range(50):
    known = known.spend("laplace", epsilon=query.epsilon, event=query.event())
    unknown = unknown.spend("anything", epsilon=query.epsilon)
  by_event, by_response = (
    accounting.epsilon(ledger.event(), delta=1e-5) for ledger in (known, unknown)
  )
  assert by_event < by_response < 0.65 * known.spent[0]
  alone = BudgetLedger(epsilon=5.0).spend("a", epsilon=3.0)
  assert accounting.epsilon(alone.event(), delta=1e-5) == pytest.approx(3.0, rel=1e-3)


def test_parallel_events_stand_for_the_largest_charge():
  ledger = BudgetLedger(epsilon=2.0, neighboring_relation="replace_special")
  event = mechanisms.Laplace(1.0, 1.0).event()
  halves = [ShardCharge(range(i, i + 1), 1.0, event=event) for i in range(2)]
  assert ledger.spend_parallel("same", halves).event().events == [event]
  unlike = [halves[0], ShardCharge([7], 0.5)]
  known = stated.only_under("replace_special", pure_dp_event(1.0))
  assert ledger.spend_parallel("unlike", unlike).event().events == [known]
  with_delta = BudgetLedger(epsilon=1.0, delta=0.1).spend("g", epsilon=0.5, delta=1e-5)
  with refuses("delta"):
    with_delta.event()


def test_the_charges_of_mechanisms_enter_the_accounting_ledger():
  """The pillars meet in the event alone."""
  mean = mechanisms.BoundedMean(epsilon=0.5, lower=0.0, upper=1.0)
  ledger = accounting.Ledger().charge(
    mean.event("replace_one"),
    l2_clip_norm=1.0,
    neighboring_relation="replace_one",
    noise_key_id="a",
    first_step=0,
  )
  found = ledger.epsilon(1e-9, neighboring_relation="replace_one")
  assert found == pytest.approx(0.5, rel=2e-3)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf, "1", None, True])
def test_negative_budgets_and_nan_are_one_line(bad):
  ledger = BudgetLedger(epsilon=1.0)
  calls = {
    "epsilon": [
      lambda: BudgetLedger(epsilon=bad),
      lambda: ledger.spend("a", epsilon=bad),
      lambda: ShardCharge([0], bad),
    ],
    "delta": [
      lambda: BudgetLedger(epsilon=1.0, delta=bad),
      lambda: ledger.spend("a", epsilon=0.1, delta=bad),
    ],
    "shares[0]": [lambda: ledger.split(bad, 0.5)],
  }
  for field, each in calls.items():
    for call in each:
      with refuses(field, value=bad) as info:
        call()
      assert "\n" not in str(info.value)


def test_empty_and_strange_shards_are_refused():
  ledger = BudgetLedger(epsilon=1.0)
  with refuses("shards"):
    ledger.spend_parallel("a", [])
  with refuses("records"):
    ledger.spend_parallel("a", [ShardCharge([0.5], 0.1)])
  with refuses("delta"):
    BudgetLedger(epsilon=1.0, delta=1.0)
  with refuses("epsilon"):
    BudgetLedger(epsilon=0)
