"""Calibration: on the private side, close to the target, or one clear line."""

import functools
import math
import random

import dp_accounting as dpa
import pytest

from dpjax import accounting
from dpjax.accounting import compose, epsilon, proved
from dpjax.accounting.event_kinds.discrete_gaussian import DiscreteGaussianDpEvent
from dpjax.accounting.event_kinds.kind import every_kind
from dpjax.accounting.event_kinds.skellam import SkellamDpEvent
from dpjax.accounting.event_kinds.smooth_sensitivity import SmoothSensitivityDpEvent
from dpjax.validate import UserError
from tests.refuses import refuses


def _step(noise_multiplier, sampling_prob):
  noise = accounting.gaussian_event(noise_multiplier)
  return accounting.poisson_sampled_event(noise, sampling_prob=sampling_prob)


def _run(noise_multiplier, sampling_prob, num_steps):
  return compose(_step(noise_multiplier, sampling_prob), num_steps)


def _settings(count, seed):
  draw = random.Random(seed)
  for _ in range(count):
    yield {
      "q": 10 ** draw.uniform(-3, -1),
      "steps": int(10 ** draw.uniform(0, 4)),
      "epsilon": 10 ** draw.uniform(-0.7, 1),
      "delta": 10 ** draw.uniform(-8, -3),
      "z": 10 ** draw.uniform(-0.1, 0.7),
    }


def _check_noise(setting, accountant):
  make = lambda z: _run(z, setting["q"], setting["steps"])
  target = {"delta": setting["delta"], "accountant": accountant}
  z = accounting.calibrate_noise_multiplier(make, epsilon=setting["epsilon"], **target)
  found = epsilon(make(z), **target)
  assert found <= setting["epsilon"], setting
  if found < setting["epsilon"] * (1 - 1e-3):  # wasteful, unless epsilon jumps right there
    assert epsilon(make(z * (1 - 1e-6)), **target) > setting["epsilon"], setting


def _check_prob(setting, accountant):
  make = lambda q: _run(setting["z"], q, setting["steps"])
  target = {"delta": setting["delta"], "accountant": accountant}
  q = accounting.calibrate_sampling_prob(make, epsilon=setting["epsilon"], **target)
  found = epsilon(make(q), **target)
  assert 0 < q <= 1 and found <= setting["epsilon"], setting
  if q < 1 and found < setting["epsilon"] * (1 - 1e-3):
    assert epsilon(make(q * (1 + 1e-6)), **target) > setting["epsilon"], setting


def _check_steps(setting, accountant):
  step = _step(setting["z"], setting["q"])
  target = {"delta": setting["delta"], "accountant": accountant}
  try:
    n = accounting.calibrate_num_steps(step, epsilon=setting["epsilon"], **target)
  except UserError as error:
    assert "unreachable" in str(error)
    n = 0
  assert epsilon(compose(step, n), **target) <= setting["epsilon"], setting
  assert epsilon(compose(step, n + 1), **target) > setting["epsilon"], setting


_CHECKS = {"noise": _check_noise, "prob": _check_prob, "steps": _check_steps}
_SETTINGS = {"noise": 40, "prob": 20, "steps": 140}  # by what they cost


@pytest.mark.cases(slow=["steps"], long=...)
@pytest.mark.parametrize("what", _CHECKS)
def test_p25_calibration_lands_on_the_private_side(what):
  for setting in _settings(_SETTINGS[what], seed=25):
    _CHECKS[what](setting, "rdp")


@pytest.mark.cases(slow=["steps"], long=...)
@pytest.mark.parametrize("what", _CHECKS)
def test_p25_calibration_lands_on_the_private_side_by_pld(what):
  for setting in _settings(3, seed=55):
    _CHECKS[what](setting, "pld")


@pytest.mark.slow
def test_pld_needs_no_more_noise_than_rdp():
  make = functools.partial(_run, sampling_prob=0.01, num_steps=1000)
  options = {"epsilon": 2.0, "delta": 1e-5}
  by_pld = accounting.calibrate_noise_multiplier(make, **options)
  by_rdp = accounting.calibrate_noise_multiplier(make, accountant="rdp", **options)
  assert 0.8 * by_rdp < by_pld < by_rdp


def test_few_accountings_are_needed(monkeypatch):
  """Seconds, not minutes: the search asks the accountant a dozen times, RDP included."""
  calls = []
  original = accounting.calibrate_noise_multiplier.__globals__["epsilon_of"]
  counted = lambda *args, **kwargs: calls.append(kwargs) or original(*args, **kwargs)
  monkeypatch.setitem(
    accounting.calibrate_noise_multiplier.__globals__, "epsilon_of", counted
  )
  make = functools.partial(_run, sampling_prob=0.01, num_steps=4000)
  accounting.calibrate_noise_multiplier(make, epsilon=1.0, delta=1e-5)
  assert sum(call["accountant"] == "pld" for call in calls) <= 8
  assert len(calls) <= 20


def test_events_that_only_pld_knows_are_calibrated_too():
  make = lambda b: accounting.poisson_sampled_event(
    dpa.LaplaceDpEvent(b), sampling_prob=0.1
  )
  b = accounting.calibrate_noise_multiplier(make, epsilon=0.5, delta=1e-6)
  exact = 1 / math.log1p(math.expm1(0.5) / 0.1)  # log(1 + q (e^(1/b) - 1)) = 0.5
  assert exact * (1 - 1e-3) <= b <= exact * 1.02


@pytest.mark.long
def test_fixed_size_batches_are_calibrated_under_replace_one():
  make = lambda z: compose(
    accounting.fixed_size_event(
      accounting.gaussian_event(z), num_examples=1000, batch_size=10
    ),
    100,
  )
  target = {"delta": 1e-5, "neighboring_relation": "replace_one", "accountant": "rdp"}
  z = accounting.calibrate_noise_multiplier(make, epsilon=1.0, **target)
  assert 0.999 <= epsilon(make(z), **target) <= 1.0


def test_a_generous_target_needs_next_to_no_noise():
  z = accounting.calibrate_noise_multiplier(dpa.GaussianDpEvent, epsilon=1e5, delta=1e-5)
  assert z == 0.01
  q = accounting.calibrate_sampling_prob(lambda q: _run(5.0, q, 1), epsilon=5.0, delta=1e-5)
  assert q == 1.0


@pytest.mark.cases(long=["pld"])
@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
def test_what_cannot_be_reached_is_said_in_one_line(accountant):
  target = {"delta": 1e-9, "accountant": accountant}
  with refuses("epsilon"):
    accounting.calibrate_noise_multiplier(
      lambda z: compose(accounting.gaussian_event(z), 10_000), epsilon=1e-9, **target
    )
  with refuses("epsilon"):
    accounting.calibrate_noise_multiplier(
      lambda z: dpa.NonPrivateDpEvent(), epsilon=1.0, **target
    )
  with refuses("epsilon"):
    accounting.calibrate_num_steps(dpa.GaussianDpEvent(1.0), epsilon=0.1, **target)
  with refuses("epsilon"):
    accounting.calibrate_sampling_prob(
      lambda q: dpa.GaussianDpEvent(1.0), epsilon=0.1, **target
    )
  with refuses("epsilon"):
    accounting.calibrate_num_steps(dpa.NoOpDpEvent(), epsilon=0.1, **target)


@pytest.mark.parametrize(
  "bad", [{"epsilon": 0.0}, {"epsilon": math.inf}, {"delta": 0.0}, {"tol": 0.0}]
)
def test_bad_targets_are_user_errors(bad):
  ((field, value),) = bad.items()
  with refuses(field, value=value):
    accounting.calibrate_noise_multiplier(
      dpa.GaussianDpEvent, **{"epsilon": 1.0, "delta": 1e-5, **bad}
    )


@pytest.mark.cases(long=["rdp"])
@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
def test_p13_a_mismatch_is_named_and_not_searched_around(accountant):
  with refuses("event"):
    accounting.calibrate_noise_multiplier(
      lambda z: _run(z, 0.1, 3),
      epsilon=1.0,
      delta=1e-5,
      neighboring_relation="replace_one",
      accountant=accountant,
    )


_WITHOUT_A_GRID = {
  "discrete_gaussian": lambda z: DiscreteGaussianDpEvent(z),
  "skellam": lambda z: SkellamDpEvent(z * z * 900, 30.0, 120.0),
  "smooth_sensitivity": lambda z: SmoothSensitivityDpEvent(1e-3, z, "add_or_remove_one"),
}


@pytest.mark.parametrize("name", _WITHOUT_A_GRID)
def test_noise_is_found_for_events_that_have_no_privacy_loss_distribution(name):
  relation = "replace_special" if name == "skellam" else "add_or_remove_one"
  how = {"delta": 1e-5, "accountant": "rdp", "neighboring_relation": relation}
  make = lambda z: compose(_WITHOUT_A_GRID[name](z), 3)
  z = accounting.calibrate_noise_multiplier(make, epsilon=2.0, **how)
  assert 1.99 < epsilon(make(z), **how) <= 2.0


def test_only_these_kinds_have_none():
  # Accountants compose what is inside these, or what stands in their place.
  taken_apart = {
    "no_op",
    "non_private",
    "self_composed",
    "composed",
    "k_out_of_t",
    "stated",
    "claimed",
  }
  without = {
    name
    for name, kind in every_kind().items()
    if type(kind).pld.__qualname__.startswith("EventKind")
  }
  assert without - taken_apart == {*_WITHOUT_A_GRID, "repeat_and_select"}
