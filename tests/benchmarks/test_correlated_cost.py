"""A step with noise that is drawn again takes the memory of white noise; slips end in a line."""

import pytest

from benchmarks import correlated_cost
from tests import pages
from tests.refuses import refuses


@pytest.mark.long
def test_a_step_that_draws_again_takes_the_memory_of_white_noise():
  white, kept, redrawn = correlated_cost.measure(
    "linear", ["bisr_32_kept", "bisr_32"], repeats=1
  )
  assert (white.strategy, kept.strategy, redrawn.strategy) == (
    *("white", "bisr_32_kept", "bisr_32"),
  )
  assert redrawn.bytes_ratio <= 1.05 and redrawn.draws == 32 and redrawn.copies == 0
  # 31 copies of float32 parameters.
  assert kept.state_bytes - redrawn.state_bytes >= 31 * 4 * white.parameters
  assert redrawn.state_bytes - white.state_bytes <= 16


def test_the_committed_figures_hold_the_memory_that_the_guide_claims():
  rows = pages.tables().entries("training/correlated.csv")
  large = pages.tables().one(rows, model="mlp_10m", strategy="bisr_32")
  assert 9.9e6 < float(large["parameters"]) < 1.01e7 and large["draws"] == "32"
  assert float(large["bytes_ratio"]) <= 1.05
  kept = pages.tables().one(rows, model="mlp_10m", strategy="bisr_32_kept")
  assert float(kept["bytes_ratio"]) > 5


def test_wrong_arguments_end_in_a_line():
  with refuses("workloads", value="mlp_1b"):
    correlated_cost.measure("mlp_1b", ["white"])
  with refuses("methods", value="bisr_33"):
    correlated_cost.measure("linear", ["bisr_33"])
