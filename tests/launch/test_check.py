"""launch.check from the command line."""

import functools
import json

import pytest

from dpjax.checks import table
from dpjax.checks.subject import row
from tests import commands

_BROKEN = """
import importlib

from configs import quickstart

module = importlib.import_module("dpjax.transforms.clip_and_noise")
honest = module.white_noise


def half_the_noise(*args, noise_multiplier, **options):
  return honest(*args, noise_multiplier=noise_multiplier / 2, **options)


module.white_noise = half_the_noise  # what a patched installation would do


def get_config():
  return quickstart.get_config()
"""
_launch = functools.partial(commands.run, "launch.check")


@pytest.mark.long
def test_quickstart_passes_and_writes_its_table(tmp_path):
  done = _launch(f"--workdir={tmp_path / 'run'}", "--config.model.name=linear",
                 "--config.model.options={}")  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("pass  ") == 23 and "FAIL" not in done.stdout
  result = json.loads((tmp_path / "run" / "check.json").read_text())
  assert result["passed"] and len(result["checks"]) == 23


@pytest.mark.long
def test_a_broken_run_exits_with_1_and_names_the_check(tmp_path):
  path = tmp_path / "broken.py"
  path.write_text(_BROKEN)
  done = _launch(f"--config={path}", "--config.model.name=linear",
                 "--config.model.options={}")  # fmt: skip
  assert done.returncode == 1
  assert "FAIL  noise as charged" in done.stdout
  message = done.stderr.strip()
  assert message.startswith("error: ") and " of 23 checks failed: " in message
  assert "noise as charged; noise has its tails" in message and "\n" not in message


def test_each_check_is_named_before_it_runs():
  begun = []

  def slow_noise(subject):
    assert begun[-1] == "slow noise"
    return row(0.0, 1.0, "")

  def ends_badly(subject):
    raise ValueError("bad")

  checks = {"slow noise": slow_noise, "ends badly": ends_badly}
  rows = list(table.rows(checks, None, begins=begun.append))
  assert begun == ["slow noise", "ends badly"]
  assert [(row.name, row.passed) for row in rows] == [
    ("slow noise", True),
    ("ends badly", False),
  ]


def test_a_mistake_is_one_line_and_exit_code_2():
  done = _launch("--config.privacy=sgd")
  *notes, line = done.stderr.strip().splitlines()
  assert done.returncode == 2 and "promises nothing" in line, done.stderr
  assert [note.partition(":")[0] for note in notes] == ["note"]


def test_help_names_the_flags_and_shows_a_command():
  done = _launch("--help")
  assert "--workdir" in done.stdout and "python -m launch.check --config=" in done.stdout
