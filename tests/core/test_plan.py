"""A plan's epsilon is the accountant's for exactly what its batches and transform do."""

import dataclasses
import functools
import math

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

import dpjax
from dpjax import plan as plan_lib
from dpjax.accounting import overflow
from dpjax.accounting.event_kinds.elements import parts
from dpjax.accounting.matrix import join
from tests import plans
from tests.refuses import refuses


class _Data:
  """Ten thousand examples; indexing counts as a gather."""

  def __init__(self, size=10_000):
    self.x = np.arange(size, dtype=np.float32)[:, None]

  def __len__(self):
    return len(self.x)

  def __getitem__(self, indices):
    return dpjax.Example(self.x[indices], self.x[indices, 0])


_plan = functools.partial(
  plans.of, 200, prob=0.01, noise_multiplier=1.1, normalize_by=100, num_steps=500
)


def _direct(accountant, q, z, steps, delta):
  event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(z))
  return accountant.compose(event, steps).get_epsilon(delta)


@pytest.mark.slow
def test_epsilon_is_the_accountants_own_at_delta_less_the_overflow_share():
  accounted = 1e-5 * (1 - plan_lib.OVERFLOW_SHARE)
  for name, accountant in (("pld", PLDAccountant), ("rdp", RdpAccountant)):
    expected = _direct(accountant(), 0.01, 1.1, 500, accounted)
    assert _plan(accountant=name).epsilon() == pytest.approx(expected, rel=1e-4)
    assert _plan(accountant=name).epsilon() >= expected * (1 - 1e-9)  # the private side
  assert _plan().epsilon() >= _direct(PLDAccountant(), 0.01, 1.1, 500, 1e-5)
  assert _plan().epsilon() < _plan(accountant="rdp").epsilon()


@pytest.mark.slow
def test_p25_calibrated_plans_stay_within_the_target():
  rng = np.random.default_rng(0)
  for _ in range(6):
    epsilon, prob = float(rng.uniform(0.3, 8)), float(rng.uniform(1e-3, 0.2))
    plan = dpjax.Plan.calibrated(
      epsilon=epsilon,
      delta=1e-5,
      sampler=dpjax.PoissonSampler(sampling_prob=prob, capacity=5000),
      num_steps=int(rng.integers(1, 2000)),
      l2_clip_norm=1.0,
      normalize_by=100,
    )
    assert 0.995 * epsilon <= plan.epsilon() <= epsilon


def test_p27_epsilon_grows_with_the_steps_that_ran_and_no_further():
  plan = _plan()
  curve = plan.epsilon_curve([0, 1, 100, 500])
  assert curve[0] == 0 and (np.diff(curve) > 0).all()
  assert curve[-1] == pytest.approx(plan.epsilon())
  assert curve[2] == pytest.approx(plan.epsilon(steps=100))
  with refuses("steps", value=501):
    plan.epsilon(steps=501)
  with refuses("steps", value=1.5):
    plan.epsilon(steps=1.5)


@pytest.mark.slow
def test_p9_replace_one_costs_what_half_the_noise_multiplier_would():
  fixed = dpjax.FixedSizeSampler(batch_size=100, num_examples=10_000)
  plan = _plan(sampler=fixed, num_steps=50)
  assert plan.neighboring_relation == "replace_one" and plan.accountant == "pld"
  event = dp_accounting.SampledWithoutReplacementDpEvent(
    10_000, 100, dp_accounting.GaussianDpEvent(1.1 / 2)
  )
  accountant = RdpAccountant(
    neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
  )
  general = accountant.compose(event, 50).get_epsilon(1e-5)
  # One direction of the pair, as Poisson sampling has it, is a lower bound.
  poisson = dp_accounting.PoissonSampledDpEvent(
    0.01, dp_accounting.GaussianDpEvent(1.1 / 2)
  )
  least = dpjax.accounting.epsilon(dpjax.accounting.compose(poisson, 50), delta=1e-5)
  assert least < plan.epsilon() < general


def test_p13_p14_sampler_relation_and_accountant_must_agree():
  fixed = dpjax.FixedSizeSampler(batch_size=100, num_examples=10_000)
  with refuses("neighboring_relation"):
    _plan(sampler=fixed, neighboring_relation="add_or_remove_one")
  with refuses("neighboring_relation"):
    _plan(neighboring_relation="replace_one")
  with refuses("accountant"):
    _plan(sampler=fixed, accountant="gdp").epsilon()
  shuffled = _plan(sampler=dpjax.ShuffledSampler(batch_size=100))
  assert shuffled.epsilon() == math.inf and not shuffled.is_private
  with refuses("sampler"):
    dpjax.Plan.calibrated(
      epsilon=1.0,
      delta=1e-5,
      sampler=dpjax.ShuffledSampler(batch_size=100),
      num_steps=10,
      l2_clip_norm=1.0,
      normalize_by=100,
    )


def test_no_noise_is_no_privacy():
  assert _plan(noise_multiplier=0.0).epsilon() == math.inf


def test_p33_batches_are_padded_masked_and_of_one_shape():
  plan, data = _plan(), _Data()
  shapes, sizes = set(), []
  traces = []
  step = jax.jit(lambda batch: (traces.append(None), batch.mask.sum())[1])
  for _, batch in zip(range(50), plan.batches(data, rng=0)):
    shapes.add((batch.examples.x.shape, batch.mask.shape))
    sizes.append(int(step(batch)))
  assert shapes == {((200, 1), (200,))} and len(traces) == 1
  assert len(set(sizes)) > 10 and abs(np.mean(sizes) - 100) < 10


def test_p16_batches_resume_where_they_stopped():
  plan, data = _plan(num_steps=7), _Data()
  whole = list(plan.batches(data, rng=3))
  resumed = list(plan.batches(data, rng=3, start=4))
  assert len(whole) == 7 and len(resumed) == 3
  for a, b in zip(whole[4:], resumed):
    jax.tree.map(np.testing.assert_array_equal, a, b)
  other = next(plan.batches(data, rng=4))
  assert not np.array_equal(whole[0].examples.x, other.examples.x)


def test_p12_a_capacity_that_could_overflow_is_refused_before_the_first_step():
  plan = _plan(sampler=dpjax.PoissonSampler(sampling_prob=0.01, capacity=120))
  with refuses("capacity", value=120) as caught:
    plan.batches(_Data(), rng=0)
  needed = int(str(caught.value).split("per step; ")[1].split()[0])
  enough = dataclasses.replace(
    plan, sampler=dpjax.PoissonSampler(sampling_prob=0.01, capacity=needed)
  )
  enough.batches(_Data(), rng=0)
  tight = dataclasses.replace(
    plan, sampler=dpjax.PoissonSampler(sampling_prob=0.01, capacity=needed - 8)
  )
  with refuses("capacity"):
    tight.batches(_Data(), rng=0)


def test_a_delta_next_to_nothing_has_a_logarithm():
  assert overflow.log_allowed(1e-322, 0.0, 150) == pytest.approx(
    math.log(1e-322) + math.log(0.05 / 150) - math.log(2)
  )


def test_p12_the_overflow_share_pays_for_both_neighbours():
  plan = _plan()
  per_draw = math.exp(overflow.log_allowed(1e-5, 2.0, 500))
  spent = (1 + math.exp(2.0)) * 500 * per_draw
  assert spent == pytest.approx(plan_lib.OVERFLOW_SHARE * 1e-5)
  assert plan.accounted_delta(1e-5) + spent == pytest.approx(1e-5)
  with refuses("delta"):
    plan.epsilon(delta=1e-7)


@pytest.mark.slow
def test_the_transform_and_the_clipped_grad_carry_the_plans_numbers():
  plan = _plan(l2_clip_norm=0.25, noise_multiplier=2.0, normalize_by=10)
  assert plan.clipped_grad(lambda w, x: w * x).sensitivity("add_or_remove_one") == 0.25
  tx = plan.transform(jax.random.key(0))
  params = np.zeros(20_000, np.float32)
  grads = dpjax.wrap_grads(np.zeros((1, 20_000), np.float32))
  update, _ = tx.update(grads, tx.init(params), params, mask=np.ones(1, bool))
  assert np.std(update) == pytest.approx(2.0 * 0.25 / 10, rel=0.02)


@pytest.mark.parametrize(
  ("changes", "field"),
  [
    ({"num_steps": 0}, "num_steps"),
    ({"delta": 0.0}, "delta"),
    ({"delta": 1.0}, "delta"),
    ({"normalize_by": -1}, "normalize_by"),
    ({"noise_multiplier": -0.1}, "noise_multiplier"),
    ({"l2_clip_norm": -0.1}, "l2_clip_norm"),
    ({"neighboring_relation": "replace"}, "neighboring_relation"),
  ],
)
def test_wrong_numbers_are_named(changes, field):
  with refuses(field):
    _plan(**changes)


def test_a_refused_capacity_shows_the_chance_for_the_neighbour_with_one_row_more():
  sampler = dpjax.PoissonSampler(sampling_prob=0.5, capacity=4)
  plan = dpjax.Plan(
    sampler, 1.0, 1.0, 3.0, 2, delta=1e-5, neighboring_relation="replace_special"
  )
  with refuses("capacity", value=4) as caught:
    plan.check_capacity(5)
  # Five or six of 5 + 1 heads: 7 / 64.
  assert "1.1e-01 per step" in str(caught.value)


def test_a_target_of_nothing_is_refused():
  options = dict(sampler=dpjax.PoissonSampler(0.1, 10), delta=1e-5, num_steps=1)
  with refuses("epsilon", value=0):
    dpjax.Plan.calibrated(epsilon=0, l2_clip_norm=1.0, normalize_by=1, **options)


def test_a_run_of_passes_is_one_event_with_a_count():
  """At 1e7 steps, too: no step is listed. A pass that has begun counts in full."""
  sampler = dpjax.RandomAllocationSampler(steps_per_pass=100, capacity=50)
  plan = _plan(sampler=sampler, num_steps=10**7 - 1)
  assert plan.event().count == 10**5
  for first, last in ((0, 0), (0, 1), (0, 250), (100, 300), (101, 199), (99, 301)):
    listed = join([plan.step_event(step) for step in range(first, last)])
    together = plan._event_of(range(first, last))
    assert parts(together) == parts(listed)

  class OnlyTheThird(dpjax.RandomAllocationSampler):
    """A sampler that accounts for its steps in a way of its own."""

    def event_at(self, step, inner):
      return inner if step == 3 else dp_accounting.NoOpDpEvent()

  own = _plan(sampler=OnlyTheThird(steps_per_pass=4, capacity=50), num_steps=8)
  assert sum(parts(own.event()).values()) == 1
