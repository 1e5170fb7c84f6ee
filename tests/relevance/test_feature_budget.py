"""Shares and budgets against closed forms: oracles T6, T7, T9, T10, T12 of the design."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpjax.relevance import feature_budget, rigorous
from dpjax.relevance.feature_shares import l1_sensitivity, shares
from dpjax.relevance.settings import Rigorous
from tests.refuses import refuses

_SCORES = hnp.arrays(
  np.float32, hnp.array_shapes(min_dims=2, max_dims=4, max_side=4),
  elements=st.floats(-1e6, 1e6, width=32),
)  # fmt: skip


# --- the simplex


@given(scores=_SCORES, norm=st.sampled_from(["abs", "relu"]))
@settings(max_examples=50)
def test_every_row_of_shares_lies_on_the_simplex(scores, norm):
  p = shares(scores, norm)
  assert (p >= 0).all()
  np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-12)


def test_a_row_without_relevance_or_with_nan_is_uniform_not_dropped():
  p = shares(np.array([[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]]))
  assert p.tolist() == [[0.5, 0.5]] * 3


def test_c2_raw_shares_are_refused_where_a_relevance_is_negative():
  assert shares(np.array([[1.0, 3.0]]), "raw").tolist() == [[0.25, 0.75]]
  with refuses("rel_norm", value="raw"):
    shares(np.array([[1.0, 3.0], [3.0, -1.0]]), "raw")


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 20), d=st.integers(2, 30))
@settings(max_examples=50)
def test_t9_one_record_moves_the_mean_by_at_most_two_over_n(seed, n, d):
  rng = np.random.default_rng(seed)
  p = shares(rng.normal(size=(n, d)))
  other = p.copy()
  other[0] = shares(rng.normal(size=(1, d)) * 10 ** rng.uniform(-5, 5))[0]
  moved = np.abs(p.mean(axis=0) - other.mean(axis=0)).sum()
  assert moved <= l1_sensitivity(n) * (1 + 1e-9)
  assert moved / 2 <= l1_sensitivity(n, "add_or_remove_one") * (1 + 1e-9)


def test_t9_two_corners_of_the_simplex_attain_the_bound():
  p, other = np.eye(4)[[0, 2, 2]], np.eye(4)[[1, 2, 2]]
  assert np.abs(p.mean(axis=0) - other.mean(axis=0)).sum() == pytest.approx(2 / 3)


# --- beta


@given(
  noisy=hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e3, 1e3)),
  floor=st.floats(1e-6, 1.0),
  power=st.floats(0.2, 2.0),
)
@settings(max_examples=60)
def test_t6_beta_sums_to_one_is_floored_and_monotone(noisy, floor, power):
  beta = feature_budget.floor_normalized(noisy, floor, power)
  assert beta.sum() == pytest.approx(1)
  total = (np.maximum(noisy, floor) ** power).sum()
  assert (beta >= floor**power / total * (1 - 1e-9)).all() and (beta > 0).all()
  order = np.argsort(noisy)
  assert (np.diff(beta[order]) >= -1e-12).all()


# --- T7: the entropy rule


def test_t7_entropy_peaks_at_one_over_e_and_sums_to_at_most_log2_d():
  grid = np.linspace(1e-4, 1, 20_001)
  assert grid[feature_budget.entropy_bits(grid).argmax()] == pytest.approx(
    1 / math.e, abs=1e-4
  )
  assert feature_budget.entropy_bits([1 / math.e])[0] == pytest.approx(0.5307, abs=1e-4)
  for d, bits in ((784, 9.6147), (1024, 10.0)):
    assert feature_budget.entropy_bits(np.full(d, 1 / d)).sum() == pytest.approx(
      bits, abs=1e-4
    )
  rng = np.random.default_rng(0)
  assert feature_budget.entropy_bits(rng.dirichlet(np.ones(784))).sum() < math.log2(784)


@pytest.mark.parametrize(("r", "ratio"), [(1 / 784, 1.066), (5e-3, 0.087), (1e-4, 125)])
def test_t7_noise_to_signal(r, ratio):
  b = feature_budget.entropy_noise_scales([r], 60_000, 0.0)[0]
  assert b / r == pytest.approx(ratio, rel=0.01)


def test_a_feature_without_relevance_gets_infinite_noise_unless_floored():
  assert feature_budget.entropy_noise_scales([0.0, 1.0], 10, 0.0).tolist() == [math.inf] * 2
  assert feature_budget.entropy_noise_scales([0.0], 10, 0.5).tolist() == [0.2]


def test_t10_noise_whose_scale_depends_on_the_data_has_no_finite_epsilon():
  """C4: two neighbours with different shares have different scales, so the log-ratio of
  their densities grows without bound."""
  n, y = 100, np.array([10.0, 100.0, 1000.0])
  r, other = 0.30, 0.30 + 1 / n
  b, c = (feature_budget.entropy_noise_scales([share], n, 0.0)[0] for share in (r, other))
  log_density = lambda y, mean, scale: -np.abs(y - mean) / scale - np.log(2 * scale)
  ratio = log_density(y, r, b) - log_density(y, other, c)
  slope = 1 / c - 1 / b
  np.testing.assert_allclose(np.diff(ratio), slope * np.diff(y), rtol=1e-6)
  assert abs(ratio[-1]) > 100  # far above epsilon_1, which is at most 1 bit here


# --- T8, T12: scales


@pytest.mark.parametrize(
  ("preset", "scale"),
  [("P1", 256 * 784 / 2), ("P2", 784 / 2), ("P3", 0.5), ("P4", 0.5), ("P5", 0.5)],
)
def test_t8_the_scale_of_each_preset_at_uniform_beta(preset, scale):
  beta = feature_budget.uniform(784)
  b = feature_budget.PRESETS[preset].scales(beta, epsilon=2.0, batch_size=256)
  np.testing.assert_allclose(b, scale)
  draws = {"P4": "batch", "P5": "run"}
  assert feature_budget.PRESETS[preset].draw == draws.get(preset, "record_once")


def test_what_each_preset_proves_for_a_record():
  beta = np.random.default_rng(0).dirichlet(np.ones(784))
  proved = {
    name: feature_budget.local_epsilon(reading.scales(beta, epsilon=2.0, batch_size=256))
    for name, reading in feature_budget.PRESETS.items()
  }
  assert proved["P1"] == pytest.approx(2 / 256)
  assert proved["P2"] == pytest.approx(2)
  assert proved["P3"] == pytest.approx(784 * 2)


@given(seed=st.integers(0, 2**32 - 1), channels=st.sampled_from([1, 3]))
@settings(max_examples=30)
def test_t12_the_scales_of_c1_cost_exactly_epsilon(seed, channels):
  beta = np.random.default_rng(seed).dirichlet(np.ones(20)) + 1e-6
  beta /= beta.sum()
  how = Rigorous(features="laplace")
  drawn = rigorous.feature_noise(beta, how, epsilon=1.7, channels=channels)
  assert feature_budget.local_epsilon(drawn.scales, channels=channels) == pytest.approx(1.7)
