"""A plan's epsilon holds at EVERY delta: batch overflow is paid for at the epsilon there."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpjax
from dpjax import accounting, sampling
from dpjax.plan import OVERFLOW_SHARE
from dpjax.validate import UserError
from tests.refuses import refuses

_N = 2000
_SAMPLERS = {
  "poisson": lambda q: sampling.PoissonSampler(sampling_prob=q, capacity=_N + 1),
  "cyclic_poisson": lambda q: sampling.CyclicPoissonSampler(
    turn_prob=q, num_groups=3, capacity=_N + 1
  ),
  "balls_in_bins": lambda q: sampling.BallsInBinsSampler(num_bins=7, capacity=_N + 1),
  "min_sep": lambda q: sampling.MinSepSampler(
    turn_prob=q, steps_apart=3, num_steps=12, capacity=_N + 1
  ),
}


def _plan(kind, q, z, num_steps, delta, accountant="rdp", **options):
  """With the smallest capacity that the plan allows for _N records."""
  plan = dpjax.Plan(
    sampler=_SAMPLERS[kind](q), noise_multiplier=z, l2_clip_norm=1.0, normalize_by=1.0,
    num_steps=num_steps, delta=delta, accountant=accountant, **options,
  )  # fmt: skip
  return plan.fitted(_N)


def _abort(plan, steps):
  """The most that a capacity which the plan accepts can add: not the sampler's own
  probability alone, which may be far below it."""
  allowed = OVERFLOW_SHARE * plan.delta / (1 + math.exp(plan.epsilon())) / plan.num_steps
  sampled = math.exp(plan.sampler.log_overflow_prob(_N + 1))
  assert sampled <= allowed * (1 + 1e-9)
  return allowed * steps


def _spent(plan, epsilon, steps):
  """delta of the analysed run at epsilon, and the aborts."""
  of_noise = accounting.delta(
    plan.event(steps), epsilon=epsilon, accountant=plan.accountant,
    neighboring_relation=plan.neighboring_relation,
  )  # fmt: skip
  return of_noise + (1 + math.exp(epsilon)) * _abort(plan, steps)


def _epsilon(plan, delta, steps=None):
  try:
    return plan.epsilon(delta, steps=steps)
  except UserError as error:
    assert "too small" in str(error) and "\n" not in str(error)
    return math.inf


@pytest.mark.slow
@settings(max_examples=60, derandomize=True)
@given(
  kind=st.sampled_from(sorted(_SAMPLERS)),
  q=st.floats(0.005, 0.9),
  z=st.floats(0.6, 6.0),
  log_delta=st.floats(-9, -2),
  ratio=st.floats(-1.3, 1.5),
  part=st.floats(0, 1),
)
def test_delta_of_the_noise_and_of_the_aborts_fits_any_delta(
  kind, q, z, log_delta, ratio, part
):
  plan = _plan(kind, q, z, 12, 10**log_delta)
  delta, steps = min(10 ** (log_delta + ratio), 0.9), round(12 * part)
  epsilon = _epsilon(plan, delta, steps)
  if math.isfinite(epsilon):
    assert _spent(plan, epsilon, steps) <= delta * (1 + 1e-6)
    assert epsilon <= _epsilon(plan, delta, 12)  # fewer steps never cost more
  else:  # really out of reach, or nearly so
    assert delta < plan.delta
    grid = np.linspace(0, 60, 121)
    assert all(_spent(plan, e, steps) > 0.5 * delta for e in grid)


@pytest.mark.long
def test_twenty_settings_by_pld_and_every_epsilon_falls_with_delta():
  rng = np.random.default_rng(11)
  for _ in range(4):
    q, z = float(rng.uniform(0.01, 0.1)), float(rng.uniform(0.7, 2))
    plan = _plan("poisson", q, z, 200, 1e-5, "pld")
    deltas = 1e-5 * 10.0 ** np.array([-1.3, -1.0, -0.5, -0.2, -1e-6, 0.0, 1.0])
    found = [_epsilon(plan, d) for d in deltas]
    assert found == sorted(found, reverse=True) and math.isfinite(found[-4])
    for delta, epsilon in zip(deltas, found):
      if math.isfinite(epsilon):
        assert _spent(plan, epsilon, 200) <= delta * (1 + 1e-6)


def test_the_old_rule_of_a_fixed_share_is_found_out():
  """What the test above would say of delta less 5 % of the PLAN's delta."""
  plan = _plan("poisson", 0.05, 0.8, 200, 1e-5, "pld")
  low = 1e-6
  old = accounting.epsilon(plan.event(), delta=low - OVERFLOW_SHARE * 1e-5)
  assert _spent(plan, old, 200) > 1.2 * low
  assert _epsilon(plan, low) > old


def test_at_its_own_delta_a_plan_pays_exactly_the_share():
  plan = _plan("poisson", 0.05, 1.0, 20, 1e-5)
  assert plan.accounted_delta(1e-5) == 1e-5 - OVERFLOW_SHARE * 1e-5
  assert plan.accounted_delta(1e-6, 0) == 1e-6  # nothing ran, nothing can have aborted
  assert plan.epsilon(1e-6, steps=0) == 0
  assert plan.epsilon_curve([0, 7, 20], 8e-6).tolist() == [
    plan.epsilon(8e-6, steps=t) for t in (0, 7, 20)
  ]


def test_a_capacity_for_nobody_but_all_costs_nothing_where_none_is_set_aside():
  fixed = sampling.FixedSizeSampler(batch_size=4, num_examples=40)
  plan = dpjax.Plan(
    sampler=fixed, noise_multiplier=4.0, l2_clip_norm=1.0, normalize_by=1.0, num_steps=3,
    delta=1e-5,
  )  # fmt: skip
  assert plan.accounted_delta(1e-12) == 1e-12 and plan.epsilon(1e-12) > plan.epsilon()


def test_a_delta_out_of_reach_is_one_line():
  plan = _plan("poisson", 0.05, 0.7, 200, 1e-5)
  for delta in (1e-300, 1e-12, 4e-7):
    with refuses("delta"):
      plan.epsilon(delta)
  for delta in (0.0, 1.0, math.nan, -1e-5):
    with refuses("delta"):
      plan.epsilon(delta)
