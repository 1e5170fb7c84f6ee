"""A run from config to result.json: resume, budget, foreign workdirs, what is written."""

import gc
import json

import numpy as np
import pytest

from dpjax import data
from dpjax.accounting import Ledger
from dpjax.data.text import encode_text
from dpjax.experiments.kinds.central import build
from dpjax.experiments.run import checkpoint, loop, writers
from tests.refuses import refuses
from tests.runs import small_configs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("run") / "whole"
  return workdir, loop.train(small_configs.short(), workdir)


@pytest.mark.long
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


@pytest.mark.slow
def test_the_ledger_holds_what_ran(finished):
  _, result = finished
  ledger = Ledger.from_json(result["ledger"])
  assert ledger.num_steps == result["num_steps"] == 12
  plan = build.assemble(small_configs.short()).plan
  accounted = ledger.epsilon(plan.accounted_delta(plan.delta))
  assert accounted == pytest.approx(result["epsilon"], rel=1e-9)


@pytest.mark.slow
def test_sgd_has_no_epsilon_and_says_so(tmp_path):
  config = small_configs.short(**{"privacy": "sgd", "optimizer.learning_rate": 0.1})
  result = loop.train(config, tmp_path / "run")
  assert result["epsilon"] is None and result["epsilon_kind"] == "none"


@pytest.mark.slow
def test_shuffled_batches_prove_nothing(tmp_path):
  overrides = {"privacy.sampler": "shuffled"}
  with refuses("privacy.sampler"):
    loop.train(small_configs.short(**overrides), tmp_path / "run")
  overrides |= {"privacy.epsilon": None, "privacy.noise_multiplier": 1.0}
  assert (
    loop.train(small_configs.short(**overrides), tmp_path / "run")["epsilon_kind"] == "none"
  )


@pytest.mark.cases(long=[4])
@pytest.mark.parametrize(
  ("overrides", "field"),
  [
    ({"privacy.epsilon": 0.0}, "privacy.epsilon"),
    ({"privacy.epsilon": -1.0}, "privacy.epsilon"),
    ({"privacy.sampling_prob": 1.5}, "privacy.sampling_prob"),
    ({"privacy.delta": 0.0}, "privacy.delta"),
    ({"privacy.sampler.capacity": 90}, "privacy.sampler.capacity"),
    ({"privacy.noise_multiplier": 1.0}, "privacy.noise_multiplier"),
    ({"privacy.epsilon": None}, "privacy.epsilon"),
    ({"privacy.neighboring_relation": "replace_one"}, "privacy.neighboring_relation"),
    ({"privacy.sampler": "poison"}, "config.privacy.sampler"),
    ({"optimizer.rule": "sgdd"}, "config.optimizer.rule"),
    ({"optimizer.learning_rate": 0.0}, "optimizer.learning_rate"),
    ({"model.name": "cnnn"}, "model.name"),
    ({"model.options": {"depth": 3}}, "model.options.depth"),
    ({"data.name": "digit"}, "data.name"),
    ({"data.limit": 0}, "data.limit"),
    ({"data.limit": 1438}, "data.limit"),
    ({"data.num_classes": 11}, "data.num_classes"),
    ({"num_steps": 0}, "num_steps"),
    ({"augmult": 4}, "augmult"),
    ({"ema_decay": 1.5}, "ema_decay"),
    ({"microbatch_size": 0}, "microbatch_size"),
    ({"grad_method": "fast"}, "grad_method"),
  ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, overrides, field):
  with refuses(field) as caught:
    loop.train(small_configs.short(**overrides), tmp_path / "run")
  assert "\n" not in str(caught.value)
  assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_delta_not_below_one_over_n_is_warned_of(tmp_path, capsys):
  loop.train(small_configs.short(**{"privacy.delta": 0.01}), tmp_path / "run")
  assert "delta" in capsys.readouterr().err


@pytest.mark.slow
def test_p32_diagnostics_are_named_not_private_and_can_be_switched_off(finished, tmp_path):
  named = {name for row in writers.read_metrics(finished[0]) for name in row}
  assert {"not_private/train_loss", "not_private/batch_size"} <= named
  loop.train(small_configs.short(diagnostics=False), tmp_path / "run")
  silent = {name for row in writers.read_metrics(tmp_path / "run") for name in row}
  assert not [name for name in silent if name.startswith("not_private")]


@pytest.mark.parametrize(
  "like",
  [np.zeros(3, np.int32), np.zeros(2, np.float32), np.zeros((3, 1), np.float32), None],
  ids=["type", "shape", "rank", "gone"],
)
def test_a_state_of_another_form_is_one_line_and_is_not_cast(like, tmp_path, capfd):
  """A float state was restored as zeros of integers."""
  checkpoints = checkpoint.Checkpoints(tmp_path)
  checkpoints.save(1, {"w": np.full(3, 0.9, np.float32)}, {})
  with refuses("checkpoint") as caught:
    checkpoint.Checkpoints(tmp_path).restore({} if like is None else {"w": like})
  assert "float32[3]" in str(caught.value)
  gc.collect()
  assert not capfd.readouterr().err


def test_checkpoints_keep_keys_typed_and_ignore_unfinished_saves(tmp_path):
  import jax

  checkpoints = checkpoint.Checkpoints(tmp_path)
  state = {"key": jax.random.key(3), "w": np.arange(3.0), "none": None}
  checkpoints.save(1, state, {"ledger": [1]})
  left = checkpoints.directory / ".2.npz.7.tmp"  # by a process that was killed
  left.write_bytes(b"")
  again = checkpoint.Checkpoints(tmp_path)
  restored, meta = again.restore(state)
  assert again.latest == 1 and meta == {"ledger": [1]}
  assert (
    jax.random.key_data(restored["key"]).tolist()
    == jax.random.key_data(state["key"]).tolist()
  )
  np.testing.assert_array_equal(restored["w"], state["w"])
  again.save(2, state, {})
  assert not left.exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int4", "bool", "complex64"])
def test_checkpoints_keep_the_bits_of_every_type(dtype, tmp_path):
  import jax.numpy as jnp

  state = {
    "w": jnp.arange(-3, 3).astype(dtype).reshape(2, 3),
    "empty": jnp.zeros((0, 2), dtype),
  }
  checkpoint.Checkpoints(tmp_path).save(1, state, {})
  restored, _ = checkpoint.Checkpoints(tmp_path).restore(state)
  for name, array in state.items():
    assert restored[name].dtype == array.dtype and restored[name].shape == array.shape
    assert np.asarray(restored[name]).tobytes() == np.asarray(array).tobytes()


@pytest.mark.long
def test_a_transformer_learns_text_and_refuses_images(tmp_path):
  options = {"features": 8, "num_heads": 2, "num_layers": 1, "max_length": 16}
  config = small_configs.short(
    **{"model.name": "transformer", "model.options": options, "num_steps": 4}
  )
  with refuses("model.name"):
    loop.train(config, tmp_path / "images")
  tokens = encode_text(["the cat sat", "a dog ran off"] * 40, max_length=12)
  dataset = data.from_arrays(
    tokens, np.zeros(80, int), num_classes=1, vocab_size=256, nominal_size=80
  )
  result = loop.train(config, tmp_path / "text", data=(dataset, dataset))
  assert result["task"] == "language_modeling" and result["test_perplexity"] < 260
  assert result["epsilon_kind"] == "proved"
