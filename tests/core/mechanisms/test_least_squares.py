"""Least squares by noisy sums: sensitivity by search, exact sums, law of the noise, ridge."""

import jax
import numpy as np
import pytest
from scipy import optimize, stats
from sklearn.linear_model import Ridge

from dpjax import accounting
from dpjax.mechanisms import least_squares, stated
from dpjax.mechanisms.additive import gaussian_delta
from dpjax.mechanisms.least_squares import (
  LeastSquares,
  centred_labels,
  centred_norm,
  exact_sums,
  joint_sensitivity,
)
from tests.refuses import refuses

_UNIT = 2.0**-38
_WEIGHTS = (0.0, 0.3, 0.7, 0.71, 1.0, 3.0)


def _vector(weight, z, t):
  """Returns v(z, t), written out: the matrix in full, whose Frobenius norm is |U|."""
  return np.concatenate([weight * np.outer(z, z).ravel(), np.outer(z, t).ravel()])


def _clipped(row):
  return row / max(1.0, float(np.linalg.norm(row)))


@pytest.mark.parametrize("weight", _WEIGHTS)
def test_the_sensitivity_is_what_a_search_reaches_and_never_passes(weight):
  rng = np.random.default_rng(3)

  def moved(numbers):
    z, other_z, t, other_t = (_clipped(row) for row in numbers.reshape(4, 2))
    step = _vector(weight, z, t) - _vector(weight, other_z, other_t)
    return float(np.linalg.norm(step))

  bound = joint_sensitivity(weight, "replace_one")
  starts = 4 * rng.normal(size=(400, 8))
  reached = [moved(start) for start in starts]
  # The strongest starts are searched further: a climb finds the correlated pair.
  for start in starts[np.argsort(reached)[-4:]]:
    climbed = optimize.minimize(
      lambda numbers: -moved(numbers), start, method="Nelder-Mead", options={"maxfev": 900}
    )
    reached.append(-climbed.fun)
  assert max(reached) <= bound * (1 + 1e-12)
  assert max(reached) >= 0.99 * bound
  added = [
    np.linalg.norm(_vector(weight, *(_clipped(row) for row in numbers.reshape(2, 2))))
    for numbers in 4 * rng.normal(size=(400, 4))
  ]
  alone = joint_sensitivity(weight)
  assert 0.99 * alone <= max(added) <= alone * (1 + 1e-12)


def test_the_joint_bound_is_below_that_of_two_releases_and_of_two_hops():
  for weight in (0.6, 1.0, 2.0):
    square = joint_sensitivity(weight, "replace_one") ** 2
    assert square < 2 * weight**2 + 4 < (2 * joint_sensitivity(weight)) ** 2


# Rows that clipping, rounding and summing might each let past the bound.
_HOSTILE = np.array(
  [
    [1e200, 1e200, 0.0],
    [1.0, 1.0, 0.0],
    [np.nextafter(1.0, 2.0), 0.0, 0.0],
    [1e-320, 0.0, 0.0],
    [0.1, -0.7, 0.7071067811865476],
    [np.inf, 0.0, 0.0],
    [np.nan, 5.0, 0.0],
    [0.0, 0.0, 0.0],
  ]
)


@pytest.mark.parametrize(
  ("dtype", "filled"), [(np.float64, False), (np.float32, True), (np.float16, False)]
)
def test_real_sums_move_by_no_more_than_the_bound(dtype, filled):
  with np.errstate(over="ignore"):
    rows = _HOSTILE.astype(dtype)
  mechanism = LeastSquares(1.0, feature_norm=0.5, target_norm=1.0, unit_rows=filled)
  targets = rows[:, :2]
  moves = []
  empty = exact_sums(mechanism, rows[:0], targets[:0])
  assert not empty[0].any() and not empty[1].any()
  for row in range(len(rows)):
    others = np.delete(np.arange(len(rows)), row)
    base = exact_sums(mechanism, rows[others], targets[others])
    # At the end, so that no row's place changes.
    order = np.append(others, row)
    whole = exact_sums(mechanism, rows[order], targets[order])
    step = [(after - before) * _UNIT for before, after in zip(base, whole)]
    alone = exact_sums(mechanism, rows[[row]], targets[[row]])
    # Integers: the rest of the data set changes nothing in a row's part.
    assert all(np.array_equal(a * _UNIT, b) for a, b in zip(alone, step))
    moves.append(np.sqrt(sum(np.square(part).sum() for part in step)))
  assert max(moves) <= mechanism.l2_sensitivity
  assert max(moves) >= 0.99 * mechanism.l2_sensitivity
  assert not np.isnan(moves).any()


def test_sums_are_those_of_float64_and_do_not_depend_on_chunks(monkeypatch):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(200, 5))
  y = centred_labels(rng.integers(0, 3, 200), 3)
  mechanism = LeastSquares(1.0, feature_norm=2.0, target_norm=centred_norm(3))
  xx, xy = exact_sums(mechanism, x, y)
  z = x * np.minimum(1, 2.0 / np.linalg.norm(x, axis=1))[:, None]
  np.testing.assert_allclose(4 * xx * _UNIT, z.T @ z, rtol=1e-4, atol=1e-3)
  np.testing.assert_allclose(
    2 * centred_norm(3) * xy * _UNIT, z.T @ y, rtol=1e-4, atol=1e-3
  )
  monkeypatch.setattr(least_squares, "_CHUNK", 7)
  again = exact_sums(mechanism, x, y)
  assert np.array_equal(again[0], xx) and np.array_equal(again[1], xy)


def test_the_largest_data_set_stays_exact():
  """The first row is the longest there is: 2^24 of it sum to less than int64 holds."""
  rows = least_squares.whole_rows(np.array([[3.0, 0.0]]), 1.0)
  assert rows[0, 0] < 2**19
  assert 2**24 * int(rows[0, 0]) ** 2 < 2**63
  assert least_squares._CHUNK * int(rows[0, 0]) ** 2 <= 2**53


def test_weights_without_noise_are_those_of_scikit_learn():
  rng = np.random.default_rng(1)
  x = rng.normal(size=(300, 6)) / 6
  classes = rng.integers(0, 4, 300)
  y = centred_labels(classes, 4)
  mechanism = LeastSquares(1e-9, target_norm=centred_norm(4))
  released = mechanism(jax.random.key(0), x, y)
  wanted = Ridge(alpha=0.7, fit_intercept=False).fit(x, y).coef_.T
  np.testing.assert_allclose(
    released.ridge(strength=0.0, penalty=0.7), wanted, rtol=2e-3, atol=1e-3
  )
  # The same decisions as from labels of 0 and 1.
  plain = Ridge(alpha=0.7, fit_intercept=False).fit(x, np.eye(4)[classes]).coef_.T
  assert np.array_equal((x @ wanted).argmax(1), (x @ plain).argmax(1))


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_the_noise_has_its_law_in_every_part(relation):
  mechanism = LeastSquares(2.0, 0.5, 3.0, 0.8, neighboring_relation=relation)
  zeros = np.zeros((60, 60), np.int64), np.zeros((60, 40), np.int64)
  found = mechanism.noisy(jax.random.key(5), *zeros)
  assert found.xx is not None
  std = 2.0 * joint_sensitivity(0.8, relation)
  assert np.array_equal(found.xx, found.xx.T)
  beside = found.xx[np.triu_indices(60, 1)]
  parts = {
    "diagonal": (np.diagonal(found.xx), 0.25 * std / 0.8),
    "beside": (beside, 0.25 * std / 0.8 / np.sqrt(2)),
    "products": (found.xy.ravel(), 1.5 * std),
  }
  for name, (values, wanted) in parts.items():
    assert stats.kstest(values / wanted, "norm").pvalue > 1e-3, name
  # The test must reject another law: the entries beside the diagonal with the diagonal's.
  assert stats.kstest(beside / found.xx_std, "norm").pvalue < 1e-3
  assert np.isclose(found.xx_std, 0.25 * std / 0.8) and np.isclose(found.xy_std, 1.5 * std)
  # The norm that the ridge is made of is that of the noise, to the tolerance of d = 60.
  assert 0.8 < np.linalg.norm(found.xx, 2) / found.noise_norm < 1.1
  again = mechanism.noisy(jax.random.key(5), *zeros)
  assert again.xx is not None
  assert np.array_equal(again.xx, found.xx) and np.array_equal(again.xy, found.xy)


def test_the_event_is_that_of_one_gaussian_release():
  alone = LeastSquares(3.0)
  assert alone.event() == accounting.gaussian_event(3.0)
  # The accountant halves a multiplier under replace_one.
  swap = LeastSquares(3.0, neighboring_relation="replace_one")
  halved = stated.only_under("replace_one", accounting.gaussian_event(6.0))
  assert swap.event("replace_one") == halved
  epsilon = accounting.epsilon(
    swap.event("replace_one"), delta=1e-5, neighboring_relation="replace_one"
  )
  wanted = gaussian_delta(3.0, epsilon)
  assert wanted <= 1e-5 * (1 + 1e-6)
  with refuses("neighboring_relation"):
    swap.event()


def test_no_matrix_no_cost():
  mechanism = LeastSquares(2.0, moment_weight=0.0)
  found = mechanism(jax.random.key(0), np.ones((4, 3)), np.ones((4, 2)))
  assert found.xx is None and mechanism.l2_sensitivity == 1.0
  assert np.array_equal(found.ridge(), found.xy)


def test_noise_is_on_a_grid_that_the_data_do_not_decide():
  mechanism = LeastSquares(1.0)
  rng = np.random.default_rng(0)
  step = 2.0**-7
  for rows in (np.zeros((1, 2)), rng.normal(size=(3, 2))):
    found = mechanism(jax.random.key(1), rows, rows)
    assert np.array_equal(found.xy, step * np.round(found.xy / step))


@pytest.mark.parametrize(
  ("settings", "field"),
  [
    ({"noise_multiplier": 0.0}, "noise_multiplier"),
    ({"noise_multiplier": 1.0, "feature_norm": -1.0}, "feature_norm"),
    # Its square is no float64, and nor is the inverse of the next one's.
    ({"noise_multiplier": 1.0, "feature_norm": 1e300}, "feature_norm"),
    ({"noise_multiplier": 1.0, "target_norm": 1e-300}, "target_norm"),
    ({"noise_multiplier": 1.0, "target_norm": np.nan}, "target_norm"),
    ({"noise_multiplier": 1.0, "moment_weight": 1e-9}, "moment_weight"),
    ({"noise_multiplier": 1.0, "neighboring_relation": "none"}, "neighboring_relation"),
  ],
)
def test_settings_are_refused_in_one_line(settings, field):
  with refuses(field) as caught:
    LeastSquares(**settings)
  assert "\n" not in str(caught.value)


def test_data_are_refused_in_one_line():
  mechanism = LeastSquares(1.0)
  key = jax.random.key(0)
  for x, y, field in (
    (np.zeros(3), np.zeros((3, 1)), "x"),
    (np.zeros((3, 2)), np.zeros((2, 1)), "y"),
    (np.zeros((3, 2)), np.zeros(3), "y"),
    (np.zeros((1, least_squares.MAX_FEATURES + 1)), np.zeros((1, 1)), "x"),
  ):
    with refuses(field):
      mechanism(key, x, y)
  with refuses("y"):
    centred_labels(np.zeros(3), 2)
  with refuses("penalty", value=0.0):
    least_squares.NoisyMoments(np.zeros((2, 2)), np.zeros((2, 1)), 0.0, 0.0).ridge()
  assert not centred_labels(np.array([-1, 7]), 3).any()
