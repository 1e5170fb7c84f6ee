"""The law of each sampler, its event, and exact resume."""

import dp_accounting
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpjax import sampling
from dpjax.accounting.proved import ADD
from dpjax.sampling import batches
from dpjax.sampling.draws import generator
from dpjax.sampling.registry import SCHEMES, Sizing
from dpjax.validate import UserError
from tests.refuses import refuses

_INNER = dp_accounting.GaussianDpEvent(1.0)


def _memberships(sampler, n, steps):
  taken = np.zeros((steps, n), bool)
  for step in range(steps):
    taken[step, sampler.draw(n, seed=7, step=step)] = True
  return taken


def test_poisson_sizes_are_binomial_and_members_independent():
  n, q, steps = 40, 0.3, 4000
  taken = _memberships(sampling.PoissonSampler(q, n), n, steps)
  sizes = np.bincount(taken.sum(1), minlength=n + 1)

  def pvalue(prob):
    expected = stats.binom.pmf(np.arange(n + 1), n, prob) * steps
    keep = expected > 5
    return stats.chisquare(
      np.append(sizes[keep], sizes[~keep].sum()),
      np.append(expected[keep], expected[~keep].sum()),
    ).pvalue

  assert pvalue(q) > 1e-3
  assert pvalue(q * 1.05) < 1e-6
  correlation = np.corrcoef(taken.T)[np.triu_indices(n, 1)]
  assert np.abs(correlation).max() < 5 / np.sqrt(steps)  # a fixed size would show -1/(n-1)
  assert abs(correlation.mean()) < 4 / np.sqrt(steps * n * (n - 1) / 2)


def test_fixed_size_is_uniform_without_repeats():
  n, size, steps = 12, 5, 4000
  taken = _memberships(sampling.FixedSizeSampler(size, n), n, steps)
  assert (taken.sum(1) == size).all()
  assert stats.chisquare(taken.sum(0)).pvalue > 1e-3
  correlation = np.corrcoef(taken.T)[np.triu_indices(n, 1)].mean()
  assert correlation == pytest.approx(-1 / (n - 1), abs=0.01)


def test_shuffled_visits_everyone_once_per_epoch_in_a_new_order():
  sampler = sampling.ShuffledSampler(batch_size=4)
  epochs = [
    np.concatenate([sampler.draw(12, seed=0, step=3 * e + t) for t in range(3)])
    for e in range(2)
  ]
  for epoch in epochs:
    np.testing.assert_array_equal(np.sort(epoch), np.arange(12))
  assert not np.array_equal(*epochs)


@given(seed=st.integers(0, 2**130), step=st.integers(0, 10**6))
def test_p16_a_draw_depends_on_seed_and_step_alone(seed, step):
  sampler = sampling.PoissonSampler(0.3, 50)
  first = sampler.draw(50, seed=seed, step=step)
  np.testing.assert_array_equal(first, sampler.draw(50, seed=seed, step=step))
  assert not np.array_equal(
    generator(seed, step).random(4), generator(seed, step + 1).random(4)
  )
  assert not np.array_equal(
    generator(seed, step).random(4), generator(seed + 1, step).random(4)
  )


def test_p13_each_sampler_declares_its_event_or_none():
  poisson = sampling.PoissonSampler(0.1, 10).event(_INNER)
  assert poisson == dp_accounting.PoissonSampledDpEvent(0.1, _INNER)
  fixed = sampling.FixedSizeSampler(3, 10).event(_INNER)
  assert fixed == dp_accounting.SampledWithoutReplacementDpEvent(10, 3, _INNER)
  assert sampling.ShuffledSampler(3).event(_INNER) is None
  assert sampling.ShuffledSampler(3).proved_under == ()


def test_p12_a_draw_above_capacity_raises_and_is_never_cut():
  sampler = sampling.PoissonSampler(sampling_prob=1.0, capacity=3)
  with refuses("capacity", value=3) as caught:
    sampler.draw(4, seed=0, step=0)
  assert "\n" not in str(caught.value)


def test_overflow_probability_against_simulation_and_fitted_capacity():
  sampler = sampling.PoissonSampler(0.3, 14)
  sizes = np.random.default_rng(0).binomial(40, 0.3, 200_000)
  assert np.exp(sampler.log_overflow_prob(40)) == pytest.approx(
    (sizes > 14).mean(), rel=0.03
  )
  fitted = sampling.PoissonSampler(0.01, 1).fit_to(60_000, log_overflow_prob=np.log(1e-12))
  assert fitted.log_overflow_prob(60_000) <= np.log(1e-12)
  smaller = sampling.PoissonSampler(0.01, fitted.capacity - 8)
  assert smaller.log_overflow_prob(60_000) > np.log(1e-12)


def test_p8_an_empty_draw_is_a_batch_like_any_other():
  drawn = sampling.PoissonSampler(1e-9, 4).draw(10, seed=0, step=0)
  indices, mask = batches.pad(drawn, 4)
  assert drawn.size == 0 and indices.shape == mask.shape == (4,) and not mask.any()


@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: sampling.PoissonSampler(1.5, 4), "sampling_prob"),
    (lambda: sampling.PoissonSampler(0, 4), "sampling_prob"),
    (lambda: sampling.PoissonSampler(0.1, 0), "capacity"),
    (lambda: sampling.FixedSizeSampler(5, 4), "batch_size"),
    (lambda: sampling.FixedSizeSampler(2, 4).draw(5, seed=0, step=0), "num_examples"),
    (lambda: sampling.ShuffledSampler(2.5), "batch_size"),
    (lambda: sampling.ShuffledSampler(9).draw(5, seed=0, step=0), "batch_size"),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field):
    make()


def test_p15_no_example_is_drawn_twice_in_one_step():
  samplers = (
    sampling.PoissonSampler(0.5, 40),
    sampling.FixedSizeSampler(20, 40),
    sampling.ShuffledSampler(20),
  )
  for sampler in samplers:
    for step in range(50):
      drawn = sampler.draw(40, seed=1, step=step)
      assert np.unique(drawn).size == drawn.size


@pytest.mark.parametrize("kind", [sampling.CyclicPoissonSampler, sampling.MinSepSampler])
def test_an_example_cannot_take_part_more_often_than_its_separation_allows(kind):
  ask = lambda prob: kind.sized(
    Sizing(prob, num_examples=100, num_steps=50, steps_apart=10, padded_batch_size=99)
  )
  assert ask(0.1).sampling_prob == pytest.approx(0.1)
  with pytest.raises(UserError, match="prob=0.5: must be <= 0.1") as caught:
    ask(0.5)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("prob", "apart", "turn_prob"), [(0.1, 4, 1 / 7), (0.25, 2, 1 / 3), (0.2, 5, 1.0)]
)
def test_min_sep_turns_come_as_often_as_the_sampling_probability_asks(
  prob, apart, turn_prob
):
  """Between two steps of an example: apart - 1 without it, then 1 / turn_prob on average."""
  size = Sizing(
    prob, num_examples=100, num_steps=50, steps_apart=apart, padded_batch_size=99
  )
  made = sampling.MinSepSampler.sized(size)
  assert made.turn_prob == pytest.approx(turn_prob) and made.steps_apart == apart
  assert 1 / prob == pytest.approx(apart - 1 + 1 / made.turn_prob)


@pytest.mark.parametrize(
  ("name", "asked", "nearest"),
  [
    ("balls_in_bins", 0.3, 1 / 4),
    ("cyclic", 0.45, 1 / 3),
    ("k_out_of_t", 0.3, 2 / 7),
    ("balls_in_bins", 0.25, 1 / 4),
    ("fixed_size", 0.304, 0.3),
    ("poisson", 0.3, 0.3),
  ],
)
def test_the_nearest_probability_of_whole_passes_is_the_largest_up_to_what_is_asked(
  name, asked, nearest
):
  size = Sizing(asked, num_examples=100, num_selected=2)
  assert SCHEMES[name].nearest_prob(size) == pytest.approx(nearest)


@pytest.mark.parametrize("name", ["fixed_size", "with_replacement"])
@pytest.mark.parametrize(
  ("prob", "num_examples", "may_leave", "batch_size", "least"),
  [(0.1, 100, 10, 10, 90), (0.25, 40, 8, 10, 32), (0.25, 40, 0, 10, 40)],
)
def test_a_fixed_size_is_charged_for_the_fewest_records_that_an_audit_may_leave(
  name, prob, num_examples, may_leave, batch_size, least
):
  size = Sizing(prob, num_examples, may_leave=may_leave, neighboring_relation=ADD)
  made = SCHEMES[name].kind.sized(size)
  assert (made.batch_size, made.num_examples) == (batch_size, least)
  assert not made.size_is_public
