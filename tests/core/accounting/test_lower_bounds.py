"""Every printed epsilon is above what really happens: an independent lower bound.

Binning the output of a mechanism is post-processing, and rounding each privacy loss DOWN
makes delta smaller, so what is computed here can never exceed the truth. It shares nothing
with the accountants but the definition of delta.
"""

import dataclasses
import math

import dp_accounting as dpa
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal, stats

from dpjax import accounting, sampling
from dpjax.accounting import proved
from dpjax.accounting.event_kinds.truncated_poisson import truncated_poisson_event
from dpjax.accounting.ledger import BudgetExceeded
from dpjax.plan import Plan
from dpjax.sampling import registry
from dpjax.sampling.registry import whole_batch_size
from dpjax.validate import UserError

_N, _GRID = 60, 5e-3
_LARGEST = 3000  # losses above are counted as this, those below its negative not at all


def _mixture(edges, weights, means, z):
  cdf = sum(w * stats.norm.cdf(edges, m, z) for w, m in zip(weights, means))
  return np.diff(np.concatenate([[0.0], cdf, [1.0]]))


def _composed_losses(p, q, steps):
  """(least loss, masses) of `steps` losses log(p / q), each rounded down to the grid."""
  keep = (p > 1e-14) & (q > 0)  # what is left out only lowers delta
  loss = np.floor(np.log(p[keep] / q[keep]) / _GRID).astype(int)
  high = np.minimum(loss, _LARGEST)[loss > -_LARGEST]
  masses = np.bincount(high - high.min(), weights=p[keep][loss > -_LARGEST])
  loss, total = high, masses
  for _ in range(steps - 1):
    total = np.maximum(signal.fftconvolve(total, masses) - 1e-17, 0)
  return steps * int(loss.min()), total


def _true_delta(pair, z, steps, epsilon):
  """At most the delta of `steps` releases, in the worse direction."""
  (one, other), edges = pair, np.linspace(-2 - 9 * z, 2 + 9 * z, 801)
  p, q = _mixture(edges, *one, z), _mixture(edges, *other, z)
  found = []
  for a, b in ((p, q), (q, p)):
    least, masses = _composed_losses(a, b, steps)
    losses = (least + np.arange(len(masses))) * _GRID
    above = losses > epsilon
    found.append(float(masses[above] @ -np.expm1(epsilon - losses[above])))
  return max(found)


def _halves(prob, far):
  """The record's gradient is C against 0, or against -C, in a batch of nothing else."""
  here = ((1 - prob, prob), (0.0, 1.0))
  return here, (((1 - prob, prob), (0.0, -1.0)) if far else ((1.0,), (0.0,)))


def _pushed_out(prob):
  """The record's gradient is C where everybody else's is -C, and a batch has one size."""
  return ((1 - prob, prob), (-1.0, 1.0)), ((1.0,), (-1.0,))


def _several(sampler):
  """All examples of one user have the gradient C, against 0, in a batch of nothing else."""
  counts = np.arange(sampler.max_contribution + 1)
  chances = stats.binom.pmf(counts, sampler.max_contribution, sampler.sampling_prob)
  return (tuple(chances), tuple(counts.astype(float))), ((1.0,), (0.0,))


def _copies(sampler):
  """The record's gradient is C where everybody else's is -C, and it may come several times."""
  counts = np.arange(sampler.batch_size + 1)
  chances = stats.binom.pmf(counts, sampler.batch_size, 1 / sampler.num_examples)
  sums = 2.0 * counts - sampler.batch_size
  return (tuple(chances), tuple(sums)), ((1.0,), (-float(sampler.batch_size),))


def _kept(sampler):
  """Chance of one record to be in a batch that is cut to the capacity."""
  others = np.arange(sampler.num_examples)
  probs = stats.binom.pmf(others, sampler.num_examples - 1, sampler.sampling_prob)
  return sampler.sampling_prob * float(
    probs @ np.minimum(1, sampler.capacity / (others + 1))
  )


# sampler -> (pair, noise of what is observed / z, releases): an experiment that an attacker
# can really make on a run of 6 steps
_ATTACKS = {
  sampling.PoissonSampler: lambda s, far: (_halves(s.sampling_prob, far), 1.0, 6),
  sampling.BoundedContributionSampler: lambda s, far: (_several(s), 1.0, 6),
  sampling.FixedSizeSampler: lambda s, far: (
    _pushed_out(s.batch_size / s.num_examples), 1.0, 6,
  ),
  sampling.WithReplacementSampler: lambda s, far: (_copies(s), 1.0, 6),
  sampling.TruncatedPoissonSampler: lambda s, far: (_halves(_kept(s), far), 1.0, 6),
  sampling.ShuffledSampler: lambda s, far: (  # the sum of an epoch
    _halves(1.0, far), math.sqrt(s.steps_per_epoch), 6 // s.steps_per_epoch,
  ),
  sampling.CyclicSampler: lambda s, far: (_halves(1.0, far), 1.0, 6 // s.steps_per_pass),
  sampling.BallsInBinsSampler: lambda s, far: (
    _halves(1.0, far), math.sqrt(s.num_bins), 6 // s.num_bins,
  ),
  sampling.RandomAllocationSampler: lambda s, far: (  # the sum of a pass
    _halves(1.0, far), math.sqrt(s.steps_per_pass), 6 // s.steps_per_pass,
  ),
  sampling.KOutOfTSampler: lambda s, far: (  # the sum of a pass holds the record k times
    _halves(1.0, far), math.sqrt(s.steps_per_pass) / s.num_selected, 6 // s.steps_per_pass,
  ),
  sampling.CyclicPoissonSampler: lambda s, far: (
    _halves(s.turn_prob, far), math.sqrt(s.num_groups), 6 // s.num_groups,
  ),
  sampling.MinSepSampler: lambda s, far: (_halves(s.sampling_prob, far), 1.0, 1),
}  # fmt: skip


def _samplers(prob):
  size = whole_batch_size(prob, _N)
  yield sampling.PoissonSampler(prob, _N + 1)
  yield sampling.BoundedContributionSampler(prob, _N + 3, max_contribution=3)
  yield sampling.FixedSizeSampler(size, _N)
  yield sampling.FixedSizeSampler(min(size, _N - 1), _N, size_is_public=False)
  yield sampling.WithReplacementSampler(min(size, 8), _N)
  yield sampling.WithReplacementSampler(min(size, 8), _N, size_is_public=False)
  yield sampling.TruncatedPoissonSampler(prob, size, _N)
  yield sampling.ShuffledSampler(_N // 3, _N)
  yield sampling.CyclicSampler(2, _N)
  yield sampling.BallsInBinsSampler(3, _N + 1)
  yield sampling.RandomAllocationSampler(3, _N + 1)
  yield sampling.KOutOfTSampler(3, 2, _N + 1)
  yield sampling.CyclicPoissonSampler(prob, 2, _N + 1)
  yield sampling.MinSepSampler(prob, 2, 6, _N + 1)


@pytest.mark.slow
@settings(max_examples=3, derandomize=True)
@given(prob=st.floats(0.02, 1.0), z=st.floats(0.5, 3.0), log_delta=st.floats(-7, -2))
def test_no_epsilon_is_below_what_an_attack_can_see(prob, z, log_delta):
  # Each row of the registry has an attack that computes its delta without the accountants.
  assert {type(s) for s in _samplers(prob)} == set(_ATTACKS)
  assert {row.kind for row in registry.SCHEMES.values()} == set(_ATTACKS), (
    "a sampler needs an entry of _ATTACKS and a line of _samplers"
  )
  for sampler in _samplers(prob):
    for relation in sampler.proved_under:
      pair, spread, releases = _ATTACKS[type(sampler)](sampler, relation == "replace_one")
      for accountant in sampler.accountants(relation):
        plan = Plan(
          sampler=sampler, noise_multiplier=z, l2_clip_norm=1.0, normalize_by=1.0,
          num_steps=6, delta=10**log_delta, neighboring_relation=relation,
          accountant=accountant,
        )  # fmt: skip
        epsilon = plan.epsilon()
        assert epsilon > 0
        seen = _true_delta(pair, z * spread, releases, epsilon)
        assert seen <= plan.delta * (1 + 1e-9), (sampler, relation, accountant)


def test_the_lower_bound_is_nearly_the_truth_and_catches_a_small_epsilon():
  for prob, steps, z in ((1.0, 1, 1.0), (0.2, 6, 1.0), (0.5, 3, 2.0)):
    noise = accounting.gaussian_event(z)
    event = accounting.poisson_sampled_event(noise, sampling_prob=prob)
    epsilon = accounting.epsilon(accounting.compose(event, steps), delta=1e-4)
    assert _true_delta(_halves(prob, False), z, steps, epsilon) > 0.9e-4
    assert _true_delta(_halves(prob, False), z, steps, 0.97 * epsilon) > 1e-4


# --- the ends of the ranges


def _poisson(z, prob, steps):
  noise = accounting.gaussian_event(z)
  return accounting.compose(
    accounting.poisson_sampled_event(noise, sampling_prob=prob), steps
  )


@pytest.mark.cases(
  long=[
    "1e-300-1e-15-1e+160-rdp",
    "1e-300-1e-06-1e+160-rdp",
    "1e-300-0.5-1000000.0-rdp",
    "1e-300-0.5-1e+160-rdp",
    "1e-12-1e-15-0.001-pld",
    "1e-12-1e-15-1e+160-rdp",
    "1e-12-1e-06-0.001-pld",
    "1e-12-1e-06-1e+160-rdp",
    "1e-12-0.5-0.001-pld",
    "1e-12-1.0-0.001-pld",
    "0.999-1e-15-0.001-pld",
    "0.999-1e-15-1e+160-rdp",
    "0.999-1e-06-0.001-pld",
    "0.999-1e-06-1e+160-rdp",
    "0.999-0.5-0.001-pld",
    "0.999-1.0-0.001-pld",
  ]
)
@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
@pytest.mark.parametrize("z", [1e-300, 1e-160, 1e-6, 1e-3, 1e6, 1e160])
@pytest.mark.parametrize("prob", [1e-15, 1e-6, 0.5, 1.0])
@pytest.mark.parametrize("delta", [1e-300, 1e-12, 0.999])
def test_extreme_settings_give_a_bound_or_one_line(accountant, z, prob, delta):
  try:
    found = accounting.epsilon(_poisson(z, prob, 3), delta=delta, accountant=accountant)
  except UserError as error:
    assert "\n" not in str(error)
    return
  assert found >= 0 and not math.isnan(found)
  if prob == 1.0 and z < 1e-2 and delta < 0.5:
    assert found > 1 / z  # at least the loss of one step's mean, or inf


@pytest.mark.cases(long=["pld"])
@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
def test_a_step_that_happens_almost_never_costs_delta_not_nothing(accountant):
  """With probability q the record is bare: below delta = q no epsilon may be small."""
  found = accounting.epsilon(_poisson(1e-3, 1e-4, 1), delta=1e-6, accountant=accountant)
  assert found > 100
  small = accounting.delta(_poisson(1e-3, 1e-4, 1), epsilon=1.0, accountant=accountant)
  assert small >= 0.99e-4


def test_a_budget_may_be_spent_to_the_last_digit_and_no_further():
  step = dpa.GaussianDpEvent(20.0)
  ledger = accounting.Ledger().charge(
    step,
    num_steps=50,
    l2_clip_norm=1.0,
    neighboring_relation="add_or_remove_one",
    noise_key_id="a",
    first_step=0,
  )
  exact = ledger.epsilon(1e-5)
  assert ledger.check(accounting.Budget(exact, 1e-5)) == exact
  with pytest.raises(BudgetExceeded) as caught:
    ledger.check(accounting.Budget(math.nextafter(exact, 0.0), 1e-5))
  shown = float(str(caught.value).split("would cost ")[1])
  assert shown >= exact


def test_a_ledger_of_unlike_plans_costs_no_less_than_each_and_all_together():
  poisson = accounting.poisson_sampled_event(dpa.GaussianDpEvent(1.0), sampling_prob=0.1)
  runs = [(poisson, 20), (dpa.GaussianDpEvent(5.0), 4), (dpa.LaplaceDpEvent(4.0), 2)]
  ledger = accounting.Ledger()
  for index, (event, steps) in enumerate(runs):
    ledger = ledger.charge(
      event,
      num_steps=steps,
      l2_clip_norm=1.0,
      neighboring_relation="add_or_remove_one",
      noise_key_id=str(index),
      first_step=0,
    )
  whole = ledger.epsilon(1e-5)
  alone = [accounting.epsilon(accounting.compose(e, n), delta=1e-5) for e, n in runs]
  assert max(alone) < whole < sum(alone)
  assert accounting.Ledger.from_json(ledger.to_json()).epsilon(1e-5) == whole
  with pytest.raises(UserError):  # what has no common proof has no common number
    ledger.charge(
      truncated_poisson_event(
        dpa.GaussianDpEvent(1.0), sampling_prob=0.1, num_examples=10, capacity=2
      ),
      num_steps=1, l2_clip_norm=1.0, noise_key_id="z", first_step=0,
      neighboring_relation="add_or_remove_one",
    ).epsilon(1e-5)  # fmt: skip


@pytest.mark.cases(long=["rdp"])
@pytest.mark.parametrize("accountant", proved.ACCOUNTANTS)
def test_one_step_and_no_step(accountant):
  plan = Plan(
    sampler=sampling.PoissonSampler(1.0, 100), noise_multiplier=1.0, l2_clip_norm=1.0,
    normalize_by=1.0, num_steps=1, delta=1e-5, accountant=accountant,
  )  # fmt: skip
  assert plan.epsilon(steps=0) == 0 == plan.epsilon_curve([0])[0]
  exact = dpa.get_epsilon_gaussian(1.0, 1e-5)
  assert plan.epsilon() >= exact
  assert dataclasses.replace(plan, noise_multiplier=0.0).epsilon() == math.inf
