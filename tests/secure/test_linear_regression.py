"""Ridge regression over clients: closed forms against each other, the theorem, the noise."""

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats
from sklearn import datasets, linear_model

from dpjax import accounting
from dpjax.secure import linear_regression as lr
from dpjax.validate import UserError


def clients(*, unlike=0.0, num_clients=5, rows=40, features=3, seed=0):
  """Rows of each client about its own line; `unlike` moves the lines and inputs apart."""
  random = np.random.default_rng(seed)
  common = random.normal(size=features)
  out = []
  for k in range(num_clients):
    x = random.normal(size=(rows + 10 * k, features)) + unlike * random.normal(
      size=features
    )
    x = x * (1 + unlike * random.uniform(size=features))
    w = common + unlike * random.normal(size=features)
    out.append((x, x @ w + 0.5 + 0.1 * random.normal(size=len(x))))
  return out


def known(data):
  return [lr.statistics(x, y) for x, y in data]


def pooled(data):
  return np.concatenate([x for x, _ in data]), np.concatenate([y for _, y in data])


# --- the optimum


@hypothesis.given(st.integers(0, 99), st.floats(1e-6, 10), st.integers(1, 4))
@hypothesis.settings(max_examples=30)
def test_closed_form_is_the_minimum_of_the_documents_objective(seed, ridge, num_clients):
  data = clients(unlike=1.0, seed=seed, num_clients=num_clients)
  w = lr.closed_form(known(data), ridge=ridge)
  x, y = pooled(data)
  x = np.column_stack([x, np.ones(len(x))])
  gradient = 2 * x.T @ (x @ w - y) / len(y) + 2 * ridge * w
  np.testing.assert_allclose(gradient, 0, atol=1e-8)


def test_against_scikit_learn_on_diabetes():
  """Document 004, section 4, on real data over 7 clients; the bias penalised there too."""
  x, y = datasets.load_diabetes(return_X_y=True)
  x = np.asarray(x) * 20
  parts = np.array_split(np.arange(len(y)), 7)
  w = lr.closed_form([lr.statistics(x[p], y[p]) for p in parts], ridge=0.1)
  model = linear_model.Ridge(alpha=0.1 * len(y), fit_intercept=False, tol=1e-12)
  model.fit(np.column_stack([x, np.ones(len(y))]), y)
  np.testing.assert_allclose(w, model.coef_, rtol=1e-6)


def test_how_rows_are_dealt_does_not_matter():
  data = clients(unlike=1.0)
  x, y = pooled(data)
  one = lr.closed_form([lr.statistics(x, y)], ridge=0.1)
  empty = lr.statistics(x[:0], y[:0])
  np.testing.assert_allclose(lr.closed_form([*known(data), empty], ridge=0.1), one)


# --- FedAvg


def test_one_local_step_reaches_the_optimum_however_unlike_the_clients():
  data = known(clients(unlike=1.0))
  path = lr.fed_avg(
    data, ridge=0.1, num_rounds=3_000, num_local_steps=1, learning_rate=0.03
  )
  np.testing.assert_allclose(path[-1], lr.closed_form(data, ridge=0.1), atol=1e-6)


def test_one_local_step_is_gradient_descent_on_the_pooled_rows():
  data = clients(unlike=1.0)
  path = lr.fed_avg(
    known(data), ridge=0.2, num_rounds=3, num_local_steps=1, learning_rate=0.05
  )
  x, y = pooled(data)
  x, w = np.column_stack([x, np.ones(len(x))]), np.zeros(4)
  for got in path:
    np.testing.assert_allclose(got, w, atol=1e-12)
    w = w - 0.05 * (2 * x.T @ (x @ w - y) / len(y) + 0.4 * w)


def fixed_point(data, *, ridge, num_local_steps, learning_rate):
  """[d] where FedAvg comes to rest.

  E local steps are w -> M_k w + (I - M_k) w_k with M_k = (I - 2 rate H_k)^E and w_k the
  client's own optimum, so the fixed point solves (I - sum p_k M_k) w = sum p_k (I - M_k) w_k.
  """
  count, eye = sum(s.count for s in data), np.eye(len(data[0].xy))
  left, right = 0.0, 0.0
  for s in data:
    matrix = s.xx / s.count + ridge * eye
    power = np.linalg.matrix_power(eye - 2 * learning_rate * matrix, num_local_steps)
    left = left + s.count / count * (eye - power)
    right = right + s.count / count * (eye - power) @ np.linalg.solve(
      matrix, s.xy / s.count
    )
  return np.linalg.solve(left, right)


@pytest.mark.cases(long=["1"])
@pytest.mark.parametrize("num_local_steps", [1, 5, 20])
def test_fed_avg_comes_to_rest_at_its_fixed_point(num_local_steps):
  options = dict(ridge=0.1, num_local_steps=num_local_steps, learning_rate=0.02)
  data = known(clients(unlike=1.0))
  path = lr.fed_avg(data, num_rounds=4_000 // num_local_steps, **options)
  np.testing.assert_allclose(path[-1], fixed_point(data, **options), atol=1e-6)


def test_many_local_steps_are_biased_on_unlike_clients_only():
  data = known(clients(unlike=1.0))
  best = lr.closed_form(data, ridge=0.1)
  bias = lambda steps: np.linalg.norm(
    fixed_point(data, ridge=0.1, num_local_steps=steps, learning_rate=0.02) - best
  )
  assert bias(1) < 1e-9 < 0.01 < bias(5) < bias(50)
  x, y = clients()[0]
  same = [lr.statistics(x, y)] * 4
  point = fixed_point(same, ridge=0.1, num_local_steps=50, learning_rate=0.02)
  np.testing.assert_allclose(point, lr.closed_form(same, ridge=0.1), atol=1e-9)


# --- O(1 / T)


def test_decaying_rate_converges_like_one_over_t_and_below_the_theorems_bound():
  """Li et al. 2020, theorem 1, on ridge regression with single-row gradients."""
  data, ridge = clients(unlike=0.5, num_clients=4), 0.5
  of = lambda gradient: lr.FedAvgBound.of(
    data, ridge=ridge, num_local_steps=5, gradient=gradient
  )
  runs, largest = lr.stochastic_fed_avg(
    data, of(1.0), ridge=ridge, num_rounds=1_000, num_runs=3, seed=0
  )
  gaps, bound = runs.mean(axis=1), of(largest)
  rounds = np.arange(1, 1_001)
  above = [bound.gap(5 * r) for r in rounds]
  assert (gaps <= above).all()
  late = rounds >= 50
  time = np.log(bound.offset + 5 * rounds)
  slope = np.polyfit(time[late], np.log(gaps[late]), 1)[0]
  assert -1.3 < slope < -0.8
  assert bound.gap(1_000_000) / bound.gap(2_000_000) == pytest.approx(2, rel=1e-2)


def test_the_bounds_numbers_are_those_of_each_clients_objective():
  """Curvature and dissimilarity by differences of F_k, from its definition over the rows."""
  data, ridge = clients(unlike=1.0, num_clients=3), 0.2
  bound = lr.FedAvgBound.of(data, ridge=ridge, num_local_steps=2, gradient=3.0)

  def f(k, w):
    x, y = data[k]
    return np.mean((x @ w[:-1] + w[-1] - y) ** 2) + ridge * w @ w

  shares = np.array([len(y) for _, y in data]) / sum(len(y) for _, y in data)
  best = lr.closed_form(known(data), ridge=ridge)
  own = [lr.closed_form([s], ridge=ridge) for s in known(data)]
  apart = sum(p * (f(k, best) - f(k, own[k])) for k, p in enumerate(shares))
  assert bound.dissimilarity == pytest.approx(apart)
  for direction in np.random.default_rng(0).normal(size=(50, 4)):
    direction /= np.linalg.norm(direction)
    for k in range(3):
      second = f(k, direction) + f(k, -direction) - 2 * f(k, 0 * direction)
      assert bound.convexity <= second * (1 + 1e-9)
      assert second <= bound.smoothness * (1 + 1e-9)
  assert bound.gradient_noise == pytest.approx(9 * (shares**2).sum())
  assert bound.squared_start == pytest.approx(best @ best)


def test_stochastic_rounds_by_hand():
  """Clients of one row each draw it always: each step and average is known."""
  data = [
    (np.array([[1.0, -2.0]]), np.array([3.0])),
    (np.array([[0.5, 1.0]]), np.array([-1.0])),
  ]
  bound = lr.FedAvgBound.of(data, ridge=0.3, num_local_steps=2, gradient=1.0)
  gaps, largest = lr.stochastic_fed_avg(
    data, bound, ridge=0.3, num_rounds=3, num_runs=2, seed=0
  )
  best, w, norms = lr.closed_form(known(data), ridge=0.3), np.zeros(3), []
  least = lr.objective(known(data), best, ridge=0.3)
  for r in range(3):
    local = []
    for x, y in data:
      v, row = w, np.append(x[0], 1.0)
      for e in range(2):
        gradient = 2 * (row @ v - y[0]) * row + 0.6 * v
        norms.append(np.linalg.norm(gradient))
        v = v - bound.learning_rate(2 * r + e) * gradient
      local.append(v)
    w = np.mean(local, axis=0)
    np.testing.assert_allclose(gaps[r], lr.objective(known(data), w, ridge=0.3) - least)
  assert largest == pytest.approx(max(norms))


def test_a_constant_rate_stops_short_of_the_optimum():
  """Why the rate must decay: the fixed point's gap does not shrink with more rounds."""
  data = known(clients(unlike=1.0))
  path = lr.fed_avg(data, ridge=0.1, num_rounds=800, num_local_steps=10, learning_rate=0.02)
  least = lr.objective(data, lr.closed_form(data, ridge=0.1), ridge=0.1)
  gaps = [lr.objective(data, path[r], ridge=0.1) - least for r in (400, 800)]
  assert gaps[1] > 1e-3 and gaps[1] == pytest.approx(gaps[0], rel=1e-3)


# --- privacy

PRIVATE = lr.PrivateStatistics(noise_multiplier=2.0, x_bound=1.5, y_bound=2.0)


def released(private, key, data):
  return private.read(private.noisy(key, private.exact(data)))


def vector_of(rows):
  s = lr.statistics(*PRIVATE.bound_rows(*rows))
  return np.concatenate([lr._to_vector(s.xx), s.xy])


ROW = st.tuples(
  st.lists(st.floats(-1e308, 1e308), min_size=3, max_size=3),
  st.floats(allow_nan=True, allow_infinity=True),
)


@hypothesis.given(ROW)
@hypothesis.settings(max_examples=200)
def test_no_row_moves_the_statistics_beyond_the_sensitivity(row):
  x, y = np.array([row[0]]), np.array([row[1]])
  assert np.linalg.norm(vector_of((x, y))) <= PRIVATE.l2_sensitivity


def test_the_sensitivity_is_reached():
  rows = (np.array([[99.0, 0.0, 0.0]]), np.array([50.0]))
  np.testing.assert_allclose(
    np.linalg.norm(vector_of(rows)), PRIVATE.l2_sensitivity, rtol=1e-9
  )


def test_rows_that_are_not_finite_are_dropped():
  x, y = clients()[0]
  worse = np.vstack([x, [[np.nan, 0, 0]], [[np.inf, 0, 0]], x[:1]])
  targets = np.concatenate([y, [0.0, 0.0, np.nan]])
  np.testing.assert_array_equal(vector_of((worse, targets)), vector_of((x, y)))


@pytest.mark.long
def test_noise_has_the_stated_std_on_every_coordinate():
  """KS at the right std, and rejected at 3/2 and 2/3 of it."""
  x, y = clients()[0]
  exact = vector_of((x, y))
  noise = []
  for i in range(60):
    s = released(PRIVATE, jax.random.key(i), [(x, y)])
    noise.append(np.concatenate([lr._to_vector(s.xx), s.xy]) - exact)
  noise = np.concatenate(noise)
  fits = lambda std: stats.kstest(noise, stats.norm(0, std).cdf).pvalue
  assert fits(PRIVATE.std) > 0.01
  assert fits(PRIVATE.std * 1.5) < 1e-4 and fits(PRIVATE.std / 1.5) < 1e-4


def test_epsilon_is_that_of_one_gaussian_release():
  assert PRIVATE.epsilon(delta=1e-5) == pytest.approx(1.993, abs=1e-3)
  for relation in ("add_or_remove_one", "replace_one"):
    private = lr.PrivateStatistics.calibrated(
      epsilon=1.0, delta=1e-5, x_bound=1.0, y_bound=1.0, neighboring_relation=relation
    )
    assert 0.99 < private.epsilon(delta=1e-5) <= 1.0 + 1e-3
    assert private.event == accounting.gaussian_event(private.noise_multiplier)
  add = lr.PrivateStatistics.calibrated(epsilon=1.0, delta=1e-5, x_bound=1.0, y_bound=1.0)
  assert private.noise_multiplier == 2 * add.noise_multiplier  # replace_one moves by 2 C


def test_no_two_releases_share_their_noise():
  """With one key for both, their difference was the exact statistics of the added row."""
  x, y = clients()[0]
  few, many = (PRIVATE.release([(x[:n], y[:n])]) for n in (39, 40))
  exact = [lr.statistics(*PRIVATE.bound_rows(x[:n], y[:n])) for n in (39, 40)]
  moved = np.abs((many.xx - few.xx) - (exact[1].xx - exact[0].xx))
  assert moved.min() > 1e-6 * PRIVATE.std and moved.max() > PRIVATE.std / 10


@pytest.mark.slow
def test_dealing_the_rows_to_clients_changes_nothing():
  data = clients()
  key = jax.random.key(0)
  many, one = released(PRIVATE, key, data), released(PRIVATE, key, [pooled(data)])
  np.testing.assert_allclose(many.xx, one.xx, atol=1e-9)


@pytest.mark.slow
def test_more_epsilon_comes_nearer_to_the_optimum():
  data = clients(rows=400)
  x, y = pooled(data)
  bounds = dict(x_bound=float(np.linalg.norm(x, axis=1).max()), y_bound=np.abs(y).max())
  best = lr.closed_form(known(data), ridge=1e-3)

  def distance(epsilon):
    private = lr.PrivateStatistics.calibrated(epsilon=epsilon, delta=1e-6, **bounds)
    out = []
    for seed in range(5):
      noisy = released(private, jax.random.key(seed), data)
      w = lr.private_ridge(noisy, ridge=1e-3, floor=private.std)
      out.append(np.linalg.norm(w - best))
    return np.mean(out)

  far, near, nearest = distance(0.1), distance(1.0), distance(100.0)
  assert nearest < near < far and nearest < 0.05


def test_a_matrix_that_noise_made_indefinite_is_repaired():
  released = lr.Statistics(np.diag([4.0, -3.0]), np.array([4.0, 3.0]), 2.0)
  np.testing.assert_allclose(lr.private_ridge(released, ridge=0.0, floor=1.0), [1.0, 3.0])


# --- what can be wrong


def test_bad_input_is_one_line():
  x, y = clients()[0]
  good = [lr.statistics(x, y)]
  singular = [lr.statistics(x[:1], y[:1])]
  empty = [lr.statistics(x[:0], y[:0])]
  steps = dict(num_local_steps=1, learning_rate=0.1)
  for call, says in (
    (lambda: lr.statistics(x, y[:3]), "y.shape=(3,): must be (40,)"),
    (lambda: lr.statistics(x[0], y), "x.shape=(3,)"),
    (lambda: PRIVATE.bound_rows(x[0], y), "x.shape=(3,)"),
    (lambda: lr.closed_form(good, ridge=-1), "ridge=-1"),
    (lambda: lr.closed_form(singular, ridge=0), "singular"),
    (lambda: lr.closed_form(empty, ridge=1), "no rows"),
    (lambda: lr.fed_avg(good, ridge=0, num_rounds=0, **steps), "num_rounds=0"),
    (
      lambda: lr.FedAvgBound.of([(x, y)], ridge=0.0, num_local_steps=1, gradient=1.0),
      "ridge",
    ),
    (lambda: lr.PrivateStatistics(1.0, 0.0, 1.0), "x_bound=0.0"),
    (lambda: lr.PrivateStatistics(1.0, 1.0, 1.0, "replaceone"), "did you mean"),
  ):
    with pytest.raises(UserError) as caught:
      call()
    assert says in str(caught.value) and "\n" not in str(caught.value)
