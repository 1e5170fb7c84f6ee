"""The committed noise multipliers of riskcal, another implementation of attack-aware noise."""

import csv
import pathlib

import pytest

from dpjax import accounting
from dpjax.accounting.attack_bounds import attack_bound
from dpjax.accounting.epsilon import privacy_profile

_TABLE = pathlib.Path(__file__).parents[3] / "results" / "accounting" / "riskcal.csv"
_NUMBERS = ("tpr", "fpr", "advantage", "bayes_risk", "prior")


def _rows():
  with _TABLE.open(newline="", encoding="utf-8") as file:
    return list(csv.DictReader(file))


def test_there_are_ten_settings_of_three_kinds():
  bounds = [row["bound"] for row in _rows()]
  assert len(bounds) == 10 and set(bounds) == {"tpr", "advantage", "bayes_risk"}


@pytest.mark.parametrize("number", range(10))
def test_riskcals_noise_is_ours_within_one_percent(number):
  row = _rows()[number]
  bound = attack_bound(**{name: float(row[name]) for name in _NUMBERS if row[name]})
  noise = float(row["noise_multiplier"])

  def cost(noise_multiplier):
    step = accounting.poisson_sampled_event(
      accounting.gaussian_event(noise_multiplier), sampling_prob=float(row["sampling_prob"])
    )
    run = accounting.compose(step, int(row["num_steps"]))
    return bound.cost(privacy_profile(run), 1e-5)

  # The cost falls with the noise, so ours lies between.
  assert cost(noise * 1.01) <= bound.limit < cost(noise * 0.99)
