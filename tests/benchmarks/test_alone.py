"""A process of its own: what it found, and a memory that is its own."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import alone

_PEAK = "from dpjax.experiments.run import provenance; print(provenance.peak_rss())"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_peak_is_not_that_of_who_started_the_process():
  """`getrusage` of a new program begins at the memory of the program that it replaced."""
  held = np.ones(10**8)  # 800 MB
  done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True)
  assert 5e7 < int(done.stdout) < held.nbytes


def test_an_order_arrives_and_a_failure_says_why(tmp_path, monkeypatch):
  (tmp_path / "echo.py").write_text(
    "import sys\nfrom benchmarks import alone\nimport json\n"
    "order = alone.ordered()\n"
    "print('a line before')\n"
    "sys.exit('no such thing') if order[0] == 'fail' else print(json.dumps(order))\n"
  )
  monkeypatch.chdir(tmp_path)
  order = ["a", 1, None, 0.5]
  assert alone.run("echo", *order) == alone.Apart(json.loads(json.dumps(order)), "")
  assert alone.run("echo", "fail") == alone.Apart(None, "no such thing")
