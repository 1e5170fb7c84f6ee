"""A user's own model and loss from the command line, and what their mistakes look like."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _launch(folder, *arguments):
  command = [
    sys.executable,
    "-m",
    "launch.train",
    f"--config={_ROOT}/configs/quickstart.py",
  ]
  env = {**os.environ, "PYTHONPATH": str(_ROOT)}
  return subprocess.run(
    [*command, *arguments], cwd=folder, capture_output=True, text=True, env=env
  )


@pytest.mark.long
def test_the_example_trains(tmp_path):
  done = _launch(
    _ROOT / "notebooks",
    f"--workdir={tmp_path}",
    "--config.model.name=mine:Net",
    '--config.model.options={"width": 48}',
    "--config.loss=mine:focal_loss",
    "--config.optimizer.rule=mine:lion",
    "--config.optimizer.learning_rate=0.01",
    "--config.num_steps=20",
  )
  assert done.returncode == 0, done.stderr
  assert "digits mine:Net: test_accuracy=" in done.stdout
  result = json.loads((tmp_path / "result.json").read_text())
  assert result["num_parameters"] == 64 * 48 + 48 + 48 * 10 + 10
  assert "mine" in result["starts"][0]["modules"]


_SCANS = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Net(nn.Module):
  num_classes: int
  width: int

  @nn.compact
  def __call__(self, x):
    rows = x.reshape(x.shape[0], 8, 8)
    cell = nn.scan(
      nn.SimpleCell, variable_broadcast="params", split_rngs={"params": False},
      in_axes=-2, out_axes=-2,
    )(features=self.width)
    carry = jnp.zeros((x.shape[0], self.width))
    carry, _ = cell(carry, rows)
    return nn.Dense(self.num_classes)(carry)


def loss(apply):
  def of_one(params, example):
    def step(total, scale):
      logits = apply(params, example.x[None] * scale)[0]
      return total + optax.softmax_cross_entropy_with_integer_labels(logits, example.y), None

    return jax.lax.scan(step, 0.0, jnp.array([0.5, 1.0]))[0]

  return of_one
"""


@pytest.mark.long
def test_a_model_and_a_loss_with_loops_train(tmp_path):
  (tmp_path / "loops.py").write_text(_SCANS)
  done = _launch(
    tmp_path,
    f"--workdir={tmp_path}/run",
    "--config.model.name=loops:Net",
    '--config.model.options={"width": 16}',
    "--config.loss=loops:loss",
    "--config.num_steps=4",
  )
  assert done.returncode == 0, done.stderr
  assert "digits loops:Net: test_accuracy=" in done.stdout
