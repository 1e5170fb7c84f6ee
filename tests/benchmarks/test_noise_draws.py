"""The committed figures of draws; slips end in a line."""

import pytest

from benchmarks import noise_draws
from dpjax.validate import UserError
from tests import pages
from tests.refuses import refuses


def test_the_committed_figures_hold_what_is_said_of_memory():
  rows = pages.tables().entries("training/draws.csv")

  def temporaries(method, target=""):
    row = pages.tables().one(rows, tree="leaf_10m", method=method, target=target)
    return float(row["temporary_bytes"]) / float(row["parameters"])

  assert temporaries("ordinary") < 0.1 < 40 < temporaries("threefry2x32")
  for target in ("tpu:v5e:1x1", "gpu:h100:1"):
    assert temporaries("ordinary", target) < 0.1
    row = pages.tables().one(rows, tree="leaf_10m", method="ordinary", target=target)
    # Each parameter is read once and written once.
    assert float(row["moved_bytes"]) == pytest.approx(
      8 * float(row["parameters"]), rel=0.01
    )


@pytest.mark.long
def test_a_small_tree_is_measured():
  plain, ordinary = noise_draws.measure("leaves_20", ["ordinary"], repeats=1)
  assert (plain.method, ordinary.method) == ("jax_normal", "ordinary")
  assert plain.time_ratio == 1 and ordinary.draw_s > 0


def test_wrong_arguments_end_in_a_line():
  with pytest.raises(UserError, match="workloads='leaf_1b'"):
    noise_draws.measure("leaf_1b", ["ordinary"])
  with refuses("methods", value="rbg"):
    noise_draws.measure("leaf_1m", ["rbg"])
  with pytest.raises(UserError, match="target='tpu'"):
    noise_draws.compiled_for("tpu", "leaf_1m", ["ordinary"])
