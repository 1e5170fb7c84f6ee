"""python -m launch.sweep on the embedded digits: real runs, very short."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests import commands

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
from dpjax.experiments.kinds.central.config import ModelConfig, DpSgd, TrainConfig
from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep
def get_config():
  base = TrainConfig(
    num_steps=4, eval_every=2, checkpoint_every=2, model=ModelConfig("mlp"),
    privacy=DpSgd(sampling_prob=0.05, accountant="rdp"))
  return Sweep(base=base, epsilons=[1.0, 4.0], seeds=[0])
def get_configs(sweep):
  for epsilon in sweep.epsilons:
    # the second limit is above the number of examples, which only the data tell
    for limit in (1400, 9999):
      changes = {"privacy.epsilon": epsilon, "data.limit": limit}
      yield f"limit {limit} @ {epsilon:g}", fields.replace_all(sweep.base, changes)
"""


_REPEATED = "--config.base.noise_seed=0"


def _command(folder, *arguments):
  (folder / "sweep.py").write_text(CONFIG)
  flags = [f"--config={folder / 'sweep.py'}", f"--workdir={folder / 'out'}"]
  return ["launch.sweep", *flags, *arguments]


def _launch(folder, *arguments):
  return commands.run(*_command(folder, *arguments))


def _written(folder):
  return {
    path.parent.name: path.stat().st_mtime_ns
    for path in folder.glob("out/points/*/result.json")
  }


@pytest.mark.slow
def test_failed_runs_are_named_and_finished_ones_kept(tmp_path):
  done = _launch(tmp_path)
  assert done.returncode == 1, done.stderr
  last = done.stderr.splitlines()[-1]
  assert "2 of 4 runs failed" in last and " and 1 more" in last, last
  assert last.count("data.limit=9999: ") == 1 and last.startswith("error: "), last
  assert "Traceback" not in done.stderr and "query on the private data" in done.stdout
  saved = json.loads((tmp_path / "out" / "sweep.json").read_text())
  assert [row["status"] for row in saved["rows"]] == ["done", "failed"] * 2
  assert 0 < saved["all_runs_together"]["epsilon"] <= 5.0
  assert (tmp_path / "out" / "curve.png").exists()
  before = _written(tmp_path)
  again = _launch(tmp_path, "--only=limit 1400*")
  assert again.returncode == 0, again.stderr
  assert len(before) == 2 and _written(tmp_path) == before


def test_mistake_is_one_line(tmp_path):
  done = _launch(tmp_path, "--config.epsilns=[1.0]")
  assert done.returncode == 2 and not (tmp_path / "out").exists()
  (line,) = done.stderr.splitlines()
  assert "did you mean 'epsilons'" in line


def test_configs_of_the_repository_are_sweeps():
  pytest.importorskip("sklearn")
  from configs.sweeps import mnist_scatter_linear, quickstart
  from dpjax.experiments.sweeps.sweep import Runs

  small, large = quickstart.get_config(), mnist_scatter_linear.get_config()
  for module, sweep in ((quickstart, small), (mnist_scatter_linear, large)):
    assert len(Runs(module.get_configs(sweep), sweep).points) == 15
  assert [round(x, 2) for _, x, _ in large.references] == [2.93, 3.0]


def _in_interpreters_of_their_own(tmp_path, *more):
  """As users start it."""
  return subprocess.run(
    [sys.executable, "-m", *_command(tmp_path, *more)],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )


@pytest.mark.long
def test_terminated_sweep_goes_on_and_ends_equal(tmp_path):
  first, second = tmp_path / "a", tmp_path / "b"
  steps = ("--only=limit 1400*", "--config.base.num_steps=400", _REPEATED)
  for folder in (first, second):
    folder.mkdir()
  process = subprocess.Popen(
    [sys.executable, "-m", *_command(first, *steps)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  while not list(first.glob("out/points/*/checkpoints/*")) and process.poll() is None:
    time.sleep(0.05)
  process.send_signal(signal.SIGTERM)
  _, errors = process.communicate()
  assert process.returncode == 128 + signal.SIGTERM, errors
  assert not os.path.exists(first / "out" / "sweep.json")  # its first run was interrupted
  for folder in (first, second):
    done = _in_interpreters_of_their_own(folder, *steps)
    assert done.returncode == 0, done.stderr
  assert (first / "out" / "curve.csv").read_bytes() == (
    second / "out" / "curve.csv"
  ).read_bytes()


SELECTION = """
from dpjax.experiments.kinds.central.config import ModelConfig, DpSgd, TrainConfig
from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Selection, Sweep
def get_config():
  base = TrainConfig(
    num_steps=3, eval_every=3, checkpoint_every=3, model=ModelConfig("mlp"),
    privacy=DpSgd(sampling_prob=0.05, accountant="rdp", epsilon=1.0))
  return Sweep(base=base, selection=Selection(mean_trials=1.0))
def get_configs(sweep):
  for rate in (0.1, 0.5):
    yield f"rate {rate}", fields.replace(sweep.base, "optimizer.learning_rate", rate)
"""


@pytest.mark.slow
def test_p40_a_private_selection_prints_both_epsilons_and_releases_one_model(tmp_path):
  command = _command(tmp_path)
  (tmp_path / "sweep.py").write_text(SELECTION)
  done = commands.run(*command)
  assert done.returncode == 0, done.stderr
  found = json.loads((tmp_path / "out" / "best" / "result.json").read_text())
  assert found["selection"]["epsilon_of_one_run"] <= 1.0 < found["epsilon"]
  assert "One run is (epsilon = " in done.stdout and "is charged" in done.stdout
  assert (tmp_path / "out" / "best" / "params.npz").exists()
  assert not (tmp_path / "out" / "trials").exists()


FEDERATED = """
import math
from configs.fed import quickstart
from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep
def get_config():
  base = quickstart.get_config()
  base.num_rounds, base.eval_every, base.data.limit = 2, 2, 200
  base.local.epochs = 1
  base.partition = {"name": "dirichlet", "num_clients": 20, "min_size": 0}
  base.clients_per_round = 5
  base.privacy.epsilon, base.privacy.noise_multiplier = None, 1.0
  return Sweep(base=base, x="partition.alpha")
def get_configs(sweep):
  for alpha in (1.0, math.inf):
    yield f"alpha {alpha}", fields.replace(sweep.base, "partition.alpha", alpha)
"""


@pytest.mark.slow
def test_a_federated_sweep_runs_over_clients(tmp_path):
  command = _command(tmp_path)
  (tmp_path / "sweep.py").write_text(FEDERATED)
  done = commands.run(*command)
  assert done.returncode == 0, done.stderr
  saved = json.loads((tmp_path / "out" / "sweep.json").read_text())
  assert [row["unit"] for row in saved["rows"]] == ["user", "user"]
  assert [row["method"] for row in saved["rows"]] == ["dp_fed_avg"] * 2
  assert (tmp_path / "out" / "curve.png").exists()
  assert "| test_accuracy |" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.long
def test_two_processes_find_what_one_finds_and_go_on_where_it_stopped(tmp_path):
  alone, together = tmp_path / "alone", tmp_path / "together"
  for folder in (alone, together):
    folder.mkdir()
  assert _in_interpreters_of_their_own(alone, _REPEATED).returncode == 1
  first = ("--only=limit 1400 @ 4", _REPEATED)
  assert _in_interpreters_of_their_own(together, *first).returncode == 0
  before = _written(together)
  command = [sys.executable, "-m", *_command(together, _REPEATED)]
  processes = [
    subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(2)
  ]
  for process in processes:
    _, errors = process.communicate()
    assert process.returncode in (0, 1), errors
  assert before.items() <= _written(together).items()
  assert (alone / "out" / "curve.csv").read_bytes() == (
    together / "out" / "curve.csv"
  ).read_bytes()
  rows = [
    [
      {key: value for key, value in row.items() if key != "wall_seconds"}
      for row in json.loads((folder / "out" / "sweep.json").read_text())["rows"]
    ]
    for folder in (alone, together)
  ]
  assert rows[0] == rows[1]


@pytest.mark.slow
def test_a_wrong_y_is_refused_before_the_first_run(tmp_path):
  done = _launch(tmp_path, "--config.y=test_acuracy")
  line = commands.refusal(done)
  assert "y='test_acuracy'" in line and "did you mean 'test_accuracy'" in line
  assert not (tmp_path / "out").exists()


def test_an_error_of_the_base_names_its_flag(tmp_path):
  line = commands.refusal(_launch(tmp_path, "--config.base.privacy.delta=2"))
  assert line.startswith("error: --config.base.privacy.delta=2.0: must be in (0, 1)")


def test_a_file_of_get_configs_alone_has_no_flags(tmp_path):
  (tmp_path / "runs.py").write_text("def get_configs():\n  yield 1\n")
  order = ["launch.sweep", f"--config={tmp_path}/runs.py", f"--workdir={tmp_path}/out"]
  line = commands.refusal(commands.run(*order, "--config.seeds=[0]"))
  assert "has no get_config()" in line
  assert "must yield (name, config)" in commands.refusal(commands.run(*order))


@pytest.mark.parametrize("flag", ["--print_commands", "--only=x"])
def test_what_a_selection_does_not_read_is_refused(tmp_path, flag):
  command = _command(tmp_path, flag)
  (tmp_path / "sweep.py").write_text(SELECTION)
  done = commands.run(*command)
  assert done.returncode == 2 and "would be ignored" in done.stderr
