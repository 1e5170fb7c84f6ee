"""Release mode: fresh keys, kept in checkpoints alone, restored exactly, nothing logged."""

import json
import shutil

import pytest

from configs import quickstart
from dpjax import data, noise
from dpjax.runs.central import build
from dpjax.runs import checkpoint
from dpjax.runs import fields
from dpjax.runs import release
from dpjax.runs.central import run
from dpjax.runs import writers
from dpjax.validate import UserError
from tests.runs.stops import die, sigterm, stop_after


def _config(**overrides):
  config = quickstart.get_config()
  small = {
    "grad_method": "vmap", "num_steps": 6, "eval_every": 2, "checkpoint_every": 2,
    "model.name": "linear", "model.options": {}, "data.limit": 300, "release": True,
  }  # fmt: skip
  for path, value in {**small, **overrides}.items():
    config = fields.replace(config, path, value)
  return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("release") / "run"
  return workdir, run.train(_config(), workdir)


def test_p18_two_runs_of_one_config_share_no_key(finished, tmp_path):
  again = run.train(_config(), tmp_path / "run")
  assert again["params_sha256"] != finished[1]["params_sha256"]
  ids = [r["ledger"]["charges"][0]["noise_key_id"] for r in (again, finished[1])]
  assert ids[0] != ids[1]
  digest = data.digest(build.load_data(_config())[0])
  derived = noise.key_id(build.streams(_config(), digest).noise)
  assert derived not in ids


@pytest.mark.parametrize("how", [sigterm, die])
def test_p16_a_resumed_release_equals_the_uninterrupted_one(tmp_path, monkeypatch, how):
  """All three streams come back: noise, augmentation and batches. (The copy of the first
  checkpoint, run to its end without a stop, is the uninterrupted run.)"""
  config = _config(augmentation="shift" if how is sigterm else "none")
  workdir, whole_dir = tmp_path / "run", tmp_path / "whole"
  stop_after(monkeypatch, run._Loop, 1, sigterm)
  with pytest.raises(run.Interrupted):
    run.train(config, workdir)
  shutil.copytree(workdir, whole_dir)
  whole = run.train(config, whole_dir)
  stop_after(monkeypatch, run._Loop, 3, how)
  with pytest.raises((run.Interrupted, KeyboardInterrupt)):
    run.train(config, workdir)
  resumed = run.train(config, workdir)
  for name in ("params_sha256", "ledger", "epsilon", "test_accuracy"):
    assert resumed[name] == whole[name], name
  assert resumed["ledger"]["charges"][0]["num_steps"] == 6  # one key, all the steps


def test_keys_are_saved_before_the_first_step(tmp_path, monkeypatch):
  stop_after(monkeypatch, run._Loop, 1, die)
  with pytest.raises(KeyboardInterrupt):
    run.train(_config(), tmp_path / "run")
  checkpoints = checkpoint.Checkpoints(tmp_path / "run")
  assert checkpoints.latest_step() == 0
  saved = release.from_meta(_config(), checkpoints.meta())
  result = run.train(_config(), tmp_path / "run")
  charge = result["ledger"]["charges"][0]
  assert charge["noise_key_id"] == noise.key_id(saved.noise)
  assert charge["first_step"] == 0 and charge["num_steps"] == 6


def test_killed_before_its_first_checkpoint_it_starts_with_new_keys(tmp_path, monkeypatch):
  made = []
  new_streams = release.new_streams

  def remember(*what):
    made.append(new_streams(*what))
    return made[-1]

  monkeypatch.setattr(release, "new_streams", remember)
  monkeypatch.setattr(run._Loop, "save", lambda loop: die())
  with pytest.raises(KeyboardInterrupt):
    run.train(_config(), tmp_path / "run")
  monkeypatch.undo()
  result = run.train(_config(), tmp_path / "run")
  used = result["ledger"]["charges"][0]["noise_key_id"]
  assert len(made) == 1 and used != noise.key_id(made[0].noise)


def test_p32_release_logs_no_diagnostics_and_says_what_it_is(finished):
  workdir, result = finished
  named = {name for row in writers.read_metrics(workdir) for name in row}
  assert "test_accuracy" in named
  assert not [name for name in named if name.startswith("not_private")]
  assert result["release"] is True
  for words in ("Release mode.", "256 bits", "ChaCha20", "grid of multiples", "not proved"):
    assert words in " ".join(result["privacy_statement"].split())


def test_p32_how_long_a_release_took_is_not_written(finished):
  workdir, _ = finished
  result = writers.read_json(workdir / "result.json")
  assert result["wall_seconds"] is None
  assert "is not covered" in " ".join(result["privacy_statement"].split())
  assert writers.took(result) == ""


def test_no_file_but_the_checkpoints_holds_a_key(finished):
  workdir, _ = finished
  checkpoints = checkpoint.Checkpoints(workdir)
  held = checkpoints.meta()["release_streams"]
  secrets = [held["noise"], held["example"], held["sampler"]]
  assert all(len(secret) > 32 for secret in secrets)
  for path in workdir.rglob("*"):
    if path.is_file() and "checkpoints" not in path.parts:
      content = path.read_bytes()
      assert not any(secret.encode() in content for secret in secrets), path
      assert not any(bytes.fromhex(held[n]) in content for n in ("noise", "example")), path


def test_the_updates_of_a_release_lie_on_the_grid():
  """Through the whole transform: update * normalize_by is a multiple of the step."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  config = _config(**{"privacy.epsilon": 1.0})
  built = build.build(config, None, release.new_streams(config))
  plan = built.plan
  tx = plan.transform(built.random.noise)
  grads = {"w": jax.random.normal(jax.random.key(0), (4, 500))}
  params = {"w": jnp.zeros(500)}
  update, _ = tx.update(grads, tx.init(params), params, mask=jnp.ones(4, bool))
  step = noise.secure.grid_step(plan.noise_multiplier * plan.l2_bound)
  cells = np.asarray(update["w"], np.float64) * plan.normalize_by / step
  np.testing.assert_allclose(cells, np.round(cells), atol=1e-4)


def test_what_cannot_be_released_is_refused(tmp_path):
  with pytest.raises(UserError, match="release=True: needs privacy.method='dp_sgd'"):
    run.train(_config(**{"privacy.method": "sgd"}), tmp_path / "run")
  with pytest.raises(UserError, match="holds no release keys"):
    release.from_meta(_config(), {"ledger": []})
  assert not (tmp_path / "run").exists()


def test_what_an_audit_would_do_is_no_part_of_a_run_without_one():
  config = _config(release=False)
  streams = lambda config: build.streams(config, bytes(32))
  before = streams(config)
  other = streams(fields.replace(config, "audit.num_canaries", 10))
  assert noise.key_id(before.noise) == noise.key_id(other.noise)
  audited = streams(fields.replace(config, "audit.enabled", True))
  assert noise.key_id(before.noise) != noise.key_id(audited.noise)
  assert json.dumps(build.to_dict(config)["audit"])
