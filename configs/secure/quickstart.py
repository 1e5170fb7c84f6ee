"""Secure computation on embedded data, offline.

python -m launch.secure --config=configs/secure/quickstart.py --workdir=runs/secure

Hardware: 2 CPU cores; 20 s of CPU time. Seen: integer sums exact, CKKS off by 5e-8; on shares
the accuracy of float64 (.95 on breast cancer, .92 on digits); weights on ciphertexts off by 1e-7;
encrypted digits answered as in the clear (.96), 10 ms an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  Sgd,
  TrainConfig,
)
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.kinds.secure.vector_sums import SumTask


def get_config() -> SecureConfig:
  """A sum by SecAgg."""
  return SecureConfig(task=SumTask(10, 10_000))


def get_configs(base: SecureConfig) -> Iterator[tuple[str, SecureConfig]]:
  """Sums by four protocols, a regression and a network, both on ciphertexts."""
  model = {
    "task.train": TrainConfig(
      data=DataConfig(name="digits", center=True),
      model=ModelConfig(name="mlp", options={"features": (32,), "activation": "square"}),
      privacy=Sgd(sampling_prob=0.1),
      optimizer=OptimizerConfig(learning_rate=0.01),
      num_steps=200,
    )
  }
  rows: dict[str, dict[str, Any]] = {
    "sum, plain": {"task.protocol": "plain"},
    "sum, additive shares": {"task.protocol": "additive_sharing"},
    "sum, SecAgg": {},
    "sum, SecAgg, 3 silent": {"task.silent": 3},
    "sum, SecAgg on a graph": {"task.protocol": "secagg_plus"},
    "sum, BFV": {"task.protocol": "bfv"},
    "sum, CKKS": {"task.protocol": "ckks"},
    "train, breast cancer": {"task": "train"},
    "train, digits": {
      "task": {
        "name": "train", "dataset": "digits", "hidden": (16,), "learning_rate": 0.25,
        "epochs": 10, "batch_size": 32,
      },
    },
    "regress, diabetes": {
      "task": {"name": "regress", "num_features": 4, "ridge": 1.0},
    },
    "infer, digits, whole images": {"task": {"name": "infer", "num_images": 100}, **model},
    "infer, digits, by pixels": {
      "task": {"name": "infer", "num_images": 300, "layout": "pixels"}, **model,
    },
  }  # fmt: skip
  for label, changes in rows.items():
    yield label, fields.replace_all(base, changes)
