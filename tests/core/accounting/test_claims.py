"""A claim stays a claim wherever its event goes: into ledgers, files, compositions, statements."""

import json
import math

import dp_accounting as dpa
import mpmath
import numpy as np
import pytest

import dpjax
from dpjax import JointPlan, Plan, accounting
from dpjax.accounting import Ledger
from dpjax.accounting.epsilon import privacy_profile
from dpjax.accounting.event_kinds import elements
from dpjax.accounting.event_kinds.kind import event_from_json, event_to_json
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from dpjax.accounting.statement import EPSILON_KINDS

_DELTA = 1e-5


class _Users(dpjax.PoissonSampler):
  pass


class _UsersFixed(dpjax.FixedSizeSampler):
  pass


class _Mechanism:
  noise_multiplier = 2.0

  def event(self, neighboring_relation):
    del neighboring_relation
    return accounting.gaussian_event(self.noise_multiplier)


_POISSON = {"sampling_prob": 0.1, "capacity": 99}
_FIXED = {"batch_size": 10, "num_examples": 100}


def _plan(sampler, **fields):
  return Plan(**{
    "sampler": sampler, "noise_multiplier": 2.0, "l2_clip_norm": 1.0, "normalize_by": 10,
    "num_steps": 5, "delta": _DELTA, **fields,
  })  # fmt: skip


def _kind(text):
  words = " ".join(text.split())
  (kind,) = [kind for kind in EPSILON_KINDS if f"; kind: {kind}, that is" in words]
  return kind


def _ledger(plan):
  steps = plan.num_steps
  return Ledger().charge(
    plan.step_event(), num_steps=steps, l2_clip_norm=1.0, noise_key_id="a", first_step=0,
    neighboring_relation=plan.neighboring_relation,
  )  # fmt: skip


def _reread(ledger):
  return Ledger.from_json(json.loads(json.dumps(ledger.to_json())))


_DOORS = {
  "its event": lambda plan: plan.event(),
  "one step": lambda plan: plan.step_event(),
  "what remains": lambda plan: plan.remaining_event(2),
  "a ledger": lambda plan: _ledger(plan).event(),
  "a ledger from a file": lambda plan: _reread(_ledger(plan)).event(),
  "an event from a file": lambda plan: event_from_json(
    json.loads(json.dumps(event_to_json(plan.event())))
  ),
  "a composition": lambda plan: dpa.ComposedDpEvent(
    [plan.event(), dpa.GaussianDpEvent(3.0)]
  ),
  "a statement of its relation": lambda plan: elements.StatedDpEvent(
    str(plan.neighboring_relation), plan.event()
  ),
  "the best of several": lambda plan: repeat_and_select_event(plan.event(), mean_trials=3),
  "its normal form": lambda plan: dpa.ComposedDpEvent([*elements.parts(plan.event())]),
  "a joint plan": lambda plan: JointPlan({"a": plan}, _DELTA).event(),
}


@pytest.mark.parametrize("door", _DOORS)
@pytest.mark.parametrize(
  ("own", "known", "fields"),
  [(_Users, dpjax.PoissonSampler, _POISSON), (_UsersFixed, dpjax.FixedSizeSampler, _FIXED)],
)
def test_an_event_of_an_own_sampler_says_that_it_is_claimed(own, known, fields, door):
  for sampler, kind in ((own, "claimed"), (known, "proved")):
    plan = _plan(sampler(**fields))
    event = _DOORS[door](plan)
    text = accounting.privacy_statement(
      event, delta=_DELTA, neighboring_relation=plan.neighboring_relation
    )
    assert _kind(text) == kind == _kind(plan.statement())
    assert elements.claims(event) == plan.assumptions


@pytest.mark.parametrize(
  ("own", "known", "fields"),
  [(_Users, dpjax.PoissonSampler, _POISSON), (_UsersFixed, dpjax.FixedSizeSampler, _FIXED)],
)
def test_a_claim_costs_what_it_claims(own, known, fields):
  claimed, proved = _plan(own(**fields)), _plan(known(**fields))
  assert claimed.accountant == proved.accountant
  np.testing.assert_allclose(claimed.epsilon(), proved.epsilon(), rtol=1e-12)
  relation = str(proved.neighboring_relation)
  for accountant in ("pld", "rdp"):
    options = {"delta": _DELTA, "neighboring_relation": relation, "accountant": accountant}
    np.testing.assert_allclose(
      accounting.epsilon(claimed.event(), **options),
      accounting.epsilon(proved.event(), **options),
      rtol=1e-12,
    )


def test_a_mechanism_of_a_user_is_claimed_in_the_ledger_of_a_joint_plan():
  joint = JointPlan({"mine": _Mechanism()}, _DELTA)
  ledger = joint.charge(Ledger(), "mine", noise_key_id="k")
  for event in (joint.event(), _reread(ledger).event()):
    assert _kind(accounting.privacy_statement(event, delta=_DELTA)) == "claimed"
  assert joint.spent(_reread(ledger)).epsilon == joint.epsilon()


def test_what_costs_nothing_or_has_no_noise_rests_on_no_claim():
  for event in (dpa.NoOpDpEvent(), dpa.NonPrivateDpEvent()):
    assert elements.with_claims(event, ["Mine: my word"]) is event
  plan = _plan(_Users(**_POISSON), noise_multiplier=0.0)
  assert not plan.is_private and math.isinf(plan.epsilon())
  with pytest.raises(dpjax.UserError) as error:
    elements.parts(elements.ClaimedDpEvent("", dpa.GaussianDpEvent(1.0)))
  assert error.value.field == "claim"


@pytest.mark.parametrize(
  "event",
  [
    dpa.NonPrivateDpEvent(),
    accounting.gaussian_event(0.0),
    elements.StatedDpEvent("replace_one", dpa.GaussianDpEvent(1.0)),
    elements.ClaimedDpEvent("my word", dpa.GaussianDpEvent(0.0)),
  ],
)
def test_an_epsilon_that_is_infinite_or_unknown_is_of_kind_none(event):
  assert _kind(accounting.privacy_statement(event, delta=_DELTA)) == "none"


def test_a_delta_that_underflows_is_not_zero():
  """Noise with tails is (epsilon, 0)-private for no epsilon."""
  for accountant in ("rdp", "pld"):
    assert (
      accounting.delta(dpa.GaussianDpEvent(50.0), epsilon=9.0, accountant=accountant) > 0
    )


def test_a_true_positive_rate_near_one_is_not_rounded_below_the_truth():
  with mpmath.workdps(40):
    for multiplier in (0.085, 0.11, 0.117, 0.234):
      profile = privacy_profile(dpa.GaussianDpEvent(multiplier))
      for fpr in (1e-4, 2e-3, 0.05, 0.2):
        quantile = mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(fpr) - 1)
        truth = mpmath.ncdf(quantile + 1 / mpmath.mpf(multiplier))
        assert accounting.true_positive_rate(profile, fpr) >= truth
