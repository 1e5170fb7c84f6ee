"""launch.secure from the command line: what a user types, right and wrong."""

import csv
import functools
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.secure.vector_sums import SumTask
from dpjax.experiments.sweeps import sweep
from dpjax.validate import UserError
from tests import commands

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TINY = """
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.secure.vector_sums import SumTask

def get_configs():
  for name, protocol in (("plain", "plain"), ("shares", "additive_sharing")):
    task = {"name": "sum", "num_clients": 5, "length": 30, "protocol": protocol}
    yield name, SecureConfig(task=task)
"""
_launch = functools.partial(commands.run, "launch.secure")


@pytest.mark.slow
def test_a_table_is_written_and_resumed(tmp_path):
  (tmp_path / "tiny.py").write_text(_TINY)
  order = (f"--config={tmp_path / 'tiny.py'}", f"--workdir={tmp_path / 'run'}")
  done = _launch(*order)
  assert done.returncode == 0, done.stderr
  assert "| plain | sum | plain | 5 clients x 30 entries |" in done.stdout
  assert "not differential privacy" in done.stdout
  with open(tmp_path / "run" / "secure.csv") as file:
    rows = list(csv.DictReader(file))
  assert [row["protocol"] for row in rows] == ["plain", "additive_sharing"]
  assert all(float(row["error"]) == 0 and float(row["bytes"]) > 0 for row in rows)
  again = _launch(*order)
  assert again.returncode == 0 and again.stdout == done.stdout


@pytest.mark.parametrize(
  ("task", "words", "more"),
  [
    ("NoisyModelTask(learning_rate=16.0)", "task.learning_rate=16.0: over num_rows", ()),
    (
      "ColumnsTask(feature_norm=1e-9)",
      "task.feature_norm=1e-09: leaves",
      ["private_set_intersection"],
    ),
  ],
)
def test_numbers_that_only_the_data_refuse_are_one_line_too(task, words, more, tmp_path):
  for library in ("cryptography", "Crypto", *more):  # a missing one is told first
    pytest.importorskip(library)
  (tmp_path / "bad.py").write_text(
    "from dpjax.experiments.kinds.secure.aligned_columns import *\n"
    "from dpjax.experiments.kinds.secure.config import SecureConfig\n\n"
    f"def get_config():\n  return SecureConfig(task={task})\n"
  )
  done = _launch(f"--config={tmp_path / 'bad.py'}", f"--workdir={tmp_path / 'run'}")
  assert words in commands.refusal(done) and not done.stdout
  assert not (tmp_path / "run").exists()


def test_rows_without_their_extra_are_named_first_and_left_out(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(sys.modules, "tenseal", None)  # its import fails
  sums = SecureConfig(task=SumTask(3, 5))
  rows = [
    ("a", fields.replace(sums, "task.protocol", "bfv")),
    ("b", fields.replace(sums, "task.protocol", "plain")),
    ("c", fields.replace(sums, "task", "regress")),
  ]
  finished = sweep.run(rows, tmp_path / "run")
  lines = capsys.readouterr().err.splitlines()
  assert lines[0].startswith("note: 2 of 3 rows are left out (a, c): needs tenseal, ")
  assert [(row["name"], row["status"]) for row in finished] == [("b", "done")]
  # Without any row that could run nothing is begun.
  with pytest.raises(UserError, match="needs tenseal"):
    sweep.run(rows[:1], tmp_path / "other")
  assert not (tmp_path / "other").exists()
  # The same command runs the others once the library is there.
  monkeypatch.undo()
  pytest.importorskip("tenseal")
  finished = sweep.run(rows[:2], tmp_path / "run")
  assert [row["name"] for row in finished] == ["a", "b"]


@pytest.mark.long
def test_the_quickstart_is_stopped_and_goes_on(tmp_path):
  """About a minute: a kill between rows, then the rest."""
  pytest.importorskip("tenseal", reason="needs TenSEAL: pip install -e '.[he]'")
  order = [sys.executable, "-m", "launch.secure", f"--workdir={tmp_path / 'run'}"]
  first = subprocess.Popen(order, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  while not list(tmp_path.glob("run/points/*/result.json")):
    assert first.poll() is None
    time.sleep(0.2)
  first.send_signal(signal.SIGTERM)
  _, stderr = first.communicate(timeout=60)
  assert first.returncode == 128 + signal.SIGTERM and b"run the same command" in stderr
  done = subprocess.run(order, cwd=_ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert len(list(tmp_path.glob("run/points/*/result.json"))) >= 8
