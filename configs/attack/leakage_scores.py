"""The gradient leakage score in its three readings, each beside its shuffled null.

  python -m launch.attack --config=configs/attack/leakage_scores.py --workdir=runs/leakage

The column `published` holds what a text on federated learning prints as "GLS / success rate"
without saying of which network, attack or threshold; no equality is to be expected. Ours: a
first dense layer (256 sigmoid units) at batches of 1, 4 and 16, and DLG on Zhu's LeNet at
batch 1. Needs the prepared MNIST and CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.attack import common
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.central.config import ModelConfig

_DENSE = ModelConfig(name="mlp", options={"features": (256,), "activation": "sigmoid"})
_NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
_PUBLISHED = {"mnist": ".82 / 76 %", "cifar10": ".68 / 54 %"}
_COUNT = 24  # messages of a dense layer; DLG gets 8


def _row(dataset: str, batch: int) -> dict[str, Any]:
  return {
    "attack": "dense_first",
    "target.data.name": dataset,
    "target.data.limit": _COUNT * batch,
    "target.partition.num_clients": _COUNT,
  }


def get_config() -> AttackConfig:
  """The dense layer on MNIST; `get_configs` sets the attack."""
  return AttackConfig(
    target=common.clients("mnist", _DENSE, count=_COUNT), attack="dense_first"
  )


def get_configs(base: AttackConfig) -> Iterator[tuple[str, AttackConfig]]:
  """Three batches of a dense layer and one DLG on each data set."""
  for dataset, name in _NAMES.items():
    for batch in (1, 4, 16):
      label = f"dense layer first, {name} batch {batch}"
      yield label, fields.replace_all(base, _row(dataset, batch))
    changes = {
      **_row(dataset, 1),
      "attack": common.DLG,
      "beside": _PUBLISHED[dataset],
      "target.data.limit": 8,
      "target.partition.num_clients": 8,
      "target.model.name": common.LENET.name,
      "target.model.options": common.LENET.options,
    }
    yield f"DLG, {name} LeNet batch 1", fields.replace_all(base, changes)
