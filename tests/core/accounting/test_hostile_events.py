"""Events and ledgers by a hostile hand: they are refused, or cost at least what they should."""

import json
import math

import dp_accounting as dpa
import numpy as np
import pytest

from dpjax import accounting
from dpjax.accounting import Ledger
from dpjax.accounting.epsilon import delta_curve, privacy_profile
from tests.refuses import refuses

_FACTS = {
  "l2_clip_norm": 1.0,
  "neighboring_relation": "add_or_remove_one",
  "noise_key_id": "a",
}


class _Small(float):
  """A number that claims other quotients and powers than its value."""

  def __truediv__(self, other):
    return _Small(1e-9)

  def __rtruediv__(self, other):
    return _Small(1e-9)

  def __pow__(self, other):
    return _Small(1e9)


def test_narrow_counts_of_steps_do_not_wrap_round():
  noise = dpa.GaussianDpEvent(20.0)
  ledger = Ledger().charge(noise, num_steps=np.uint8(200), first_step=0, **_FACTS)
  ledger = ledger.charge(noise, num_steps=np.uint8(100), first_step=200, **_FACTS)
  assert ledger.num_steps == 300
  assert ledger == Ledger().charge(noise, num_steps=300, first_step=0, **_FACTS)


def test_a_charge_keeps_its_events_when_the_list_is_emptied():
  events = [dpa.GaussianDpEvent(np.float32(1.0))]
  ledger = Ledger().charge(dpa.ComposedDpEvent(events), first_step=0, **_FACTS)
  before = ledger.epsilon(1e-5)
  events.clear()
  assert ledger.epsilon(1e-5) == before > 4
  assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_number_with_its_own_arithmetic_costs_what_its_value_costs(accountant):
  for hostile, plain in (
    (dpa.GaussianDpEvent(_Small(0.5)), dpa.GaussianDpEvent(0.5)),
    (
      dpa.PoissonSampledDpEvent(_Small(0.5), dpa.GaussianDpEvent(_Small(0.5))),
      dpa.PoissonSampledDpEvent(0.5, dpa.GaussianDpEvent(0.5)),
    ),
  ):
    costs = [
      accounting.epsilon(e, delta=1e-5, accountant=accountant) for e in (hostile, plain)
    ]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("make", [iter, lambda events: dict.fromkeys(events, 3)])
def test_events_that_are_no_list_are_refused(make):
  event = dpa.ComposedDpEvent(make([dpa.GaussianDpEvent(1.0)]))
  with refuses("events"):
    accounting.epsilon(event, delta=1e-5)
  with refuses("events"):
    Ledger().charge(event, first_step=0, **_FACTS)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_response_almost_without_noise_is_not_free(accountant):
  event = dpa.RandomizedResponseDpEvent(1e-308, 10**18)
  assert accounting.epsilon(event, delta=1e-5, accountant=accountant) == math.inf
  with refuses("num_buckets", value=10**300):
    accounting.epsilon(
      dpa.RandomizedResponseDpEvent(1e-308, 10**300), delta=1e-5, accountant=accountant
    )


@pytest.mark.parametrize(
  "data",
  [
    {"version": 2},
    {"version": 2, "chargs": []},
    {"version": 2, "charges": {}},
    {"version": 2, "charges": ""},
    {"version": 2, "charges": None},
    {"version": 2, "charges": [], "more": 1},
  ],
)
def test_a_ledger_without_its_charges_is_refused(data):
  with refuses("ledger", value=data):
    Ledger.from_json(data)


def test_a_profile_is_no_nan_where_the_power_of_epsilon_overflows():
  epsilons = [0.0, 709.0, 710.0, 1000.0, 5000.0, 1e6]
  for event in (
    dpa.GaussianDpEvent(1e-3),
    dpa.PoissonSampledDpEvent(0.1, dpa.LaplaceDpEvent(1e-3)),
  ):
    deltas = privacy_profile(event)(epsilons)
    exact = delta_curve(event, epsilons)
    assert np.all((deltas >= exact * (1 - 1e-12)) & (deltas <= 1))
