"""Every sampler x accountant x relation: an epsilon, or one line that names the way out."""

import itertools
import math

import pytest

from dpjax import accounting, sampling
from dpjax.accounting.proved import ACCOUNTANTS, RELATIONS
from dpjax.validate import UserError
from tests import plans

_SAMPLERS = {
  "poisson": sampling.PoissonSampler(sampling_prob=0.05, capacity=2000),
  "truncated": sampling.TruncatedPoissonSampler(
    sampling_prob=0.05, capacity=70, num_examples=1000
  ),
  "fixed_size": sampling.FixedSizeSampler(batch_size=50, num_examples=1000),
  "fixed, joining": sampling.FixedSizeSampler(50, num_examples=1000, size_is_public=False),
  "shuffled": sampling.ShuffledSampler(batch_size=50, num_examples=1000),
}
_NO_EVENT = sampling.ShuffledSampler(batch_size=50)
_ADD, _REPLACE, _ZERO = "add_or_remove_one", "replace_one", "replace_special"
_BOTH = ("pld", "rdp")
# What is proved, written down a second time: relation -> accountants.
_PROVED = {
  "poisson": {_ADD: _BOTH, _ZERO: _BOTH},
  "truncated": {_ZERO: ("pld",)},
  "fixed_size": {_REPLACE: _BOTH},
  "fixed, joining": {_ADD: _BOTH},
  "shuffled": {_REPLACE: _BOTH, _ZERO: _BOTH},
}
_WAYS_OUT = ("use accountant=", "is accounted under", "is proved only under", "dpjax.")
_CASES = list(itertools.product(_SAMPLERS, (*ACCOUNTANTS, "gdp"), RELATIONS))


def _plan(sampler, relation, accountant):
  return plans.of(
    sampler=sampler,
    noise_multiplier=2.0,
    normalize_by=50,
    num_steps=20,
    neighboring_relation=relation,
    accountant=accountant,
  )


def _one_line(error):
  text = str(error.value)
  assert "\n" not in text and any(way in text for way in _WAYS_OUT), text


@pytest.mark.cases(long=[20, 31])
@pytest.mark.parametrize(("name", "accountant", "relation"), _CASES)
def test_p13_p14_a_plan_has_an_epsilon_exactly_where_there_is_a_proof(
  name, accountant, relation
):
  if accountant in _PROVED[name].get(relation, ()):
    epsilon = _plan(_SAMPLERS[name], relation, accountant).epsilon()
    assert 0 < epsilon < math.inf
    return
  with pytest.raises(UserError) as error:
    _plan(_SAMPLERS[name], relation, accountant).epsilon()
  _one_line(error)


@pytest.mark.parametrize(("name", "accountant", "relation"), _CASES)
def test_p13_p14_an_event_alone_is_refused_too(name, accountant, relation):
  """Past the plan, straight to the accountant: the sampled events carry their sampler. (A
  shuffled epoch is one Gaussian, which knows nothing of a sampler: the plan refuses.)"""
  event = _SAMPLERS[name].event(accounting.gaussian_event(2.0))
  options = {"neighboring_relation": relation, "accountant": accountant}
  # The event of a fixed size is proved under both of its samplers' relations.
  both = {_REPLACE: _BOTH, _ADD: _BOTH}
  rows = both if name.startswith("fixed") else _PROVED[name]
  proved = rows.get(relation, ())
  if accountant in proved or (name == "shuffled" and accountant != "gdp"):
    assert accounting.epsilon(event, delta=1e-5, **options) > 0
    return
  with pytest.raises(UserError) as error:
    accounting.epsilon(event, delta=1e-5, **options)
  _one_line(error)


@pytest.mark.parametrize(("accountant", "relation"), [c[1:] for c in _CASES[:9]])
def test_p13_no_public_size_no_event_no_epsilon(accountant, relation):
  if accountant == "gdp":
    return
  plan = _plan(_NO_EVENT, relation, accountant)
  assert plan.epsilon() == math.inf and not plan.is_private


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", _SAMPLERS)
def test_every_epsilon_is_at_least_that_of_poisson_sampling_at_the_same_rate(
  name, relation
):
  """No sampler here may be charged less than Poisson under the weaker relation."""
  for accountant in _PROVED[name].get(relation, ()):
    epsilon = _plan(_SAMPLERS[name], relation, accountant).epsilon()
    poisson = _plan(_SAMPLERS["poisson"], _ZERO, accountant)
    least = accounting.epsilon(poisson.event(), delta=1e-5, accountant=accountant)
    assert epsilon >= least * (1 - 1e-6)


def test_p42_only_public_sizes_are_fields():
  """A relation under which the size of the data is hidden never comes with a sampler that
  prints it."""
  for sampler in _SAMPLERS.values():
    if sampler.only_size is not None:
      assert _ADD not in sampler.proved_under
  assert not hasattr(_SAMPLERS["poisson"], "num_examples")
