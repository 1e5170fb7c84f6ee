"""--dry_run: the plan of the run that would follow, and nothing of the run."""

import json
import re

import numpy as np
import pytest

from dpjax import data, trees
from dpjax.experiments.config import fields
from dpjax.experiments.config.naming import naming
from dpjax.experiments.kinds.central import build, features
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.run import dry_run, loop
from dpjax.experiments.run.kind import experiment_of
from dpjax.validate import UserError
from dpjax.zoo import datasets
from tests import commands, pinned
from tests.refuses import refuses

_TINY = {"num_steps": 3, "eval_every": 2, "seed": 1}
_NOISE = {"privacy.epsilon": None, "privacy.noise_multiplier": 2.0, "model.name": "linear"}


def _plan(config, workdir):
  with naming(config):  # as the launcher does
    return dry_run.report(experiment_of(config), workdir)


def _lines(text):
  head, *lines = text.splitlines()
  assert head == "Plan only: nothing is trained, nothing is written."
  return dict(re.split(r"  +", line, maxsplit=1) for line in lines)


def _agrees(plan, result):
  """What the plan says is what the run then reports."""
  shared = [name for name in plan if name in result]
  assert {"noise_multiplier", "sampler", "model", "l2_clip_norm"} <= set(shared)
  for name in shared:
    value = result[name]
    shown = f"{value:,}" if name == "num_parameters" else dry_run._show(name, value)
    assert plan[name] == shown


@pytest.mark.long
def test_the_plan_is_that_of_the_run(tmp_path):
  relation = {"privacy.neighboring_relation": "replace_special"}
  config = fields.replace_all(TrainConfig(**_TINY), _NOISE | relation)
  plan = _lines(_plan(config, tmp_path / "run"))
  assert list(tmp_path.iterdir()) == []  # the run itself makes its folder
  result = loop.train(config, tmp_path / "run")
  _agrees(plan, result)
  assert "delta=1e-05, replace_special, per example), mu=" in plan["privacy"]
  assert plan["privacy"].endswith(", by pld")
  assert plan["train"] == "3 optimizer steps" and "(proved" in plan["privacy"]
  planned = float(re.search(r"epsilon=([\d.]+)", plan["privacy"])[1])
  assert result["epsilon"] <= planned <= result["epsilon"] * 1.002
  assert "estimate" in plan["time"] and "estimate" in plan["memory"]
  before = sorted(path.name for path in tmp_path.rglob("*"))
  state = dry_run.state_of(experiment_of(config), build.load_data(config), tmp_path / "run")
  assert state == "holds this run, finished; it would not run again"
  with refuses("workdir"):
    _plan(fields.replace(config, "seed", 2), tmp_path / "run")
  assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.long
def test_no_step_sees_the_data(monkeypatch, tmp_path):
  """Other values, other labels and other sizes of clients: the steps are the same."""
  seen = []

  def spy(work):
    state = work.init()
    for draw in work.draws(0):
      state, _ = work.step(state, draw)
    seen.append(trees.sha256(work.released(state)))
    return dry_run.Timing(1.0, (0.1,), 0.1, 650), state

  monkeypatch.setattr(dry_run, "time_steps", spy)
  plans = []
  for flipped in (False, True):
    # The same keys twice: else steps of the same zeros would differ by their noise.
    pinned.restart("plan")
    monkeypatch.setattr(data, "load", _loaded(flipped))
    skewed = {"name": "dirichlet", "alpha": 0.5, "min_size": 0}
    fed = FedConfig(num_rounds=2, clients_per_round=5, partition=skewed)
    for config in (TrainConfig(**_TINY), fed):
      # Under it the number of own records is public.
      relation = (
        {"privacy.neighboring_relation": "replace_special"} if config is not fed else {}
      )
      config = fields.replace_all(fields.replace_all(config, _NOISE), relation)
      plans.append(_lines(dry_run.report(experiment_of(config), tmp_path / "run")))
  assert seen[0] == seen[2] and seen[1] == seen[3]
  assert "per user)" in plans[1]["privacy"]
  assert plans[1]["rounds"] == "2 communication rounds"
  for before, after in zip(plans[:2], plans[2:]):
    for name in set(before) - {"time", "memory"}:
      assert before[name] == after[name]


def _loaded(flipped):
  """digits, or a set of that shape with other pixels and labels."""
  train, test = datasets.registry.load("digits")
  x, y = train.x, train.y
  if flipped:
    order = np.random.default_rng(0).permutation(len(train))
    x = 1 - x[order]
    y = y[order][::-1]
  train = data.from_arrays(x, y, num_classes=10, name="digits")
  return lambda *args, **named: (train, test)


@pytest.mark.cases(long=[1, 2])
@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"num_steps": -1, "data.name": "nothing.npz"}, "num_steps=-1"),
    ({"privacy.epsilon_budget": 0.1}, "privacy.epsilon_budget=0.1"),
    ({"privacy.sampler.capacity": 20}, "capacity=20"),
    ({"data.name": "nothing.npz"}, "nothing.npz"),
    ({"model.options": {"features": [0]}}, "features[0]=0"),
  ],
)
def test_what_a_run_refuses_the_plan_refuses_in_the_same_line(tmp_path, change, words):
  config = fields.replace_all(TrainConfig(**_TINY), change)
  messages = []
  for name, begin in (("train", loop.train), ("plan", _plan)):
    with pytest.raises(UserError) as refused:
      begin(config, tmp_path / name)
    messages.append(str(refused.value))
  assert messages[0] == messages[1] and words in messages[0], messages


@pytest.mark.slow
def test_a_model_that_knows_the_data_by_another_name_is_refused_in_the_same_line(tmp_path):
  config = fields.replace_all(TrainConfig(**_TINY), _NOISE)
  loop.train(config, tmp_path / "first")
  result = tmp_path / "first" / "result.json"
  result.write_text(json.dumps(json.loads(result.read_text()) | {"dataset": "renamed"}))
  path = str(tmp_path / "first" / "params.npz")
  config = fields.replace_all(config, {"pretrained": path, "seed": 2})
  messages = []
  for name, begin in (("train", loop.train), ("plan", _plan)):
    with refuses("pretrained") as refused:
      begin(config, tmp_path / name)
    messages.append(str(refused.value))
  assert messages[0] == messages[1]


def test_features_are_neither_computed_nor_read(monkeypatch):
  config = TrainConfig(**_TINY)
  config.model.name = "scatter_linear"
  rows = []
  real = features.add_features
  spy = lambda model, dataset: rows.append(len(dataset)) or real(model, dataset)
  loaded = build.load_data(config, features=False)
  monkeypatch.setattr(features, "add_features", spy)
  (train, test), seconds = dry_run._blank(config, loaded)
  assert rows == [256, 256] and seconds > 0
  assert train.x.shape == (1437, 2, 2, 81) and len(test) == 360
  assert not train.x.any() and not train.y.any()
  monkeypatch.setattr(features, "_MOST_IN_MEMORY", 10**6)  # bytes: train only
  (train, test), _ = dry_run._blank(config, loaded)
  assert not train.in_memory and test.in_memory  # where the run would have them


@pytest.mark.slow
def test_the_flag(tmp_path):
  folder = tmp_path / "run"
  done = commands.run(
    "launch.train", f"--workdir={folder}", "--config.num_steps=3", "--dry_run"
  )
  assert done.returncode == 0, done.stderr
  assert "noise_multiplier" in done.stdout and not folder.exists()
  several = ["--coordinator=localhost:1", "--num_processes=2", "--process_id=0"]
  done = commands.run("launch.federate", "--dry_run", *several)
  assert done.returncode == 2 and "--dry_run: must be without --coordinator" in done.stderr
