"""A kind of run is one folder with config.py and build.py, and needs no change of dpjax."""

import dataclasses
import importlib
import shutil
import signal
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import mechanisms, pictures
from dpjax.accounting import Ledger, gaussian_event
from dpjax.experiments.run import guarantee, loop, writers
from tests import commands
from tests.refuses import refuses
from tests.runs.stops import stop_after

_CONFIG = """
import dataclasses

@dataclasses.dataclass
class MeanConfig:
  path: str = ""  # of an .npy, [n, d]
  epsilon: float = 1.0
  num_steps: int = 8
  seed: int = 0
"""

_BUILD = """
import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import Plan, PoissonSampler, training
from dpjax.experiments.run import guarantee
from dpjax.experiments.run.loop import Job, Phase, single


def build(config, data=None):
  x = np.load(config.path) if data is None else data
  return Job(
    config=config,
    seed=config.seed,
    data_name=config.path,
    data=lambda: hashlib.sha256(x.tobytes()).digest(),
    start=lambda random: single(_phase(config, x, random)),
  )


def _phase(config, x, random):
  \"\"\"The mean [d] of rows of norm 1 or less, by gradient steps towards it.\"\"\"
  n = len(x)
  plan = Plan.calibrated(
    epsilon=config.epsilon, delta=1e-5, sampler=PoissonSampler(prob=0.5, capacity=n + 1),
    num_steps=config.num_steps, l2_clip_norm=2.0, normalize_by=n / 2,
  )
  loss = lambda w, row: 0.5 * jnp.sum((w - row) ** 2)
  algorithm = training.dp_sgd(loss, plan, optax.sgd(0.5), noise_key=random.noise)
  return Phase(
    num_steps=config.num_steps,
    init=lambda: algorithm.init(jnp.zeros(x.shape[1])),
    step=jax.jit(algorithm.step),
    draws=lambda start: plan.batches(x, rng=random.sampler, start=start),
    released=lambda state: {"mean": state.params},
    evaluate=lambda state: {"accuracy": 1 - float(jnp.abs(state.params - 0.3).max())},
    guarantee=guarantee.of_plan(plan, n),
    save_every=3,
    planned=lambda: {"task": "mean", "dataset": "rows", "method": "private_mean"},
  )
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
  folder = tmp_path / "averages_of_mine"
  folder.mkdir()
  for name, text in {"__init__": "", "config": _CONFIG, "build": _BUILD}.items():
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
  rows = np.full((400, 3), 0.3) + np.random.default_rng(0).normal(0, 0.05, (400, 3))
  np.save(tmp_path / "rows.npy", rows.astype(np.float32))
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "averages_of_mine.config", raising=False)
  made = importlib.import_module("averages_of_mine.config")
  return made.MeanConfig(path=str(tmp_path / "rows.npy"))


@pytest.mark.long
def test_a_private_mean_is_a_run_like_any_other(config, tmp_path, monkeypatch, capsys):
  whole = loop.train(config, tmp_path / "whole")
  assert whole["test_accuracy"] > 0.9 and 0.95 < whole["epsilon"] <= 1.0
  assert "(proved, delta=1e-05, add_or_remove_one, per example)" in guarantee.summary(whole)
  assert "Privacy statement" in whole["privacy_statement"]
  assert Ledger.from_json(whole["ledger"]).num_steps == 8
  for name in ("config.json", "metrics.jsonl", "report.png", "params.npz", "tensorboard"):
    assert (tmp_path / "whole" / name).exists()
  assert "train: 8/8" in capsys.readouterr().err
  stop_after(monkeypatch, 4)
  with pytest.raises(loop.Interrupted, match="step 4"):
    loop.train(config, tmp_path / "run")
  shutil.copytree(tmp_path / "run", tmp_path / "copy")
  resumed = loop.train(config, tmp_path / "run")
  whole = loop.train(config, tmp_path / "copy")
  assert resumed["params_sha256"] == whole["params_sha256"]
  assert writers.read_metrics(tmp_path / "run") == writers.read_metrics(tmp_path / "copy")
  config.epsilon = 2.0
  with refuses("workdir"):
    loop.train(config, tmp_path / "run")
  config.epsilon = 1.0
  np.save(config.path, np.load(config.path)[1:])
  with refuses("data.name"):
    loop.train(config, tmp_path / "run")


_LAUNCH = '''
"""Private means: python -m averages_of_mine.launch --config=means.py --workdir=run"""

from absl import flags

from averages_of_mine import config
from dpjax.experiments.run import kind, loop, guarantee
from launch import app, config_flag

KIND = kind.Kind(
  config=config.MeanConfig, launcher="averages_of_mine.launch", check=lambda config: None
)
config_flag.define(kind=KIND)
flags.DEFINE_string("workdir", None, "Directory of this run (default: runs/<config>).")


def main():
  config, workdir = config_flag.get(), config_flag.workdir()
  with app.stoppable(workdir):
    print(guarantee.summary(loop.train(config, workdir)))


if __name__ == "__main__":
  app.run(main)
'''


@pytest.mark.long
def test_its_launcher_takes_its_fields_as_flags(config, tmp_path):
  (tmp_path / "averages_of_mine" / "launch.py").write_text(_LAUNCH)
  made = f"from averages_of_mine import config\nget_config = lambda: config.{config}\n"
  (tmp_path / "means.py").write_text(made)
  options = ("--config=means.py", "--workdir=run", "--config.epsilon=2")
  done = commands.run("averages_of_mine.launch", *options, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("epsilon=2 (proved, delta=1e-05, add_or_remove_one")
  refused = commands.run("averages_of_mine.launch", *options, "--config.no=2", cwd=tmp_path)
  assert refused.returncode == 2 and "no such field" in refused.stderr


@dataclasses.dataclass
class _Count:
  seed: int = 0


_TOLD = {"task": "count", "dataset": "none", "method": "by_hand"}


def _phase(**changes):
  """Counts to 3, in a state that is one array: the least that a kind of run needs."""
  least = {
    "num_steps": 3,
    "init": lambda: jnp.zeros(2),
    "step": lambda state, draw: (state + draw, None),
    "draws": lambda start: range(start, 3),
    "released": lambda state: state,
    "evaluate": None,
    "planned": lambda: _TOLD,
  }
  return loop.Phase(**{**least, **changes})


def _job(phase=(), **changes):
  made = {
    "config": _Count(),
    "seed": 0,
    "data_name": "none",
    "data": lambda: bytes(32),
    "start": lambda random: loop.single(_phase(**dict(phase))),
  }
  return loop.Job(**{**made, **changes})


def test_the_least_kind_of_run_needs_no_metric_and_no_tree(tmp_path, monkeypatch):
  whole = loop.run(_job(), tmp_path / "whole")
  assert whole["num_steps"] == 3 and whole["test_accuracy"] is None
  assert whole["epsilon_kind"] == "none"
  with np.load(tmp_path / "whole" / "params.npz") as held:
    assert held["params"].tolist() == [3.0, 3.0]
  stop_after(monkeypatch, 2)
  with pytest.raises(loop.Interrupted, match="step 2"):
    loop.run(_job(), tmp_path / "run")
  again = loop.run(_job(), tmp_path / "run")
  assert again["params_sha256"] == whole["params_sha256"]


def test_a_stop_in_the_last_step_of_a_phase_stops_the_next_one(tmp_path, monkeypatch):
  """With a handler of the system or of Python, nothing else would end the run."""

  def schedule(train_phase):
    first = train_phase(_phase(subfolder="first", released=lambda state: state))
    return loop.single(_phase(init=lambda: first.state))(train_phase)

  job = lambda: _job(start=lambda random: schedule)
  whole = loop.run(job(), tmp_path / "whole")
  interrupt = lambda: signal.raise_signal(signal.SIGINT)
  stop_after(monkeypatch, 3, error=interrupt, subfolder="first")
  with pytest.raises(loop.Interrupted, match="step 1"):
    loop.run(job(), tmp_path / "run")
  again = loop.run(job(), tmp_path / "run")
  assert again["params_sha256"] == whole["params_sha256"]
  with np.load(tmp_path / "run" / "params.npz") as held:
    assert held["params"].tolist() == [6.0, 6.0]


def test_a_run_without_a_plan_states_the_event_of_its_mechanism(tmp_path):
  count = mechanisms.Laplace(epsilon=1.0, l1_sensitivity=1.0)
  numbers = {"delta": 1e-7, "l2_bound": 1.0, "num_records": 10**6}
  promised = guarantee.of_event(count.event(), num_steps=3, **numbers)
  result = loop.run(_job({"guarantee": promised}), tmp_path)
  assert 2.99 < result["epsilon"] <= 3.0 and result["epsilon_kind"] == "proved"
  assert Ledger.from_json(result["ledger"]).epsilon(1e-7) == result["epsilon"]
  assert "3 x Laplace noise" in result["privacy_statement"]
  word = "S1: the count is of distinct people"
  claimed = guarantee.of_event(count.event(), assumed=word, **numbers)
  assert (claimed.kind, claimed.failed_assumptions) == ("claimed", (word,))
  assert guarantee.of_event(gaussian_event(0.0), **numbers).kind == "none"
  with refuses("privacy.epsilon_budget", value=1.0):
    guarantee.of_event(gaussian_event(0.0), budget=1.0, **numbers)


def test_a_score_of_any_name_is_drawn(tmp_path, monkeypatch):
  titles, dress = [], pictures.dress
  monkeypatch.setattr(
    pictures, "dress", lambda axes, **labels: (titles.append(labels), dress(axes, **labels))
  )
  phase = {"evaluate": lambda state: {"loss": float(state[0])}, "row_at": lambda step: step}
  assert loop.run(_job(phase), tmp_path)["test_loss"] == 3.0
  assert [(labels["ylabel"], labels["title"]) for labels in titles] == [
    ("test loss", "none, by hand: not private: 3.000 at the end")
  ]


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("config", {}),
    ("seed", -1),
    ("data", b"abc"),
    ("data", lambda: np.ones(3)),
    ("data", lambda: b"abc"),
    ("start", lambda random: None),
  ],
)
def test_a_job_that_is_none_is_refused_by_the_name_of_its_field(tmp_path, field, value):
  with refuses(f"Job.{field}"):
    loop.run(_job(**{field: value}), tmp_path)
  assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
  "changes, field",
  [
    ({"num_steps": 2.5}, "Phase.num_steps"),
    ({"evaluate": {"accuracy": 1}}, "Phase.evaluate"),
    (
      {"guarantee": "mine"},
      "Phase.guarantee",
    ),
    ({"planned": dict}, "Phase.planned"),
    (
      {"init": lambda: {"w": "zero"}},
      "Phase.init",
    ),
    ({"init": lambda: None}, "Phase.init"),
    ({"step": lambda state, draw: state}, "Phase.step"),
    ({"step": lambda state, draw: ((state,), 0)}, "Phase.step"),
    ({"draws": lambda start: [1]}, "Phase.draws"),
    ({"evaluate": lambda state: 0.5}, "Phase.evaluate"),
    ({"evaluate": lambda state: {"a": [1, 2]}}, "Phase.evaluate"),
  ],
)
def test_a_work_that_is_none_is_refused_before_or_at_its_first_step(
  tmp_path, changes, field
):
  with refuses(field):
    loop.run(_job(changes), tmp_path)
  assert not (tmp_path / writers.RESULT).exists()


def test_a_config_without_a_build_is_told_where_it_belongs(tmp_path):
  with refuses("config"):
    loop.train(_Count(), tmp_path)
