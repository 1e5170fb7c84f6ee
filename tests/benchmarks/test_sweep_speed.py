"""Sweeps are timed by the number of processes, whole."""

import csv

import pytest

from tests import commands

_CONFIG = """
from dpjax.runs.central.config import ModelConfig, PrivacyConfig, TrainConfig

def get_config():
  privacy = PrivacyConfig(epsilon=None, noise_multiplier=1.0)
  return TrainConfig(model=ModelConfig("linear"), privacy=privacy, num_steps=2)
"""


@pytest.mark.slow
def test_the_command_measures_one_process_against_two(tmp_path):
  (tmp_path / "small.py").write_text(_CONFIG)
  flags = ["--suite=sweeps", "--processes=1,2", "--repeats=1", f"--out={tmp_path}"]
  done = commands.run("launch.benchmark", *flags, f"--configs={tmp_path / 'small.py'}")
  assert done.returncode == 0, done.stderr
  with open(tmp_path / "sweeps.csv") as file:
    rows = list(csv.DictReader(file))
  assert [row["processes"] for row in rows] == ["1", "2"]
  first, second = (float(row["median_s"]) for row in rows)
  assert float(rows[0]["ratio"]) == 1 and float(rows[1]["ratio"]) == second / first


@pytest.mark.parametrize("given", ["0", "", "x", "1,999999"])
def test_a_wrong_number_is_one_line(given):
  done = commands.run("launch.benchmark", "--suite=sweeps", f"--processes={given}")
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert "processes=" in done.stderr
