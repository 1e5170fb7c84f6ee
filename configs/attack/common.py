"""Settings that the published attacks share."""

from __future__ import annotations

from typing import Any

from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  ClientOptimizerConfig,
  FedConfig,
  FedDataConfig,
  LocalConfig,
  NoPrivacy,
)

# Zhu's LeNet: sigmoid, so that second derivatives exist; with weights from U(-.5, .5).
LENET = ModelConfig(
  name="convnet",
  options={
    "filters": (12, 12, 12), "strides": (2, 2, 1), "kernel_size": 5, "activation": "sigmoid",
  },
)  # fmt: skip
# Steps of a fixed length, as in the published tables; sigmoid networks need no line search.
DLG: dict[str, Any] = {
  "name": "dlg", "steps": 2500, "uniform_init": 0.5, "line_search": False,
}  # fmt: skip


def clients(dataset: str, model: ModelConfig, *, count: int, batch: int = 1) -> FedConfig:
  """Clients with that many examples each. Each sends its gradient as one step of SGD."""
  return FedConfig(
    data=FedDataConfig(name=dataset, limit=count * batch),
    partition={"name": "iid", "num_clients": count},
    model=model,
    local=LocalConfig(batch_size=None, epochs=1),
    client_optimizer=ClientOptimizerConfig(learning_rate=1.0),
    privacy=NoPrivacy(),
    num_rounds=1,
    clients_per_round=2,
  )
