"""An event that is true under one relation is accounted under no other."""

import json
import math

import dp_accounting as dpa
import numpy as np
import pytest

from dpjax import accounting, mechanisms
from dpjax.accounting.epsilon import zcdp
from dpjax.accounting.event_kinds import kind
from dpjax.accounting.event_kinds.random_allocation import random_allocation_event
from dpjax.accounting.event_kinds.repeat_and_select import repeat_and_select_event
from dpjax.mechanisms import stated
from tests.refuses import refuses

_ADD, _REPLACE = "add_or_remove_one", "replace_one"


def _epsilon(event, relation=_ADD, **more):
  return accounting.epsilon(event, delta=1e-9, neighboring_relation=relation, **more)


def test_a_sensitivity_of_replaced_records_says_nothing_of_one_that_leaves():
  """Accounted as if it did, a mean that costs 1 was said to cost half of that, and a response that
  does not hide who responds to cost 1."""
  mean = mechanisms.BoundedMean(epsilon=1.0, lower=0.0, upper=1.0)
  response = mechanisms.RandomizedResponse(1.0)
  for event in (mean.event(_REPLACE), response.event(_REPLACE)):
    with refuses("event"):
      _epsilon(event)
    assert _epsilon(event, _REPLACE) == pytest.approx(1.0)


def test_a_pure_epsilon_doubles_for_a_replaced_record():
  """The event of a record that leaves was accounted at 1 for one that is replaced, of which this
  choice tells 2."""
  choice = mechanisms.Exponential(epsilon=1.0, monotonic=True)
  before, after = (choice.probs(np.array(scores)) for scores in ([0, 50.0], [1, 49.0]))
  assert math.log(after[0] / before[0]) == pytest.approx(2.0)
  with refuses("event"):
    _epsilon(choice.event(), _REPLACE)
  ledger = mechanisms.BudgetLedger(epsilon=9.0, neighboring_relation=_REPLACE)
  for event, epsilon in ((choice.event(), None), (choice.event(_REPLACE), 2.0)):
    spent = ledger.spend("choice", epsilon=2.0, event=event).event()
    if epsilon is None:
      with refuses("event"):
        _epsilon(spent, _REPLACE)
    else:
      assert _epsilon(spent, _REPLACE) == pytest.approx(epsilon)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_it_costs_what_its_inner_event_costs(accountant):
  inner = accounting.gaussian_event(6.0)
  event = accounting.compose(stated.gaussian_event(3.0, _REPLACE, _REPLACE), 4)
  plain = accounting.compose(inner, 4)
  by = {"relation": _REPLACE, "accountant": accountant}
  assert _epsilon(event, **by) == _epsilon(plain, **by)
  rho = [zcdp(each, neighboring_relation=_REPLACE) for each in (event, plain)]
  assert rho[0] == rho[1]
  # A replacement in two steps is proved beside Gaussian noise, this one too.
  allocated = random_allocation_event(inner, num_steps=9)
  both = [dpa.ComposedDpEvent([allocated, each]) for each in (event, plain)]
  assert _epsilon(both[0], **by) == _epsilon(both[1], **by)


def test_it_survives_json_and_hides_no_missing_noise():
  event = stated.only_under(_REPLACE, dpa.ComposedDpEvent([dpa.GaussianDpEvent(2.0)]))
  there = json.loads(json.dumps(kind.event_to_json(event)))
  assert kind.event_from_json(there) == event
  bare = stated.only_under(_REPLACE, dpa.NonPrivateDpEvent())
  assert _epsilon(bare, _REPLACE) == math.inf
  with refuses("neighboring_relation"):
    _epsilon(stated.only_under("none", dpa.GaussianDpEvent(2.0)))


def _stated_twice(event):
  return stated.only_under(_REPLACE, stated.only_under(_REPLACE, event))


def test_a_relation_that_is_stated_twice_hides_no_second_half():
  """A replacement that is accounted in two was said to cost 0.62, half of what it does."""
  allocated = random_allocation_event(accounting.gaussian_event(1.0), num_steps=9)
  for accountant in ("pld", "rdp"):
    by = {"relation": _REPLACE, "accountant": accountant}
    assert _epsilon(_stated_twice(allocated), **by) == _epsilon(allocated, **by)
  with refuses("event"):
    _epsilon(
      _stated_twice(dpa.ComposedDpEvent([allocated, dpa.LaplaceDpEvent(1.0)])), _REPLACE
    )
  with refuses("event"):
    _epsilon(stated.only_under(_REPLACE, stated.only_under(_ADD, allocated)), _REPLACE)


def test_the_best_of_several_runs_has_no_more_proofs_once_it_is_stated():
  """Its runs were not asked for theirs: a Poisson sample was accounted for a replaced record."""
  noise = accounting.gaussian_event(1.0)
  sampled = accounting.poisson_sampled_event(noise, sampling_prob=0.1)
  allocated = random_allocation_event(noise, num_steps=9)
  for run in (sampled, allocated):
    best = repeat_and_select_event(run, mean_trials=2.0)
    inner = repeat_and_select_event(stated.only_under(_REPLACE, run), mean_trials=2.0)
    for event in (best, inner, stated.only_under(_REPLACE, best), _stated_twice(inner)):
      with refuses("event"):
        _epsilon(event, _REPLACE, accountant="rdp")
  plain = repeat_and_select_event(noise, mean_trials=2.0)
  by = {"relation": _REPLACE, "accountant": "rdp"}
  assert _epsilon(_stated_twice(plain), **by) == _epsilon(plain, **by)
