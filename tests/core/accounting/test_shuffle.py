"""Shuffled local reports: exact laws of binary randomised response, and refusals."""

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from dpjax.accounting import shuffle
from tests.refuses import refuses


def _exact_delta(local_epsilon, num_reports, epsilon, ones):
  """Binary responses of n users, `ones` of the others hold a 1; only the number of 1s is
  published. Hockey-stick divergence of the user's two inputs, exactly."""
  n, keep = num_reports, 1 / (1 + math.exp(-local_epsilon))
  count = np.arange(n + 1)
  truthful = stats.binom.pmf(count, ones, keep)
  flipped = stats.binom.pmf(count, n - 1 - ones, 1 - keep)
  others = np.convolve(truthful, flipped)[:n]
  of_user = lambda prob: np.convolve(others, [1 - prob, prob])
  one, zero = of_user(keep), of_user(1 - keep)
  gap = lambda p, q: np.maximum(p - math.exp(epsilon) * q, 0).sum()
  return max(gap(one, zero), gap(zero, one))


@pytest.mark.cases(long=["300-0.3", "300-1.0", "300-2.5"])
@pytest.mark.parametrize("local_epsilon", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("num_reports", [1, 2, 5, 40, 300])
def test_the_clones_bound_every_data_set_of_randomised_response(local_epsilon, num_reports):
  for epsilon in (0.0, 0.05, 0.3, 1.0):
    bound = shuffle.amplified_delta(
      local_epsilon=local_epsilon, num_reports=num_reports, epsilon=epsilon
    )
    for ones in {0, (num_reports - 1) // 2, num_reports - 1}:
      exact = _exact_delta(local_epsilon, num_reports, epsilon, ones)
      assert exact <= bound + 1e-13


def test_rounding_never_lowers_the_bound():
  """Found by search: 1 - kept lost digits, which e^epsilon made 1.5e-13 of delta."""
  local, n, epsilon = 6.685331381885923, 80, 6.618478068067064
  bound = shuffle.amplified_delta(local_epsilon=local, num_reports=n, epsilon=epsilon)
  exact = mpmath.mpf("0.06147663709199157317715180513486")
  assert exact <= bound <= exact * (1 + 1e-10)
  assert shuffle.amplified_delta(local_epsilon=5.0, num_reports=9, epsilon=800.0) < 1e-13


def test_alone_there_is_no_one_to_hide_among():
  for epsilon in (0.0, 0.5, 0.99):
    bound = shuffle.amplified_delta(local_epsilon=1.0, num_reports=1, epsilon=epsilon)
    exact = (math.e - math.exp(epsilon)) / (1 + math.e)
    assert bound == pytest.approx(exact, rel=1e-9)


@pytest.mark.cases(quick=["1e-06-2.0"], long=...)
@pytest.mark.parametrize("local_epsilon", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_the_closed_form_is_an_upper_bound_and_shrinks_like_one_over_root_n(
  local_epsilon, delta
):
  n = 4000
  found = shuffle.amplified_epsilon(local_epsilon=local_epsilon, num_reports=n, delta=delta)
  assert 0 < found < local_epsilon
  numeric = shuffle.amplified_delta(
    local_epsilon=local_epsilon, num_reports=n, epsilon=found
  )
  assert numeric <= delta
  exact = _exact_delta(local_epsilon, n, found, n // 2)
  assert exact <= numeric
  far = shuffle.amplified_epsilon(
    local_epsilon=local_epsilon, num_reports=100 * n, delta=delta
  )
  assert math.expm1(far) == pytest.approx(math.expm1(found) / 10, rel=0.3)


def test_the_numeric_bound_is_not_vacuous():
  """Within a factor of the truth for randomised response: it can tell a wrong law."""
  bound = shuffle.amplified_delta(local_epsilon=1.0, num_reports=1000, epsilon=0.15)
  exact = _exact_delta(1.0, 1000, 0.15, 500)
  assert (
    exact
    < bound
    < 0.5 * shuffle.amplified_delta(local_epsilon=1.0, num_reports=500, epsilon=0.15)
  )


def test_outside_its_condition_the_closed_form_is_refused():
  with refuses("local_epsilon", value=8.0):
    shuffle.amplified_epsilon(local_epsilon=8.0, num_reports=1000, delta=1e-6)
  with refuses("local_epsilon"):
    shuffle.amplified_epsilon(local_epsilon=0.1, num_reports=10, delta=1e-6)
  largest = math.log(1000 / (16 * math.log(2e6)))
  shuffle.amplified_epsilon(local_epsilon=largest * 0.999, num_reports=1000, delta=1e-6)


@pytest.mark.cases(quick=[0, 1], long=...)
@pytest.mark.parametrize(
  "options",
  [
    {"local_epsilon": 0.0},
    {"local_epsilon": math.inf},
    {"num_reports": 0},
    {"num_reports": 2.5},
    {"delta": 0.0},
  ],
)
def test_bad_input_is_one_line(options):
  given = {"local_epsilon": 1.0, "num_reports": 100_000, "delta": 1e-6} | options
  ((field, value),) = options.items()
  with refuses(field, value=value):
    shuffle.amplified_epsilon(**given)
