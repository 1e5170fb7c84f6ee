"""Means, histograms and quantiles: neighbours, laws, bounds, bad input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpjax import accounting, mechanisms
from tests.refuses import refuses

_AGES = jnp.array([20.0, 30.0, 40.0, 90.0])
_DRAWS = 20_000


def _draws(mechanism, data, key=0):
  keys = jax.random.split(jax.random.key(key), _DRAWS)
  return np.asarray(jax.vmap(mechanism, (0, None))(keys, data), np.float64)


def _cost(mechanism, relation, delta=1e-9):
  event = mechanism.event(relation)
  return accounting.epsilon(event, delta=delta, neighboring_relation=relation)


# --- the mean


def test_the_mean_of_much_data_is_near_the_true_one_under_both_relations():
  """Bounds whose sum is not their difference; the noise is a thousandth of their distance."""
  many = jnp.linspace(1.0, 6.0, 20_000)  # their mean is not that of the bounds
  for relation in ("replace_one", "add_or_remove_one"):
    mechanism = mechanisms.BoundedMean(
      2.0, lower=-2.0, upper=5.0, neighboring_relation=relation
    )
    found = float(mechanism(jax.random.key(0), many))
    assert found == pytest.approx(np.clip(many, -2, 5).mean(), abs=7e-3)


@pytest.mark.long
def test_row_9_the_mean_age_has_noise_of_range_over_n_and_no_less():
  mechanism = mechanisms.BoundedMean(epsilon=1.0, lower=0.0, upper=100.0)
  sample = _draws(mechanism, _AGES) - 45
  assert stats.kstest(sample / 25, "laplace").pvalue > 1e-3  # 100 / 4 / epsilon
  assert stats.kstest(sample / 0.25, "laplace").pvalue < 1e-6  # document 003: 1 / 4
  assert _cost(mechanism, "replace_one") == pytest.approx(1.0, rel=2e-3)


@given(
  values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8),
  new=st.floats(-1e3, 1e3),
)
def test_row_9_replacing_a_record_moves_the_mean_within_the_noise(values, new):
  mechanism = mechanisms.BoundedMean(epsilon=0.7, lower=-10.0, upper=50.0)
  clip = lambda x: np.clip(x, -10, 50)
  moved = abs(clip(values).mean() - clip([*values[:-1], new]).mean())
  scale = mechanism.noise(num_records=len(values)).scale
  assert moved / scale <= 0.7 * (1 + 1e-9)
  attained = (50 - -10) / len(values) / scale
  assert attained == pytest.approx(0.7)


@pytest.mark.long
def test_p9_with_a_private_count_the_sum_and_the_count_share_epsilon():
  """One record moves (centred sum / half width, count) by at most 2 in L1."""
  mechanism = mechanisms.BoundedMean(
    epsilon=2.0, lower=0.0, upper=10.0, neighboring_relation="add_or_remove_one"
  )
  noise = mechanism.noise(num_records=1)
  assert (noise.l1_sensitivity, noise.scale) == (2.0, 1.0)
  for added in np.linspace(-5, 15, 9):
    move = np.array([(np.clip(added, 0, 10) - 5) / 5, 1.0])
    assert np.abs(move).sum() / noise.scale <= 2.0
  assert _cost(mechanism, "add_or_remove_one") == pytest.approx(2.0, rel=2e-3)
  many = jnp.full(5_000, 3.0)
  assert np.abs(_draws(mechanism, many)[:500] - 3).max() < 0.1
  none = _draws(mechanism, jnp.zeros(0))
  assert ((none >= 0) & (none <= 10)).all()
  with refuses("num_records"):
    mechanisms.BoundedMean(1.0, 0.0, 1.0)(jax.random.key(0), jnp.zeros(0))


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_with_delta_the_noise_is_analytic_gaussian(relation):
  mechanism = mechanisms.BoundedMean(
    2.0, 0.0, 10.0, delta=1e-5, neighboring_relation=relation
  )
  assert isinstance(mechanism.noise(num_records=5), mechanisms.Gaussian)
  found = accounting.epsilon(
    mechanism.event(relation), delta=1e-5, neighboring_relation=relation
  )
  assert found == pytest.approx(2.0, rel=1e-3)


@pytest.mark.slow
def test_nan_and_infinity_are_bounded_like_all_others():
  exact = mechanisms.BoundedMean(epsilon=1e9, lower=0.0, upper=10.0)
  values = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 4.0])
  assert float(exact(jax.random.key(0), values)) == pytest.approx((5 + 10 + 0 + 4) / 4)
  ints = exact(jax.random.key(0), jnp.array([1, 2]))
  assert float(ints) == pytest.approx(1.5)


# --- the histogram


@pytest.mark.long
def test_the_histogram_counts_and_adds_the_stated_noise():
  bins = jnp.array([0, 2, 2, 7, -1])  # two of them outside
  mechanism = mechanisms.Histogram(epsilon=0.5, num_bins=3)
  assert mechanism.counts(bins).tolist() == [1, 0, 2]
  residuals = (_draws(mechanism, bins)[:, 2] - 2) / 2
  assert stats.kstest(residuals, "laplace").pvalue > 1e-3
  assert stats.kstest(residuals / 1.1, "laplace").pvalue < 1e-6


@pytest.mark.cases(long=["add_or_remove_one-2.0"])
@pytest.mark.parametrize(
  "relation, scale", [("add_or_remove_one", 2.0), ("replace_one", 4.0)]
)
def test_p9_the_histogram_under_both_relations(relation, scale):
  mechanism = mechanisms.Histogram(0.5, 3, neighboring_relation=relation)
  assert mechanism.noise.scale == scale
  one = np.asarray(mechanism.counts(jnp.array([0, 1, 1])))
  other = jnp.array([0, 1, 2] if relation == "replace_one" else [0, 1])
  loss = np.abs(one - np.asarray(mechanism.counts(other))).sum() / scale
  assert loss == pytest.approx(0.5)  # attained
  assert _cost(mechanism, relation) == pytest.approx(0.5, rel=2e-3)
  gaussian = mechanisms.Histogram(0.5, 3, delta=1e-5, neighboring_relation=relation)
  assert gaussian.noise.l2_sensitivity == pytest.approx(math.sqrt(scale / 2))


# --- the quantile


def _density(mechanism, values, points):
  """exp(-|rank - q n| / scale), normalised over [lower, upper]: Smith's density."""
  values = np.clip(values, mechanism.lower, mechanism.upper)
  score = lambda at: (
    -np.abs((values[None] < at[:, None]).sum(1) - mechanism.quantile * len(values))
  )
  knots = np.unique([mechanism.lower, *values, mechanism.upper])
  middles, widths = (knots[1:] + knots[:-1]) / 2, np.diff(knots)
  total = np.sum(widths * np.exp(score(middles) / mechanism.scale))
  return np.exp(score(np.asarray(points)) / mechanism.scale) / total


def test_a_histogram_of_nobody_is_noise_around_zero():
  mechanism = mechanisms.Histogram(0.5, 3)
  np.testing.assert_array_equal(mechanism.counts([]), [0, 0, 0])
  assert mechanism(jax.random.key(0), []).shape == (3,)


def test_a_median_lies_between_the_middle_records_and_anywhere_there():
  mechanism = mechanisms.Quantile(100.0, 0.0, 10.0)
  values = jnp.array([2.0, 2.0, 2.0, 8.0, 8.0, 8.0])
  keys = jax.random.split(jax.random.key(0), 200)
  drawn = np.asarray(jax.jit(jax.vmap(lambda key: mechanism(key, values)))(keys))
  assert 2 <= drawn.min() < 2.3 and 7.7 < drawn.max() <= 8
  assert drawn.mean() == pytest.approx(5, abs=0.5)


@pytest.mark.long
@pytest.mark.parametrize("quantile", [0.25, 0.5])
def test_quantiles_follow_the_exact_density_and_no_other(quantile):
  values = np.array([1.0, 2.0, 2.5, 6.0, 30.0])
  mechanism = mechanisms.Quantile(2.0, 0.0, 10.0, quantile=quantile)
  grid = np.linspace(0, 10, 20_001)
  middles = (grid[1:] + grid[:-1]) / 2
  cdf = lambda m: (
    lambda x: np.interp(
      x, grid, np.r_[0, np.cumsum(_density(m, values, middles)) * 10 / 20_000]
    )
  )
  sample = _draws(mechanism, jnp.array(values, jnp.float32))
  assert stats.kstest(sample, cdf(mechanism)).pvalue > 1e-3
  for wrong in (1.5, 2.7):
    other = mechanisms.Quantile(wrong, 0.0, 10.0, quantile=quantile)
    assert stats.kstest(sample, cdf(other)).pvalue < 1e-6


def test_intervals_have_the_mass_of_the_exact_density():
  values = np.array([1.0, 2.0, 2.5, 6.0, 9.0])
  mechanism = mechanisms.Quantile(2.0, 0.0, 10.0, quantile=0.25)
  edges, logs = mechanism.intervals(jnp.array(values, jnp.float32))
  edges = np.asarray(edges, np.float64) * 10 / edges[-1]
  mass = np.exp(np.asarray(logs, np.float64))
  exact = _density(mechanism, values, (edges[1:] + edges[:-1]) / 2) * np.diff(edges)
  np.testing.assert_allclose(mass / mass.sum(), exact, rtol=1e-5)


@pytest.mark.cases(long=["replace_one"])
@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
@given(
  values=st.lists(st.integers(0, 20), min_size=1, max_size=6),
  new=st.integers(0, 20),
  quantile=st.sampled_from([0.1, 0.5, 0.8]),
)
def test_no_neighbours_have_a_larger_density_ratio(relation, values, new, quantile):
  mechanism = mechanisms.Quantile(
    1.0, 0.0, 20.0, quantile=quantile, neighboring_relation=relation
  )
  other = [*values[:-1], new] if relation == "replace_one" else values[:-1]
  points = np.arange(20) + 0.5
  one, two = (_density(mechanism, np.array(v, float), points) for v in (values, other))
  assert np.abs(np.log(one / two)).max() <= 1.0 * (1 + 1e-9)


def test_half_of_the_quantile_noise_would_be_too_little():
  mechanism = mechanisms.Quantile(1.0, 0.0, 20.0, neighboring_relation="replace_one")
  halved = mechanisms.Quantile(2.0, 0.0, 20.0, neighboring_relation="replace_one")
  one, two = np.array([0.0, 0.0, 1.0, 20.0]), np.array([0.0, 1.0, 20.0, 20.0])
  points = np.arange(20) + 0.5
  loss = lambda m: np.abs(np.log(_density(m, one, points) / _density(m, two, points))).max()
  assert 0.9 < loss(mechanism) <= 1.0 < 1.8 < loss(halved)


@pytest.mark.long
def test_quantile_edge_cases():
  mechanism = mechanisms.Quantile(1.0, 0.0, 10.0)
  empty = _draws(mechanism, jnp.zeros(0))
  assert stats.kstest(empty / 10, "uniform").pvalue > 1e-3
  ties = _draws(mechanism, jnp.array([5.0, 5.0, jnp.nan, jnp.nan]))
  assert np.isfinite(ties).all() and ((ties >= 0) & (ties <= 10)).all()
  at_the_end = mechanisms.Quantile(50.0, 0.0, 10.0)
  near = _draws(at_the_end, jnp.concatenate([jnp.zeros(50), jnp.full(50, 10.0)]))
  assert np.isfinite(near).all()


@pytest.mark.cases(long=[10, 11, 12])
@pytest.mark.parametrize(
  "call, field",
  [
    (lambda: mechanisms.BoundedMean(-1.0, 0.0, 1.0), "epsilon"),
    (lambda: mechanisms.BoundedMean(1.0, 1.0, 0.0), "upper"),
    (lambda: mechanisms.BoundedMean(1.0, 0.0, math.inf), "upper"),
    (lambda: mechanisms.BoundedMean(1.0, 0.0, 1.0, delta=1.5), "delta"),
    (lambda: mechanisms.BoundedMean(1.0, 0.0, 1.0, delta=-1e-5), "delta"),
    (
      lambda: mechanisms.BoundedMean(1.0, 0.0, 1.0, neighboring_relation="replace"),
      "neighboring_relation",
    ),
    (lambda: mechanisms.Histogram(1.0, 0), "num_bins"),
    (lambda: mechanisms.Histogram(math.nan, 3), "epsilon"),
    (lambda: mechanisms.Quantile(1.0, 0.0, 1.0, quantile=1.0), "quantile"),
    (lambda: mechanisms.Quantile(1.0, math.nan, 1.0), "lower"),
    (lambda: mechanisms.Quantile(1.0, 0.0, 1.0)(jax.random.key(0), 1.0), "values"),
    (
      lambda: mechanisms.BoundedMean(1.0, 0.0, 1.0)(jax.random.key(0), jnp.ones((2, 2))),
      "values",
    ),
    (
      lambda: mechanisms.Histogram(1.0, 3)(jax.random.key(0), jnp.ones(2)),
      "bins",
    ),
  ],
)
def test_bad_input_is_one_line(call, field):
  with refuses(field) as info:
    call()
  assert "\n" not in str(info.value)
