"""Release mode: fresh keys, kept in checkpoints alone, restored exactly, nothing logged."""

import pytest

from dpjax import gradients
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central import build
from dpjax.experiments.run import loop, run_keys, writers
from dpjax.noise import source
from dpjax.validate import UserError
from tests.refuses import refuses
from tests.runs import small_configs


def _config(**overrides):
  few = {"num_steps": 6, "eval_every": 2, "checkpoint_every": 2, "data.limit": 300}
  return fields.replace_all(small_configs.short(**few, release=True), overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("release") / "run"
  return workdir, loop.train(_config(), workdir)


@pytest.mark.long
def test_p32_release_logs_no_diagnostics_and_says_what_it_is(finished):
  workdir, result = finished
  named = {name for row in writers.read_metrics(workdir) for name in row}
  assert "test_accuracy" in named
  assert not [name for name in named if name.startswith("not_private")]
  assert result["release"] is True
  for words in ("Release mode.", "256 bits", "ChaCha20", "grid of multiples", "not proved"):
    assert words in " ".join(result["privacy_statement"].split())


@pytest.mark.slow
def test_p32_how_long_a_release_took_is_not_written(finished):
  workdir, _ = finished
  result = writers.read_json(workdir / "result.json")
  assert result["wall_seconds"] is None
  assert "is not covered" in " ".join(result["privacy_statement"].split())
  assert writers.took(result) == ""


@pytest.mark.long
def test_the_updates_of_a_release_lie_on_the_grid():
  """Through the whole transform: update * normalize_by is a multiple of the step."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  config = _config(**{"privacy.epsilon": 1.0})
  built = build.assemble(config, None, run_keys.draw(config.seed, release=True))
  plan = built.plan
  tx = plan.transform(built.random.noise)
  grads = gradients.wrap_grads({"w": jax.random.normal(jax.random.key(0), (4, 500))})
  params = {"w": jnp.zeros(500)}
  update, _ = tx.update(grads, tx.init(params), params, mask=jnp.ones(4, bool))
  step = source.grid_step(plan.noise_multiplier * plan.l2_bound)
  cells = np.asarray(update["w"], np.float64) * plan.normalize_by / step
  np.testing.assert_allclose(cells, np.round(cells), atol=1e-4)


def test_what_cannot_be_released_is_refused(tmp_path):
  with refuses("release", value=True):
    loop.train(_config(**{"privacy": "sgd"}), tmp_path / "run")
  noiseless = {"privacy.epsilon": None, "privacy.noise_multiplier": 0.0}
  with refuses("privacy.noise_multiplier"):
    loop.train(_config(**noiseless), tmp_path / "run")  # not at its end
  with pytest.raises(UserError, match="holds no keys"):
    run_keys.from_meta(0, {"data_sha256": ""})
  assert not (tmp_path / "run").exists()
