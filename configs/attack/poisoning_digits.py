"""Poisoned rounds on the embedded digits: three attacks against aggregators and user-level DP.

  python -m launch.attack --config=configs/attack/poisoning_digits.py --workdir=runs/poisoning

Twelve clients of whom three attack: they call threes nines, drive the model away, or plant a
white square that makes any image a zero. Each defence is one field of `launch.federate`.

Hardware: 2 CPU cores; 70 s of CPU time. Seen: under the mean a scaled update leaves .09 of .94
accuracy and a backdoor misleads .98 of the victims; median, trimmed mean and Krum are not shown
to fail against three of twelve; clipping and user-level DP FAIL against the backdoor (.64, .63).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  ClientOptimizerConfig,
  FedConfig,
  FedDataConfig,
  LocalConfig,
  NoPrivacy,
)

_ATTACKS: dict[str, dict[str, Any]] = {
  "label flip": {"name": "label_flip", "source": 3, "target": 9},
  "scaled update": {"name": "scaled_update", "factor": -3.0},
  "backdoor": {"name": "backdoor", "size": 2, "factor": 3.0},
}
_PRIVATE = {
  "target.privacy": "central",
  "target.privacy.epsilon": None,
  "target.privacy.noise_multiplier": 0.5,
  "target.privacy.l2_clip_norm": 0.5,
}
_DEFENCES: dict[str, dict[str, Any]] = {
  "none": {},
  "median": {"target.aggregator": "median"},
  "trimmed mean": {"target.aggregator": {"name": "trimmed_mean", "trim": 0.25}},
  "Krum": {"target.aggregator": {"name": "krum", "num_byzantine": 3}},
  "clipping": {**_PRIVATE, "target.privacy.noise_multiplier": 0.0},
  "user-level DP": _PRIVATE,
}


def get_config() -> AttackConfig:
  """Three attacks against six defences."""
  return AttackConfig(
    attack="scaled_update",
    target=FedConfig(
      data=FedDataConfig(name="digits"),
      partition={"name": "iid", "num_clients": 12},
      model=ModelConfig(name="linear"),
      local=LocalConfig(batch_size=None, epochs=5),
      client_optimizer=ClientOptimizerConfig(learning_rate=0.5),
      privacy=NoPrivacy(),
      num_rounds=20,
      clients_per_round=12,
    ),
  )


def get_configs(base: AttackConfig) -> Iterator[tuple[str, AttackConfig]]:
  for name, attack in _ATTACKS.items():
    for defence, changes in _DEFENCES.items():
      changed = {"attack": {**attack, "fraction": 0.25}, **changes}
      yield f"{name}, {defence}", fields.replace_all(base, changed)
