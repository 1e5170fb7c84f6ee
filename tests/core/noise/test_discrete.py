"""Integer noise: its law both ways, rounding within the stated bound, and the ring."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpjax.noise import discrete
from tests.refuses import refuses


def _gaussian_pmf(variance, reach=60):
  x = np.arange(-reach, reach + 1)
  weight = np.exp(-(x**2) / (2 * variance))
  return x, weight / weight.sum()


def _pvalue(draws, x, pmf):
  """Chi-square of draws against a pmf, cells of expectation below 5 pooled."""
  counts = np.array([(draws == value).sum() for value in x])
  expected = pmf * draws.size
  keep = expected >= 5
  pooled = lambda a, rest: np.append(a[keep], rest)
  observed = pooled(counts, draws.size - counts[keep].sum())
  wanted = pooled(expected, draws.size - expected[keep].sum())
  return stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue


@pytest.mark.cases(slow=["1", "2", "5"])
@pytest.mark.parametrize("variance", [1, 2, 5, 30])
def test_discrete_gaussian_has_its_pmf_and_no_other(variance):
  draws = discrete.discrete_gaussian(np.random.default_rng(1), 120_000, variance=variance)
  assert _pvalue(draws, *_gaussian_pmf(variance)) > 1e-3
  assert _pvalue(draws, *_gaussian_pmf(variance * 1.05)) < 1e-6


def test_rounded_gaussian_noise_is_not_discrete_gaussian_noise():
  draws = np.round(np.random.default_rng(0).normal(0, 1, 120_000)).astype(int)
  assert _pvalue(draws, *_gaussian_pmf(1)) < 1e-6


def test_discrete_gaussian_of_large_variance_stays_in_64_bits():
  draws = discrete.discrete_gaussian(np.random.default_rng(2), 20_000, variance=2**24)
  assert stats.kstest(draws / 2**12, "norm").pvalue > 1e-3
  assert stats.kstest(draws / (2**12 * 1.05), "norm").pvalue < 1e-3
  with refuses("variance", value=16777217):
    discrete.discrete_gaussian(np.random.default_rng(2), 3, variance=2**24 + 1)


@pytest.mark.parametrize("numerator", [0, 1, 5, 6, 7, 20])
def test_bernoulli_exp_is_exact(numerator):
  n = 60_000
  hits = discrete._bernoulli_exp(np.random.default_rng(3), np.full(n, numerator), 6).sum()
  assert stats.binomtest(int(hits), n, math.exp(-numerator / 6)).pvalue > 1e-3
  if 0 < numerator < 20:
    assert stats.binomtest(int(hits), n, math.exp(-numerator / 6) * 1.1).pvalue < 1e-3


@pytest.mark.parametrize("variance", [0.3, 2.0, 40.0])
def test_skellam_has_its_pmf_and_shares_add_up_to_it(variance):
  rng = np.random.default_rng(4)
  x = np.arange(-80, 81)
  law = lambda v: stats.skellam.pmf(x, v / 2, v / 2)
  draws = discrete.skellam(rng, 100_000, variance=variance)
  shares = sum(discrete.skellam(rng, 100_000, variance=variance / 5) for _ in range(5))
  for sample in (draws, shares):
    assert _pvalue(sample, x, law(variance)) > 1e-3
    assert _pvalue(sample, x, law(variance * 1.06)) < 1e-6


@settings(max_examples=40)
@given(
  seed=st.integers(0, 2**32),
  dim=st.integers(1, 60),
  norm=st.floats(0.01, 500),
  beta=st.sampled_from([0.0, discrete.BETA, 0.9]),
)
def test_p38_after_rounding_the_norm_is_within_the_inflated_bound(seed, dim, norm, beta):
  rng = np.random.default_rng(seed)
  vector = rng.normal(size=dim)
  vector *= norm / np.linalg.norm(vector)
  rounded = discrete.round_randomly(rng, vector, l2_norm=norm, beta=beta)
  assert np.linalg.norm(rounded) <= discrete.rounded_norm_bound(norm, dim=dim, beta=beta)
  assert np.abs(rounded - vector).max() < 1


def test_p21_the_worst_case_of_rounding_is_longer_than_the_clip_norm():
  """All coordinates just above zero: rounded up together they have norm sqrt(d). The norm
  before rounding, as sensitivity, would be wrong by far."""
  dim, norm = 400, 1.0
  vector = np.full(dim, norm / math.sqrt(dim))
  rng = np.random.default_rng(0)
  lengths = [
    np.linalg.norm(discrete.round_randomly(rng, vector, l2_norm=norm)) for _ in range(50)
  ]
  assert min(lengths) > 3 * norm
  assert max(lengths) <= discrete.rounded_norm_bound(norm, dim=dim)
  everything_up = np.ceil(vector).astype(int)
  assert not discrete.within(everything_up, discrete.rounded_norm_bound(norm, dim=dim))
  worst = discrete.rounded_norm_bound(norm, dim=dim, beta=0.0)
  assert discrete.within(everything_up, worst)


def test_p21_a_loose_tail_is_drawn_again_and_not_let_through():
  """beta near 1 makes the bound fail about as often as not: every result still keeps it."""
  rng, dim = np.random.default_rng(5), 50
  vector = np.full(dim, 0.5)
  norm = float(np.linalg.norm(vector))
  bound = discrete.rounded_norm_bound(norm, dim=dim, beta=0.999)
  plain = np.floor(vector + rng.random((2000, dim)))
  assert 0.05 < (np.linalg.norm(plain, axis=1) > bound).mean() < 0.9
  for _ in range(300):
    rounded = discrete.round_randomly(rng, vector, l2_norm=norm, beta=0.999)
    assert np.linalg.norm(rounded) <= bound


def test_rounding_keeps_the_mean_but_for_the_bound():
  rng = np.random.default_rng(6)
  vector = np.array([0.25, -1.75, 3.5])
  norm = float(np.linalg.norm(vector))
  mean = np.mean(
    [discrete.round_randomly(rng, vector, l2_norm=norm, beta=0.0) for _ in range(8000)], 0
  )
  np.testing.assert_allclose(mean, vector, atol=0.03)


def test_squares_beyond_64_bits_do_not_overflow():
  huge = np.array([3_000_000_000, 3_000_000_000, 3_000_000_000])
  assert not discrete.within(huge, 5e9)
  assert discrete.within(huge, 5.2e9)


def test_p21_wrapping_is_modular_and_rarer_than_its_bound():
  rng, modulus = np.random.default_rng(7), 64
  sums = rng.integers(-10_000, 10_000, 1000)
  wrapped = discrete.wrap(sums, modulus)
  assert wrapped.min() >= -32 and wrapped.max() <= 31
  np.testing.assert_array_equal((wrapped - sums) % modulus, 0)
  for noise, draw in (
    ("skellam", lambda: discrete.skellam(rng, 200_000, variance=40.0)),
    ("discrete_gaussian", lambda: discrete.discrete_gaussian(rng, 200_000, variance=40)),
  ):
    bound = discrete.wrap_probability(
      modulus=modulus, largest_sum=10, variance=40.0, dim=1, noise=noise
    )
    noisy = 10 + draw()
    happened = (noisy != discrete.wrap(noisy, modulus)).mean()
    assert 0 < happened <= bound < 0.01
  full = dict(modulus=64, variance=1.0, dim=1, noise="skellam")
  assert discrete.wrap_probability(largest_sum=32, **full) == 1


def test_clients_integers_come_back_as_their_sum():
  rng, clients, dim, bits = np.random.default_rng(8), 20, 30, 16
  vectors = rng.normal(size=(clients, dim))
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  scale = discrete.scale_for(
    l2_clip_norm=1.0, noise_multiplier=1.0, num_clients=clients, bits=bits
  )
  share = scale**2 / clients  # together noise_multiplier 1
  sent = [
    discrete.encode(rng, vector, l2_clip_norm=1.0, scale=scale)
    + discrete.skellam(rng, dim, variance=share)
    for vector in vectors
  ]
  total = np.sum(sent, axis=0) % 2**bits  # what secure aggregation adds up
  error = discrete.decode(total, modulus=2**bits, scale=scale) - vectors.sum(0)
  assert np.sqrt((error**2).mean()) == pytest.approx(1.0, rel=0.3)


@pytest.mark.cases(long=[7, 8])
@pytest.mark.parametrize(
  ("make", "field"),
  [
    (lambda rng: discrete.discrete_gaussian(rng, 3, variance=2.5), "variance"),
    (lambda rng: discrete.skellam(rng, 3, variance=0.0), "variance"),
    # NumPy's draws are even from 2^54 on: the parity of the sum would be bare
    (lambda rng: discrete.skellam(rng, 3, variance=2.0**55), "variance"),
    (lambda rng: discrete.skellam(rng, 3, variance=1e30), "variance"),
    (lambda rng: discrete.round_randomly(rng, [3.0], l2_norm=1.0), "vector"),
    (lambda rng: discrete.round_randomly(rng, [math.nan], l2_norm=1.0), "vector"),
    (lambda rng: discrete.wrap(np.array([0.5]), 8), "values"),
    (lambda rng: discrete.rounded_norm_bound(1.0, dim=3, beta=1.0), "beta"),
    (
      lambda rng: discrete.scale_for(
        l2_clip_norm=1.0, noise_multiplier=1.0, num_clients=200, bits=8
      ),
      "bits",
    ),
  ],
)
def test_bad_input_is_one_line(make, field):
  with refuses(field) as caught:
    make(np.random.default_rng(0))
  assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_wide_noise_has_the_law_of_the_other_sampler(monkeypatch):
  """The same algorithm in unbounded integers: at a small variance by its pmf."""
  monkeypatch.setattr(discrete, "MAX_VARIANCE", 0)
  draws = discrete.wide_discrete_gaussian(np.random.default_rng(1), 5_000, variance=5)
  assert _pvalue(draws, *_gaussian_pmf(5)) > 1e-3
  assert _pvalue(draws, *_gaussian_pmf(6.5)) < 1e-6


def test_wide_noise_of_the_largest_variance_is_not_cut():
  variance = discrete.MAX_WIDE_VARIANCE
  draws = discrete.wide_discrete_gaussian(np.random.default_rng(2), 800, variance=variance)
  assert stats.kstest(draws / 2.0**56, "norm").pvalue > 1e-3
  assert stats.kstest(draws / 2.0**56 / 1.3, "norm").pvalue < 1e-3
  # No lattice: the lowest bit is as good as a coin.
  assert stats.binomtest(int((draws & 1).sum()), 800).pvalue > 1e-3
  with refuses("variance", value=5192296858534827628530496329220097):
    discrete.wide_discrete_gaussian(np.random.default_rng(2), 3, variance=variance + 1)
