"""Copies of a model of the embedded digits, from its answers to at most 150 test images.

  python -m launch.attack --config=configs/attack/extraction_digits.py --workdir=runs/extraction

What an owner keeps back (all but the label, digits), and DP-SGD, which promises nothing here.

Hardware: 2 CPU cores; 20 s of CPU time. Seen: 150 answers make a copy that agrees with the model
on .93 of other images, one decimal .92, labels alone .90; DP-SGD at epsilon 3 is copied at .88.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.copies import CopyByAnswers
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  Sgd,
  TrainConfig,
)


def get_config() -> AttackConfig:
  """The attack, and the model that is attacked."""
  return AttackConfig(
    attack=CopyByAnswers(num_queries=(15, 150), learning_rate=0.003),
    target=TrainConfig(
      data=DataConfig(name="digits", center=True),
      model=ModelConfig(name="mlp", options={"features": (64,)}),
      privacy=Sgd(sampling_prob=0.1),
      optimizer=OptimizerConfig(learning_rate=0.5),
      num_steps=150,
    ),
  )


def get_configs(base: AttackConfig) -> Iterator[tuple[str, AttackConfig]]:
  """No defence, what an owner keeps back, and DP-SGD."""
  private = {"target.privacy": "dp_sgd", "target.privacy.epsilon": 3.0}
  defences: dict[str, dict[str, Any]] = {
    "none": {},
    "one decimal": {"attack.decimals": 1},
    "labels only": {"attack.labels_only": True},
    "DP-SGD at epsilon 3": private,
  }
  for defence, changes in defences.items():
    yield f"extraction, {defence}", fields.replace_all(base, changes)
