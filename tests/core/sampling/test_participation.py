"""What a sampler declares about participation is what its trace shows."""

import itertools

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpjax import sampling
from dpjax.accounting.proved import NeighboringRelation
from tests.refuses import refuses

_INNER = dp_accounting.GaussianDpEvent(1.0)
_N = 60


def _samplers(steps_apart, steps):
  return (
    sampling.CyclicSampler(steps_per_pass=steps_apart, num_examples=_N),
    sampling.BallsInBinsSampler(num_bins=steps_apart, capacity=_N),
    sampling.CyclicPoissonSampler(turn_prob=0.5, num_groups=steps_apart, capacity=_N),
    sampling.MinSepSampler(
      turn_prob=0.4, steps_apart=steps_apart, num_steps=steps, capacity=_N
    ),
  )


def _trace(sampler, steps, seed=7, n=_N):
  """Whether example i takes part in step t: [steps, n]."""
  taken = np.zeros((steps, n), bool)
  for step in range(steps):
    taken[step, sampler.draw(n, seed=seed, step=step)] = True
  return taken


@settings(max_examples=25)
@given(steps_apart=st.integers(1, 9), steps=st.integers(1, 40), seed=st.integers(0, 2**130))
def test_p43_participation_is_enforced(steps_apart, steps, seed):
  for sampler in _samplers(steps_apart, steps):
    declared = sampler.participation
    assert declared.steps_apart == steps_apart
    for column in _trace(sampler, steps, seed).T:
      gaps = np.diff(np.flatnonzero(column))
      assert (gaps >= steps_apart).all()
      assert column.sum() <= -(-steps // steps_apart)
      if declared.cyclic:
        assert not (gaps % steps_apart).any()


def test_p43_the_check_above_can_fail():
  taken = _trace(sampling.PoissonSampler(0.5, _N), 40)
  gaps = [np.diff(np.flatnonzero(column)).min() for column in taken.T]
  assert min(gaps) == 1


def test_a_cyclic_pass_takes_everyone_once_in_the_same_batches():
  sampler = sampling.CyclicSampler(steps_per_pass=7, num_examples=_N)
  taken = _trace(sampler, 14)
  assert (taken[:7].sum(0) == 1).all()
  np.testing.assert_array_equal(taken[:7], taken[7:])
  sizes = taken.sum(1)
  assert sizes.max() <= sampler.padded_batch_size and sizes.max() - sizes.min() <= 1
  assert not np.array_equal(taken, _trace(sampler, 14, seed=8))


def test_balls_fall_uniformly_and_independently():
  sampler = sampling.BallsInBinsSampler(num_bins=4, capacity=40_000)
  taken = _trace(sampler, 4, n=40_000)
  assert (taken.sum(0) == 1).all()
  assert stats.chisquare(taken.sum(1)).pvalue > 1e-3
  sizes = [sampler.draw(400, seed=seed, step=0).size for seed in range(400)]
  spread = np.var(sizes) / (400 * 0.25 * 0.75)
  assert 0.75 < spread < 1.3  # binomial; a fixed partition would show 0


def test_cyclic_poisson_is_poisson_within_its_groups():
  prob, groups, n = 0.3, 4, 20_000
  sampler = sampling.CyclicPoissonSampler(turn_prob=prob, num_groups=groups, capacity=n)
  taken = _trace(sampler, 24, n=n)
  sizes = taken.sum(1)
  scale = np.sqrt(n * prob / groups)
  assert np.abs(sizes - n * prob / groups).max() < 5 * scale
  times = taken.sum(0)  # of 6 turns each
  expected = stats.binom.pmf(np.arange(7), 6, prob) * n
  observed = np.bincount(times, minlength=7)

  def pvalue(p):
    expected = stats.binom.pmf(np.arange(7), 6, p) * n
    expected = np.append(expected[:5], expected[5:].sum())
    return stats.chisquare(np.append(observed[:5], observed[5:].sum()), expected).pvalue

  assert expected.sum() == pytest.approx(n) and pvalue(prob) > 1e-3
  assert pvalue(prob * 1.05) < 1e-6


def test_one_group_is_poisson_sampling():
  cyclic = sampling.CyclicPoissonSampler(turn_prob=0.3, num_groups=1, capacity=_N)
  poisson = sampling.PoissonSampler(sampling_prob=0.3, capacity=_N)
  for step in range(5):
    np.testing.assert_array_equal(
      cyclic.draw(_N, seed=3, step=step), poisson.draw(_N, seed=3, step=step)
    )


def test_min_sep_batches_have_one_law_from_the_first_step_on():
  n, steps = 40_000, 30
  sampler = sampling.MinSepSampler(
    turn_prob=0.4, steps_apart=5, num_steps=steps, capacity=n
  )
  sizes = _trace(sampler, steps, n=n).sum(1)
  assert sampler.sampling_prob == pytest.approx(0.4 / 2.6)
  assert np.abs(sizes - n * sampler.sampling_prob).max() < 5 * np.sqrt(
    n * sampler.sampling_prob
  )
  assert abs(sizes[0] - n * 0.4) > 50 * np.sqrt(n * 0.4)  # a cold start would be there


def test_min_sep_with_certain_turns_takes_everyone_in_every_other_step():
  sampler = sampling.MinSepSampler(turn_prob=1.0, steps_apart=2, num_steps=9, capacity=_N)
  taken = _trace(sampler, 9)
  np.testing.assert_array_equal(taken[:-1] + taken[1:], 1)
  assert abs(taken[0].mean() - 0.5) < 5 * np.sqrt(0.25 / _N)


def test_coins_of_two_steps_are_independent_in_one_pass_and_in_the_next():
  """The n-th example of a group and the n-th of another one toss coins of their own."""
  sizes = {"num_groups": 3, "capacity": 90}
  full = sampling.CyclicPoissonSampler(turn_prob=1.0, **sizes)
  half = sampling.CyclicPoissonSampler(turn_prob=0.5, **sizes)
  coins = []
  for seed in range(40):
    tossed = [
      np.isin(full.draw(90, seed=seed, step=step), half.draw(90, seed=seed, step=step))
      for step in range(6)
    ]
    shortest = min(map(len, tossed))
    coins.append([heads[:shortest] for heads in tossed])
  coins = np.concatenate(coins, axis=1)
  correlation = np.corrcoef(coins)[np.triu_indices(6, 1)]
  assert coins.shape[1] > 500
  assert np.abs(correlation).max() < 5 / np.sqrt(coins.shape[1])


@given(seed=st.integers(0, 2**130), step=st.integers(0, 39))
@settings(max_examples=20)
def test_p16_draws_depend_on_seed_and_step_alone(seed, step):
  for sampler, again in zip(_samplers(5, 40), _samplers(5, 40)):
    later = sampler.draw(_N, seed=seed, step=39)
    first = again.draw(_N, seed=seed, step=step)
    np.testing.assert_array_equal(first, sampler.draw(_N, seed=seed, step=step))
    np.testing.assert_array_equal(later, again.draw(_N, seed=seed, step=39))


def test_the_partition_is_apart_from_the_steps_coins():
  sampler = sampling.CyclicPoissonSampler(turn_prob=0.5, num_groups=2, capacity=4000)
  groups = np.zeros(4000, int)
  for seed_step in (0, 1):
    full = sampling.CyclicPoissonSampler(turn_prob=1.0, num_groups=2, capacity=4000)
    groups[full.draw(4000, seed=0, step=seed_step)] = seed_step
  taken = np.zeros(4000)
  for step in (0, 1):
    taken[sampler.draw(4000, seed=0, step=step)] = 1
  table = [[np.sum((groups == g) & (taken == t)) for t in (0, 1)] for g in (0, 1)]
  assert stats.chi2_contingency(table).pvalue > 1e-3


def test_p13_relations_and_events_are_declared():
  cyclic, balls, poisson, min_sep = _samplers(5, 40)
  proved = lambda sampler: sampler.proved_under
  add_remove = NeighboringRelation.ADD_OR_REMOVE_ONE
  assert add_remove not in proved(cyclic)  # one example more moves the others
  for sampler in (balls, poisson, min_sep):
    assert add_remove in proved(sampler)
  assert NeighboringRelation.REPLACE_ONE not in proved(poisson)
  for sampler in (cyclic, balls, min_sep):
    assert sampler.event(_INNER) == _INNER and sampler.participation.turn_prob == 1
  assert poisson.event(_INNER) == dp_accounting.PoissonSampledDpEvent(0.5, _INNER)


def test_one_example_more_leaves_the_others_where_they_are_in_law_only_if_declared():
  """Add/remove needs: the others' positions do not depend on how many there are."""
  bins = sampling.BallsInBinsSampler(num_bins=3, capacity=_N)
  before, after = (_trace(bins, 3, n=n) for n in (_N - 1, _N))
  np.testing.assert_array_equal(before, after[:, :-1])
  moved = [
    _trace(sampling.CyclicSampler(steps_per_pass=3, num_examples=n), 3, n=n)
    for n in (_N - 1, _N)
  ]
  assert not np.array_equal(moved[0], moved[1][:, :-1])


def test_p12_a_draw_above_capacity_raises_and_its_chance_is_known():
  for sampler in (
    sampling.BallsInBinsSampler(num_bins=2, capacity=3),
    sampling.CyclicPoissonSampler(turn_prob=1.0, num_groups=2, capacity=3),
    sampling.MinSepSampler(turn_prob=1.0, steps_apart=2, num_steps=4, capacity=3),
  ):
    with refuses("capacity", value=3) as caught:
      sampler.draw(_N, seed=0, step=0)
    assert "\n" not in str(caught.value)
    exact = stats.binom.logsf(3, _N, 0.5)
    assert sampler.log_overflow_prob(_N) == pytest.approx(exact)
    assert sampler.log_overflow_prob(3) == -np.inf
    fitted = sampler.fit_to(_N, log_overflow_prob=-20)
    assert fitted.log_overflow_prob(_N) <= -20 and fitted.capacity % 8 == 0


def test_fitting_finds_the_smallest_capacity():
  for prob, n in itertools.product((0.01, 0.3), (1000, 60_000)):
    found = sampling.PoissonSampler(prob, 1).fit_to(n, log_overflow_prob=-25.0)
    less = sampling.PoissonSampler(prob, found.capacity - 8)
    assert found.capacity % 8 == 0
    assert found.log_overflow_prob(n) <= -25 < less.log_overflow_prob(n)


def test_p12_the_chance_of_an_overflow_is_a_number_also_below_the_smallest_float():
  """log P(Bin(n, p) > k), against the sum of its largest terms in extended precision."""
  n, prob = 4000, 0.01
  for capacity in (900, 1500, 3990):
    terms = stats.binom.logpmf(np.arange(capacity + 1, n + 1), n, prob)
    exact = np.logaddexp.reduce(terms)
    found = sampling.PoissonSampler(prob, capacity).log_overflow_prob(n)
    assert exact <= found <= exact + 10 and np.isfinite(found)
  falling = [
    sampling.PoissonSampler(prob, k).log_overflow_prob(n) for k in range(40, 3999, 40)
  ]
  assert all(later < earlier for earlier, later in itertools.pairwise(falling))


@pytest.mark.cases(long=[7, 8])
@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda: sampling.CyclicSampler(0, 4), "steps_per_pass"),
    (lambda: sampling.CyclicSampler(5, 4), "steps_per_pass"),
    (lambda: sampling.CyclicSampler(2, 4).draw(5, seed=0, step=0), "num_examples"),
    (lambda: sampling.BallsInBinsSampler(0, 4), "num_bins"),
    (lambda: sampling.CyclicPoissonSampler(1.5, 2, 4), "turn_prob"),
    (lambda: sampling.CyclicPoissonSampler(0.5, 0, 4), "num_groups"),
    (lambda: sampling.MinSepSampler(0.0, 2, 4, 4), "turn_prob"),
    (lambda: sampling.MinSepSampler(0.5, 0, 4, 4), "steps_apart"),
    (
      lambda: sampling.MinSepSampler(0.5, 2, 4, 4).draw(4, seed=0, step=4),
      "step",
    ),
  ],
)
def test_wrong_arguments_are_named(make, field):
  with refuses(field):
    make()
