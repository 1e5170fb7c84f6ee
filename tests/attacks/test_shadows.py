"""Shadow models: the public pipeline, one program for all, resumed, and never told the truth."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpjax
from dpjax import attacks, training
from dpjax.attacks import allowed, signals
from dpjax.attacks.roc import curve_of
from dpjax.types import Algorithm
from tests.refuses import refuses

_N = 48


def _records(seed=0):
  """Half of them easy, so that who is sure of a record need not have seen it."""
  rng = np.random.default_rng(seed)
  x, y = rng.standard_normal((_N, 30)), rng.integers(0, 2, _N)
  x[: _N // 2, 0] += 8 * (2 * y[: _N // 2] - 1)
  return dpjax.data.from_arrays(x, y, num_classes=2)


_MODEL = dpjax.models.Linear(num_classes=2)
_SIGNAL = signals.log_odds_of_model(_MODEL.apply)


def _plan(**changes):
  options = dict(
    sampler=dpjax.PoissonSampler(sampling_prob=0.5, capacity=_N),
    noise_multiplier=0.0,
    l2_clip_norm=10.0,
    normalize_by=12,
    num_steps=60,
    delta=1e-5,
  )
  return dpjax.Plan(**{**options, **changes})


def _options(plan, **changes):
  loss_fn = dpjax.losses.softmax_cross_entropy(_MODEL.apply)
  options = dict(
    algorithm=lambda key: training.dp_sgd(loss_fn, plan, optax.sgd(0.5), noise_key=key),
    batches=plan.batches,
    init_params=lambda key: _MODEL.init(key, jnp.zeros((1, 30))),
    signal=_SIGNAL,
    seed=0,
  )
  return {**options, **changes}


def _train(included, plan=None, **changes):
  return attacks.train_shadows(_records(), included, **_options(plan or _plan(), **changes))


@functools.cache
def _scores():
  halves = attacks.random_halves(9, _N, seed=0)
  return _train(halves), halves


@pytest.mark.long
def test_an_overfitted_model_is_attacked_and_its_shadows_make_the_attack_better():
  scores, halves = _scores()
  found = {"loss": [], "lira_fixed": [], "rmia": []}
  for evidence, members in attacks.each_as_target(scores, halves):
    for name in found:
      value = attacks.MEMBERSHIP_ATTACKS[name](evidence)
      found[name].append(curve_of(value, members).auc)
  mean = {name: np.mean(values) for name, values in found.items()}
  assert mean["loss"] > 0.55 and mean["lira_fixed"] > mean["loss"] + 0.04
  assert mean["rmia"] > mean["loss"] + 0.06


@pytest.mark.slow
def test_noise_takes_it_away_by_one_number():
  plan = _plan(noise_multiplier=20.0, num_steps=20)
  halves = attacks.random_halves(6, _N, seed=0)
  scores = _train(halves, plan)
  aucs = [
    curve_of(attacks.lira(evidence, fixed_variance=True), members).auc
    for evidence, members in attacks.each_as_target(scores, halves)
  ]
  assert abs(np.mean(aucs) - 0.5) < 0.12


@pytest.mark.long
@pytest.mark.parametrize(("noisy", "expected"), [(False, "above"), (True, "cannot tell")])
def test_noise_that_was_forgotten_is_above_the_line_that_it_promised(noisy, expected):
  """300 records of 3,000 random features with random labels: learnt by heart without noise."""
  rng = np.random.default_rng(0)
  x, y = rng.standard_normal((300, 3000)), rng.integers(0, 2, 300)
  records = dpjax.data.from_arrays(x, y, num_classes=2)
  promised = dpjax.Plan.calibrated(
    epsilon=0.5,
    delta=1e-5,
    sampler=dpjax.PoissonSampler(sampling_prob=0.5, capacity=300),
    num_steps=10,
    l2_clip_norm=1.0,
    normalize_by=75,
  )
  ran = promised if noisy else dataclasses.replace(promised, noise_multiplier=0.0)
  halves = attacks.random_halves(5, 300, seed=0)
  options = _options(ran, init_params=lambda key: _MODEL.init(key, jnp.zeros((1, 3000))))
  scores = attacks.train_shadows(records, halves, **options)
  evidence = attacks.Evidence(scores[-1], scores[:-1], halves[:-1])
  curve = curve_of(attacks.lira(evidence, fixed_variance=True), halves[-1])
  line = allowed.by_plan(promised)
  found = attacks.judge(curve, line, fprs=(0.01, 0.05))
  assert found.verdict == expected, found.words


@pytest.mark.long
def test_a_shadow_is_the_training_that_a_caller_would_write():
  """By hand: the same records, batches, noise and initial parameters."""
  plan, halves = (
    _plan(noise_multiplier=1.0, num_steps=5),
    attacks.random_halves(2, _N, seed=3),
  )
  seen = {}

  def algorithm(key):
    made = _options(plan)["algorithm"](key)
    if not isinstance(key, jax.core.Tracer):
      seen["noise"] = key
    return made

  def batches(part, seed):
    seen.update(part=part, seed=seed)
    return plan.batches(part, seed)

  def init_params(key):
    seen["init"] = key
    return _options(plan)["init_params"](key)

  scores = _train(
    halves, plan, algorithm=algorithm, batches=batches, init_params=init_params
  )
  np.testing.assert_array_equal(seen["part"].x, _records().x[halves[1]])
  own = _options(plan)["algorithm"](seen["noise"])
  state, step = own.init(_options(plan)["init_params"](seen["init"])), jax.jit(own.step)
  for batch in plan.batches(seen["part"], seen["seed"]):
    state, _ = step(state, batch)
  np.testing.assert_allclose(_SIGNAL(state.params, _records()), scores[1], rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("side_by_side", [2, 100])  # 5 shadows: the last group is not full
def test_side_by_side_is_one_after_the_other(side_by_side):
  plan = _plan(noise_multiplier=1.0, num_steps=6)
  halves = attacks.random_halves(5, _N, seed=0)
  one = _train(halves, plan)
  together = _train(halves, plan, side_by_side=side_by_side)
  np.testing.assert_allclose(together, one, rtol=1e-4, atol=1e-5)
  assert np.ptp(one, axis=0).min() > 0  # no two alike


@pytest.mark.cases(long=["3"], slow=...)
@pytest.mark.parametrize("side_by_side", [1, 3])
def test_all_shadows_are_one_program(side_by_side):
  plan, traces = _plan(num_steps=4), []

  def algorithm(key):
    made = _options(plan)["algorithm"](key)

    def step(state, batch):
      traces.append(1)
      return made.step(state, batch)

    return Algorithm(made.init, step)

  _train(
    attacks.random_halves(7, _N, seed=0),
    plan,
    algorithm=algorithm,
    side_by_side=side_by_side,
  )
  assert len(traces) == 1


@pytest.mark.long
def test_a_shadow_does_not_depend_on_which_others_there_are():
  plan, halves = (
    _plan(noise_multiplier=1.0, num_steps=5),
    attacks.random_halves(4, _N, seed=0),
  )
  np.testing.assert_array_equal(_train(halves, plan)[:2], _train(halves[:2], plan))
  other = _train(halves, plan, seed=1)
  assert not np.isclose(other, _train(halves, plan)).all(axis=1).any()


@pytest.mark.slow
def test_the_complement_of_a_target_is_not_among_its_shadows():
  _, halves = _scores()
  for evidence, members in attacks.each_as_target(*_scores()):
    counts = evidence.included.sum(axis=0)
    if len(evidence.included) == 8:  # the last row, whose coins are its own
      assert (counts == 4).all()
    else:  # in or out says nothing of the count: the rest are pairs and the last row
      assert len(evidence.included) == 7
      extra = counts - halves[-1]
      assert (extra == 3).all(), members


def test_a_design_that_balances_every_record_is_refused_for_it_tells_the_members():
  """Every record in exactly half of the models, and no two models complements."""
  order = np.random.default_rng(0).random((8, 60)).argsort(axis=0)
  with refuses("included") as caught:
    list(attacks.each_as_target(np.zeros((8, 60)), order < 4))
  assert "\n" not in str(caught.value)
  for count in (8, 9, 17):  # what random_halves deals is never refused, however few records
    for seed in range(20):
      halves = attacks.random_halves(count, 5, seed=seed)
      assert len(list(attacks.each_as_target(halves + 0.0, halves))) == count


def test_halves_are_fair_and_independent_of_each_other():
  halves = attacks.random_halves(41, 2000, seed=5)
  np.testing.assert_array_equal(halves[0:40:2], ~halves[1:41:2])
  own = halves[::2]
  assert abs(own.mean() - 0.5) < 0.02
  assert np.abs(np.corrcoef(own) - np.eye(21)).max() < 0.1
  exact = attacks.random_halves(5, 100, seed=0, exact=True)
  assert (exact.sum(axis=1) == 50).all() and not (exact[0] == exact[2]).all()


_HALVES = attacks.random_halves(2, _N, seed=0)


@pytest.mark.cases(long=[6, 7, 8, 9, 10, 11])
@pytest.mark.parametrize(
  ("call", "field"),
  [
    (lambda: _train(_HALVES[:, 1:]), "included"),
    (lambda: _train(_HALVES + 0), "included"),
    (lambda: _train(_HALVES[:0]), "included"),
    (lambda: _train(np.zeros((1, _N), bool)), "included"),
    (lambda: _train(_HALVES, side_by_side=0), "side_by_side"),
    (lambda: _train(_HALVES, seed=-1), "seed"),
    (
      lambda: _train(_HALVES, _plan(num_steps=1), signal=lambda p, r: np.zeros(3)),
      "signal",
    ),
    (
      lambda: _train(_HALVES, _plan(num_steps=1), signal=lambda p, r: np.full(_N, np.nan)),
      "signal",
    ),
    (lambda: attacks.random_halves(0, 5, seed=0), "num_models"),
    (lambda: attacks.random_halves(2, 5, seed=0, exact=True), "num_records"),
    (lambda: list(attacks.each_as_target(_HALVES + 0.0, _HALVES)), "shadows.shape"),
    (lambda: list(attacks.each_as_target(1.0, _HALVES)), "included"),
  ],
)  # fmt: skip
def test_bad_input_is_one_line(call, field):
  with refuses(field):
    call()
