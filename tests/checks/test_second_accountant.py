"""Epsilons of plans, derived a second time by other code."""

import dataclasses

import pytest

from dpjax import FixedSizeSampler, Plan
from tests import plans
from tests.checks import second_accountant


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_poisson_batches_are_derived_a_second_time(accountant):
  plan = plans.of(200, prob=0.05, normalize_by=50.0, num_steps=40, accountant=accountant)
  assert second_accountant.agrees(plan)
  louder = dataclasses.replace(plan, noise_multiplier=1.1)
  assert not second_accountant.agrees(_Named(louder, plan.epsilon()))


@dataclasses.dataclass
class _Named:
  """A plan that states an epsilon which is not its own."""

  plan: Plan
  stated: float

  def epsilon(self):
    return self.stated

  def __getattr__(self, name):
    return getattr(self.plan, name)


_FIXED = [
  # (num_examples, batch_size, noise multiplier, steps): epsilon from .05 to 10
  (60_000, 250, 4.0, 1000),
  (60_000, 600, 2.0, 1000),
  (60_000, 60, 8.0, 500),
  (500, 100, 3.0, 50),
]


@pytest.mark.cases(
  slow=[
    *("setting0-pld-replace_one", "setting0-rdp-replace_one", "setting1-pld-replace_one"),
    *("setting1-rdp-replace_one", "setting1-pld-add_or_remove_one"),
    *("setting2-rdp-replace_one", "setting2-pld-replace_one"),
    *("setting1-rdp-add_or_remove_one", "setting0-pld-add_or_remove_one"),
  ]
)
@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("setting", _FIXED)
def test_fixed_size_batches_are_derived_a_second_time(relation, accountant, setting):
  num_examples, batch_size, noise_multiplier, num_steps = setting
  plan = plans.of(
    sampler=FixedSizeSampler(
      num_examples=num_examples,
      batch_size=batch_size,
      size_is_public=relation == "replace_one",
    ),
    noise_multiplier=noise_multiplier,
    normalize_by=float(batch_size),
    num_steps=num_steps,
    neighboring_relation=relation,
    accountant=accountant,
  )
  assert second_accountant.agrees(plan)
  # Less noise is another epsilon, and no tolerance hides it.
  derived = second_accountant.derived_epsilon(plan)
  assert derived is not None
  quieter = dataclasses.replace(plan, noise_multiplier=noise_multiplier / 2)
  assert quieter.epsilon() > derived * 1.05
