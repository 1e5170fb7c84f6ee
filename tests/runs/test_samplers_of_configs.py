"""From the words of a config to samplers and plans, each with its proof or its refusal."""

import dataclasses
import math

import numpy as np
import pytest

from dpjax import accounting, sampling
from dpjax.accounting.event_kinds.elements import parts
from dpjax.experiments.config import fields
from dpjax.experiments.config.naming import naming
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import (
  CanaryAudit,
  DpSgd,
  Sgd,
  TrainConfig,
)
from dpjax.experiments.kinds.central.privacy import make_plan, sampler
from tests.refuses import refuses

_N = 1000


def _plan(num_steps=40, **privacy):
  given = {"sampling_prob": 0.05, "noise_multiplier": 4.0, "epsilon": None} | privacy
  config = TrainConfig(num_steps=num_steps, privacy=DpSgd(**given))
  build.Central(config).check()
  with naming(config):
    return make_plan(config, _N)


def test_p12_truncated_poisson_with_a_capacity_of_its_own_or_a_safe_one():
  plan = _plan(sampler="truncated_poisson", neighboring_relation="replace_special")
  deviation = math.sqrt(_N * 0.05 * 0.95)
  assert isinstance(plan.sampler, sampling.TruncatedPoissonSampler)
  assert 50 + 3 * deviation <= plan.sampler.capacity < 50 + 3 * deviation + 8
  small = _plan(
    sampler={"name": "truncated_poisson", "capacity": 50},
    neighboring_relation="replace_special",
  )
  assert small.sampler.padded_batch_size == 50 and small.epsilon() > 1.05 * plan.epsilon()
  assert small.accounted_delta(1e-5) == 1e-5  # nothing overflows, nothing is set aside
  poisson = _plan(neighboring_relation="replace_special")
  assert plan.epsilon() >= poisson.epsilon() * 0.98  # which pays overflow from delta
  with refuses("privacy.neighboring_relation"):
    _plan(sampler="truncated_poisson")


@pytest.mark.parametrize(
  ("relation", "sensitivity"), [("replace_one", 2.0), ("replace_special", 1.0)]
)
def test_p13_a_shuffled_run_pays_by_the_epoch(relation, sensitivity):
  """20 steps an epoch, 40 steps: two Gaussians; the 41st step begins a third."""
  plan = _plan(sampler="shuffled", neighboring_relation=relation)
  one = accounting.gaussian_event(4.0 / sensitivity)
  cost = lambda epochs: accounting.epsilon(accounting.compose(one, epochs), delta=1e-5)
  assert plan.epsilon() == pytest.approx(cost(2), rel=1e-6)
  assert plan.epsilon(steps=1) == pytest.approx(cost(1), rel=1e-6)
  assert plan.epsilon(steps=20) == plan.epsilon(steps=1)
  longer = _plan(41, sampler="shuffled", neighboring_relation=relation)
  assert longer.epsilon() == pytest.approx(cost(3), rel=1e-6)


def test_p13_a_shuffled_run_is_calibrated_to_its_epochs():
  plan = _plan(
    sampler="shuffled",
    neighboring_relation="replace_special",
    noise_multiplier=None,
    epsilon=2.0,
  )
  assert 1.99 < plan.epsilon() <= 2.0
  epochs = accounting.compose(accounting.gaussian_event(plan.noise_multiplier), 2)
  assert accounting.epsilon(epochs, delta=1e-5) <= 2.0


def test_p13_without_a_relation_that_makes_the_size_public_nothing_is_proved():
  plan = _plan(sampler="shuffled")
  assert plan.epsilon() == math.inf and not plan.is_private
  config = TrainConfig(privacy=DpSgd(sampler="shuffled"))
  with refuses("sampler"):
    make_plan(config, _N)
  plain = dataclasses.replace(config, privacy=Sgd(sampler="shuffled"))
  assert not make_plan(plain, _N).is_private


def test_less_noise_later_in_an_epoch_that_was_paid_at_its_start_is_refused():
  with refuses("privacy.noise_levels"):
    _plan(
      sampler="shuffled", neighboring_relation="replace_special", noise_levels=[2.0, 1.0]
    )


def test_random_allocation_passes_through_the_data_as_its_probability_says():
  plan = _plan(sampler="random_allocation", sampling_prob=0.25)
  assert isinstance(plan.sampler, sampling.RandomAllocationSampler)
  assert plan.sampler.steps_per_pass == 4
  poisson = _plan(sampler="poisson", sampling_prob=0.25)
  assert plan.epsilon() < poisson.epsilon()


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"sampling_prob": 0.3}, "privacy.sampling_prob"),
    ({"noise_levels": [1.0, 2.0]}, "privacy.noise_levels"),
  ],
)
def test_random_allocation_refuses_half_steps_and_changing_noise(changes, field):
  with refuses(field):
    _plan(sampler="random_allocation", **changes)


@pytest.mark.parametrize("steps", [40, 50])
def test_k_out_of_t_is_random_allocation_of_k_shorter_passes(steps):
  plan = _plan(steps, sampler={"name": "k_out_of_t", "num_selected": 2}, sampling_prob=0.05)
  assert plan.sampler == sampling.KOutOfTSampler(40, 2, plan.sampler.capacity)
  once = _plan(20, sampler="random_allocation", sampling_prob=0.05)
  passes = math.ceil(steps / 40)
  both = accounting.compose(once.event(), 2 * passes)
  left = plan.accounted_delta(plan.delta)
  assert plan.epsilon() == accounting.epsilon(both, delta=left)
  assert plan.epsilon() < _plan(40 * passes).epsilon()


def test_one_step_of_a_pass_is_random_allocation_bit_by_bit():
  one = _plan(sampler={"name": "k_out_of_t", "num_selected": 1}, sampling_prob=0.25)
  other = _plan(sampler="random_allocation", sampling_prob=0.25)
  assert one.event() == other.event() and one.sampler.capacity == other.sampler.capacity
  assert one.epsilon() == other.epsilon()
  for step in (0, 5, 39):
    drawn = [plan.sampler.draw(_N, seed=3, step=step) for plan in (one, other)]
    np.testing.assert_array_equal(*drawn)


@pytest.mark.parametrize(
  "changes, field",
  [
    ({}, "privacy.sampler.num_selected"),
    ({"sampler.num_selected": 0}, "privacy.sampler.num_selected"),
    ({"sampler.num_selected": 2, "sampling_prob": 0.3}, "privacy.sampling_prob"),
    ({"sampler.num_selected": 2, "noise_levels": [1.0, 2.0]}, "privacy.noise_levels"),
    (
      {"sampler.num_selected": 2, "sampler": "poisson"},
      "config.privacy.sampler.num_selected",
    ),
    (
      {"sampler.num_selected": 2, "sampler": "builtins:dict"},
      "config.privacy.sampler.num_selected",
    ),
  ],
)
def test_what_k_out_of_t_cannot_be_is_one_line_before_data_are_read(changes, field):
  given = {f"privacy.{name}": value for name, value in changes.items()}
  with refuses(field) as caught:
    config = fields.replace_all(TrainConfig(), {"privacy.sampler": "k_out_of_t", **given})
    build.Central(config).check()
    make_plan(config, _N)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_batches_with_replacement_are_accounted_copy_by_copy(relation):
  plan = _plan(sampler="with_replacement", neighboring_relation=relation)
  noise = accounting.gaussian_event(4.0)
  step = accounting.with_replacement_event(noise, num_examples=_N, batch_size=50)
  assert parts(plan.event()) == {step: 40}
  assert plan.sampler.only_size == (_N if relation == "replace_one" else None)
  without = _plan(
    sampler="fixed_size", neighboring_relation=relation, accountant="pld"
  ).epsilon()
  assert 1.001 * without < plan.epsilon() < 1.2 * without
  # An audit may leave canaries out: the event is that of what is left.
  config = TrainConfig(
    num_steps=40,
    audit=CanaryAudit(num_canaries=100),
    privacy=DpSgd(neighboring_relation=relation, sampler="with_replacement"),
  )
  left = _N if relation == "replace_one" else _N - 100
  assert sampler(config, _N).num_examples == left


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"accountant": "rdp"}, "privacy.accountant"),
    ({"neighboring_relation": "replace_special"}, "privacy.neighboring_relation"),
    (
      {"sampler": {"name": "with_replacement", "capacity": 60}},
      "config.privacy.sampler.capacity",
    ),
    ({"sampling_prob": 1.0}, "batch_size"),
  ],
)
def test_what_is_not_proved_of_copies_is_one_line(changes, field):
  with refuses(field):
    _plan(**{"sampler": "with_replacement", **changes})


def test_half_a_step_of_a_pass_is_refused_before_any_data_are_read():
  """So also by a sweep, before its first run."""
  privacy = DpSgd(sampling_prob=0.3, sampler="random_allocation")
  with refuses("privacy.sampling_prob", value=0.3):
    build.Central(TrainConfig(privacy=privacy)).check()
