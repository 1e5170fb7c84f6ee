"""launch.train from the command line: what a user types, right and wrong."""

import json
import pathlib

import pytest

from tests import commands

_ROOT = pathlib.Path(__file__).resolve().parents[2]


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


@pytest.mark.cases(slow=["arguments3-words3"])
@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--config.privacy.epsilom=1"], ["epsilom", "epsilon"]),
    (["--config.privacy.epsilon=-1"], ["privacy.epsilon=-1", "> 0"]),
    (["--config.privacy.sampling_prob=1.5"], ["sampling_prob=1.5", "[1e-09, 1]"]),
    (["--config.privacy.sampler.capacity=100"], ["capacity=100", ">="]),
    (
      ["--config.data.name=mnist", "--config.data.data_dir=NOWHERE"],
      ["NOWHERE", "launch.prepare"],
    ),
    (["--config=configs/nothing.py"], ["configs/nothing.py"]),
    (["stray"], ["stray"]),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, arguments, words):
  arguments = [
    argument.replace("NOWHERE", str(tmp_path / "NOWHERE")) for argument in arguments
  ]
  done = _launch(f"--workdir={tmp_path / 'run'}", *arguments)
  line = commands.refusal(done)
  assert all(word in line for word in words), line
  assert not (tmp_path / "run").exists()


def test_help_names_the_flags_and_shows_a_command():
  done = _launch("--help")
  assert done.returncode == 0
  assert "--workdir" in done.stdout and "--config" in done.stdout
  assert "python -m launch.train --config=configs/quickstart.py" in done.stdout
