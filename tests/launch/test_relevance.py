"""launch.relevance from the command line: what a user types, right and wrong."""

import functools
import json
import pathlib

import pytest

from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps import experiment
from launch import config_flag
from tests import commands

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_CONFIGS = sorted(
  path
  for path in (_ROOT / "configs" / "radp").glob("*.py")
  if path.stem not in ("__init__", "common")
)
_SMALL = ("--config.num_epochs=2", "--config.data.limit=200", "--config.batch_size=50")
_launch = functools.partial(commands.run, "launch.relevance")


@pytest.mark.slow
def test_paper_mode_never_prints_a_claim_without_what_fails(tmp_path):
  done = _launch(f"--workdir={tmp_path / 'run'}", *_SMALL)
  assert done.returncode == 0, done.stderr
  (line,) = [text for text in done.stdout.splitlines() if "epsilon=" in text]
  assert (
    "CLAIMED" in line
    and "nothing is proved" in line
    and "neighbors, Delta R, data-dependent noise, entropy as epsilon" in line
  )
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["proved_epsilon"] is None and result["num_examples"] == 200
  # What the run does otherwise than the paper is said, and its measures stand beside ours.
  assert result["departures"][0].startswith("noise: its scale is 1 / (d beta_j epsilon_2)")
  assert {"model 1", "model 2", "relevance and noise"} == set(result["stage_seconds"])
  assert 0 <= result["test_squared_error"] <= 2 and result["accuracy_oscillation"] >= 0
  counts = (tmp_path / "run" / "confusion.csv").read_text().splitlines()
  assert counts[0].startswith("class,true_positives") and len(counts) == 11


@pytest.mark.slow
def test_rigorous_mode_prints_its_proof(tmp_path):
  proved = "--config=configs/radp/quickstart_proved.py"
  done = _launch(f"--workdir={tmp_path / 'run'}", proved, *_SMALL)
  assert done.returncode == 0, done.stderr
  assert "epsilon=8 (proved, delta=0, replace_one, per example)" in done.stdout
  result = json.loads((tmp_path / "run" / "result.json").read_text())
  assert result["epsilon"] == result["proved_epsilon"]
  assert result["failed_assumptions"] == [] and result["stage_seconds"] is None


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (["--config.method=radpp"], ["method='radpp'", "did you mean 'radp'"]),
    (["--config.method=radp_rigorous", "--config.method.labels=raw"], ["raw labels"]),
    (
      [
        "--config.method=radp_rigorous",
        "--config.method.model1=untrained",
        "--config.method.model1.rel_noise=entropy",
      ],
      ["method.model1.rel_noise='entropy'", "data-dependent budgets"],
    ),
    (["--config.method.preset=P9"], ["method.preset='P9'"]),
    (
      ["--config.method.weight_decay=0.5"],
      ["--config.method.weight_decay", "'radp' has no such field", "radp_rigorous"],
    ),
    (["--config.noise_seed=1", "--config.method=no_dp"], ["noise_seed=1", "ignored"]),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, arguments, words):
  done = _launch(f"--workdir={tmp_path / 'run'}", *arguments)
  line = commands.refusal(done)
  assert all(word in line for word in words), line
  assert not (tmp_path / "run").exists()


@pytest.mark.cases(
  long=["quickstart", "test3_cifar10", "test4_gaussian", "test5_activations"]
)
@pytest.mark.parametrize("path", _CONFIGS, ids=lambda path: path.stem)
def test_every_published_config_is_ready_to_run(path):
  config = config_flag.load(str(path), RelevanceConfig)
  runs = experiment.points(config)
  assert runs and len({run.name for run in runs}) == len(runs)
  text = path.read_text()
  assert f"--config=configs/radp/{path.name}" in text
