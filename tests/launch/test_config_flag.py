"""Configs on the command line: whatever is wrong ends in one line and exit code 2."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import pytest

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.sweeps.sweep import Sweep
from dpjax.validate import UserError
from launch import config_flag
from tests import commands

DRIVER = """
import io, json, os, sys, traceback
from dpjax.experiments.config.choices import to_dict
from dpjax.experiments.run.kind import KINDS
from launch import app, config_flag

def launch(arguments, default):  # what a launcher does, in a child of its own
  sys.argv = ["main", *arguments.split()]
  config_flag.define(kind=KINDS["train"], default=default)
  app.run(lambda: print(json.dumps(to_dict(config_flag.get()))))

def child(name, arguments, default):
  for stream, number in (("out", 1), ("err", 2)):
    os.dup2(os.open(f"{name}.{stream}", os.O_CREAT | os.O_WRONLY), number)
  code = 0
  try:
    launch(arguments, default)
  except SystemExit as stop:
    code = stop.code or 0
  except BaseException:
    traceback.print_exc()
    code = 99
  sys.stdout.flush()
  os._exit(code)

codes = {}
for name, arguments, default in json.loads(sys.argv[1]):
  pid = os.fork() or child(name, arguments, default)
  codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(codes))
"""
GOOD = """
from dpjax.experiments.kinds.central.config import ModelConfig, TrainConfig
def get_config():
  return TrainConfig(num_steps=7, model=ModelConfig(options={"width": 8}))
"""
CASES = {  # arguments -> what the one line on stderr says
  "unknown field": (
    "--config=good.py --config.privacy.epsilom=1",
    "did you mean 'epsilon'",
  ),
  "a field as a flag": (
    "--config=good.py --epsilon=1",
    "did you mean --config.privacy.epsilon?",
  ),
  "a field of another library": (
    "--config=good.py --config.batch_size=64",
    "did you mean 'privacy.sampling_prob'?",
  ),
  "a flag of another library": (
    "--config=good.py --lr=.1",
    "did you mean --config.optimizer.learning_rate?",
  ),
  "of other runs": ("--config=good.py --fraction_fit=.1", "'clients_per_round'"),
  "wrong type": ("--config=good.py --config.num_steps=many", "--config.num_steps='many'"),
  "unknown section": (
    "--config=good.py --config.nope.x=1",
    "--config.nope.x: no such field",
  ),
  "no name": ("--config=good.py --config.=1", "--config.: no such field"),
  "missing file": ("--config=nowhere.py", "--config=nowhere.py: no such file"),
  "not a config": (
    "--config=other.py",
    "returned dict, but this launcher wants",
  ),
  "failing file": ("--config=failing.py", "ModuleNotFoundError: No module named"),
  "no file": ("", "--config"),
  "override alone": ("--config.seed=1", "--config"),
  "stray argument": ("--config=good.py 3", "unexpected argument '3'"),
  "no value": ("--config=good.py --config.seed", "config.seed"),
}
GOOD_ARGUMENTS = (
  "--config.privacy.epsilon=none --config.privacy.noise_multiplier=2 --config=good.py "
  "--config.model.options.width=16 --config.model.options.deep true --config.num_steps=1 "
  "--config.num_steps=9 --flagfile=more.flags"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp("configs")
  (path / "good.py").write_text(GOOD)
  (path / "other.py").write_text("def get_config():\n  return {}\n")
  (path / "failing.py").write_text("\nimport no_such_module_of_mine\n")
  (path / "more.flags").write_text("--config.data.center=true\n")
  return path


@pytest.fixture(scope="module")
def ended(folder):
  """Each case in a process of its own, forked after the imports: (exit code, out, err)."""
  cases = [(name, arguments, None) for name, (arguments, _) in CASES.items()]
  cases += [("good", GOOD_ARGUMENTS, None), ("default", "--config.seed=3", "good.py")]
  command = [sys.executable, "-W", "ignore", "-c", DRIVER, json.dumps(cases)]
  env = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
  done = subprocess.run(
    command, cwd=folder, env=env, capture_output=True, text=True, check=True
  )
  return {
    name: (code, *((folder / f"{name}.{stream}").read_text() for stream in ("out", "err")))
    for name, code in json.loads(done.stdout).items()
  }


@pytest.mark.cases(
  slow=["failing file", "a field as a flag", "a field of another library"],
  long=["unknown field", "wrong type", "missing file", "not a config"],
)
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line_and_exit_code_2(ended, name):
  code, out, err = ended[name]
  assert code == 2 and out == ""
  (line,) = err.splitlines()
  assert line.startswith("error: ") and CASES[name][1] in line


def test_overrides_reach_the_config_in_any_order(ended):
  code, out, err = ended["good"]
  assert (code, err) == (0, "")
  config = json.loads(out)
  assert (
    config["privacy"]["epsilon"] is None and config["privacy"]["noise_multiplier"] == 2.0
  )
  assert config["model"]["options"] == {"width": 16, "deep": True}
  assert config["num_steps"] == 9 and config["data"]["center"] is True


def test_default_file_takes_overrides(ended):
  code, out, err = ended["default"]
  assert (code, err) == (0, "")
  assert json.loads(out)["seed"] == 3 and json.loads(out)["num_steps"] == 7


@pytest.mark.parametrize(
  ("texts", "ignored"),
  [
    ({"base.seed": "5"}, "base.seed"),
    ({"base.num_steps": "5"}, ""),
    ({"base.seed": "0"}, ""),  # as in the file: nothing is lost
  ],
)
def test_a_flag_that_every_run_of_a_sweep_sets_itself_is_found(texts, ignored):
  def get_configs(sweep):
    yield "a run", dataclasses.replace(sweep.base, seed=3)

  before = Sweep()
  config = fields.override_all(before, texts)
  module: Any = types.SimpleNamespace(get_configs=get_configs)
  got = config_flag._Got(config, module, before=before, texts=texts)
  found = [
    name for name in texts if config_flag._is_ignored(got, name, [*get_configs(config)])
  ]
  assert found == [ignored] * bool(ignored)


def test_failing_file_names_its_line(folder):
  with pytest.raises(UserError, match=r"failing\.py: ModuleNotFoundError.*\(line 2\)"):
    config_flag.load(str(folder / "failing.py"), TrainConfig)


@pytest.mark.parametrize(
  "text, says",
  [
    ("x = 1", "must define get_config"),
    ("def get_config(:", "SyntaxError"),
    ("def get_config():\n  raise RuntimeError('a\\nb')", r"RuntimeError: a b \(line 2\)"),
    ("def get_config(name):\n  pass", "TypeError"),
    ("raise SystemExit(3)", "SystemExit: 3"),
    (
      "from dpjax.experiments.kinds.central.config import *\n"
      "def get_config():\n  return TrainConfig(privacy=DpSgd(epsilon='2'))",
      r"--config\.privacy\.epsilon='2': must be a number or none",
    ),
  ],
)
def test_bad_files(tmp_path, text, says):
  path = tmp_path / "bad.py"
  path.write_text(text)
  with pytest.raises(UserError, match=says) as error:
    config_flag.load(str(path), TrainConfig)
  assert "\n" not in str(error.value)


def test_a_file_without_a_name_is_none():
  with pytest.raises(UserError, match="--config=: must name a Python file"):
    config_flag.load("", TrainConfig)


def test_a_sweep_is_no_config_of_one_run():
  with pytest.raises(UserError, match=r"returned Sweep, but .* wants TrainConfig"):
    config_flag.load("configs/sweeps/quickstart.py", TrainConfig)


def test_a_config_of_another_launcher_is_named(folder):
  with pytest.raises(UserError, match=r"returned TrainConfig, but .* wants Sweep"):
    config_flag.load(str(folder / "good.py"), Sweep)


@pytest.mark.parametrize("wrong", [True, False])
def test_a_value_that_a_choice_drops_is_noted_but_not_above_an_error(wrong):
  words = ["--config=configs/mnist_scatter_ftrl.py", "--config.privacy=sgd"]
  done = commands.run(
    "launch.train", *words, "--config.num_steps=0" if wrong else "--print_config"
  )
  assert ("the file's values are dropped" in done.stderr) == (not wrong)
  assert len(done.stderr.splitlines()) == 1 and (done.returncode != 0) == wrong
