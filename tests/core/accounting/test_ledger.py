"""The ledger: each step of each key once, JSON, and the budget."""

import json
import math
import random

import dp_accounting as dpa
import pytest

from dpjax import accounting
from dpjax.accounting import Budget, Ledger, proved
from dpjax.accounting.ledger import BudgetExceeded, Charge
from dpjax.accounting.proved import NeighboringRelation
from dpjax.validate import UserError
from tests.refuses import refuses

_STEP = accounting.poisson_sampled_event(accounting.gaussian_event(1.0), sampling_prob=0.02)
_OTHER = accounting.poisson_sampled_event(
  accounting.gaussian_event(2.0), sampling_prob=0.02
)


_PUBLIC = accounting.gaussian_event(1.0)
_ADD = "add_or_remove_one"


def _charge(
  ledger, first_step, num_steps=1, *, event=_STEP, key="a", clip=1.0, relation=_ADD
):
  return ledger.charge(
    event,
    num_steps=num_steps,
    l2_clip_norm=clip,
    neighboring_relation=relation,
    noise_key_id=key,
    first_step=first_step,
  )


def _ledger(*charges):
  ledger = Ledger()
  for first_step, num_steps, options in charges:
    ledger = _charge(ledger, first_step, num_steps, **options)
  return ledger


def test_p27_a_ledger_counts_every_step_and_costs_what_ran():
  ledger = Ledger()
  for step in range(40):
    ledger = _charge(ledger, step)
  assert ledger.num_steps == 40 and len(ledger.charges) == 1
  assert ledger == _charge(Ledger(), 0, 40)
  whole = accounting.epsilon(accounting.compose(_STEP, 40), delta=1e-5)
  assert ledger.epsilon(1e-5) == whole
  assert ledger.epsilon(1e-5, accountant="rdp") > whole


def test_p8_steps_on_empty_batches_are_charged_like_any_other():
  """The event knows no batch: at q = 1e-6 nearly every batch is empty, every one costs."""
  rare = accounting.poisson_sampled_event(
    accounting.gaussian_event(0.5), sampling_prob=1e-6
  )
  ledger = Ledger()
  for step in range(100):
    ledger = _charge(ledger, step, event=rare)
  assert ledger.num_steps == 100
  assert ledger.epsilon(1e-7, accountant="rdp") > 0


def test_a_charge_leaves_the_old_ledger_alone():
  old = _charge(Ledger(), 0, 3)
  new = _charge(old, 3, 2)
  assert (old.num_steps, new.num_steps) == (3, 5)


@pytest.mark.parametrize("first_step, num_steps", [(9, 1), (0, 1), (0, 20), (5, 10)])
def test_p17_a_noise_key_is_never_used_twice(first_step, num_steps):
  ledger = _charge(Ledger(), 0, 10)
  with refuses("first_step"):
    _charge(ledger, first_step, num_steps)
  with refuses("first_step"):  # nor by another mechanism
    _charge(ledger, first_step, num_steps, event=_OTHER)
  assert _charge(ledger, first_step=0, key="b").num_steps == 11


def test_a_step_left_out_is_refused():
  ledger = _charge(Ledger(), 0, 10)
  with refuses("first_step"):
    _charge(ledger, 11)
  with refuses("first_step"):
    _charge(ledger, 12, key="b")
  with refuses("first_step"):
    _charge(Ledger(), 1)
  assert _charge(ledger, 10, key="b").num_steps == 11  # the run goes on with a fresh key


def test_a_new_key_within_a_pass_is_no_free_rest_of_it():
  """Steps of another run, whose own first pass would be charged to nobody."""
  passed = accounting.event_kinds.random_allocation.random_allocation_event(
    accounting.gaussian_event(1.0), num_steps=4
  )
  within = _charge(_ledger(), 0, event=passed)
  assert _charge(within, 1, 3, event=dpa.NoOpDpEvent()).num_steps == 4
  with refuses("noise_key_id", value="b"):
    _charge(within, 1, event=dpa.NoOpDpEvent(), key="b")
  anew = _charge(within, 0, event=passed, key="b")
  assert anew.epsilon(1e-5) > 1.2 * within.epsilon(1e-5)


def test_only_alike_steps_are_merged():
  changes = [{}, {"event": _OTHER}, {"clip": 2.0}]
  for before in changes:
    for after in changes:
      ledger = _charge(_charge(Ledger(), 0, 3, **before), 3, 2, **after)
      assert len(ledger.charges) == (1 if before == after else 2)
      assert ledger.num_steps == 5


def test_two_keys_that_take_turns_stay_two_charges():
  ledger = Ledger()
  for step in range(20):
    ledger = _charge(_charge(ledger, step, key="a"), step, key="b", event=_OTHER)
  assert [charge.num_steps for charge in ledger.charges] == [20, 20]
  both = dpa.ComposedDpEvent([dpa.SelfComposedDpEvent(e, 20) for e in (_STEP, _OTHER)])
  assert ledger.event() == both


def test_an_interrupted_run_has_the_ledger_of_an_uninterrupted_one():
  draw, ledger = random.Random(0), Ledger()
  while ledger.num_steps < 300:
    ledger = _charge(ledger, ledger.num_steps, draw.randint(1, 20))
    ledger = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
  assert ledger == _charge(Ledger(), 0, ledger.num_steps)


def test_json_round_trip_is_exact():
  ledger = _ledger(
    (0, 7, {"clip": 0.1 + 0.2}),
    (7, 1, {"event": _OTHER}),
    (0, 2, {"key": "b", "event": dpa.LaplaceDpEvent(1 / 3)}),
    (0, 1, {"key": "c", "event": dpa.NonPrivateDpEvent(), "clip": math.inf}),
  )
  text = json.dumps(ledger.to_json(), allow_nan=False)
  assert Ledger.from_json(json.loads(text)) == ledger
  assert ledger.epsilon(1e-5) == math.inf


def _spoil(change):
  data = _ledger((0, 7, {}), (7, 1, {"event": _OTHER})).to_json()
  change(data)
  return data


@pytest.mark.parametrize(
  "change",
  [
    lambda data: data["charges"].pop(0),
    lambda data: data["charges"].reverse(),
    lambda data: data["charges"][1].update(first_step=3),
    lambda data: data["charges"][0].update(num_steps=-1),
    lambda data: data["charges"][0].update(num_steps=6.5),
    lambda data: data["charges"][0].update(event={"kind": "unknown"}),
    lambda data: data["charges"][0].pop("l2_clip_norm"),
    lambda data: data["charges"].append("?"),
    lambda data: data.update(version=1),
  ],
)
def test_a_spoilt_ledger_is_refused(change):
  Ledger.from_json(_spoil(lambda data: None))
  with pytest.raises(UserError):
    Ledger.from_json(_spoil(change))


@pytest.mark.parametrize(
  "change",
  [
    {"num_steps": 0},
    {"num_steps": 1.5},
    {"first_step": -1},
    {"l2_clip_norm": 0.0},
    {"l2_clip_norm": math.inf},
    {"l2_clip_norm": None},
    {"neighboring_relation": ""},
    {"neighboring_relation": "adjacent"},
    {"noise_key_id": ""},
    {"noise_key_id": 7},
    {"event": dpa.UnsupportedDpEvent()},
  ],
)
def test_bad_charges_are_user_errors(change):
  good = {
    "event": _STEP,
    "num_steps": 1,
    "l2_clip_norm": 1.0,
    "neighboring_relation": _ADD,
    "noise_key_id": "a",
    "first_step": 0,
  }
  Charge(**good)
  with pytest.raises(UserError):
    Charge(**{**good, **change})


@pytest.mark.cases(long=["pld"])
@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
def test_the_budget_is_checked_before_the_steps_run(accountant):
  options = {"delta": 1e-5, "accountant": accountant}
  target = accounting.epsilon(accounting.compose(_STEP, 100), **options)
  budget = Budget(epsilon=target, delta=1e-5)
  ledger = _charge(Ledger(), 0, 60)
  check = lambda *proposed: ledger.check(budget, *proposed, accountant=accountant)
  assert check() == ledger.epsilon(1e-5, accountant=accountant)
  assert check(_STEP, 0) == check()
  assert check(_STEP, 40) == target  # the last allowed step is allowed
  with refuses("epsilon", error=BudgetExceeded) as error:
    check(_STEP, 41)
  assert isinstance(error.value, UserError) and "\n" not in str(error.value)
  with pytest.raises(BudgetExceeded):
    check(dpa.NonPrivateDpEvent())


def test_a_calibrated_run_fits_its_budget_to_the_last_step():
  budget = Budget(epsilon=1.5, delta=1e-6)
  steps = accounting.calibrate_num_steps(_STEP, epsilon=1.5, delta=1e-6)
  ledger = Ledger()
  assert ledger.check(budget, _STEP, steps) <= 1.5
  ledger = _charge(ledger, 0, steps)
  with pytest.raises(BudgetExceeded):
    ledger.check(budget, _STEP)


def test_the_relation_reaches_the_accountant():
  gaussian = accounting.gaussian_event(4.0)
  ledger = _charge(Ledger(), 0, event=gaussian, relation="replace_one")
  replaced = ledger.epsilon(1e-5, neighboring_relation="replace_one")
  assert replaced == pytest.approx(
    accounting.epsilon(accounting.gaussian_event(2.0), delta=1e-5), rel=1e-9
  )
  with pytest.raises(BudgetExceeded):
    ledger.check(Budget(replaced * 0.99, 1e-5), neighboring_relation="replace_one")
  assert ledger.epsilon(1e-5) == replaced  # the recorded one, unless another is asked for


def test_p14_a_relation_under_which_nothing_was_charged_is_refused():
  """A shuffled epoch is a plain Gaussian, which no longer knows where it was proved."""
  epoch = accounting.gaussian_event(2.0)
  ledger = _charge(Ledger(), 0, event=epoch, relation="replace_special")
  with refuses("neighboring_relation"):
    ledger.epsilon(1e-5, neighboring_relation=_ADD)
  with refuses("neighboring_relation"):
    ledger.check(Budget(9.0, 1e-5), epoch, neighboring_relation=_ADD)
  both = _charge(ledger, 0, event=epoch, key="b")
  with refuses("neighboring_relation"):
    both.epsilon(1e-5)
  assert Ledger.from_json(both.to_json()) == both
  silent = _charge(Ledger(), 0, event=dpa.NonPrivateDpEvent(), relation="")
  assert silent.epsilon(1e-5) == math.inf


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize("bad", [{"epsilon": 0.0}, {"delta": 1.0}, {"delta": 0.0}])
def test_bad_budgets_are_user_errors(bad):
  with pytest.raises(UserError):
    Budget(**{"epsilon": 1.0, "delta": 1e-5, **bad})


def test_its_json_is_what_a_file_gives_back():
  """A resumed run compares the two, types included."""

  def types(data):
    if isinstance(data, dict):
      return {key: types(value) for key, value in data.items()}
    return [types(each) for each in data] if isinstance(data, list) else type(data)

  ledger = _charge(Ledger(), 0, relation=NeighboringRelation.REPLACE_ONE, event=_PUBLIC)
  written = ledger.to_json()
  read = json.loads(json.dumps(written))
  assert read == written and types(read) == types(written)
