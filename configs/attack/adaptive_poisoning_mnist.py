"""Poisoned rounds on MNIST by clients who agree and adapt: three attacks, and one that does not.

  python -m launch.attack --config=configs/attack/adaptive_poisoning_mnist.py --workdir=runs/lies

Forty clients with shares of the classes by Dirichlet(1), of whom eight attack, against six ways
to take their mean.

Hardware: 2 CPU cores; 10 minutes of CPU time. Seen: a scaled update leaves .54 of .89 accuracy
under the mean. ALIE, min-max and min-sum leave at least .98 of the accuracy that each defence has
without them, but for Krum (.67 of .71): Krum FAILS under all four, the others under the scaled
update alone.
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
  "ALIE": {"name": "alie", "z": 1.5},
  "min-max": {"name": "min_max"},
  "min-sum": {"name": "min_sum"},
  "scaled update": {"name": "scaled_update", "factor": -3.0},
}
_PRIVATE = {
  "target.privacy": "central",
  "target.privacy.epsilon": None,
  "target.privacy.noise_multiplier": 0.3,
  "target.privacy.l2_clip_norm": 0.5,
}
_DEFENCES: dict[str, dict[str, Any]] = {
  "mean": {},
  "median": {"target.aggregator": "median"},
  "trimmed mean": {"target.aggregator": {"name": "trimmed_mean", "trim": 0.2}},
  "Krum": {"target.aggregator": {"name": "krum", "num_byzantine": 8}},
  "geometric median": {"target.aggregator": "geometric_median"},
  "user-level DP": _PRIVATE,
}


def get_config() -> AttackConfig:
  """Four attacks against six ways to take the mean; 8 of 40 clients attack."""
  return AttackConfig(
    attack="alie",
    target=FedConfig(
      data=FedDataConfig(name="mnist", limit=8000),
      partition={"name": "dirichlet", "num_clients": 40, "alpha": 1.0},
      model=ModelConfig(name="mlp", options={"features": (32,)}),
      local=LocalConfig(batch_size=None, epochs=5),
      client_optimizer=ClientOptimizerConfig(learning_rate=0.2),
      privacy=NoPrivacy(),
      num_rounds=20,
      clients_per_round=40,
      execution="vmap",
    ),
  )


def get_configs(base: AttackConfig) -> Iterator[tuple[str, AttackConfig]]:
  for name, attack in _ATTACKS.items():
    for defence, changes in _DEFENCES.items():
      changed = {"attack": {**attack, "fraction": 0.2}, **changes}
      yield f"{name}, {defence}", fields.replace_all(base, changed)
