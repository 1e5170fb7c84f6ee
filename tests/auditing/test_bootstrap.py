"""Bootstrap intervals: their coverage where they are honest, and their label."""

import numpy as np
import pytest
from scipy import special

from dpjax.auditing import bootstrap
from dpjax.auditing.lower_bounds import METHODS, epsilon_from_mu
from dpjax.auditing.scores import Scores
from tests.refuses import refuses


def _scores(seed, n=150, mu=1.0):
  noise = np.random.default_rng(seed).standard_normal((2, n))
  return Scores(mu + noise[0], noise[1])


@pytest.mark.long
def test_auc_intervals_cover_the_truth_about_as_often_as_they_say():
  truth = float(special.ndtr(1 / np.sqrt(2)))
  found = [
    bootstrap.bootstrap_interval(bootstrap.auc, _scores(seed), seed=seed, num_draws=200)
    for seed in range(60)
  ]
  covered = sum(one.low <= truth <= one.high for one in found)
  assert 50 <= covered <= 60  # of 60 at 95 %
  wrong = sum(one.low <= truth + 0.15 <= one.high for one in found)
  assert wrong < 10


def test_an_estimate_is_labelled_and_is_no_bound():
  estimate = lambda scores: bootstrap.estimated_epsilon(scores, delta=1e-5)
  truth = epsilon_from_mu(1.0, 1e-5)
  found = [estimate(_scores(seed, 400)) for seed in range(40)]
  assert (
    8 < sum(one > truth for one in found) < 32
  )  # above the truth about every other time
  interval = bootstrap.bootstrap_interval(estimate, _scores(0, 400), seed=0, num_draws=100)
  assert interval.low < truth < interval.high
  assert interval.to_json()["meaning"] == "bootstrap, not a guarantee"
  assert "bootstrap" not in METHODS


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize(
  ("scores", "options", "field"),
  [
    (_scores(0, 5), {}, "scores"),
    (_scores(0), {"confidence": 1.5}, "confidence"),
    (_scores(0), {"num_draws": 10}, "num_draws"),
  ],
)
def test_bad_input_is_one_line(scores, options, field):
  with refuses(field) as caught:
    bootstrap.bootstrap_interval(bootstrap.auc, scores, seed=0, **options)
  assert "\n" not in str(caught.value)
