"""launch.train from the command line: what a user types, right and wrong."""

import json

import pytest

from tests import commands


def _launch(*arguments, env=None):
  return commands.run("launch.train", *arguments, env=env)


@pytest.mark.slow
def test_quickstart_prints_a_result_and_writes_it(tmp_path):
  done = _launch(
    f"--workdir={tmp_path / 'run'}", "--config.num_steps=20", "--config.privacy.epsilon=2"
  )
  assert done.returncode == 0, done.stderr
  assert (
    "test_accuracy=" in done.stdout
    and "proved, delta=1e-05, add_or_remove_one" in done.stdout
  )
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["num_steps"] == 20 and 1.98 < result["epsilon"] <= 2.0
  assert "Traceback" not in done.stderr and "backend" not in done.stderr


def test_help_names_the_flags_and_shows_a_command():
  done = _launch("--help")
  assert done.returncode == 0
  assert "--workdir" in done.stdout and "--config" in done.stdout
  assert "python -m launch.train --config=configs/quickstart.py" in done.stdout
