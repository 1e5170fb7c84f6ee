"""Final models alone: worst-case initial parameters, through the public pipeline."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest

from dpjax import auditing, losses, models
from dpjax.auditing import final_model
from dpjax.auditing.lower_bounds import METHODS, gdp_lower_bound
from dpjax.data import from_arrays
from dpjax.experiments.checks import many_models
from dpjax.mechanisms.additive import analytic_noise_multiplier
from dpjax.plan import Plan
from dpjax.sampling import FixedSizeSampler, PoissonSampler
from dpjax.types import Example
from dpjax.zoo import networks
from dpjax.zoo.datasets.registry import load
from tests import commands, hlo
from tests.refuses import refuses

RECORDS, DELTA = 60, 1e-5


@pytest.fixture(scope="module")
def audited():
  """(plan at epsilon 4) -> scores of final models on a few digits."""
  train, _ = load("digits")
  records, own = (
    train.subset(slice(0, RECORDS - 1)).declared(RECORDS),
    train.subset(slice(200, 500)),
  )
  model = networks.build("linear", num_classes=10)
  loss_fn = losses.softmax_cross_entropy(model.apply)
  zeros = model.init(jax.random.key(0), train.x[:1])
  params = final_model.fitted_params(loss_fn, zeros, own, num_steps=60, learning_rate=0.03)
  target = final_model.blank_target(model.apply, params, train)

  def scores(plan, num_models=60):
    return auditing.final_model_scores(
      loss_fn, plan, optax.sgd(4.0), params=params, records=records, target=target,
      num_models=num_models, seed=0,
    )  # fmt: skip

  scores.gain = lambda: float(jax.vmap(loss_fn, (None, 0))(params, own[:50]).mean())
  scores.before = lambda: float(jax.vmap(loss_fn, (None, 0))(zeros, own[:50]).mean())
  scores.target = lambda: float(jax.vmap(loss_fn, (None, 0))(params, target)[0])
  return scores


def _plan(**changes):
  numbers = dict(
    epsilon=4.0, delta=DELTA, sampler=PoissonSampler(sampling_prob=1.0, capacity=RECORDS + 16),
    num_steps=5, l2_clip_norm=1.0, normalize_by=RECORDS,
  )  # fmt: skip
  return Plan.calibrated(**(numbers | changes))


@pytest.mark.long
def test_worst_case_parameters_fit_the_records_and_not_the_target(audited):
  assert audited.gain() < 0.2 * audited.before()
  assert audited.target() > 2.0  # the blank with the least likely label


@pytest.mark.long
def test_a_sound_training_is_told_apart_and_not_refuted(audited):
  plan = _plan()
  found = audited(plan)
  assert found.inside.shape == found.outside.shape == (60,)
  assert len({*found.inside, *found.outside}) == 120  # each has noise of its own
  gap = (found.inside.mean() - found.outside.mean()) / found.outside.std()
  mu = 1 / analytic_noise_multiplier(plan.epsilon(), DELTA)
  assert 0.5 * mu < gap < 1.5 * mu  # of the mu of all steps, the final model keeps most
  for name in many_models._SHOWN:
    assert METHODS[name](found, delta=DELTA) <= plan.epsilon()


@pytest.mark.long
def test_a_step_in_slices_is_one_step_not_many(audited):
  """The target would else be in every slice, and the noise added once for all of them."""
  plan = _plan()
  whole, sliced = (audited(p, 4) for p in (plan, dataclasses.replace(plan, slices=2)))
  np.testing.assert_array_equal(whole.inside, sliced.inside)
  np.testing.assert_array_equal(whole.outside, sliced.outside)


@pytest.mark.long
def test_convolutions_of_the_trainings_are_in_the_fast_form():
  """Steps are a compiled loop, in which XLA takes fifty times as long for the other form."""
  net = models.Cnn(num_classes=3, features=(2, 3), kernel_sizes=(3, 2), strides=(2, 1))
  x = np.ones((4, 8, 8, 1), np.float32)
  target = Example(np.zeros((1, 8, 8, 1)), np.zeros(1, int))
  params = net.init(jax.random.key(0), x[:1])
  loss_fn = losses.softmax_cross_entropy(net.apply)
  plan = _plan(sampler=PoissonSampler(sampling_prob=1.0, capacity=8), normalize_by=4)
  records = from_arrays(x, np.zeros(4, int), num_classes=3)
  batch = next(iter(plan.batches(records, rng=0)))
  finals = final_model._finals(loss_fn, plan, optax.sgd(1.0), params, target)
  keys = jax.random.split(jax.random.key(1), 3)
  compiled = finals.lower(keys, batch).compile()
  assert "dim_labels" in compiled.as_text()
  assert not hlo.slow_convolutions(compiled)


@pytest.mark.long
def test_too_little_noise_is_refuted_by_the_final_model(audited):
  plan = _plan()
  found = audited(dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier / 4))
  assert gdp_lower_bound(found, delta=DELTA) > plan.epsilon()


@pytest.mark.slow
def test_what_it_cannot_audit_is_one_line(audited):
  for plan, words in (
    (_plan(sampler=PoissonSampler(sampling_prob=0.5, capacity=RECORDS)), "plan"),
    (
      _plan(
        sampler=PoissonSampler(sampling_prob=1.0, capacity=RECORDS + 16),
        neighboring_relation="replace_special",
      ),
      "plan",
    ),
    (_plan(sampler=FixedSizeSampler(RECORDS, RECORDS)), "plan"),
  ):
    with refuses(words) as caught:
      audited(plan)
    assert "\n" not in str(caught.value)
  for field, value in {"initial": "worst", "num_models": 1, "epsilon": 0.0}.items():
    with refuses(field, value=value):
      many_models.FinalModels(**{field: value})
  many = many_models.FinalModels(data="digits", num_records=5000)
  with refuses("num_records", value=5000):
    many_models.run(many, "unused")


def test_a_result_of_other_settings_is_kept_and_a_folder_that_cannot_be_is_named(tmp_path):
  """Before two thousand models are trained, not after."""
  asked = many_models.FinalModels(data="digits", num_models=3)
  (tmp_path / many_models.RESULT).write_text('{"data": "mnist"}')
  with refuses("out"):
    many_models.run(asked, tmp_path)
  with refuses("out"):
    many_models.run(asked, tmp_path / many_models.RESULT / "below")


@pytest.mark.slow
def test_the_command_writes_what_it_says(tmp_path):
  done = commands.run(
    "launch.audit", "--final_model=digits", "--models=4", f"--out={tmp_path}"
  )
  assert done.returncode == 0, done.stderr
  found = json.loads((tmp_path / many_models.RESULT).read_text())
  assert found["num_models"] == 4 and found["bounds"]["gdp"] <= found["epsilon_claimed"]
  assert done.stdout.startswith("not refuted (so few models CANNOT refute it): digits, ")
  assert found["can_refute"] is False
  both = commands.run("launch.audit", "--final_model=digits", "--all")
  assert both.returncode == 2 and len(both.stderr.strip().splitlines()) == 1
  alone = commands.run("launch.audit", "--all", "--models=4")
  assert alone.returncode == 2 and "needs --final_model" in alone.stderr
