"""A run from config to result.json: resume, budget, foreign workdirs, what is written."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from configs import quickstart
from dpjax import data, noise
from dpjax.accounting import Ledger
from dpjax.runs.central import build
from dpjax.runs import checkpoint
from dpjax.runs import fields
from dpjax.runs.central import run
from dpjax.runs import writers
from dpjax.validate import UserError

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _config(**overrides):
  config = quickstart.get_config()
  small = {
    "grad_method": "vmap",
    "num_steps": 12,
    "eval_every": 4,
    "checkpoint_every": 3,
    "model.name": "linear",
    "model.options": {},
    "data.limit": 400,
  }
  for path, value in {**small, **overrides}.items():
    config = fields.replace(config, path, value)
  return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run") / "whole"
  return workdir, run.train(_config(), workdir)


def test_the_result_holds_every_key_and_the_files_are_there(finished):
  workdir, result = finished
  assert set(writers.RESULT_KEYS) <= set(result)
  assert result["epsilon_kind"] == "proved" and 2.97 < result["epsilon"] <= 3.0
  assert (
    result["neighboring_relation"] == "add_or_remove_one" and result["unit"] == "example"
  )
  assert json.loads((workdir / "result.json").read_text())["params_sha256"]
  for name in ("config.json", "metrics.jsonl", "report.png", "report.csv", "params.npz"):
    assert (workdir / name).stat().st_size > 0
  assert [row["step"] for row in writers.read_metrics(workdir)] == [4, 8, 12]
  arrays = np.load(workdir / "params.npz")
  assert sum(arrays[name].size for name in arrays) == result["num_parameters"]


def test_the_ledger_holds_what_ran(finished):
  _, result = finished
  ledger = Ledger.from_json(result["ledger"])
  assert ledger.num_steps == result["num_steps"] == 12
  plan = build.build(_config()).plan
  accounted = ledger.epsilon(plan.accounted_delta(plan.delta))
  assert accounted == pytest.approx(result["epsilon"], rel=1e-9)


def test_a_finished_run_is_returned_not_repeated(finished):
  workdir, result = finished
  before = (workdir / "result.json").stat().st_mtime_ns
  assert run.train(_config(), workdir)["params_sha256"] == result["params_sha256"]
  assert (workdir / "result.json").stat().st_mtime_ns == before


def test_p16_stopped_and_resumed_equals_uninterrupted(finished, tmp_path, monkeypatch):
  _, whole = finished
  stop_at = 7
  original = run._Loop.charge

  def charge(loop):
    original(loop)
    if loop.step == stop_at and not (tmp_path / "stopped").exists():
      (tmp_path / "stopped").touch()
      os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(run._Loop, "charge", charge)
  with pytest.raises(run.Interrupted, match=f"step {stop_at} .*run the same command"):
    run.train(_config(), tmp_path / "run")
  resumed = run.train(_config(), tmp_path / "run")
  for name in ("params_sha256", "ledger", "epsilon", "test_accuracy"):
    assert resumed[name] == whole[name], name
  same = [(path / "metrics.jsonl").read_text() for path in (finished[0], tmp_path / "run")]
  assert same[0] == same[1]


def test_p16_another_seed_is_another_run(finished, tmp_path):
  other = run.train(_config(seed=1), tmp_path / "run")
  assert other["params_sha256"] != finished[1]["params_sha256"]


def test_p16_killed_and_resumed_equals_uninterrupted(finished, tmp_path):
  """kill -9 between two checkpoints: later steps are repeated, and charged, once."""
  workdir = tmp_path / "run"
  command = [
    sys.executable, "-m", "launch.train", "--config=configs/quickstart.py",
    f"--workdir={workdir}", "--config.num_steps=12", "--config.eval_every=4",
    "--config.checkpoint_every=3", "--config.model.name=linear", "--config.model.options={}",
    "--config.data.limit=400", "--config.grad_method=vmap",
  ]  # fmt: skip
  process = subprocess.Popen(command, cwd=_ROOT, stderr=subprocess.DEVNULL)
  deadline = time.monotonic() + 120
  while not list((workdir / "checkpoints").glob("[0-9]*")) and time.monotonic() < deadline:
    if process.poll() is not None:
      break
    time.sleep(0.002)
  process.kill()
  process.wait()
  assert not (workdir / "result.json").exists()  # it was killed on its way
  done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
  resumed = json.loads((workdir / "result.json").read_text())
  assert resumed["params_sha256"] == finished[1]["params_sha256"], done.stderr
  assert resumed["ledger"] == finished[1]["ledger"]


def test_a_workdir_of_another_config_is_left_alone(finished, tmp_path):
  workdir, _ = finished
  with pytest.raises(
    UserError, match=r"another config \(config.privacy.epsilon: 3.0 there, 1.0"
  ):
    run.train(_config(**{"privacy.epsilon": 1.0}), workdir)
  (tmp_path / "thesis.tex").write_text("precious")
  with pytest.raises(UserError, match="must be a new, an empty"):
    run.train(_config(), tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_over_its_budget_refuses_before_it_starts(tmp_path):
  config = _config(**{"privacy.epsilon_budget": 2.0})
  with pytest.raises(UserError, match="epsilon") as caught:
    run.train(config, tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert not list((tmp_path / "run").glob("metrics.jsonl"))


def test_a_corrupt_checkpoint_is_one_line_and_nothing_is_lost(tmp_path, monkeypatch):
  def stop(loop):
    original(loop)
    if loop.step == 5:
      raise KeyboardInterrupt

  original = run._Loop.charge
  monkeypatch.setattr(run._Loop, "charge", stop)
  with pytest.raises(KeyboardInterrupt):
    run.train(_config(), tmp_path / "run")
  monkeypatch.setattr(run._Loop, "charge", original)
  newest = max((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
  before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
  for path in newest.rglob("*"):
    if path.is_file():
      path.write_bytes(b"garbage")
  with pytest.raises(UserError, match="cannot be read") as caught:
    run.train(_config(), tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before
  shutil.rmtree(newest)
  assert run.train(_config(), tmp_path / "run")["num_steps"] == 12


def test_sgd_has_no_epsilon_and_says_so(tmp_path):
  unset = {"privacy.epsilon": None, "privacy.l2_clip_norm": 1.0}
  config = _config(**{"privacy.method": "sgd", "optimizer.learning_rate": 0.1}, **unset)
  result = run.train(config, tmp_path / "run")
  assert result["epsilon"] is None and result["epsilon_kind"] == "none"


def test_shuffled_batches_prove_nothing(tmp_path):
  overrides = {"privacy.sampler": "shuffled"}
  with pytest.raises(UserError, match="ShuffledSampler: has no event"):
    run.train(_config(**overrides), tmp_path / "run")
  overrides |= {"privacy.epsilon": None, "privacy.noise_multiplier": 1.0}
  assert run.train(_config(**overrides), tmp_path / "run")["epsilon_kind"] == "none"


def test_fixed_size_sampling_is_proved_under_replace_one(tmp_path):
  overrides = {
    "privacy.sampler": "fixed_size",
    "privacy.neighboring_relation": "replace_one",
    "privacy.accountant": "rdp",
  }
  result = run.train(_config(**overrides), tmp_path / "run")
  assert result["epsilon_kind"] == "proved" and result["epsilon"] <= 3.0
  assert result["neighboring_relation"] == "replace_one"


@pytest.mark.parametrize(
  ("overrides", "match"),
  [
    ({"privacy.epsilon": 0.0}, "privacy.epsilon=0.0"),
    ({"privacy.epsilon": -1.0}, "privacy.epsilon=-1.0"),
    ({"privacy.sampling_prob": 1.5}, r"privacy.sampling_prob=1.5: must be in \(0, 1\]"),
    ({"privacy.delta": 0.0}, "delta=0.0"),
    ({"privacy.capacity": 90}, "capacity=90"),
    ({"privacy.noise_multiplier": 1.0}, "not both"),
    ({"privacy.epsilon": None}, "give privacy.epsilon or"),
    ({"privacy.neighboring_relation": "replace_one"}, "proved only under"),
    ({"privacy.sampler": "poison"}, "did you mean 'poisson'"),
    ({"optimizer.name": "sgdd"}, "did you mean 'sgd'"),
    ({"optimizer.learning_rate": 0.0}, "learning_rate=0.0"),
    ({"model.name": "cnnn"}, "model.name='cnnn'"),
    ({"model.options": {"depth": 3}}, "depth"),
    ({"data.name": "digit"}, "digit"),
    ({"data.limit": 0}, "data.limit=0"),
    ({"data.limit": 1438}, "data.limit=1438: must be <= 1437"),
    ({"data.num_classes": 11}, "num_classes=11: 'digits' declares 10"),
    ({"num_steps": 0}, "num_steps=0"),
    ({"augmult": 4}, "augmult=4"),
    ({"ema_decay": 1.5}, "ema_decay=1.5"),
    ({"microbatch_size": 0}, "microbatch_size=0"),
    ({"grad_method": "fast"}, "method='fast'"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, overrides, match):
  with pytest.raises(UserError, match=match) as caught:
    run.train(_config(**overrides), tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()


def test_delta_not_below_one_over_n_is_warned_of(tmp_path, capsys):
  run.train(_config(**{"privacy.delta": 0.01}), tmp_path / "run")
  assert "delta" in capsys.readouterr().err


def test_p32_diagnostics_are_named_not_private_and_can_be_switched_off(finished, tmp_path):
  named = {name for row in writers.read_metrics(finished[0]) for name in row}
  assert {"not_private/train_loss", "not_private/batch_size"} <= named
  run.train(_config(diagnostics=False), tmp_path / "run")
  silent = {name for row in writers.read_metrics(tmp_path / "run") for name in row}
  assert not [name for name in silent if name.startswith("not_private")]


def test_checkpoints_keep_keys_typed_and_ignore_unfinished_saves(tmp_path):
  import jax

  checkpoints = checkpoint.Checkpoints(tmp_path)
  state = {"key": jax.random.key(3), "w": np.arange(3.0), "none": None}
  checkpoints.save(1, state, {"ledger": [1]})
  (checkpoints.directory / "2.orbax-checkpoint-tmp").mkdir()
  again = checkpoint.Checkpoints(tmp_path)
  restored, meta = again.restore(state)
  assert again.latest_step() == 1 and meta == {"ledger": [1]}
  assert (
    jax.random.key_data(restored["key"]).tolist()
    == jax.random.key_data(state["key"]).tolist()
  )
  np.testing.assert_array_equal(restored["w"], state["w"])


def test_augmentation_and_average_run_and_resume(tmp_path):
  config = _config(augmentation="shift", augmult=2, ema_decay=0.9, num_steps=4)
  assert run.train(config, tmp_path / "run")["num_steps"] == 4


def test_a_transformer_learns_text_and_refuses_images(tmp_path):
  options = {"features": 8, "num_heads": 2, "num_layers": 1, "max_length": 16}
  config = _config(
    **{"model.name": "transformer", "model.options": options, "num_steps": 4}
  )
  with pytest.raises(UserError, match="needs text"):
    run.train(config, tmp_path / "images")
  tokens = data.encode_text(["the cat sat", "a dog ran off"] * 40, max_length=12)
  dataset = data.from_arrays(tokens, np.zeros(80, int), num_classes=1, vocab_size=256)
  result = run.train(config, tmp_path / "text", data=(dataset, dataset))
  assert result["task"] == "language_modeling" and result["test_perplexity"] < 260
  assert result["epsilon_kind"] == "proved"


def test_p17_one_seed_at_two_epsilons_shares_neither_noise_nor_batches():
  """Equal noise at two scales would give the exact sums away."""
  streams = lambda **changes: build.streams(_config(**changes), bytes(32))
  one, other = (streams(**{"privacy.epsilon": e}) for e in (1.0, 2.0))
  assert noise.key_id(one.noise) != noise.key_id(other.noise)
  assert one.sampler != other.sampler and one.sampler > 2**64
  assert noise.key_id(one.init) == noise.key_id(other.init)  # public: paired comparisons
  again = streams(**{"privacy.epsilon": 1, "data.data_dir": "elsewhere"})
  assert noise.key_id(again.noise) == noise.key_id(one.noise)
