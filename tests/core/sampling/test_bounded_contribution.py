"""Examples with one or several owners: every user owns few, and is accounted for all of them."""

import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpjax import accounting, sampling
from dpjax.accounting.event_kinds.bounded_contribution import bounded_contribution_event
from dpjax.plan import Plan
from dpjax.sampling import BoundedContributionSampler, bound_contributions
from tests.refuses import refuses

_OWNERS = st.lists(st.frozensets(st.integers(0, 6), max_size=3), max_size=20)


@given(owners=_OWNERS, most=st.integers(1, 4), seed=st.integers(0, 99))
def test_nobody_owns_more_and_nothing_could_be_added(owners, most, seed):
  kept = bound_contributions(owners, max_contribution=most, seed=seed)
  owned = Counter(name for row in kept for name in owners[row])
  assert all(count <= most for count in owned.values())
  assert (np.diff(kept) > 0).all()
  for row in set(range(len(owners))) - set(kept.tolist()):
    assert any(owned[name] == most for name in owners[row])
  again = bound_contributions(owners, max_contribution=most, seed=seed)
  np.testing.assert_array_equal(kept, again)


def test_with_one_owner_each_it_keeps_all_there_can_be_and_names_are_whole():
  owners = [("ann",)] * 5 + [("bob",)] * 2 + ["bob", "cy"]
  kept = bound_contributions(owners, max_contribution=2)
  assert len(kept) == 5 and {7, 8} & set(kept.tolist())
  assert 8 in kept
  assert bound_contributions([], max_contribution=1).shape == (0,)


def _sum_law(vectors, prob, z, grid):
  """Density of the noisy sum of one user's examples, every subset written out."""
  density = np.zeros_like(grid)
  for drawn in itertools.product((0, 1), repeat=len(vectors)):
    chance = math.prod(prob if bit else 1 - prob for bit in drawn)
    density += chance * stats.norm.pdf(grid, np.dot(drawn, vectors), z)
  return density


@pytest.mark.slow
@settings(max_examples=6, derandomize=True)
@given(
  vectors=st.lists(st.floats(-1, 1), min_size=1, max_size=4),
  prob=st.floats(0.05, 0.9),
  z=st.floats(0.5, 3.0),
)
def test_no_user_is_farther_from_nothing_than_proved(vectors, prob, z):
  grid = np.linspace(-24, 24, 6001)
  here = _sum_law(vectors, prob, z, grid)
  there = stats.norm.pdf(grid, 0.0, z)
  event = bounded_contribution_event(
    accounting.gaussian_event(z), sampling_prob=prob, max_contribution=len(vectors)
  )
  for epsilon in (0.0, 0.5, 2.0):
    bound = accounting.delta(event, epsilon=epsilon, neighboring_relation="replace_special")
    for one, other in ((here, there), (there, here)):
      seen = np.trapezoid(np.maximum(one - math.exp(epsilon) * other, 0), grid)
      assert seen <= bound + 1e-5


def test_one_example_each_is_poisson_sampling_and_all_of_them_is_one_sum():
  def delta(event, epsilon=0.5):
    return accounting.delta(event, epsilon=epsilon, neighboring_relation="replace_special")

  noise = accounting.gaussian_event(2.0)
  one = bounded_contribution_event(noise, sampling_prob=0.2, max_contribution=1)
  poisson = accounting.poisson_sampled_event(noise, sampling_prob=0.2)
  assert delta(one) == pytest.approx(delta(poisson), rel=1e-3)
  # The wrong law: a user of four examples accounted as one of them.
  four = bounded_contribution_event(noise, sampling_prob=0.2, max_contribution=4)
  assert delta(four) > 5 * delta(one)
  every = bounded_contribution_event(noise, sampling_prob=1.0, max_contribution=4)
  whole = accounting.gaussian_event(0.5)
  assert delta(whole) * (1 - 1e-9) <= delta(every) <= delta(whole) * 1.001 + 1e-9


@pytest.mark.parametrize(
  ("most", "prob", "z"),
  [(64, 1e-9, 1.0), (8, 0.5, 1e-3), (256, 0.01, 1e6), (16, 0.01, 20.0), (8, 1.0, 50.0)],
)
def test_extreme_numbers_give_a_bound(most, prob, z):
  event = bounded_contribution_event(
    accounting.gaussian_event(z), sampling_prob=prob, max_contribution=most
  )
  found = accounting.epsilon(event, delta=1e-6, neighboring_relation="replace_special")
  exact = accounting.epsilon(accounting.gaussian_event(z / most), delta=1e-6)
  assert 0 <= found <= exact * 1.01 + 1e-3


@pytest.mark.slow
def test_a_plan_protects_users_and_trains_on_examples():
  owners = [(row % 5, 5 + row % 3) for row in range(40)]
  kept = bound_contributions(owners, max_contribution=3)
  plan = Plan.calibrated(
    sampler=BoundedContributionSampler(sampling_prob=0.25, capacity=40, max_contribution=3),
    epsilon=4.0, l2_clip_norm=1.0, normalize_by=3.0, num_steps=4, delta=1e-3,
  )  # fmt: skip
  assert plan.unit == "user" and plan.neighboring_relation == "replace_special"
  words = " ".join(plan.statement().split())
  assert "owns at most 3 of them" in words and not plan.assumptions
  batches = list(plan.batches(np.arange(40.0)[kept], rng=0))
  assert len(batches) == 4
  tx = plan.transform(jax.random.key(0))
  assert tx.init(jnp.zeros(2)) is not None
  single = sampling.PoissonSampler(sampling_prob=0.25, capacity=40)
  example = Plan.calibrated(
    sampler=single, epsilon=4.0, l2_clip_norm=1.0, normalize_by=3.0, num_steps=4,
    delta=1e-3, neighboring_relation="replace_special",
  )  # fmt: skip
  assert plan.noise_multiplier > 1.5 * example.noise_multiplier


@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: BoundedContributionSampler(0.1, 8, 0), "max_contribution"),
    (lambda: bound_contributions([("a",)], max_contribution=0), "max_contribution"),
    (
      lambda: bound_contributions([3], max_contribution=1),
      "owners[0]",
    ),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field):
    make()
