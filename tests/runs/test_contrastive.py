"""Runs of a contrastive loss: what they learn, where they go on, and that nothing private has
one; the last layer trained alone, on top of them."""

import json

import flax.linen as nn
import jax
import numpy as np
import pytest

from dpjax import data
from dpjax.experiments.checks import of_config
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import Attack, AttackConfig
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpFtrl,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  Sgd,
  TrainConfig,
)
from dpjax.experiments.kinds.federated import build as federate_build
from dpjax.experiments.kinds.federated.config import FedConfig
from dpjax.experiments.kinds.secure.config import SecureComputation, SecureConfig
from dpjax.experiments.run import loop, writers
from dpjax.types import Example
from tests.refuses import refuses
from tests.runs import striped_data
from tests.runs.stops import sigterm, stop_after

_MODEL = ModelConfig(name="mlp", options={"features": (12,)})


def _config(**changes):
  config = TrainConfig(
    data=DataConfig(name=striped_data.SYNTHETIC),
    model=_MODEL,
    loss="contrastive",
    augmentation="crop_color",
    privacy=Sgd(sampling_prob=0.5),
    optimizer=OptimizerConfig(rule="adam", learning_rate=0.01),
    num_steps=6,
    eval_every=2,
    checkpoint_every=2,
  )  # fmt: skip
  return fields.replace_all(config, changes)


def _private(path, **changes):
  """A private run that begins from a params.npz."""
  config = TrainConfig(
    data=DataConfig(name=striped_data.OWN),
    model=_MODEL,
    pretrained=str(path),
    privacy=DpSgd(epsilon=None, noise_multiplier=1.0, sampling_prob=0.5),
    num_steps=2,
    eval_every=2,
  )
  return fields.replace_all(config, changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """(folder, result) of a whole run."""
  folder = tmp_path_factory.mktemp("whole") / "run"
  return folder, loop.train(_config(), folder)


@pytest.mark.long
def test_a_run_has_the_result_of_every_run_and_promises_nothing(whole):
  folder, result = whole
  assert set(writers.RESULT_KEYS) <= set(result)
  assert result["task"] == "contrastive" and result["epsilon_kind"] == "none"
  assert result["epsilon"] is None and 0 <= result["test_accuracy"] <= 1
  with np.load(folder / "params.npz") as held:
    assert held["params/head/kernel"].shape == (12, 128)
  rows = writers.read_metrics(folder)
  assert rows[-1]["test_loss"] < rows[0]["test_loss"]


@pytest.mark.long
def test_stopped_and_resumed_equals_uninterrupted(whole, tmp_path, monkeypatch):
  stop_after(monkeypatch, 3, sigterm)
  with pytest.raises(loop.Interrupted):
    loop.train(_config(), tmp_path / "run")
  result = loop.train(_config(), tmp_path / "run")
  assert result["params_sha256"] == whole[1]["params_sha256"]
  rows = [(path / writers.METRICS).read_bytes() for path in (tmp_path / "run", whole[0])]
  assert rows[0] == rows[1]


@pytest.mark.long
def test_a_private_run_begins_from_all_but_the_embedding(whole, tmp_path):
  run = build.assemble(_private(whole[0] / "params.npz"))
  held = np.load(whole[0] / "params.npz")
  kernel = run.params["params"]["dense_0"]["kernel"]
  np.testing.assert_array_equal(kernel, held["params/dense_0/kernel"])
  assert run.params["params"]["head"]["kernel"].shape == (12, 3)
  result = loop.train(_private(whole[0] / "params.npz"), tmp_path / "run")
  assert result["pretrained_on"] == [striped_data.SYNTHETIC]
  assert (
    result["epsilon"] > 0 and result["epsilon_kind"] == "claimed"
  )  # own data: not checked


# --- nothing private has it

_REFUSED = [
  ("loss", {"privacy": DpSgd(epsilon=2.0)}),
  ("loss", {"privacy": DpFtrl()}),
  ("loss", {"audit": "canaries"}),
  ("loss", {"augmentation": "none"}),
  ("loss", {"trainable": "head"}),
  ("loss", {"loss": "contrastiv"}),
  ("release", {"release": True}),
  ("augmult", {"augmult": 2}),
  ("slices", {"slices": 2}),
  ("grad_method", {"grad_method": "vmap"}),
  ("microbatch_size", {"microbatch_size": 2}),
  ("memory_budget_gb", {"memory_budget_gb": 1.0}),
  ("mesh", {"mesh": "data:1"}),
]


@pytest.mark.parametrize(("field", "changes"), _REFUSED)
def test_what_needs_a_loss_of_one_example_is_refused_in_one_line(field, changes):
  with refuses(field):
    build.Central(_config(**changes)).check()


def test_other_kinds_of_runs_refuse_it():
  for check, config, message in (
    (federate_build.check, FedConfig(loss="contrastive"), "loss"),
    (
      lambda config: Attack(config).check(),
      AttackConfig(target=_config()),
      "target.loss",
    ),
    (lambda config: SecureComputation(config).check(), _secure(), "task.train.loss"),
  ):
    with refuses(message):
      check(config)


def _secure():
  return fields.replace_all(SecureConfig(task="infer"), {"task.train": _config()})


def test_there_is_nothing_to_check_and_no_loss_of_one_example():
  with refuses("privacy", value="sgd"):
    of_config.subject(_config())
  run = build.assemble(_config())
  with refuses("loss"):
    run.task.loss(run.apply)(run.params, Example(run.train.x[0], run.train.y[0]))


def test_of_text_there_are_no_views():
  config = _config(**{"data.name": "shakespeare", "model.name": "transformer"})
  tokens = data.Dataset(
    np.ones((4, 9), np.int32), np.zeros(4, np.int32), "t", 2, "train", 9
  )
  with refuses("augmentation"):
    build.assemble(fields.replace(config, "model.options", {}), (tokens, tokens))


# --- the last layer alone


@pytest.mark.long
def test_the_last_layer_alone_is_trained_released_and_paid_for(whole, tmp_path):
  path = whole[0] / "params.npz"
  result = loop.train(_private(path, trainable="head"), tmp_path / "run")
  released = dict(np.load(tmp_path / "run" / "params.npz"))
  assert sorted(released) == ["params/head/bias", "params/head/kernel"]
  assert result["num_parameters"] == 12 * 3 + 3 and result["trainable"] == "head"
  begun = build.assemble(_private(path)).params["params"]["head"]["kernel"]
  assert np.abs(released["params/head/kernel"] - begun).max() > 0


@pytest.mark.long
def test_the_layers_below_are_those_that_it_began_with(whole):
  path = whole[0] / "params.npz"
  run, full = (build.assemble(_private(path, trainable=name)) for name in ("head", "all"))
  outputs = [each.apply(each.params, each.test.x[:5]) for each in (run, full)]
  np.testing.assert_array_equal(*outputs)
  example = jax.tree.map(lambda leaf: leaf[0], run.train[np.arange(1)])
  ours, theirs = (jax.grad(each.loss_fn)(each.params, example) for each in (run, full))
  jax.tree.map(
    np.testing.assert_array_equal, ours["params"]["head"], theirs["params"]["head"]
  )


_FIRST = {"trainable": {"name": "head_first", "steps": 2}, "num_steps": 4}


def _kernels(folder):
  held = np.load(folder / "params.npz")
  return [held[f"params/{layer}/kernel"] for layer in ("dense_0", "head")]


@pytest.mark.long
def test_head_first_is_one_run_that_costs_what_every_run_of_its_steps_does(
  whole, tmp_path, monkeypatch
):
  path = whole[0] / "params.npz"
  result = loop.train(_private(path, noise_seed=0, **_FIRST), tmp_path / "run")
  plain = build.assemble(_private(path, num_steps=4))
  assert result["epsilon"] == plain.plan.epsilon(result["delta"])
  assert result["trainable"] == "head first, 2 steps"
  begun = plain.params["params"]["dense_0"]["kernel"]
  assert np.abs(_kernels(tmp_path / "run")[0] - begun).max() > 0  # in the later steps
  stop_after(monkeypatch, 1, sigterm)  # and within the first ones it goes on exactly
  with pytest.raises(loop.Interrupted):
    loop.train(_private(path, noise_seed=0, **_FIRST), tmp_path / "stopped")
  again = loop.train(_private(path, noise_seed=0, **_FIRST), tmp_path / "stopped")
  assert again["params_sha256"] == result["params_sha256"]


@pytest.mark.long
def test_the_first_steps_move_the_last_layer_alone(whole, tmp_path):
  config = _private(whole[0] / "params.npz", **_FIRST)
  run = build.assemble(config)
  work = build.phase(config, run)
  state, seen = work.init(), []
  for slices in work.draws(0):
    state, _ = work.step(state, slices)
    seen.append(np.asarray(state.params["params"]["dense_0"]["kernel"]))
  begun = run.params["params"]["dense_0"]["kernel"]
  assert [bool(np.array_equal(kernel, begun)) for kernel in seen] == [
    True,
    True,
    False,
    False,
  ]


@pytest.mark.cases(slow=[0, "trainable.steps-changes1", "audit.kind-changes2"])
@pytest.mark.parametrize(
  ("field", "changes"),
  [
    ("trainable.steps", {"trainable.steps": 0}),
    ("trainable.steps", {"trainable.steps": 4}),
    ("audit.kind", {
      "audit": "canaries", "audit.kind": "gradient", "audit.score": "sums"
    }),
    ("mesh", {"mesh": "data:1"}),
  ],
)  # fmt: skip
def test_first_steps_that_cannot_be_are_refused(field, changes, whole):
  config = _private(whole[0] / "params.npz", **_FIRST)
  with refuses(field):
    build.Central(fields.replace_all(config, changes)).check()


def test_a_head_on_a_mesh_or_of_a_model_without_one_is_refused(whole):
  path = whole[0] / "params.npz"
  with refuses("mesh", value="data:1"):
    build.Central(_private(path, trainable="head", mesh="data:1")).check()
  audit = {"audit": "canaries", "audit.kind": "gradient", "audit.score": "sums"}
  with refuses("audit.kind", value="gradient"):
    build.Central(fields.replace_all(_private(path, trainable="head"), audit)).check()
  own = {"model.name": f"{__name__}:headless", "model.options": {}, "pretrained": None}
  with refuses("trainable", value="head"):
    build.assemble(_private(path, trainable="head", **own))


def headless(num_classes):
  return nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(num_classes)])


def test_the_folder_says_which_loss_it_was(whole):
  assert json.loads((whole[0] / "config.json").read_text())["loss"] == "contrastive"
