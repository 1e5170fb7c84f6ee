"""Draws of batch size: the distribution is that of one coin for each row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpjax import sampling
from dpjax.sampling import draws

_TRIALS = 6
_DRAWS = 20_000


def _one_coin_each(rng, num_trials, prob):
  return np.flatnonzero(rng.random(num_trials) < prob)


def _first_is_rarer(rng, num_trials, prob):
  """Counts a gap from 0, as a slip would."""
  places = np.cumsum(rng.geometric(prob, num_trials + 1))
  return places[places < num_trials]


def _size_is_fixed(rng, num_trials, prob):
  return np.sort(rng.choice(num_trials, round(prob * num_trials), replace=False))


def _size_is_rounded_poisson(rng, num_trials, prob):
  size = min(rng.poisson(prob * num_trials), num_trials)
  return np.sort(rng.choice(num_trials, size, replace=False))


def _p_value(draw, prob):
  """Of all subsets of six trials, by a chi-square test."""
  rng = np.random.default_rng(17)
  seen = np.zeros(2**_TRIALS)
  for _ in range(_DRAWS):
    seen[np.sum(2 ** draw(rng, _TRIALS, prob))] += 1
  sizes = np.array([subset.bit_count() for subset in range(2**_TRIALS)])
  wanted = _DRAWS * prob**sizes * (1 - prob) ** (_TRIALS - sizes)
  # Rare subsets are counted with the empty one.
  rare = (wanted < 10) | (sizes == 0)
  groups = lambda counts: np.append(counts[~rare], counts[rare].sum())
  return stats.chisquare(groups(seen), groups(wanted)).pvalue


@pytest.mark.parametrize("prob", [0.1, 0.5])
def test_every_subset_is_as_likely_as_with_one_coin_for_each_row(prob):
  assert _p_value(draws.successes, prob) > 1e-3
  assert _p_value(_one_coin_each, prob) > 1e-3
  wrong = (_first_is_rarer, _size_is_fixed, _size_is_rounded_poisson)
  assert all(_p_value(draw, prob) < 1e-6 for draw in wrong)


def test_the_number_of_rows_is_binomial_where_batches_are_small_parts_of_the_data():
  rng = np.random.default_rng(3)
  drawn = [draws.successes(rng, 10**7, 2e-6) for _ in range(4000)]
  sizes = np.array([rows.size for rows in drawn])
  law = stats.binom(10**7, 2e-6)
  edges = np.arange(13, 28)
  seen = np.histogram(sizes, [-np.inf, *edges, np.inf])[0]
  wanted = 4000 * np.diff([0, *law.cdf(edges - 1), 1])
  assert stats.chisquare(seen, wanted).pvalue > 1e-3
  places = np.concatenate(drawn) / 10**7
  assert stats.kstest(places, "uniform").pvalue > 1e-3


@settings(max_examples=60)
@given(
  st.integers(0, 2000),
  st.floats(0, 1, exclude_min=True, allow_subnormal=True),
  st.integers(0, 2**32),
)
def test_rows_rise_and_do_not_depend_on_how_many_follow(num_trials, prob, seed):
  rows, more = (
    draws.successes(draws.generator(seed, 0), size, prob)
    for size in (num_trials, num_trials + 700)
  )
  assert rows.dtype == np.int64
  assert np.all(np.diff(rows) > 0)
  np.testing.assert_array_equal(rows, more[more < num_trials])


@pytest.mark.parametrize("prob", [5e-324, 1e-300, 1e-17, 1.0])
def test_chances_at_the_ends(prob):
  rows = draws.successes(np.random.default_rng(0), 10**6, prob)
  assert rows.size == (10**6 if prob == 1 else 0)


def test_a_draw_of_a_billion_rows_is_as_large_as_its_batch():
  sampler = sampling.PoissonSampler(sampling_prob=1e-7, capacity=200)
  rows = sampler.draw(10**9, seed=1, step=2)
  assert 50 < rows.size < 160
  assert rows.max() > 10**8


@pytest.mark.parametrize(
  "sampler",
  [
    sampling.ShuffledSampler(batch_size=7, num_examples=100),
    sampling.RandomAllocationSampler(steps_per_pass=9, capacity=100),
    sampling.BallsInBinsSampler(num_bins=9, capacity=100),
    sampling.CyclicSampler(steps_per_pass=9, num_examples=100),
    sampling.MinSepSampler(turn_prob=0.3, steps_apart=4, num_steps=40, capacity=100),
  ],
  ids=lambda sampler: sampler.name,
)
def test_what_a_pass_keeps_is_no_draw_that_a_caller_can_change(sampler):
  first = sampler.draw(100, seed=3, step=2)
  kept = first.copy()
  first[:] = 0
  np.testing.assert_array_equal(sampler.draw(100, seed=3, step=2), kept)
  # Another run in turns, and a step of another pass, change nothing either.
  for seed, step in [(4, 2), (3, 20), (5, 0), (3, 2)]:
    again = sampler.draw(100, seed=seed, step=step)
  np.testing.assert_array_equal(again, kept)


def test_what_is_kept_cannot_be_written():
  kept = draws.assign(1, 2, count=3, num_examples=9)
  for array in (*kept, draws.permutation(1, 2, num_examples=9)):
    with pytest.raises(ValueError, match="read-only"):
      array[0] = 1


@pytest.mark.parametrize("prob", [1e-18, 5e-324])
def test_long_waits_of_min_sep_do_not_overflow(prob):
  sampler = sampling.MinSepSampler(turn_prob=prob, steps_apart=2, num_steps=20, capacity=50)
  assert [sampler.draw(50, seed=1, step=step).size for step in range(20)] == [0] * 20


def test_groups_of_more_numbers_than_16_bits_hold():
  numbers = np.array([70_000, 3, 70_000, 0])
  grouped = draws.groups(numbers, 70_001)
  assert grouped.of(70_000).tolist() == [0, 2]
  assert grouped.of(3).tolist() == [1]
  assert grouped.of(5).tolist() == []
