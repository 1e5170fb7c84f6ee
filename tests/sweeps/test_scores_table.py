"""Numbers of a sweep's table."""

import pytest

from dpjax.experiments.sweeps import table


@pytest.mark.parametrize(
  ("score", "text"),
  [
    (0.5, ".5000"),
    (-0.5, "-.5000"),
    (0.99999, "1.0000"),
    (-0.00001, "-.0000"),
    (2.5, "2.5"),
  ],
)
def test_scores_below_one_have_no_leading_zero(score, text):
  assert table._number(score, "test_r2") == text
