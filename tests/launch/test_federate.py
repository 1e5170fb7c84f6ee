"""launch.federate from the command line: what a user types, right and wrong."""

import functools
import json
import pathlib

import pytest

from tests import commands

_ROOT = pathlib.Path(__file__).resolve().parents[2]
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


@pytest.mark.cases(
  slow=["arguments1-words1"], long=["arguments4-words4", "arguments5-words5"]
)
@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--config.clients_per_round=0"], ["clients_per_round=0", "> 0"]),
    (["--config.execution=pmap", "--config.num_devices=64"], ["num_devices=64", "<="]),
    (["--config.privacy.epsilom=1"], ["epsilom", "epsilon"]),
    (["--local_devices=0"], ["--local_devices", "needs --coordinator"]),
    (["--peer_timeout=3"], ["--peer_timeout", "needs --coordinator"]),
    (
      ["--config.algorithm.mu=0.5"],
      ["algorithm.mu", "'fed_avg' has no such field", "fed_prox"],
    ),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, arguments, words):
  done = _launch(f"--workdir={tmp_path / 'run'}", *arguments)
  line = commands.refusal(done)
  assert all(word in line for word in words), line
  assert not (tmp_path / "run").exists()
