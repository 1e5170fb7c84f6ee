"""A sampler is added by one file that holds all there is to know of it.

Here it is a module of its own. Plan, ledger, games, configs and `launch.list` take it as it is.
"""

import sys
import types

import dp_accounting
import pytest

import dpjax
from dpjax import accounting
from dpjax.accounting import Ledger, proved
from dpjax.accounting.event_kinds.elements import mechanism_of, parts
from dpjax.auditing.games import registry, samplers
from dpjax.auditing.games.game import play
from dpjax.sampling import registry as registry_of_samplers
from dpjax.sampling.registry import SCHEMES, Scheme, Sizing
from dpjax.sampling.samplers import assumption
from dpjax.validate import UserError
from tests.refuses import refuses

_FILE = '''
import dataclasses
from typing import Any, ClassVar

import numpy as np

from dpjax.sampling import draws, samplers


@dataclasses.dataclass(frozen=True)
class HalvesSampler(samplers.Sampler):
  """A coin decides which half of the examples takes part."""

  name: ClassVar[str] = "halves"
  relations: ClassVar[Any] = ("replace_special", "replace_one")
  small: ClassVar[Any] = ({"num_examples": 4},)

  num_examples: int

  @property
  def padded_batch_size(self):
    return self.num_examples // 2

  @property
  def only_size(self):
    return self.num_examples

  def event(self, inner):
    return inner

  def draw(self, num_examples, *, seed, step):
    second = draws.generator(seed, step).random() < 0.5
    return np.arange(self.padded_batch_size) + second * self.padded_batch_size

'''


@pytest.fixture
def halves(monkeypatch):
  module = types.ModuleType("dpjax.sampling.halves")
  monkeypatch.setitem(sys.modules, module.__name__, module)
  exec(_FILE, vars(module))
  return module.HalvesSampler


def _plan(sampler, **changes):
  numbers = dict(noise_multiplier=2.0, l2_clip_norm=1.0, normalize_by=4, num_steps=3)
  return dpjax.Plan(**{**numbers, "sampler": sampler, "delta": 1e-5, **changes})


def test_plan_and_ledger_take_it_as_it_is(halves):
  plan = _plan(halves(8))
  assert (plan.neighboring_relation, plan.accountant) == ("replace_special", "pld")
  three = accounting.compose(accounting.gaussian_event(2.0), 3)
  assert plan.epsilon() == accounting.epsilon(three, delta=1e-5)
  rows = list(plan.batches(dpjax.data.load("digits")[0].subset(slice(0, 8)), rng=1))
  assert [batch.mask.sum() for batch in rows] == [4, 4, 4]
  assert "Unit: one example" in plan.statement(8)
  with refuses("neighboring_relation"):
    _plan(halves(8), neighboring_relation="add_or_remove_one")
  ledger = Ledger().charge(
    plan.step_event(),
    num_steps=3,
    l2_clip_norm=1.0,
    neighboring_relation=plan.neighboring_relation,
    noise_key_id="a",
    first_step=0,
  )
  assert ledger.epsilon(1e-5) == plan.epsilon()


def test_every_row_is_a_public_name():
  for name, row in SCHEMES.items():
    kind = row.kind
    assert kind.name == name
    assert getattr(dpjax.sampling, kind.__name__, None) is kind, (
      f"dpjax/sampling/__init__.py must import {kind.__name__}"
    )


@pytest.mark.long
def test_its_games_are_found_and_played(halves):
  assert registry.is_sampler(halves)
  found = samplers.games(halves)
  assert {game.relation for game in found} == {"replace_special", "replace_one"}
  results = [one for game in found for one in play(game, num_draws=400, seed=3)]
  assert results and not any(one.refuted for one in results)


def test_it_says_how_the_numbers_of_a_run_size_it(halves, monkeypatch):
  size = Sizing(0.5, num_examples=9)
  with refuses("sampler"):
    halves.sized(size)
  rule = classmethod(lambda kind, size: kind(size.num_examples // 2 * 2))
  monkeypatch.setattr(halves, "sized", rule)
  assert halves.sized(size) == halves(8)
  monkeypatch.setitem(SCHEMES, halves.name, Scheme(halves, ("examples",)))
  assert halves.name in registry_of_samplers.used_for("examples")
  own = type("Own", (halves,), {})  # a subclass is sized like its base
  assert type(own.sized(size)) is own


def test_without_relations_nothing_is_proved(halves, monkeypatch):
  monkeypatch.delattr(halves, "relations")
  with pytest.raises(UserError) as caught:
    _plan(halves(8))
  assert caught.value.field == "sampler"
  monkeypatch.setattr(halves, "event", dpjax.sampling.Sampler.event)
  assert not _plan(halves(8)).is_private


def test_relations_that_are_set_on_an_object_are_the_word_of_who_set_them():
  sampler = dpjax.ShuffledSampler(2, 4)
  assert not assumption(sampler)
  vars(sampler)["relations"] = proved.RELATIONS
  assert assumption(sampler)
  without = dpjax.ShuffledSampler(2)
  assert without.proved_under == () and not assumption(without)


@pytest.mark.parametrize("base", [dpjax.PoissonSampler, dpjax.RandomAllocationSampler])
def test_a_sampler_with_costs_of_its_own_steps_is_asked_for_each(base):
  """Free in even steps, and charged in odd ones: step 0 does not stand for all."""

  class Odd(base):
    def event_at(self, step, inner):
      return dp_accounting.NoOpDpEvent() if step % 2 == 0 else inner

  fields = (
    {"steps_per_pass": 4}
    if base is dpjax.RandomAllocationSampler
    else {"sampling_prob": 0.5}
  )
  plan = _plan(Odd(capacity=40, **fields), num_steps=4)
  assert not plan.steps_alike
  assert dict(parts(plan.event())) == {plan.step_event(1): 2}
  assert mechanism_of(plan.step_event(1)) == accounting.gaussian_event(2.0)
  assert plan.epsilon() > 1


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_a_pass_of_no_whole_number_of_steps_is_refused(steps):
  class Passes(dpjax.PoissonSampler):
    steps_per_event = steps

  with refuses("steps_per_event", value=steps):
    _plan(Passes(sampling_prob=0.5, capacity=40))
