"""A kind of run is one folder with config.py and build.py, and needs no change of dpjax."""

import importlib
import sys
import textwrap

import numpy as np
import pytest

from dpjax.accounting import Ledger
from dpjax.runs import loop, promise, writers
from dpjax.validate import UserError
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
from dpjax.runs import promise, streams
from dpjax.runs.loop import Job, Work, single


def build(config, data=None):
  x = np.load(config.path) if data is None else data
  return Job(
    config=config,
    digest=streams.config_digest("mean", dataclasses.asdict(config)),
    seed=config.seed,
    data_name=config.path,
    data=lambda: hashlib.sha256(x.tobytes()).digest(),
    start=lambda random: single(_work(config, x, random)),
  )


def _work(config, x, random):
  \"\"\"The mean [d] of rows of norm 1 or less, by gradient steps towards it.\"\"\"
  n = len(x)
  plan = Plan.calibrated(
    epsilon=config.epsilon, delta=1e-5, sampler=PoissonSampler(prob=0.5, capacity=n + 1),
    num_steps=config.num_steps, l2_clip_norm=2.0, normalize_by=n / 2,
  )
  loss = lambda w, row: 0.5 * jnp.sum((w - row) ** 2)
  algorithm = training.dp_sgd(loss, plan, optax.sgd(0.5), noise_key=random.noise)
  return Work(
    num_steps=config.num_steps,
    init=lambda: algorithm.init(jnp.zeros(x.shape[1])),
    step=jax.jit(algorithm.step),
    draws=lambda start: plan.batches(x, rng=random.sampler, start=start),
    released=lambda state: {"mean": state.params},
    evaluate=lambda state: {"accuracy": 1 - float(jnp.abs(state.params - 0.3).max())},
    promise=promise.of_plan(plan, n),
    save_every=3,
    describe=lambda *_: {"task": "mean", "dataset": "rows", "method": "private_mean"},
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


def test_a_private_mean_is_a_run_like_any_other(config, tmp_path, monkeypatch, capsys):
  whole = loop.train(config, tmp_path / "whole")
  assert whole["test_accuracy"] > 0.9 and 0.95 < whole["epsilon"] <= 1.0
  assert "(proved, delta=1e-05, add_or_remove_one, per example)" in promise.told(whole)
  assert "Privacy statement" in whole["privacy_statement"]
  assert Ledger.from_json(whole["ledger"]).num_steps == 8
  for name in ("config.json", "metrics.jsonl", "report.png", "params.npz", "tensorboard"):
    assert (tmp_path / "whole" / name).exists()
  assert "train: 8/8" in capsys.readouterr().err
  stop_after(monkeypatch, 4)
  with pytest.raises(loop.Interrupted, match="step 4"):
    loop.train(config, tmp_path / "run")
  resumed = loop.train(config, tmp_path / "run")
  assert resumed["params_sha256"] == whole["params_sha256"]
  assert writers.read_metrics(tmp_path / "run") == writers.read_metrics(tmp_path / "whole")
  config.epsilon = 2.0
  with pytest.raises(UserError, match="config.epsilon: 1.0 there, 2.0 now"):
    loop.train(config, tmp_path / "run")
  config.epsilon = 1.0
  np.save(config.path, np.load(config.path)[1:])
  with pytest.raises(UserError, match="are not the data of the run"):
    loop.train(config, tmp_path / "run")
