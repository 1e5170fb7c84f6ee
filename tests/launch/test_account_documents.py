"""`python -m launch.account --compare_documents`: table, files, and mistakes in one line."""

import csv
import math
import pathlib

import pytest

from launch import account
from tests import commands

_ROOT = pathlib.Path(account.__file__).parents[1]


def _run(*args):
  return commands.run("launch.account", *args)


def test_the_command_prints_and_draws_the_comparison(tmp_path):
  folder = tmp_path / "new" / "documents"
  done = _run("--compare_documents", f"--out={folder}")
  assert (done.returncode, done.stderr) == (0, "")
  with (folder / "documents.csv").open() as file:
    rows = list(csv.DictReader(file))
  table = [line for line in done.stdout.splitlines() if line[:3] in ("000", "002", "003")]
  assert len(table) == len(rows)
  row = next(row for row in rows if row["setting"] == "q=0.01, sigma=1, T=1000")
  assert float(row["claimed"]) == pytest.approx(151.7, abs=0.1)
  assert float(row["pld"]) == pytest.approx(1.83, abs=0.01)
  line = next(line for line in table if "q=0.01, sigma=1, T=1000" in line)
  assert line.split()[-4:] == ["151.8", "1.829", "2.102", "loose"]
  assert {row["verdict"] for row in rows} == {"unsound", "loose", "right"}
  assert math.isinf(float(next(r for r in rows if r["setting"] == "one round")["pld"]))
  assert (folder / "documents.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
  "args, word",
  [
    (["--compare_documents", "--epsilon=3"], "epsilon"),
    (["--compare_documents", "--delta=0"], "delta"),
    (["--out=here", "--noise_multiplier=1", "--sampler=none", "--num_steps=1"], "out"),
  ],
)
def test_mistakes_end_in_one_line(args, word, tmp_path):
  done = _run(*args)
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: ") and word in line
