"""The table of what secure sums cost."""

import csv

import pytest

from benchmarks import sum_overhead
from dpjax.validate import UserError
from tests import commands
from tests.refuses import refuses

pytest.importorskip("cryptography", reason="needs the extra 'secure'")


def test_the_command_prints_a_table_and_writes_the_files(tmp_path):
  done = commands.run(
    "benchmarks", "secure_sums", "--workloads=10x40", "--repeats=1",
    "--methods=plain,additive_sharing,secagg,simulated", "--nopeak_rss", f"--out={tmp_path}",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  with open(tmp_path / "sums.csv") as file:
    rows = list(csv.DictReader(file))
  assert [(row["method"], row["dropped"]) for row in rows] == [
    ("plain", "0"),
    ("additive_sharing", "0"),
    ("additive_sharing", "1"),
    ("secagg", "0"),
    ("secagg", "1"),
    ("simulated", "0"),
  ]
  assert rows[2]["status"] == "refused: no sum without everybody"
  for key in ("client_bytes", "server_bytes", "expansions", "operations"):
    assert rows[3][key] == rows[5][key] != "0"
  assert done.stdout.splitlines()[0].split()[:3] == ["method", "clients", "length"]
  assert (tmp_path / "sums.md").read_text() == f"```\n{done.stdout.rstrip()}\n```\n"


def test_what_would_take_too_long_says_so_and_wrong_sizes_are_one_line():
  assert (
    sum_overhead.why_not("additive_sharing", 100, 10**6, 0) == "skipped: 40 GB of shares"
  )
  for text in ("10", "axb", "2x10", "10x0"):
    with pytest.raises(UserError, match="workloads"):
      sum_overhead.sizes([text])
  with refuses("methods", value="secag"):
    sum_overhead.measure("secag", 5, 5, dropped=0)


@pytest.mark.long
def test_a_process_of_its_own_tells_its_memory():
  entry = sum_overhead.measure("plain", 3, 10**6, dropped=0)
  assert entry.status == "ok" and 2e6 < entry.peak_bytes < 200e6
