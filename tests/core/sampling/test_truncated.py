"""The truncated Poisson sampler: its law, its event, its words."""

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from dpjax import sampling
from tests.refuses import refuses

_SAMPLER = sampling.TruncatedPoissonSampler(sampling_prob=0.4, capacity=4, num_examples=10)


def _memberships(steps):
  taken = np.zeros((steps, 10), bool)
  for step in range(steps):
    taken[step, _SAMPLER.draw(10, seed=3, step=step)] = True
  return taken


def test_sizes_are_a_cut_binomial_and_the_kept_ones_uniform():
  steps = 6000
  taken = _memberships(steps)
  probs = stats.binom.pmf(np.arange(5), 10, 0.4)
  probs[4] = stats.binom.sf(3, 10, 0.4)
  sizes = np.bincount(taken.sum(1), minlength=5)
  assert stats.chisquare(sizes, probs * steps).pvalue > 1e-3
  uncut = stats.binom.pmf(np.arange(5), 10, 0.4)
  assert stats.chisquare(sizes, uncut / uncut.sum() * steps).pvalue < 1e-6
  assert stats.chisquare(taken.sum(0)).pvalue > 1e-3  # everyone alike, first and last too
  full = taken[taken.sum(1) == 4]
  pairs = np.array([full[:, i] @ full[:, j] for i in range(10) for j in range(i)])
  assert stats.chisquare(pairs).pvalue > 1e-3  # every pair alike: uniform subsets


def test_p12_the_event_is_never_plain_poisson_and_needs_gaussian_noise():
  event = _SAMPLER.event(dp_accounting.GaussianDpEvent(1.5))
  assert event == dp_accounting.TruncatedSubsampledGaussianDpEvent(10, 0.4, 4, 1.5)
  assert _SAMPLER.proved_under == ("replace_special",)
  with refuses("sampler"):
    _SAMPLER.event(dp_accounting.LaplaceDpEvent(1.0))


def test_p15_p16_no_repeats_and_a_function_of_seed_and_step():
  for step in range(50):
    drawn = _SAMPLER.draw(10, seed=1, step=step)
    assert np.unique(drawn).size == drawn.size <= _SAMPLER.padded_batch_size
    np.testing.assert_array_equal(drawn, _SAMPLER.draw(10, seed=1, step=step))


@pytest.mark.cases(long=[2, 3])
@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: sampling.TruncatedPoissonSampler(1.5, 4, 9), "sampling_prob"),
    (lambda: sampling.TruncatedPoissonSampler(0.5, 0, 9), "capacity"),
    (lambda: sampling.TruncatedPoissonSampler(0.5, 4, 9.5), "num_examples"),
    (lambda: _SAMPLER.draw(11, seed=0, step=0), "num_examples"),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field):
    make()
