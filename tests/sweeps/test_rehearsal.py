"""--dry_run of several runs: what they would guarantee together, and none of them."""

import re

import numpy as np
import pytest

from configs.radp import quickstart as radp
from dpjax import data
from dpjax.experiments.config import fields
from dpjax.experiments.config.naming import naming
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.kinds.relevance import build as relevance_build
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.run import dry_run, loop
from dpjax.experiments.run.kind import experiment_of
from dpjax.experiments.sweeps import rehearsal
from dpjax.experiments.sweeps.sweep import Runs, Selection
from dpjax.validate import UserError
from tests import commands
from tests.refuses import refuses
from tests.sweeps import grids

_TINY = {
  "num_steps": 3,
  "eval_every": 3,
  "model.name": "linear",
  "privacy.accountant": "rdp",
  "privacy.epsilon": None,
  "privacy.noise_multiplier": 2.0,
}


def _sweep(**changes):
  base = fields.replace_all(TrainConfig(), _TINY)
  varied = {"data.limit": [200, 99999]}
  return grids.Grid(**({"base": base, "grid": varied, "x": "data.limit"} | changes))


def _lines(text):
  head, *lines = text.splitlines()
  assert head == "Plan only: nothing is trained, nothing is written."
  return dict(re.split(r"  +", line, maxsplit=1) for line in lines)


@pytest.mark.long
def test_the_plan_of_a_sweep_is_that_of_its_runs(tmp_path):
  config = _sweep(seeds=[0, 1])
  plan = _lines(rehearsal.report(config.runs(), tmp_path / "new"))
  assert list(tmp_path.iterdir()) == []
  assert plan["runs"] == "4, of which 0 are finished and 2 would fail"
  failing = [
    line for line in plan.values() if line.startswith("would fail: data.limit=99999")
  ]
  assert len(failing) == 2 and "estimate" in plan["time"]
  rows = grids.run(config, tmp_path / "ran", loop.train, build.load_data)
  total = 2 * rows[0]["epsilon"]
  said = re.search(r"at most \(epsilon = ([\d.]+), delta = ([\d.e-]+)\)", plan["together"])
  assert total <= float(said[1]) <= 1.01 * total and float(said[2]) == pytest.approx(2e-5)
  again = _lines(rehearsal.report(config.runs(), tmp_path / "ran"))
  assert again["runs"] == "4, of which 2 are finished and 2 would fail"
  assert again[rows[0]["name"]].endswith(dry_run.FINISHED)
  assert again["time"].startswith("about 0 minutes")


def test_one_mistake_that_stops_every_run_is_one_error(tmp_path):
  base = fields.replace_all(TrainConfig(), _TINY | {"data.name": "missing.npz"})
  config = _sweep(base=base, grid={"data.limit": [200, 300]})
  with pytest.raises(UserError, match=r"missing.*\(all 2 runs would fail\)"):
    rehearsal.report(config.runs(), tmp_path / "new")


def test_the_plan_of_a_selection_is_what_the_choice_costs(monkeypatch, tmp_path):
  timing = dry_run.Timing(27.0, (1.0,), 1.0, 650)  # and two more steps, one evaluation
  real = dry_run.time_steps
  monkeypatch.setattr(dry_run, "time_steps", lambda work: (timing, real))
  config = _sweep(x="privacy.epsilon", grid={"optimizer.learning_rate": [0.1, 0.2]})
  config.selection = Selection(mean_trials=4.0)
  plan = _lines(rehearsal.report(config.runs(), tmp_path))
  # On a busy machine what was really measured adds seconds.
  assert re.match(r"about 2(\.[0-4])? minutes on average", plan["time"])
  assert "The choice of the best of a random number of runs is charged" in plan["privacy"]


def test_the_plan_of_a_run_of_relevance_trains_on_zeros(monkeypatch, tmp_path):
  seen, real = [], relevance_build.pipeline.story

  def spy(method, job):
    seen.append((job.train.x.any(), len(job.train)))
    return real(method, job)

  monkeypatch.setattr(relevance_build.pipeline, "story", spy)
  small = {"method": "no_dp", "num_epochs": 2, "model.options": {"features": (4,)}}
  config = fields.replace_all(fields.replace(radp.get_config(), "epsilon", 2.0), small)
  plan = _lines(experiment_of(config).plan(tmp_path / "new"))
  assert seen == [(False, 1437)] and list(tmp_path.iterdir()) == []
  assert (plan["privacy"], plan["steps"]) == ("not private", "28")
  assert plan["workdir"].endswith(": new")
  with refuses("data.limit", value=99999):
    experiment_of(fields.replace(config, "data.limit", 99999)).plan(tmp_path)
  named = [(name, fields.replace(config, "activation", name)) for name in ("relu", "tanh")]
  several = _lines(rehearsal.report(Runs(named), tmp_path / "new"))
  assert several["runs"].startswith("2, ")
  assert several["relu"].startswith("not private, 28 steps, about ")


@pytest.mark.long
def test_public_data_of_a_run_are_not_taken_for_the_private_ones(tmp_path):
  """Both are zeros in a rehearsal; where one holds records of the other the plan says so."""
  train, test = data.load("digits")
  config = fields.replace_all(
    RelevanceConfig(method="radp_rigorous", num_epochs=1, batch_size=100),
    {
      "model.options": {"features": (4,)}, "data.limit": 200, "epsilon": 8.0,
      "method.model1": "public", "method.pool": 1, "method.shuffle": False,
      "method.model1.public_data": str(tmp_path / "other.npz"),
    },
  )  # fmt: skip
  for first, match in ((200, None), (199, "1 of its records are in the training data")):
    rows = slice(first, first + 200)
    named = dict(x_test=test.x, y_test=test.y, num_classes=10)
    np.savez(tmp_path / "other.npz", x_train=train.x[rows], y_train=train.y[rows], **named)
    if match is None:
      assert "CLAIMED" in experiment_of(config).plan(tmp_path / "new")
      continue
    with refuses("method.model1.public_data"), naming(config):
      experiment_of(config).plan(tmp_path / "new")


@pytest.mark.long
@pytest.mark.parametrize("method", ["radp", "radp_dpsgd", "adlm"])
def test_every_method_can_be_rehearsed(method, tmp_path):
  config = RelevanceConfig(method=method, num_epochs=2, batch_size=400)
  config.model.options = {"features": (4,)}
  report = experiment_of(config).plan(tmp_path)
  assert re.search(r"epsilon=[\d.]+ \((proved|CLAIMED)", report)


@pytest.mark.cases(long=["attack"])
@pytest.mark.parametrize("launcher", ["attack", "secure"])
def test_what_has_no_plan_says_so(launcher):
  line = commands.refusal(commands.run(f"launch.{launcher}", "--dry_run"))
  assert line.startswith("error: --dry_run=True: would be ignored, it needs")
