"""Several mechanisms under one budget: the composed cost, what is charged, what is refused."""

import copy
import dataclasses
import math
import pickle

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

import dpjax
from dpjax import JointPlan, Plan, accounting, mechanisms, sampling
from dpjax.accounting import overflow
from dpjax.accounting.event_kinds import elements
from dpjax.accounting.event_kinds.k_out_of_t import KOutOfTDpEvent
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from dpjax.accounting.ledger import BudgetExceeded
from dpjax.validate import UserError
from tests.refuses import refuses

_DELTA = 1e-5
_ADD = "add_or_remove_one"


def _train(**changes):
  numbers = dict(
    sampler=sampling.PoissonSampler(sampling_prob=0.1, capacity=200), noise_multiplier=1.0,
    l2_clip_norm=1.0, normalize_by=100, num_steps=20, delta=_DELTA,
  )  # fmt: skip
  return Plan(**{**numbers, **changes})


def _mean(**changes):
  return mechanisms.Gaussian(**{"noise_multiplier": 4.0, "l2_sensitivity": 1.0, **changes})


_MEDIAN = mechanisms.Quantile(epsilon=0.1, lower=0.0, upper=8.0)
_PARTS = {
  "median": _MEDIAN,
  "mean": _mean(),
  "first": _train(),
  "second": _train(num_steps=9),
}


@pytest.fixture(scope="module")
def joint():
  # RDP takes a hundredth of the time of PLD, and the joint plan asks whichever it has.
  return JointPlan.calibrated(
    parts=_PARTS, epsilon=2.0, delta=_DELTA, times={"mean": 2}, accountant="rdp"
  )


def test_a_part_that_runs_once_may_say_so():
  parts = {"mean": _mean(), "median": _MEDIAN}
  once = JointPlan(parts, _DELTA, times={"mean": 1}, accountant="rdp")
  unsaid = JointPlan(parts, _DELTA, accountant="rdp")
  assert once.epsilon() == unsaid.epsilon()
  twice = JointPlan(parts, _DELTA, times={"mean": 2}, accountant="rdp")
  assert twice.epsilon() > 1.1 * once.epsilon()


@pytest.mark.slow
def test_the_tightest_accountant_is_taken_and_agrees_with_dp_accounting():
  joint = JointPlan({"mean": _mean(), "train": _train()}, _DELTA)
  assert joint.accountant == "pld"
  accountant = PLDAccountant()
  accountant.compose(dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(1.0)), 20)
  accountant.compose(dpa.GaussianDpEvent(4.0))
  left = _DELTA * (1 - overflow.OVERFLOW_SHARE)
  exact = accountant.get_epsilon(left)
  assert exact * (1 - 1e-9) <= joint.epsilon() == pytest.approx(exact, rel=5e-3)


@pytest.mark.slow
def test_epsilon_is_that_of_the_composition_by_dp_accounting_alone(joint):
  z = joint["first"].noise_multiplier
  accountant = RdpAccountant()
  accountant.compose(dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(z)), 20 + 9)
  accountant.compose(dpa.GaussianDpEvent(4 * z), 2)
  # Of pure epsilon .1: dp_accounting knows the responses under the other relation alone.
  responses = RdpAccountant(neighboring_relation=dpa.NeighboringRelation.REPLACE_ONE)
  responses.compose(dpa.RandomizedResponseDpEvent(2 / (1 + math.exp(0.1)), 2))
  left = _DELTA * (1 - overflow.OVERFLOW_SHARE)
  curve = list(np.add(accountant.rdp, responses.rdp))
  exact = compute_epsilon(accountant.orders, curve, left)[0]
  assert joint.epsilon() == pytest.approx(exact, rel=1e-6)
  assert 1.999 < joint.epsilon() <= 2.0
  assert joint["second"].noise_multiplier == z


def test_the_composition_beats_a_split_and_needs_more_noise_than_one_part(joint):
  alone = joint.epsilon(steps={"median": 0, "mean": 0, "second": 0})
  others = joint.epsilon(steps={"first": 0})
  assert max(alone, others) < joint.epsilon() < 0.9 * (alone + others)
  for name in joint.parts:
    assert joint.epsilon(steps={name: 0}) < joint.epsilon()


def test_fixed_parts_keep_their_noise():
  joint = JointPlan.calibrated(
    parts={"mean": _mean(), "train": _train()}, fixed="mean", epsilon=2.0, delta=_DELTA,
    accountant="rdp",
  )  # fmt: skip
  assert joint["mean"] == _mean()
  assert 1.999 < joint.epsilon() <= 2.0


def test_overflow_of_all_plans_fits_into_one_share_of_delta(joint):
  """(1 + e^epsilon) times the chance that any draw of any plan is too large."""
  aborts = sum(
    plan.num_steps
    * math.exp(overflow.log_allowed(plan.delta, plan.epsilon(), plan.num_steps))
    for plan in (joint["first"], joint["second"])
  )
  cost = (1 + math.exp(2.0)) * aborts
  assert 0.9 < cost / (overflow.OVERFLOW_SHARE * _DELTA) <= 1 + 1e-9
  fitted = joint.fitted(1000)
  for name in ("first", "second"):
    plan = fitted[name]
    log_abort = plan.sampler.log_overflow_prob(1001) + math.log(plan.num_steps)
    assert (1 + math.exp(2.0)) * math.exp(log_abort) <= 0.5001 * 0.05 * _DELTA
  # Plans as they came, each with all of delta for itself: their overflow costs more.
  loose = dataclasses.replace(
    joint,
    parts={
      **joint.parts,
      **{n: dataclasses.replace(joint[n], delta=_DELTA) for n in ("first", "second")},
    },
  )
  assert loose.epsilon() > joint.epsilon()


def test_the_ledger_charges_what_ran_in_any_order(joint):
  ledger = accounting.Ledger()
  for name, key, steps in [
    ("first", "a", 5), ("mean", "b", 1), ("first", "a", 5), ("median", "c", 1),
    ("second", "d", 9), ("first", "e", 10), ("mean", "f", 1),
  ]:  # fmt: skip
    ledger = joint.charge(ledger, name, noise_key_id=key, num_steps=steps)
    before = joint.spent(ledger)
    assert before.epsilon <= 2.0
  assert before.steps == 32 and before.epsilon == joint.epsilon()
  assert "first (20 of 20)" in " ".join(before.statement.split())
  again = accounting.Ledger.from_json(ledger.to_json())
  assert joint.spent(again).epsilon == joint.epsilon()
  # The ledger, read without the joint plan, has the same cost.
  left = _DELTA * (1 - overflow.OVERFLOW_SHARE)
  assert ledger.epsilon(left, accountant="rdp") == pytest.approx(joint.epsilon(), rel=1e-6)
  with refuses("parts['first']", error=BudgetExceeded):
    joint.charge(ledger, "first", noise_key_id="a")


def test_what_did_not_run_is_not_charged(joint):
  ledger = joint.charge(accounting.Ledger(), "median", noise_key_id="a")
  spent = joint.spent(ledger)
  pure = accounting.epsilon(_MEDIAN.event(_ADD), delta=_DELTA, accountant="rdp")
  assert spent.epsilon == pytest.approx(pure, rel=1e-6)
  assert "first (0 of 20)" in " ".join(spent.statement.split())
  assert joint.spent(accounting.Ledger()).epsilon == 0


def test_noise_is_never_drawn_twice(joint):
  ledger = joint.charge(accounting.Ledger(), "mean", noise_key_id="a")
  with refuses("noise_key_id"):
    joint.charge(ledger, "mean", noise_key_id="a")
  with refuses("noise_key_id"):
    joint.charge(ledger, "first", noise_key_id="a")
  keys = joint.keys(jax.random.key(7))
  draws = [np.asarray(jax.random.normal(key, (4,))).tobytes() for key in keys.values()]
  assert len(set(draws)) == 4


def test_a_ledger_of_another_plan_is_refused(joint):
  cheap = JointPlan.calibrated(
    parts=_PARTS, epsilon=0.9, delta=_DELTA, times={"mean": 2}, accountant="rdp"
  )
  ledger = joint.charge(accounting.Ledger(), "first", noise_key_id="a")
  for other in (ledger, accounting.Ledger().charge(
    accounting.gaussian_event(1.0), l2_clip_norm=1.0, neighboring_relation=_ADD,
    noise_key_id="stranger", first_step=0,
  )):  # fmt: skip
    with refuses("ledger"):
      cheap.spent(other)


def test_a_pass_of_random_allocation_beside_a_mean_is_charged_at_its_start():
  sampler = sampling.RandomAllocationSampler(steps_per_pass=4, capacity=999)
  joint = JointPlan(
    {"mean": _mean(), "train": _train(sampler=sampler, noise_multiplier=2.0, num_steps=8)},
    _DELTA,
  )
  ledger = joint.charge(accounting.Ledger(), "train", noise_key_id="a", num_steps=5)
  counts = elements.parts(ledger.event())
  once = random_allocation_event(accounting.gaussian_event(2.0), num_steps=4)
  assert counts == {once: 2}
  ledger = joint.charge(ledger, "mean", noise_key_id="b")
  # Five of eight steps overflow less often than eight, which leaves more of delta.
  assert joint.spent(ledger).epsilon == pytest.approx(joint.epsilon(), rel=5e-3)


class _Stopped(mechanisms.Gaussian):
  """A selection of the best of several runs, which only Renyi DP knows."""

  def event(self, neighboring_relation=_ADD):
    return repeat_and_select_event(
      super().event(neighboring_relation), mean_trials=2.0, shape=1.0
    )


def test_parts_that_only_rdp_knows_are_accounted_by_rdp():
  parts = {"train": _train(), "best": _Stopped(8.0, 1.0)}
  joint = JointPlan(parts, _DELTA)
  assert joint.accountant == "rdp"
  assert (
    joint.epsilon() > JointPlan({"train": _train()}, _DELTA, accountant="rdp").epsilon()
  )
  assert "claimed" in joint.statement()  # the event is a user's own
  with refuses("parts['best']"):
    JointPlan(parts, _DELTA, accountant="pld")


_CUT = sampling.TruncatedPoissonSampler(sampling_prob=0.1, capacity=150, num_examples=1000)
_ZEROED = _train(neighboring_relation="replace_special")


@pytest.mark.parametrize(
  "parts, options, message",
  [
    ({}, {}, "parts={}: must be a mapping"),
    ({"a b": _mean()}, {}, "a name of parts='a b'"),
    ({"mean": mechanisms.Gaussian}, {}, "must be a dpjax.Plan, or a mechanism"),
    ({"a": _train(), "b": _ZEROED}, {}, "must be one for all parts"),
    ({"a": _train()}, {"neighboring_relation": "replace_one"}, "must be one for all parts"),
    ({"a": _train(unit="user"), "b": _mean()}, {}, "hides one example"),
    ({"a": _train(), "b": _mean(neighboring_relation="replace_one")}, {}, "parts\\['b'\\]"),
    ({"a": _train()}, {"times": {"a": 2}}, "times='a': is a plan"),
    ({"a": _mean()}, {"times": {"a": 0}}, "times\\['a'\\]=0"),
    ({"a": _mean()}, {"times": {"b": 1}}, "times='b'"),
    ({"a": _train(sampler=_CUT)}, {"accountant": "rdp"}, "parts\\['a'\\].*'rdp'"),
    ({"a": _mean()}, {"accountant": "gdp"}, "proves nothing"),
    ({"a": _mean()}, {"delta": 0.0}, "delta=0.0"),
  ],
)  # fmt: skip
def test_what_has_no_common_epsilon_is_one_line(parts, options, message):
  with pytest.raises(UserError, match=message) as error:
    JointPlan(**{"parts": parts, "delta": _DELTA, **options})
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"parts": {"median": _MEDIAN}}, "fixed"),
    ({"fixed": ("mean", "train")}, "fixed"),
    ({"fixed": ("median",)}, "fixed"),
    ({"fixed": ("mean",), "epsilon": 0.5}, "epsilon"),
    ({"epsilon": -1.0}, "epsilon"),
    (
      {"parts": {"mean": _mean(), "a": _train(noise_multiplier=0.0)}},
      "parts['a'].noise_multiplier",
    ),
  ],
)  # fmt: skip
def test_a_target_that_nothing_reaches_is_one_line(changes, field):
  options = {"parts": {"mean": _mean(), "train": _train()}, "epsilon": 2.0, "delta": _DELTA}
  with refuses(field):
    JointPlan.calibrated(**{**options, **changes})


def test_a_plan_of_parts_without_a_shared_capacity_says_so():
  loose = JointPlan(_PARTS, _DELTA, accountant="rdp")
  with refuses("delta"):
    loose.epsilon()


def test_parts_cannot_be_changed_after_they_were_accounted(joint):
  with pytest.raises(TypeError):
    joint.parts["mean"] = _mean(noise_multiplier=0.1)
  mine = dict(joint.parts)
  plan = JointPlan(mine, _DELTA, accountant="rdp")
  before = plan.epsilon()
  mine["mean"] = _mean(noise_multiplier=0.1)
  assert plan.epsilon() == before
  with refuses("steps['first']", value=21, error=BudgetExceeded):
    plan.epsilon(steps={"first": 21})


@pytest.mark.slow
def test_a_run_of_two_parts_with_a_ledger(joint):
  """As docs/accounting.md does it, with the mechanisms really called."""
  small = joint.fitted(100)
  keys = small.keys(jax.random.key(3))
  data = dpjax.types.Example(x=np.linspace(-1, 1, 100)[:, None], y=np.zeros(100, int))
  ledger = small.charge(accounting.Ledger(), "mean", noise_key_id="mean")
  centre = small["mean"](keys["mean"], jnp.asarray(data.x).sum())
  assert np.isfinite(centre)
  plan = dataclasses.replace(small["second"], normalize_by=10)
  batches = list(plan.batches(np.asarray(data.x), rng=5))
  ledger = small.charge(ledger, "second", noise_key_id="second", num_steps=len(batches))
  assert 0 < small.spent(ledger).epsilon < small.epsilon()


@pytest.fixture(scope="module")
def in_passes():
  sampler = sampling.KOutOfTSampler(steps_per_pass=3, num_selected=2, capacity=10**6)
  train = _train(sampler=sampler, noise_multiplier=2.0, num_steps=6, accountant="rdp")
  return JointPlan(
    {"mean": _mean(), "train": train}, _DELTA, times={"mean": 3}, accountant="rdp"
  )


def _again(joint, ledger, name, first, *, key, event=None):
  """Returns a ledger to which a charge was added by hand, past the joint plan."""
  return ledger.charge(
    joint["train"].step_event(first) if event is None else event,
    l2_clip_norm=1.0,
    neighboring_relation=_ADD,
    noise_key_id=f"{name}/{key}",
    first_step=first,
  )


def test_a_first_step_that_ran_twice_is_no_first_and_second_step(in_passes):
  """Two passes were counted as one: 2.8 in place of 4.1, also by a ledger from JSON."""
  once = in_passes.charge(accounting.Ledger(), "train", noise_key_id="a")
  twice = _again(in_passes, once, "train", 0, key="b")
  assert twice.epsilon(_DELTA, accountant="rdp") > 1.4 * in_passes.spent(once).epsilon
  with refuses("ledger"):
    in_passes.spent(accounting.Ledger.from_json(twice.to_json()))
  # A charge of two steps, both as dear as the first.
  longer = accounting.Ledger((dataclasses.replace(once.charges[0], num_steps=2),))
  with refuses("ledger"):
    in_passes.spent(longer)
  # All steps but the first, which hold the pass that it paid for.
  free = dict(event=dpa.NoOpDpEvent(), first_step=1, num_steps=2)
  later = accounting.Ledger((dataclasses.replace(once.charges[0], **free),))
  with refuses("ledger"):
    in_passes.spent(later)
  # The states of its plans, which `Plan.spent` takes one by one.
  with refuses("ledger"):
    in_passes.spent({"train": None})
  # What the joint plan charges is accepted, by ones and at once, and with a second key.
  whole = in_passes.charge(accounting.Ledger(), "train", noise_key_id="a", num_steps=6)
  ledger = accounting.Ledger()
  for step in range(6):
    ledger = in_passes.charge(ledger, "train", noise_key_id="ab"[step // 3])
  assert in_passes.spent(ledger).epsilon == in_passes.spent(whole).epsilon
  assert in_passes.spent(ledger).steps == 6


def test_a_plan_that_is_begun_anew_within_a_pass_is_no_rest_of_it(in_passes):
  """Its first pass was free: at noise 1 and two steps, one of which has the record, the ledger said
  (2.496, .001), and the truth was (2.496, .0045)."""
  ledger = in_passes.charge(accounting.Ledger(), "train", noise_key_id="a", num_steps=4)
  with refuses("noise_key_id", value="b"):
    in_passes.charge(ledger, "train", noise_key_id="b")
  # Neither may it be entered by hand: the ledger itself refuses it, and else `spent`.
  with refuses("noise_key_id"):
    _again(in_passes, ledger, "train", 4, key="b")
  new = dict(event=dpa.NoOpDpEvent(), first_step=4, num_steps=1, noise_key_id="train/b")
  forged = dataclasses.replace(ledger.charges[0], **new)
  with refuses("ledger"):
    in_passes.spent(accounting.Ledger((*ledger.charges, forged)))
  # The same step under the key that the pass began with.
  assert in_passes.spent(_again(in_passes, ledger, "train", 4, key="a")).steps == 5


@pytest.mark.parametrize("key", [7, None, b"a", 1.5, "", np.arange(2)])
def test_a_key_that_the_ledger_could_not_find_again_is_refused(in_passes, key):
  """The text "7" was never equal to the number 7, so that its noise could be drawn twice."""
  with refuses("noise_key_id"):
    in_passes.charge(accounting.Ledger(), "mean", noise_key_id=key)


def test_a_ledger_whose_parts_share_noise_is_refused(in_passes):
  once = in_passes.charge(accounting.Ledger(), "mean", noise_key_id="a")
  event = once.charges[0].event
  shared = _again(in_passes, once, "train", 0, key="a")
  with refuses("ledger"):
    in_passes.spent(shared)
  # Both calls are one entry of the ledger.
  with refuses("ledger"):
    in_passes.spent(_again(in_passes, once, "mean", 1, key="a", event=event))


class _Free(Plan):
  """A plan that says that it costs nothing."""

  def event(self, steps=None):
    return dpa.NoOpDpEvent()


def test_a_subclass_of_a_plan_is_its_authors_word():
  fields = {f.name: getattr(_train(), f.name) for f in dataclasses.fields(Plan)}
  joint = JointPlan({"a": _Free(**fields)}, _DELTA, accountant="rdp")
  assert joint.assumptions == ("a: the event of _Free is its author's word",)
  # A plan alone says so, too.
  plan = joint.parts["a"]
  assert plan.assumptions == ("the event of _Free is its author's word",)
  # The event of several parts says so where the subclass's own does not.
  cheap = type(
    "_Cheap", (_Free,), {"event": lambda self, steps=None: dpa.GaussianDpEvent(9.0)}
  )
  joint = JointPlan({"a": cheap(**fields), "mean": _mean()}, _DELTA, accountant="rdp")
  assert elements.claims(joint.event()) == ("the event of _Cheap is its author's word",)
  assert "kind: claimed" in plan.statement()
  with refuses("parts['a']"):
    JointPlan({"a": joint}, _DELTA)


def test_a_ledger_says_what_a_subclass_of_a_plan_claims():
  """Its events go where no plan goes, and were proved there."""
  noise = {"sum_event": lambda self, step: dpa.GaussianDpEvent(9.0)}
  fields = {f.name: getattr(_train(), f.name) for f in dataclasses.fields(Plan)}
  joint = JointPlan({"a": type("_Cheap", (Plan,), noise)(**fields)}, _DELTA)
  ledger = joint.charge(accounting.Ledger(), "a", noise_key_id="k", num_steps=20)
  assert elements.claims(ledger.event()) == ("the event of _Cheap is its author's word",)
  assert accounting.gdp.approximate(ledger.event(), delta=_DELTA).epsilon_kind == "claimed"
  again = accounting.Ledger.from_json(ledger.to_json())
  assert joint.spent(again) == joint.spent(ledger)


def test_a_joint_plan_is_pickled_and_copied():
  joint = JointPlan({"a": _train(), "mean": _mean()}, _DELTA, times={"mean": 2})
  for other in (pickle.loads(pickle.dumps(joint)), copy.deepcopy(joint)):
    assert other == joint and other.event() == joint.event()


def test_half_precision_is_as_private_as_double():
  half = np.float16(2e-7)
  # A twentieth of it would be 0 in half precision: nothing would be set aside.
  exact = JointPlan({"a": _train(delta=float(half))}, float(half), accountant="rdp")
  rounded = JointPlan({"a": _train(delta=half)}, half, accountant="rdp")
  assert rounded.epsilon() == rounded.epsilon(half) == exact.epsilon()
  assert _train(delta=half).epsilon() == _train(delta=float(half)).epsilon()
  options = {"epsilon": 1.0, "delta": _DELTA, "accountant": "rdp"}
  for share in (np.float16(1.1), np.float16(1.3)):
    joint = JointPlan.calibrated(parts={"a": _mean(noise_multiplier=share)}, **options)
    assert isinstance(joint["a"].noise_multiplier, float)
    assert 0.999 < joint.epsilon() <= 1.0


_G = dpa.GaussianDpEvent


@pytest.mark.parametrize(
  "event, relation, accountant",
  [
    (lambda real, whole: _G(real(300.0)), _ADD, "rdp"),
    (lambda real, whole: dpa.LaplaceDpEvent(real(300.0)), _ADD, "rdp"),
    (lambda real, whole: KOutOfTDpEvent(9, whole(3), real(300.0)), _ADD, "rdp"),
    (lambda real, whole: dpa.PoissonSampledDpEvent(real(0.125), _G(4.0)), _ADD, "rdp"),
    (lambda real, whole: dpa.RandomizedResponseDpEvent(real(0.75), whole(3)), _ADD, "rdp"),
    (
      lambda real, whole: dpa.SampledWithReplacementDpEvent(whole(127), whole(127), _G(90)),
      "replace_one",
      "pld",
    ),
  ],
)
def test_an_event_of_small_numbers_costs_what_it_says(event, relation, accountant):
  """The square of 300 overflows float16: of 10,000 such sums 0.18 was counted, not 1.40."""
  by = {"delta": _DELTA, "neighboring_relation": relation, "accountant": accountant}
  times = 10_000 if accountant == "rdp" else 2
  costs = [
    accounting.epsilon(
      dpa.ComposedDpEvent([_G(20.0), dpa.SelfComposedDpEvent(event(*kinds), times)])
      if accountant == "rdp"
      else event(*kinds),
      **by,
    )
    for kinds in ((float, int), (np.float16, np.int8))
  ]
  assert costs[0] == costs[1] > 0
