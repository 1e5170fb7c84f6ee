"""Runs whose code was edited: other noise, and no way on, for every kind of run."""

import hashlib
import importlib
import json
import shutil
import sys

import jax
import pytest

from configs import quickstart
from configs.attack import gradient_inversion_cifar10, membership_cifar10
from configs.fed import quickstart as fed_quickstart
from configs.radp import quickstart as radp_quickstart
from configs.secure import quickstart as secure_quickstart
from dpjax import names, run_code
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack import build as attack
from dpjax.experiments.kinds.central import build as central
from dpjax.experiments.kinds.central.kind import CENTRAL
from dpjax.experiments.kinds.federated import build as federated
from dpjax.experiments.kinds.relevance import build as relevance
from dpjax.experiments.kinds.secure import build as secure
from dpjax.experiments.run import checkpoint, dry_run, loop, run_keys
from dpjax.experiments.run import workdir as owner
from dpjax.experiments.sweeps import grid
from dpjax.run_code import packages
from dpjax.validate import UserError
from tests import own_folder
from tests.runs.stops import stop_after

fresh = own_folder.fresh
_HELP = "SCALE = {}\n\ndef scaled(nats):\n  return SCALE * nats\n"
_MAIN = """
import dataclasses

import flax.linen as nn
import optax

from dpjax import data, federated, losses, sampling


class Net(nn.Module):
  num_classes: int

  @nn.compact
  def __call__(self, x):
    import own_help

    return own_help.scaled(nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1)))


def loss(apply):
  import own_help

  nats = losses.softmax_cross_entropy(apply)
  return lambda params, example: own_help.scaled(nats(params, example))


def digits():
  return data.load("digits")


def rule(learning_rate):
  return optax.sgd(learning_rate)


def poisson(num_examples, sampling_prob):
  return sampling.PoissonSampler(prob=sampling_prob, capacity=num_examples + 1)


def client(loss_fn, client_tx, **_):
  return federated.local_training(loss_fn, client_tx)


def mean():
  return federated.mean()
"""

_KINDS = {
  "central": (quickstart, central, {
    "model.name": "Net", "loss": "loss", "data.name": "digits", "optimizer.rule": "rule",
    "privacy.sampler": "poisson",
  }),
  "federated": (fed_quickstart, federated, {
    "model.name": "Net", "loss": "loss", "data.name": "digits", "algorithm": "client",
    "aggregator": "mean", "client_optimizer.rule": "rule", "server_optimizer.rule": "rule",
  }),
  "relevance": (radp_quickstart, relevance, {"model.name": "Net", "data.name": "digits"}),
  "attack": (gradient_inversion_cifar10, attack, {"federate.model.name": "Net"}),
  "attack of training": (membership_cifar10, attack, {
    "train.model.name": "Net", "train.loss": "loss",
  }),
  "secure": (secure_quickstart, secure, {"train.model.name": "Net"}),
}  # fmt: skip


def _write(folder, scale):
  folder.mkdir(exist_ok=True)
  (folder / "own_main.py").write_text(_MAIN)
  (folder / "own_help.py").write_text(_HELP.format(scale))


def _config(kind, **changes):
  return fields.replace_all(_KINDS[kind][0].get_config(), changes)


@pytest.mark.parametrize(
  ("kind", "field"), [(kind, field) for kind, what in _KINDS.items() for field in what[2]]
)
def test_an_edited_helper_is_another_stream_whichever_field_reaches_it(
  kind, field, tmp_path, fresh
):
  build, name = _KINDS[kind][1], _KINDS[kind][2][field]
  found = []
  for place, scale in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
    _write(tmp_path / place, scale)
    fresh(tmp_path / place)
    config = _config(kind, **{field: f"own_main:{name}"})
    found.append(build.digest(config))
  assert found[0] == found[1] != found[2]


def _small(**changes):
  small = {
    "num_steps": 2, "eval_every": 1, "checkpoint_every": 1, "loss": "own_main:loss",
    "model.name": "linear", "model.options": {}, "privacy.epsilon": None,
    "privacy.noise_multiplier": 1.0, "data.limit": 200,
  }  # fmt: skip
  return fields.replace_all(quickstart.get_config(), {**small, **changes})


def test_two_runs_of_edited_code_share_no_noise(tmp_path, fresh):
  """The difference of their models was the exact clipped sum. A loss that is multiplied by an
  edited helper clips to the same gradients here, so equal noise would give equal models."""
  released, keys = [], []
  for place, scale in (("a", 1e3), ("b", 2e3), ("c", 1e3)):
    _write(tmp_path / place, scale)
    fresh(tmp_path / place)
    result = loop.train(_small(num_steps=1), tmp_path / place / "run")
    released.append(result["params_sha256"])
    keys.append(result["ledger"]["charges"][0]["noise_key_id"])
    assert sorted(result["code"]["modules"]) == ["own_help", "own_main"]
    assert result["code"]["versions"]["jax"] == jax.__version__
    assert str(tmp_path) not in json.dumps(result["code"])
  assert released[0] == released[2] != released[1]
  assert keys[0] == keys[2] != keys[1]


def _stop_after_one_step(config, workdir, monkeypatch):
  with monkeypatch.context() as stopping:
    stop_after(stopping, 1)
    with pytest.raises(loop.Interrupted):
      loop.train(config, workdir)


@pytest.mark.parametrize("release", [False, True])
def test_a_run_is_not_continued_with_an_edited_helper(
  release, tmp_path, fresh, monkeypatch
):
  _write(tmp_path / "code", 1.0)
  fresh(tmp_path / "code")
  config = _small(release=release, **{"privacy.sampling_prob": 0.2})
  _stop_after_one_step(config, tmp_path / "run", monkeypatch)
  shutil.copytree(tmp_path / "run", tmp_path / "copy")
  _write(tmp_path / "code", 2.0)
  fresh(tmp_path / "code")
  before = {p: p.read_bytes() for p in (tmp_path / "copy").rglob("*") if p.is_file()}
  for attempt in (loop.train, _planned):
    with pytest.raises(
      UserError, match="module 'own_help': is not the code of the"
    ) as refused:
      attempt(config, tmp_path / "copy")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
  assert before == {
    p: p.read_bytes() for p in (tmp_path / "copy").rglob("*") if p.is_file()
  }
  _write(tmp_path / "code", 1.0)
  fresh(tmp_path / "code")
  done = loop.train(config, tmp_path / "run")
  _write(tmp_path / "code", 3.0)
  fresh(tmp_path / "code")
  for _ in range(2):  # also of a run that has ended, with and without its checkpoints
    with pytest.raises(UserError, match="module 'own_help': is not the code of the"):
      loop.train(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / checkpoint.FOLDER, ignore_errors=True)
  _write(tmp_path / "code", 1.0)
  fresh(tmp_path / "code")
  assert loop.train(config, tmp_path / "run") == done


_READS = """
import pathlib

from dpjax import losses

_HERE = pathlib.Path(__file__).parent
_SCALE = [float((_HERE / "own_scale.txt").read_text())]
_LATE = []


def loss(apply):
  nats = losses.softmax_cross_entropy(apply)
  return lambda params, example: _SCALE[0] * nats(params, example)


def late(stepped, when):
  count = []

  def step(work, state, draw):
    count.append(1)
    if len(count) == when:
      _LATE.append((_HERE / "own_late.txt").read_text())
    return stepped(work, state, draw)

  return step
"""


def _write_reading(folder, scale):
  folder.mkdir(exist_ok=True)
  (folder / "own_main.py").write_text(_READS)
  (folder / "own_scale.txt").write_text(f"{scale}")
  (folder / "own_late.txt").write_text("1")


def test_a_data_file_that_code_reads_is_bound_and_secret(tmp_path, fresh):
  """Two runs over two states of the file shared their noise, so their difference was exact."""
  released = []
  for place, scale in (("a", 1e3), ("b", 2e3)):
    _write_reading(tmp_path / place, scale)
    fresh(tmp_path / place)
    result = loop.train(_small(num_steps=1), tmp_path / place / "run")
    released.append(result["params_sha256"])
    digest = hashlib.sha256((tmp_path / place / "own_scale.txt").read_bytes()).hexdigest()
    public = [p for p in (tmp_path / place / "run").iterdir() if p.is_file()]
    assert not any(digest.encode() in path.read_bytes() for path in public)
  assert released[0] != released[1]


@pytest.mark.long
@pytest.mark.parametrize("release", [False, True])
def test_a_run_is_not_continued_with_an_edited_data_file(
  release, tmp_path, fresh, monkeypatch
):
  _write_reading(tmp_path / "code", 2e3)
  fresh(tmp_path / "code")
  config = _small(release=release, **{"privacy.sampling_prob": 0.2})
  _stop_after_one_step(config, tmp_path / "run", monkeypatch)
  _write_reading(tmp_path / "code", 1e3)
  fresh(tmp_path / "code")
  with pytest.raises(UserError, match="^file 'own_scale.txt': is not what") as refused:
    loop.train(config, tmp_path / "run")
  assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
  _write_reading(tmp_path / "code", 2e3)
  fresh(tmp_path / "code")
  assert loop.train(config, tmp_path / "run")["num_steps"] == 2


@pytest.mark.parametrize("step", [1, 2])
def test_what_a_step_loads_for_the_first_time_ends_the_run_before_it_is_written(
  step, tmp_path, fresh, monkeypatch
):
  """Its noise was chosen before: another state of the file would draw the same."""
  _write_reading(tmp_path / "a", 1.0)
  fresh(tmp_path / "a")
  late = importlib.import_module("own_main").late(loop.job_lib.stepped, step)
  with monkeypatch.context() as patched:
    patched.setattr(loop.job_lib, "stepped", late)
    with pytest.raises(UserError, match="^own_late.txt: own_main.py reads") as refused:
      loop.train(_small(), tmp_path / "run")
  assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
  assert (checkpoint.newest(tmp_path / "run") or 0) == step - 1
  assert not (tmp_path / "run" / "result.json").exists()


def _planned(config, workdir):
  dry_run.report(CENTRAL, config, str(workdir))


@pytest.mark.parametrize("name", ["dpjax", "jax"])
def test_a_run_is_not_continued_with_another_version(name, tmp_path, monkeypatch):
  config = _small(loss="auto", release=True)
  _stop_after_one_step(config, tmp_path / "run", monkeypatch)
  versions = run_code.of().versions
  with monkeypatch.context() as upgraded:
    upgraded.setattr(packages, "versions", lambda: {**versions, name: "99.1"})
    with pytest.raises(
      UserError, match=f"^{name}: the run in .*begun with .*, not 99.1"
    ) as refused:
      loop.train(config, tmp_path / "run")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300
  done = loop.train(config, tmp_path / "run")
  monkeypatch.setattr(packages, "versions", lambda: {**versions, name: "99.1"})
  assert loop.train(config, tmp_path / "run") == done  # nothing more is drawn


def test_a_run_that_did_not_remember_its_code_is_not_continued(tmp_path, monkeypatch):
  config = _small(loss="auto")
  _stop_after_one_step(config, tmp_path / "run", monkeypatch)
  memory = tmp_path / "run" / checkpoint.FOLDER / "run.json"
  held = json.loads(memory.read_text())
  new = (run_keys.CODE, owner._SELF)
  memory.write_text(json.dumps({k: v for k, v in held.items() if k not in new}))
  with pytest.raises(UserError, match="earlier version, which did not remember its code"):
    loop.train(config, tmp_path / "run")
  memory.write_text(json.dumps(held))
  assert owner.remembered(tmp_path / "run") == {
    k: v for k, v in held.items() if k != owner._SELF
  }
  loop.train(config, tmp_path / "run")


def test_a_sweep_takes_no_run_of_edited_code_for_its_own(tmp_path, fresh):
  base = _small(num_steps=1, **{"privacy.noise_multiplier": None})
  sweep = grid.SweepConfig(
    base=base, grid={"privacy.noise_multiplier": [1.0]}, x="privacy.noise_multiplier"
  )
  rows = []
  for scale in (1.0, 2.0, 1.0):
    _write(tmp_path / "code", scale)
    fresh(tmp_path / "code")
    rows.append(grid.run_sweep(sweep, tmp_path / "sweep", loop.train)[0])
  assert [row["status"] for row in rows] == ["done", "failed", "done"]
  assert "module 'own_help': is not the code" in rows[1]["error"]
  assert rows[0]["params_sha256"] == rows[2]["params_sha256"]


_OWN_KIND = {
  "config": "import dataclasses\n@dataclasses.dataclass\nclass Config:\n  seed: int = 0\n",
  "build": "def build(config):\n  from own_kind import steps\n",
  "steps": "SCALE = {}\n",
  "__init__": "",
}


def test_a_kind_of_run_of_ones_own_is_code_too(tmp_path, fresh):
  found = []
  for place, scale in (("a", 1), ("b", 1), ("c", 2)):
    folder = tmp_path / place / "own_kind"
    folder.mkdir(parents=True)
    for name, text in _OWN_KIND.items():
      (folder / f"{name}.py").write_text(text.format(scale))
    fresh(tmp_path / place)
    import own_kind.build  # noqa: F401 - as `loop.job_of` does
    from own_kind.config import Config

    found.append(run_keys.digest_of(Config(), bytes(32)))
    assert {"own_kind.build", "own_kind.steps"} <= {*run_keys.code_of(Config()).modules}
  assert found[0] == found[1] != found[2]


def test_what_a_config_file_only_holds_as_values_is_no_code():
  assert names.code(fields.to_dict(quickstart.get_config())).modules == {}
  assert "configs.quickstart" in sys.modules
