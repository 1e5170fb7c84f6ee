"""`launch.account` charges the event of the plan that training, or a federation, builds."""

import dataclasses

import numpy as np
import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

import dpjax
from dpjax import accounting, solve
from dpjax.accounting.event_kinds.elements import parts
from dpjax.experiments.kinds.central.config import DpFtrl, DpSgd, TrainConfig
from dpjax.experiments.kinds.central.privacy import make_plan
from dpjax.experiments.kinds.federated import privacy as federate_privacy
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.sampling.registry import whole_batch_size
from launch import account

_FLAGS = {"fixed_size": "rdp", "truncated_poisson": "pld", "poisson": "rdp"}
_FLAGS["with_replacement"] = "pld"


def _asked(*args):
  values = flags.FlagValues()
  account.define_flags(values)
  values(["account", *args])
  (question,) = account.questions(values)
  return question


def _trained(sampler, prob, n, z, steps, **changes):
  relation = {"fixed_size": "replace_one", "truncated_poisson": "replace_special"}
  relation["with_replacement"] = "replace_one"
  privacy = DpSgd(
    sampling_prob=prob,
    noise_multiplier=z,
    epsilon=None,
    neighboring_relation=relation.get(sampler, "add_or_remove_one"),
    accountant=_FLAGS[sampler],
    sampler={"name": sampler, **changes},
  )
  return make_plan(TrainConfig(privacy=privacy, num_steps=steps), n)


@pytest.mark.slow
@settings(max_examples=60, derandomize=True)
@given(
  sampler=st.sampled_from(sorted(_FLAGS)),
  n=st.integers(1, 3000),
  thousandths=st.integers(1, 1000),
  z=st.sampled_from([0.7, 1.0, 3.5]),
  steps=st.integers(1, 40),
)
def test_equal_settings_are_equal_events(sampler, n, thousandths, z, steps):
  prob = thousandths / 1000
  capacity = max(1, round(prob * n))
  flag = [f"--capacity={capacity}"] if sampler == "truncated_poisson" else []
  changes = {"capacity": capacity} if flag else {}
  question = _asked(
    f"--sampler={sampler}", f"--sampling_prob={prob!r}", f"--num_examples={n}",
    f"--noise_multiplier={z}", f"--num_steps={steps}", *flag,
  )  # fmt: skip
  plan = _trained(sampler, prob, n, z, steps, **changes)
  assert solve.run_event(question) == plan.event()
  assert question.neighboring_relation == plan.neighboring_relation
  assert question.delta == plan.delta
  if sampler in (
    "fixed_size",
    "with_replacement",
  ):  # and what the table shows is what is drawn
    drawn = plan.sampler.draw(n, seed=0, step=0).size
    assert question.sampling_prob * n == pytest.approx(drawn)


@pytest.mark.cases(quick=[2], long=...)
@pytest.mark.parametrize(
  ("sampler", "more", "law"),
  [
    ("balls_in_bins", {}, "proved, unamplified"),
    ("min_sep", {"steps_apart": 20}, "proved, unamplified"),
    ("cyclic_poisson", {"steps_apart": 20}, "cyclic poisson"),
  ],
)
def test_samplers_that_bound_participation_pay_for_overflow_too(sampler, more, law):
  prob = 0.05 if sampler == "balls_in_bins" else 0.04
  privacy = DpFtrl(
    sampler={"name": sampler, **more},
    strategy="identity",
    sampling_prob=prob,
    noise_multiplier=1.0,
    epsilon=None,
    delta=1e-2,
  )
  plan = make_plan(TrainConfig(privacy=privacy, num_steps=20), 500)
  asked = "min_sep" if sampler == "cyclic_poisson" else sampler
  rows = dict(
    solve.bounded_rows(solve.Bounded(asked, 1.0, 20, prob, 20, 1e-2, num_samples=2000))
  )
  assert rows[f"{law} (launch.train, pld)"] == plan.epsilon() > rows[f"{law} (pld)"]


def test_random_allocation_in_training_pays_for_overflow_too():
  sampler = dpjax.RandomAllocationSampler(steps_per_pass=5, capacity=200)
  plan = dpjax.Plan(sampler, 2.0, 1.0, 100.0, num_steps=7, delta=1e-5)
  question = _asked(
    "--sampler=random_allocation", "--sampling_prob=0.2", "--noise_multiplier=2",
    "--num_steps=7",
  )  # fmt: skip
  assert solve.epsilon_in_training(question, "pld") == plan.epsilon()
  assert solve.epsilon_of(question, "pld") < plan.epsilon()


def test_k_out_of_t_in_training_is_what_account_says():
  privacy = DpSgd(
    sampling_prob=0.25,
    noise_multiplier=2.0,
    epsilon=None,
    accountant="rdp",
    sampler={"name": "k_out_of_t", "num_selected": 2},
  )
  plan = make_plan(TrainConfig(privacy=privacy, num_steps=9), 500)
  question = _asked(
    "--sampler=k_out_of_t", "--num_selected=2", "--sampling_prob=0.25", "--num_steps=9",
    "--noise_multiplier=2",
  )  # fmt: skip
  # The parts, since a plan composes step by step.
  assert parts(solve.run_event(question)) == parts(plan.event())
  assert solve.epsilon_in_training(question, "rdp") == plan.epsilon()


def test_the_row_of_training_is_what_training_prints():
  question = _asked(
    "--sampling_prob=0.02", "--num_examples=500", "--noise_multiplier=1", "--num_steps=30"
  )
  plan = _trained("poisson", 0.02, 500, 1.0, 30)
  assert solve.epsilon_in_training(question, "rdp") == pytest.approx(plan.epsilon())
  last = account.table([question]).splitlines()[-1].split()
  assert last[:2] == ["launch.train", "(pld)"]
  by_pld = dataclasses.replace(plan, accountant="pld").epsilon()
  assert by_pld <= float(last[-1]) <= by_pld + 2e-4


def test_a_batch_that_is_no_integer_was_charged_as_a_smaller_one():
  """1.5 of 100: rounded for the draw, and until now cut to 1 for the charge."""
  args = ("--num_examples=100", "--noise_multiplier=2", "--num_steps=50")
  asked = _asked("--sampler=fixed_size", "--sampling_prob=0.015", *args)
  one = accounting.fixed_size_event(
    accounting.gaussian_event(2.0), num_examples=100, batch_size=1
  )
  options = {"delta": 1e-5, "accountant": "rdp", "neighboring_relation": "replace_one"}
  too_little = accounting.epsilon(accounting.compose(one, 50), **options)
  assert solve.epsilon_of(asked, "rdp") > 1.2 * too_little
  assert whole_batch_size(0.015, 100) == 2


@settings(max_examples=25, derandomize=True)
@given(clients=st.integers(2, 400), share=st.floats(0.01, 1.0), fixed=st.booleans())
def test_a_federation_charges_what_account_says(clients, share, fixed):
  cohort = max(1, round(share * clients))
  name = "fixed_size" if fixed else "poisson"
  config = FedConfig(clients_per_round=cohort, num_rounds=7)
  privacy = dataclasses.replace(
    config.privacy, sampler=name, noise_multiplier=1.5, epsilon=None,
    accountant="rdp",
  )  # fmt: skip
  plan, reported = federate_privacy.make_plan(
    dataclasses.replace(config, privacy=privacy), clients
  )
  question = _asked(
    f"--sampler={name}", f"--num_examples={clients}", f"--batch_size={cohort}",
    "--noise_multiplier=1.5", "--num_steps=7",
  )  # fmt: skip
  assert plan is reported and solve.run_event(question) == plan.event()


@pytest.mark.filterwarnings("ignore:normalize_by=0.001")  # one of 10, at a rate of 1e-4
def test_batches_have_the_size_that_is_charged():
  for prob, n in ((0.015, 100), (0.5, 5), (1e-4, 10), (0.025, 100), (0.035, 100)):
    plan = _trained("fixed_size", prob, n, 4.0, 3)
    sizes = {int(b.mask.sum()) for b in plan.batches(np.arange(n), rng=0)}
    assert sizes == {plan.step_event().sample_size}
