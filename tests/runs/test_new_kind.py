"""A kind of run is one file with a config and its experiment, and needs no change of dpjax."""

import dataclasses
import importlib
import math
import shutil
import signal
import sys
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import mechanisms, pictures
from dpjax.accounting import Ledger, gaussian_event
from dpjax.experiments.config import rules
from dpjax.experiments.run import experiment, guarantee, kind, loop, writers
from dpjax.experiments.sweeps import sweep
from tests import commands
from tests.refuses import refuses
from tests.runs.stops import stop_after

_FILE = """
import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpjax import Plan, PoissonSampler, training
from dpjax.experiments.run import guarantee, kind
from dpjax.experiments.run.experiment import Experiment, Phase, single


@dataclasses.dataclass
class MeanConfig:
  path: str = ""  # of an .npy, [n, d]
  epsilon: float = 1.0
  num_steps: int = 8
  seed: int = 0
  noise_seed: int | None = None


@kind.register(MeanConfig)
class Mean(Experiment[MeanConfig]):
  \"\"\"The mean [d] of rows of norm 1 or less, by gradient steps towards it.\"\"\"

  def data(self):
    return np.load(self.config.path)

  def digest(self, data):
    return hashlib.sha256(data.tobytes()).digest()

  def train(self, data, keys):
    config, n = self.config, len(data)
    plan = Plan.calibrated(
      epsilon=config.epsilon, delta=1e-5, sampler=PoissonSampler(sampling_prob=0.5, capacity=n + 1),
      num_steps=config.num_steps, l2_clip_norm=2.0, normalize_by=n / 2,
    )
    loss = lambda w, row: 0.5 * jnp.sum((w - row) ** 2)
    algorithm = training.dp_sgd(loss, plan, optax.sgd(0.5), noise_key=keys.noise)
    return single(Phase(
      num_steps=config.num_steps,
      init=lambda: algorithm.init(jnp.zeros(data.shape[1])),
      step=jax.jit(algorithm.step),
      draws=lambda start: plan.batches(data, rng=keys.sampler, start=start),
      released=lambda state: {"mean": state.params},
      evaluate=lambda state: {"accuracy": 1 - float(jnp.abs(state.params - 0.3).max())},
      guarantee=guarantee.of_plan(plan, n),
      save_every=3,
      planned=lambda: {"task": "mean", "dataset": "rows", "method": "private_mean"},
    ))
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
  (tmp_path / "averages_of_mine.py").write_text(_FILE)
  rows = np.full((400, 3), 0.3) + np.random.default_rng(0).normal(0, 0.05, (400, 3))
  np.save(tmp_path / "rows.npy", rows.astype(np.float32))
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "averages_of_mine", raising=False)
  # What the file registers is gone after the test.
  monkeypatch.setattr(kind, "KINDS", dict(kind.KINDS))
  made = importlib.import_module("averages_of_mine")
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


@pytest.mark.long
def test_the_launcher_of_any_kind_takes_its_fields_as_flags(config, tmp_path):
  made = f"from averages_of_mine import MeanConfig\nget_config = lambda: {config}\n"
  (tmp_path / "means.py").write_text(made)
  options = ("means.py", "--workdir=run", "--config.epsilon=2")
  done = commands.run("launch.run", *options, cwd=tmp_path)
  assert done.returncode == 0, done.stderr
  assert "epsilon=2 (proved, delta=1e-05, add_or_remove_one" in done.stdout
  refused = commands.run("launch.run", *options, "--config.no=2", cwd=tmp_path)
  assert refused.returncode == 2 and "no such field" in refused.stderr


@pytest.mark.slow
def test_a_sweep_over_a_kind_of_ones_own_draws_its_curve(config, tmp_path):
  named = [(f"epsilon {e:g}", dataclasses.replace(config, epsilon=e)) for e in (1.0, 4.0)]
  settings = sweep.Sweep(base=config, x="epsilon", seeds=[0, 1])
  rows = sweep.run(named, tmp_path / "sweep", settings)
  assert [row["status"] for row in rows] == ["done"] * 4
  # Its own field `epsilon` is what was asked for; the sum is of what was spent.
  total = writers.read_json(tmp_path / "sweep" / "sweep.json")["all_runs_together"]
  assert total["epsilon"] == math.fsum(row["epsilon"] for row in rows) < 10.0
  assert (tmp_path / "sweep" / "curve.picture.json").exists()
  assert len((tmp_path / "sweep" / "curve.csv").read_text().splitlines()) == 3


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
  return experiment.Phase(**{**least, **changes})


class _Counting(experiment.Experiment[_Count]):
  is_private = False

  def data(self):
    return ()

  def digest(self, data):
    return bytes(32)

  def train(self, data, keys):
    return experiment.single(_phase())


@dataclasses.dataclass
class _Repeated(_Count):
  noise_seed: int | None = None


@pytest.mark.parametrize(("noise_seed", "kind"), [(None, "proved"), (3, "claimed")])
def test_noise_that_a_seed_repeats_is_a_claim_of_every_kind(noise_seed, kind):
  event = {"delta": 1e-5, "l2_bound": 1.0, "num_records": 9, "num_steps": 3}
  promised = guarantee.of_event(gaussian_event(2.0), **event)

  class Noisy(_Counting):
    def train(self, data, keys):
      return experiment.single(_phase(guarantee=promised))

  run = Noisy(_Repeated(noise_seed=noise_seed))
  _, phase = experiment.begin_story(run, (), run.new_keys())
  assert phase.guarantee.kind == kind


def _run(phase=(), **changes):
  run = _Counting(_Count())
  run.train = lambda data, keys: experiment.single(_phase(**dict(phase)))
  for name, value in changes.items():
    setattr(run, name, value)
  return run


def test_the_least_kind_of_run_needs_no_metric_and_no_tree(tmp_path, monkeypatch):
  whole = loop.run(_run(), tmp_path / "whole")
  assert whole["num_steps"] == 3 and whole["test_accuracy"] is None
  assert whole["epsilon_kind"] == "none"
  assert "no scores" in _run().line(whole)
  with np.load(tmp_path / "whole" / "params.npz") as held:
    assert held["params"].tolist() == [3.0, 3.0]
  stop_after(monkeypatch, 2)
  with pytest.raises(loop.Interrupted, match="step 2"):
    loop.run(_run(), tmp_path / "run")
  again = loop.run(_run(), tmp_path / "run")
  assert again["params_sha256"] == whole["params_sha256"]


def test_ranges_in_annotations_hold_without_a_check_of_its_own(tmp_path):
  @dataclasses.dataclass
  class Ranged:
    rows: Annotated[int, rules.at_least(1)] = 1
    seed: int = 0

  for wrong in (Ranged(rows=0), Ranged(rows="many")):
    with refuses("rows"):
      loop.run(_run(config=wrong), tmp_path / "run")
  both = dataclasses.make_dataclass(
    "Both", [("seed", int, 0), ("release", bool, True), ("noise_seed", int, 3)]
  )
  with refuses("noise_seed", value=3):
    loop.run(_run(config=both()), tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_a_file_and_another_config_are_not_both_run():
  ended = commands.run("launch.run", "configs/quickstart.py", "--config=configs/other.py")
  assert ended.returncode == 2
  assert ended.stderr.startswith("error: --config=configs/other.py: ")


def test_a_stop_in_the_last_step_of_a_phase_stops_the_next_one(tmp_path, monkeypatch):
  """With a handler of the system or of Python, nothing else would end the run."""

  def story(data, keys):
    first = yield _phase(subfolder="first", released=lambda state: state)
    return (yield from experiment.single(_phase(init=lambda: first.state)))

  run = lambda: _run(train=story)
  whole = loop.run(run(), tmp_path / "whole")
  interrupt = lambda: signal.raise_signal(signal.SIGINT)
  stop_after(monkeypatch, 3, error=interrupt, subfolder="first")
  with pytest.raises(loop.Interrupted, match="step 1"):
    loop.run(run(), tmp_path / "run")
  again = loop.run(run(), tmp_path / "run")
  assert again["params_sha256"] == whole["params_sha256"]
  with np.load(tmp_path / "run" / "params.npz") as held:
    assert held["params"].tolist() == [6.0, 6.0]


def test_a_run_without_a_plan_states_the_event_of_its_mechanism(tmp_path):
  count = mechanisms.Laplace(epsilon=1.0, l1_sensitivity=1.0)
  numbers = {"delta": 1e-7, "l2_bound": 1.0, "num_records": 10**6}
  promised = guarantee.of_event(count.event(), num_steps=3, **numbers)
  result = loop.run(_run({"guarantee": promised}), tmp_path)
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
  assert loop.run(_run(phase), tmp_path)["test_loss"] == 3.0
  assert [(labels["ylabel"], labels["title"]) for labels in titles] == [
    ("test loss", "none, by hand: not private: 3.000 at the end")
  ]


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("config", {}),
    ("config", _Count(seed=-1)),
    ("digest", lambda data: np.ones(3)),
    ("digest", lambda data: b"abc"),
    ("train", lambda data, keys: None),
    ("train", lambda data, keys: (phase for phase in ())),
    ("train", lambda data, keys: (phase for phase in (1,))),
  ],
)
def test_a_run_that_is_none_is_refused_by_the_name_of_its_field(tmp_path, field, value):
  with refuses("seed" if value == _Count(seed=-1) else f"Experiment.{field}"):
    loop.run(_run(**{field: value}), tmp_path)
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
    loop.run(_run(changes), tmp_path)
  assert not (tmp_path / writers.RESULT).exists()


def test_a_config_of_no_kind_is_told_how_to_register_one(tmp_path):
  with refuses("config"):
    loop.train(_Count(), tmp_path)
