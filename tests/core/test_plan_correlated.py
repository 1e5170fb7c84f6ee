"""A plan with correlated or scheduled noise charges what its batches and transform do."""

import dataclasses
import math
import re

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

import dpjax
from dpjax import accounting, plan, sampling, transforms
from dpjax.accounting.matrix import participation_costs
from dpjax.gradients import Clip
from dpjax.noise import NoiseShape, correlated
from dpjax.validate import UserError
from tests.refuses import refuses

_BANDED = correlated.BandedToeplitz.optimized(num_steps=24, bands=4)
_CYCLIC = sampling.CyclicSampler(steps_per_pass=4, num_examples=100)
_POISSON = sampling.CyclicPoissonSampler(turn_prob=0.3, num_groups=4, capacity=101)
_SCHEDULE = tuple(1.0 + (t % 3) / 2 for t in range(24))


class _Data:
  """One hundred examples: the numbers from 0."""

  def __init__(self, size=100):
    self.x = np.arange(size)

  def __len__(self):
    return len(self.x)

  def __getitem__(self, indices):
    return self.x[indices]


def _shape(correlation=_BANDED, schedule=(), **more):
  return NoiseShape(correlation=correlation, schedule=schedule, **more)


def _plan(**changes):
  options = dict(
    sampler=_CYCLIC,
    noise_multiplier=4.0,
    l2_clip_norm=1.0,
    normalize_by=25,
    num_steps=24,
    delta=1e-5,
    noise_shape=_shape(),
  )
  return dpjax.Plan(**{**options, **changes})


_PLANS = {
  "banded": _plan(),
  "white": _plan(noise_shape=_shape(None)),
  "tree": _plan(noise_shape=_shape(correlated.Tree(restart_every=4))),
  "blt": _plan(
    noise_shape=_shape(
      correlated.BufferedToeplitz.optimized(num_steps=24, buffers=2, steps_apart=4)
    )
  ),
  "scheduled": _plan(noise_shape=_shape(schedule=_SCHEDULE)),
  "amplified": _plan(sampler=_POISSON),
  "amplified_scheduled": _plan(sampler=_POISSON, noise_shape=_shape(schedule=_SCHEDULE)),
  "bins": _plan(sampler=sampling.BallsInBinsSampler(num_bins=4, capacity=101)),
  "min_sep": _plan(sampler=sampling.MinSepSampler(0.5, 4, 24, 101)),
  "poisson_scheduled": _plan(
    sampler=dpjax.PoissonSampler(0.2, 101), noise_shape=_shape(None, _SCHEDULE)
  ),
}
_every = pytest.mark.parametrize("one", _PLANS.values(), ids=_PLANS)


@pytest.mark.cases(long=["banded", "tree", "amplified_scheduled", "poisson_scheduled"])
@_every
def test_the_ledger_after_t_steps_is_the_plan_after_t_steps_also_when_interrupted(one):
  ledger = dpjax.accounting.Ledger()
  for step in range(24):
    if step == 9:  # a checkpoint
      ledger = accounting.Ledger.from_json(ledger.to_json())
    ledger = ledger.charge(
      one.step_event(step),
      l2_clip_norm=1.0,
      neighboring_relation=one.neighboring_relation,
      noise_key_id="k",
      first_step=step,
    )
    if step + 1 in (1, 10, 17, 24):
      spent = ledger.epsilon(
        one.accounted_delta(1e-5), neighboring_relation=one.neighboring_relation
      )
      assert spent == one.epsilon(steps=step + 1)
  assert ledger.num_steps == 24


@pytest.mark.cases(long=["tree", "bins", "poisson_scheduled"])
@_every
def test_the_curve_is_epsilon_and_never_falls(one):
  curve = one.epsilon_curve([0, 1, 5, 13, 24])
  assert curve[0] == 0 and (np.diff(curve) >= 0).all() and curve[-1] > curve[1]
  assert curve[3] == pytest.approx(one.epsilon(steps=13), rel=1e-9)
  budget = accounting.epsilon(
    dp_accounting.ComposedDpEvent([one.event(10), one.remaining_event(10)]),
    delta=one.accounted_delta(1e-5),
    neighboring_relation=one.neighboring_relation,
  )
  assert budget == pytest.approx(one.epsilon(), rel=1e-9)


def test_the_whole_run_is_one_gaussian_on_c():
  found = _PLANS["banded"]
  matrix = correlated.matrix(_BANDED, 24)
  sensitivity = max(np.linalg.norm(matrix[:, r::4].sum(axis=1)) for r in range(4))
  event = dp_accounting.GaussianDpEvent(4.0 / sensitivity)
  relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
  expected = PLDAccountant(relation).compose(event).get_epsilon(1e-5)
  assert found.neighboring_relation == "replace_special"
  assert found.epsilon() == pytest.approx(expected, rel=1e-3)


def test_amplified_bands_cost_their_turns():
  norm = math.sqrt(np.sum(np.square(_BANDED.coefficients)))
  event = dp_accounting.PoissonSampledDpEvent(0.3, dp_accounting.GaussianDpEvent(4 / norm))
  delta = 1e-5 * (1 - plan.OVERFLOW_SHARE)
  expected = PLDAccountant().compose(event, 6).get_epsilon(delta)
  found = _PLANS["amplified"]
  assert found.neighboring_relation == "add_or_remove_one"
  assert found.epsilon() == pytest.approx(expected, rel=1e-3)
  assert found.epsilon() < _PLANS["banded"].epsilon()


@pytest.mark.slow
def test_a_schedule_is_composed_step_by_step():
  accountant = RdpAccountant()
  for factor in _SCHEDULE:
    accountant.compose(
      dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(4.0 * factor))
    )
  delta = 1e-5 * (1 - plan.OVERFLOW_SHARE)
  found = dataclasses.replace(_PLANS["poisson_scheduled"], accountant="rdp")
  assert found.epsilon() == pytest.approx(accountant.get_epsilon(delta), rel=1e-6)
  constant = dataclasses.replace(found, noise_shape=NoiseShape())
  assert found.epsilon() < constant.epsilon()


@pytest.mark.cases(long=["amplified", "poisson_scheduled"])
@pytest.mark.parametrize("name", ["banded", "amplified", "scheduled", "poisson_scheduled"])
def test_p25_calibrated_plans_stay_within_the_target(name):
  one = _PLANS[name]
  fields = ("sampler", "num_steps", "noise_shape", "l2_clip_norm")
  options = {field: getattr(one, field) for field in fields}
  found = dpjax.Plan.calibrated(epsilon=2.0, delta=1e-5, normalize_by=25, **options)
  assert 1.99 <= found.epsilon() <= 2.0


def _noise_rows(one, key=0):
  """The transform's noise on nothing, times the divisor: [steps, 20000]."""
  tx, size = one.transform(jax.random.key(key)), 20_000
  zeros, mask = dpjax.wrap_grads(jnp.zeros((1, size))), jnp.zeros(1, bool)

  def step(state, _):
    update, state = tx.update(zeros, state, jnp.zeros(size), mask=mask)
    return state, update

  start = tx.init(jnp.zeros(size))
  rows = jax.jit(lambda s: jax.lax.scan(step, s, None, length=24)[1])(start)
  return np.asarray(rows, np.float64) * one.normalize_by


@pytest.mark.cases(slow=["amplified"], long=...)
@pytest.mark.parametrize("name", ["banded", "tree", "blt", "scheduled", "amplified"])
def test_the_transform_draws_the_noise_that_is_charged(name):
  one = _PLANS[name]
  white = correlated.matrix(one.noise_shape.correlation, 24) @ _noise_rows(one)
  factors = np.array(one.noise_shape.schedule or np.ones(24))
  z = white.std(axis=1) / (4.0 * factors)
  assert np.abs(z - 1).max() < 0.03
  correlation = np.corrcoef(white)[np.triu_indices(24, 1)]
  assert np.abs(correlation).max() < 5 / math.sqrt(20_000)
  raw = np.corrcoef(_noise_rows(one))[np.triu_indices(24, 1)]
  assert np.abs(raw).max() > 0.2  # the noise itself is not white


@pytest.mark.parametrize("name", [name for name in _PLANS if name != "poisson_scheduled"])
def test_p43_the_batches_of_a_plan_stay_within_its_sensitivity(name):
  """Every example's own trace, through C, costs at most what was charged."""
  one = _PLANS[name]
  taken = np.zeros((24, 100), bool)
  for step, batch in enumerate(one.batches(_Data(), rng=5)):
    taken[step, batch.examples[batch.mask]] = True
  strategy = one.noise_shape.strategy
  factors = np.array(one.noise_shape.schedule or np.ones(24))[:, None]
  image = (correlated.matrix(strategy, 24) / factors) @ taken
  participation = one.sampler.participation
  costs = participation_costs(
    strategy,
    num_steps=24,
    steps_apart=participation.steps_apart,
    cyclic=participation.cyclic,
    factors=one.noise_shape.schedule,
  )
  worst = np.cumsum(image**2, axis=0).max(axis=1)
  assert (worst <= costs * (1 + 1e-9)).all()


def test_p43_a_poisson_trace_would_exceed_it():
  taken = np.zeros((24, 100), bool)
  poisson = dpjax.PoissonSampler(0.25, 101)  # as many per step, but too close together
  for step in range(24):
    taken[step, poisson.draw(100, seed=5, step=step)] = True
  costs = participation_costs(_BANDED, num_steps=24, steps_apart=4, cyclic=True)
  worst = ((correlated.matrix(_BANDED, 24) @ taken) ** 2).sum(0).max()
  assert worst > costs[-1]


def test_p43_a_step_beyond_the_plan_raises():
  for one in (
    _PLANS["banded"],
    _plan(sampler=dpjax.PoissonSampler(0.2, 101), noise_shape=_shape(None)),
  ):
    with refuses("step", value=24):
      one.step_event(24)
  with refuses("step"):
    _PLANS["banded"].step_event()


def test_p16_batches_resume_where_they_stopped():
  for one in _PLANS.values():
    whole = list(one.batches(_Data(), rng=3))
    rest = list(one.batches(_Data(), rng=3, start=20))
    assert len(whole) == 24 and len(rest) == 4
    for a, b in zip(whole[20:], rest):
      np.testing.assert_array_equal(a.examples, b.examples)
      np.testing.assert_array_equal(a.mask, b.mask)


def test_p13_a_strategy_without_its_participation_is_refused():
  for sampler in (
    dpjax.PoissonSampler(0.2, 101),
    dpjax.FixedSizeSampler(20, 100),
    dpjax.ShuffledSampler(25),
  ):
    with refuses("sampler"):
      _plan(sampler=sampler)
  wide = correlated.BandedToeplitz.optimized(num_steps=24, bands=6)
  with refuses("correlation"):
    _plan(sampler=_POISSON, noise_shape=_shape(wide))
  with refuses("correlation"):
    _plan(
      sampler=sampling.MinSepSampler(0.5, 4, 24, 101),
      noise_shape=_shape(correlated.Tree(restart_every=8)),
    )
  white = _plan(
    sampler=dpjax.PoissonSampler(0.2, 101), noise_shape=_shape(correlated.Independent())
  )
  assert white.epsilon() == dataclasses.replace(white, noise_shape=_shape(None)).epsilon()


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"neighboring_relation": "add_or_remove_one"}, "neighboring_relation"),
    ({"l2_clip_norm": Clip(1.0, "automatic")}, "clipping"),
    (
      {
        "l2_clip_norm": Clip(1.0, transforms.AdaptiveClipping()),
        "noise_shape": _shape(None),
      },
      "sampler",
    ),
    (
      {
        "l2_clip_norm": Clip(1.0, transforms.AdaptiveClipping()),
        "sampler": dpjax.PoissonSampler(0.2, 101),
        "noise_shape": _shape(None, _SCHEDULE),
      },
      "noise_schedule",
    ),
    ({"l2_clip_norm": {"w": 1.0, "b": 0.0}}, "l2_clip_norm"),
    (
      {"noise_shape": _shape(shares={"w": 1.0}), "l2_clip_norm": {"w": 1.0}},
      "noise_shares",
    ),
    ({"noise_shape": _shape(schedule=(1.0,))}, "noise_schedule"),
    (
      {
        "sampler": dpjax.PoissonSampler(0.2, 101),
        "num_steps": 40,
        "noise_shape": _shape(None, tuple(1 + t / 40 for t in range(40))),
      },
      "noise_schedule",
    ),
  ],
)
def test_wrong_combinations_are_named(changes, field):
  with refuses(field) as caught:
    _plan(**changes)
  assert "\n" not in str(caught.value)


def test_a_factor_of_nothing_is_named():
  with pytest.raises(UserError, match=r"schedule\[23\]=0.0"):
    _shape(schedule=(1.0,) * 23 + (0.0,))


def test_no_noise_is_no_privacy():
  one = _plan(noise_multiplier=0.0)
  assert one.epsilon() == math.inf and not one.is_private


def test_the_statement_names_the_strategy_the_assumption_and_one_number():
  text = _PLANS["banded"].statement(num_examples=100_000)
  assert "strategy BandedToeplitz" in text and "exactly 4 steps apart" in text
  assert text.count("Gaussian noise of") == 1 and "replace_special" in text
  sampled = _PLANS["amplified"].statement(num_examples=100_000)
  assert "with probability 0.3" in sampled and "set aside" in sampled


def test_a_shuffled_epoch_refuses_a_noise_schedule():
  """Its epoch is paid at the first step: quieter later steps would go unpaid."""
  sampler = sampling.ShuffledSampler(batch_size=10, num_examples=40)
  with refuses("sampler"):
    plan.Plan(
      sampler=sampler,
      noise_multiplier=1.0,
      l2_clip_norm=1.0,
      normalize_by=10,
      num_steps=4,
      delta=1e-5,
      noise_shape=NoiseShape((4.0, 1.0, 1.0, 1.0)),
    )


def _measured_stds(one, draws=4000):
  """Standard deviation of the noise on the SUM, step by step, of the plan's transform."""
  tx = one.transform(jax.random.key(3))
  params = np.zeros(draws, np.float32)
  state, stds = tx.init(params), []
  for _ in range(one.num_steps):
    grads = dpjax.wrap_grads(np.zeros((1, draws), np.float32))
    noisy, state = tx.update(grads, state, params, mask=np.ones(1, bool))
    stds.append(float(np.std(noisy)) * one.normalize_by / one.l2_bound)
  return np.array(stds)


@pytest.mark.long
@pytest.mark.parametrize(
  "changes", [{}, {"schedule": (1.0,) * 4 + (0.5,) * 4}, {"correlation": None}]
)
def test_the_statement_names_the_noise_that_the_transform_adds(changes):
  one = plan.Plan(
    **{
      "sampler": sampling.CyclicSampler(steps_per_pass=4, num_examples=40),
      "noise_multiplier": 2.0,
      "l2_clip_norm": 0.5,
      "normalize_by": 10.0,
      "num_steps": 8,
      "delta": 1e-5,
      "noise_shape": _shape(
        **{"correlation": correlated.BandedToeplitz((1.0, 0.5, 0.25)), **changes}
      ),
    }
  )
  text = " ".join(one.statement(40).split())
  new = re.search(r"that of a step has ([\d.]+)(?: to ([\d.]+))? times the clip", text)
  alone = re.search(r"taken alone it has up to ([\d.]+)\.", text)
  assert new and alone
  stds = _measured_stds(one)
  assert stds[0] == pytest.approx(float(new[2] or new[1]), rel=0.05)
  assert stds.max() == pytest.approx(float(alone[1]), rel=0.05)
  assert stds.min() >= 0.95 * float(new[1])
  match = re.search(r"Charged as no worse than (.*?): 1 x Gaussian noise of ([\d.]+)", text)
  assert match and "not the noise of a step" in match[1]
  assert abs(float(match[2]) / stds.min() - 1) > 0.1  # what the old words called the noise
