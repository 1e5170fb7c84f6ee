"""Adapters and public weights in a run: what is trained, what is bound, what is refused."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpjax import data
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.experiments.run import loop
from dpjax.validate import UserError
from dpjax.zoo import networks
from dpjax.zoo.datasets import shakespeare
from dpjax.zoo.datasets.shakespeare_lines import blocks_of, tokens_of
from dpjax.zoo.networks import registry
from dpjax.zoo.networks.gpt2 import save_gpt2
from tests.refuses import refuses

_OPTIONS = dict(num_layers=1, num_heads=2, features=8, max_length=7, norm_epsilon=1e-5)
_MODEL = networks.Transformer(vocab_size=shakespeare.VOCAB_SIZE, **_OPTIONS)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
  pytest.importorskip("safetensors")
  tokens = jnp.zeros((1, 7), jnp.int32)
  params = jax.jit(_MODEL.init)(jax.random.key(5), tokens)
  path = tmp_path_factory.mktemp("weights") / "base.safetensors"
  save_gpt2(path, _MODEL, params)
  return path


def _config(weights, **changed):
  config = TrainConfig(
    data=DataConfig(name="shakespeare_lines"),
    model=ModelConfig(name="transformer", options=dict(_OPTIONS)),
    pretrained=str(weights),
    trainable={"name": "lora", "rank": 2},
    privacy=DpSgd(epsilon=None, noise_multiplier=1.0, sampling_prob=0.5),
    optimizer=OptimizerConfig(learning_rate=0.1),
    num_steps=2,
    eval_every=2,
  )
  return fields.replace_all(config, changed)


def _datasets(blocks=False):
  lines = tokens_of([f"ab{i:02}" for i in range(12)], 7)
  x = blocks_of(lines, 3) if blocks else lines
  size = shakespeare.VOCAB_SIZE
  labels = np.zeros(len(x), np.int32)
  make = lambda split: data.Dataset(x, labels, "lines", size, split, size)
  # Private runs on a user's own data need a declared size.
  return make("train").declared(len(x)), make("test")


@pytest.mark.long
def test_adapters_alone_are_trained_released_and_counted(weights, tmp_path):
  config = _config(weights, safetensors=True)
  result = loop.train(config, tmp_path / "run", data=_datasets())
  with np.load(tmp_path / "run" / "params.npz") as held:
    released = dict(held)
  assert sorted(released) == sorted(
    f"params/block_0/{name}/kernel/{part}"
    for name in ("attention/query_key_value", "attention/out", "mlp_in", "mlp_out")
    for part in ("a", "b")
  )
  assert all(np.abs(value).max() > 0 for value in released.values())
  assert result["num_parameters"] == sum(map(np.size, released.values()))
  assert result["trainable"].startswith("lora, rank 2") and result["test_perplexity"] > 1
  # the merged export is the public base but for W + (alpha / rank) A B
  before = networks.load_gpt2(weights, _MODEL)["params"]
  after = networks.load_gpt2(tmp_path / "run" / "model.safetensors", _MODEL)["params"]
  out = "params/block_0/mlp_out/kernel"
  low_rank = 4.0 * released[f"{out}/a"] @ released[f"{out}/b"]
  kernel = before["block_0"]["mlp_out"].pop("kernel") + low_rank
  np.testing.assert_allclose(after["block_0"]["mlp_out"].pop("kernel"), kernel, rtol=1e-5)
  np.testing.assert_array_equal(after["embed"]["embedding"], before["embed"]["embedding"])
  # edited weights are another run: the folder is refused
  held = weights.read_bytes()
  try:
    save_gpt2(weights, _MODEL, {"params": after | {"block_0": _block(after, kernel)}})
    with pytest.raises(UserError, match="pretrained: is not the file"):
      loop.train(config, tmp_path / "run", data=_datasets())
  finally:
    weights.write_bytes(held)
  assert json.loads((tmp_path / "run" / "config.json").read_text())["pretrained"]


def _block(after, kernel):
  return after["block_0"] | {"mlp_out": after["block_0"]["mlp_out"] | {"kernel": kernel}}


@pytest.mark.long
def test_an_example_may_be_a_role_and_the_promise_says_so(weights):
  config = _config(weights, **{"data.name": "shakespeare_roles"})
  run = build.assemble(config, _datasets(blocks=True))
  assert run.plan.unit == "user" and len(run.train) == 4
  assert "one user" in run.guarantee.statement(1)
  lines, blocks = (build.assemble(config, _datasets(blocks=True)), _datasets(True)[0])
  of_lines = [
    float(lines.task.evaluate(run.apply, run.params, part)["loss"])
    for part in (blocks, _datasets()[0])
  ]
  assert of_lines[0] == pytest.approx(of_lines[1], rel=1e-5)
  assert build.assemble(config, _datasets()).plan.unit == "example"


# Layouts whose run takes longer to compile.
_LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("basic", "hugging_face")]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["bert", *_LONG])
def test_published_weights_are_tuned_by_flag(layout, tmp_path):
  save_file = pytest.importorskip("safetensors.numpy").save_file
  from tests.zoo.test_published_layouts import CASES

  case = CASES[layout]
  path = tmp_path / "public.safetensors"
  save_file(case.tensors, path)
  rng = np.random.default_rng(0)
  x = np.concatenate([case.x] * 4)
  vocabulary = None
  if x.dtype == np.int64:
    x = x.astype(np.int32)
    vocabulary = 11
  labels = rng.integers(0, 3, len(x)).astype(np.int32)
  train, test = (
    data.Dataset(x, labels, "own", 3, split, vocabulary) for split in ("train", "test")
  )
  kinds = {"bert": "bert", "basic": "resnet", "hugging_face": "vit"}
  options = {
    name: getattr(case.model, name)
    for name in registry.options(kinds[layout])
    if getattr(case.model, name) is not None
  }
  config = TrainConfig(
    data=DataConfig(name="own.npz", num_examples=len(x)),
    model=ModelConfig(kinds[layout], options),
    pretrained=str(path),
    trainable={"name": "head"},
    privacy=DpSgd(epsilon=None, noise_multiplier=1.0, sampling_prob=0.5),
    num_steps=1,
  )
  config = fields.replace_all(config, {})
  run = build.assemble(config, (train, test))
  # The head of the file has these classes, so the run begins with the file's own logits.
  logits = jax.jit(run.apply)(run.params, case.x.astype(x.dtype))
  scale = np.abs(case.logits).max()
  np.testing.assert_allclose(logits, case.logits, rtol=1e-3, atol=1e-3 * scale)
  result = loop.train(config, tmp_path / "run", data=(train, test))
  assert result["epsilon_kind"] == "claimed" and result["trainable"] == "head"
  with np.load(tmp_path / "run" / "params.npz") as held:
    assert sorted(held) == ["params/head/bias", "params/head/kernel"]
    moved = held["params/head/kernel"] - run.params["params"]["head"]["kernel"]
  assert np.abs(moved).max() > 0
  other = fields.replace_all(config, {"model.name": "mlp", "model.options": {}})
  with refuses("pretrained"):
    build.Central(other).check()


@pytest.mark.cases(long=[0, 2, 3])
@pytest.mark.parametrize(
  ("field", "changes"),
  [
    ("trainable.rank", {"trainable.rank": 0}),
    ("trainable.alpha", {"trainable.alpha": 0.0}),
    ("mesh", {"mesh": "data:1"}),
    ("pretrained", {"pretrained": "none.st"}),
    ("pretrained", {"model.options": {}}),
    (
      "safetensors",
      {"pretrained": None, "safetensors": True, "model.name": "mlp", "model.options": {}},
    ),
  ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(field, changes, weights):
  with refuses(field):
    build.Central(_config(weights, **changes)).check()


@pytest.mark.long
def test_weights_and_patterns_that_do_not_fit_the_model_are_refused(weights):
  longer = {"model.options": {**_OPTIONS, "max_length": 9}}
  with refuses("pretrained"):
    build.assemble(_config(weights, **longer), _datasets())
  for field, value in (
    ("trainable.pattern", "*/nothing"),
    ("trainable.pattern", "*/bias"),
    ("trainable.rank", 9),
  ):
    with refuses(field, value=value):
      build.assemble(_config(weights, **{field: value}), _datasets())
