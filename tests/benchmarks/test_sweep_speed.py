"""Sweeps are timed by the number of processes, whole."""

import csv

import pytest

from tests import commands


@pytest.mark.long
def test_the_command_measures_one_process_against_two(tmp_path, small_run):
  flags = ["sweeps", "--processes=1,2", "--repeats=1", f"--out={tmp_path}"]
  done = commands.run("benchmarks", *flags, f"--configs={small_run}")
  assert done.returncode == 0, done.stderr
  with open(tmp_path / "sweeps.csv") as file:
    rows = list(csv.DictReader(file))
  assert [row["processes"] for row in rows] == ["1", "2"]
  first, second = (float(row["median_s"]) for row in rows)
  assert float(rows[0]["ratio"]) == 1 and float(rows[1]["ratio"]) == second / first


@pytest.mark.cases(quick=[0], long=...)
@pytest.mark.parametrize("given", ["0", "", "x", "1,999999"])
def test_a_wrong_number_is_one_line(given):
  done = commands.run("benchmarks", "sweeps", f"--processes={given}")
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert "processes=" in done.stderr
