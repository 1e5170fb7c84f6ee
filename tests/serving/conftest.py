"""Finished runs that the tests of a service share."""

import dataclasses

import pytest

from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.experiments.run import loop
from dpjax.serving import Predictor

CONFIG = TrainConfig(
  data=DataConfig(name="digits", center=True, limit=200),
  model=ModelConfig("mlp", options={"features": (16,)}),
  privacy=DpSgd(epsilon=None, noise_multiplier=1.0, sampling_prob=0.5),
  optimizer=OptimizerConfig(learning_rate=0.5),
  grad_method="vmap",  # compiled in half the time
  num_steps=8,
  eval_every=8,
  checkpoint_every=8,
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
  """Two runs that differ in their seed."""
  root = tmp_path_factory.mktemp("runs")
  for seed in (0, 1):
    loop.train(dataclasses.replace(CONFIG, seed=seed), root / f"run{seed}")
  return [root / "run0", root / "run1"]


@pytest.fixture(scope="session")
def runs(folders):
  return [Predictor.load(folder) for folder in folders]
