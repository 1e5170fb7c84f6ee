"""launch.federate from the command line: what a user types, right and wrong."""

import functools
import json

import pytest

from tests import commands

_launch = functools.partial(commands.run, "launch.federate")


@pytest.mark.slow
def test_quickstart_prints_a_result_and_writes_it(tmp_path):
  done = _launch(f"--workdir={tmp_path / 'run'}", "--config.num_rounds=5")
  assert done.returncode == 0, done.stderr
  assert "dp_fed_avg, 100 clients: test_accuracy=" in done.stdout
  assert "proved, delta=0.001, add_or_remove_one, per user" in done.stdout
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["num_steps"] == 5 and result["unit"] == "user"
  assert "Traceback" not in done.stderr
