"""launch.relevance from the command line: what a user types, right and wrong."""

import functools
import json

import pytest

from tests import commands

_SMALL = ("--config.num_epochs=2", "--config.data.limit=200", "--config.batch_size=50")
_launch = functools.partial(commands.run, "launch.relevance")


@pytest.mark.slow
def test_paper_mode_never_prints_a_claim_without_what_fails(tmp_path):
  done = _launch(f"--workdir={tmp_path / 'run'}", *_SMALL)
  assert done.returncode == 0, done.stderr
  (line,) = [text for text in done.stdout.splitlines() if "epsilon=" in text]
  assert (
    "CLAIMED" in line
    and "nothing is proved" in line
    and "neighbors, Delta R, data-dependent noise, entropy as epsilon" in line
  )
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["proved_epsilon"] is None and result["num_examples"] == 200
  # What the run does otherwise than the paper is said, and its measures stand beside ours.
  assert result["departures"][0].startswith("noise: its scale is 1 / (d beta_j epsilon_2)")
  assert {"model 1", "model 2", "relevance and noise"} == set(result["stage_seconds"])
  assert 0 <= result["test_squared_error"] <= 2 and result["accuracy_oscillation"] >= 0
  counts = (tmp_path / "run" / "confusion.csv").read_text().splitlines()
  assert counts[0].startswith("class,true_positives") and len(counts) == 11


@pytest.mark.slow
def test_rigorous_mode_prints_its_proof(tmp_path):
  proved = "--config=configs/radp/quickstart_proved.py"
  done = _launch(f"--workdir={tmp_path / 'run'}", proved, *_SMALL)
  assert done.returncode == 0, done.stderr
  assert "epsilon=8 (proved, delta=0, replace_one, per example)" in done.stdout
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["epsilon"] == result["proved_epsilon"]
  assert result["failed_assumptions"] == [] and result["stage_seconds"] is None


@pytest.mark.long
def test_a_list_of_methods_takes_the_flags_of_a_sweep_and_its_audit(tmp_path):
  small = (
    "base.num_epochs=1",
    "base.data.limit=100",
    "seeds=[0,1]",
    "base.audit.num_trials=20",
  )
  done = _launch(
    "--config=configs/radp/table.py", "--only=[NR][oA]*DP*", "--audit", f"--workdir={tmp_path}",
    "--config.base.audit.canary_runs=false", *(f"--config.{text}" for text in small),
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  rows = json.loads((tmp_path / "sweep.json").read_text())["rows"]
  assert {row["seed"] for row in rows} == {0, 1} and "No_DP" in {
    row["curve"] for row in rows
  }
