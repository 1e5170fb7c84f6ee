"""Membership inference on an overfitted CIFAR-10 network, and on the same under DP-SGD.

  python -m launch.attack --config=configs/attack/membership_cifar10.py --workdir=runs/mia

4,000 records, of which each of 17 models trains on half; each model is once the target. Needs
the prepared CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Iterator

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  Sgd,
  TrainConfig,
)

_METHODS = ("confidence", "loss", "lira", "lira_fixed", "rmia")


def get_config() -> AttackConfig:
  """An overfitted network and five scores."""
  return AttackConfig(
    target=TrainConfig(
      data=DataConfig(name="cifar10", center=True, limit=4000),
      model=ModelConfig(
        name="convnet",
        options={
          "filters": (16, 32), "strides": (2, 2), "kernel_size": 5, "dense_sizes": (128,),
          "activation": "relu",
        },
      ),
      privacy=Sgd(sampling_prob=0.05),
      optimizer=OptimizerConfig(rule={"name": "sgd", "momentum": 0.9}, learning_rate=0.05),
      num_steps=300,
    ),
    attack={"name": "membership", "methods": _METHODS},
  )  # fmt: skip


def get_configs(base: AttackConfig) -> Iterator[tuple[str, AttackConfig]]:
  """Without a defence, and at epsilon 8."""
  yield "membership, none", base
  private = {"target.privacy": "dp_sgd", "target.privacy.epsilon": 8.0}
  yield "membership, epsilon 8", fields.replace_all(base, private)
