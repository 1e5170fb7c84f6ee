"""Privacy for each of 2,000 users: MNIST, 30 images a user, epsilon .1 to 8. DP-FedAvg.

  python -m launch.sweep --config=configs/sweeps/fed_user_level.py --workdir=runs/fed_user_level

Every epsilon is proved, per USER (all 30 images of one user may come or go; add/remove-one),
delta 1e-4 < 1 / 2,000, Poisson sampling of users, 500 of them expected in a round. Two models:
a linear one on the pixels, and a linear one on scattering features, which are fixed and cost
no privacy.

Hardware: 2 CPU cores, 19 to 103 s a run. Numbers: results/fed_user_level.
The server's learning rate falls with epsilon below 2, a rule that was chosen on these data.

The users are an IID split of MNIST, not people: what is measured is the price of the unit,
not of real heterogeneity. Needs MNIST prepared by tensorflow-datasets.
"""

from collections.abc import Iterator
from typing import Any

from configs.sweeps.mnist_curves import EPSILONS, over_epsilon
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  Central,
  FedConfig,
  FedDataConfig,
  LocalConfig,
  ServerOptimizerConfig,
)
from dpjax.experiments.sweeps.sweep import Sweep


def _server(epsilon: float) -> dict:
  return {"server_optimizer.learning_rate": min(1.0, epsilon / 2)}


LINES = {
  "linear": lambda epsilon: (
    _server(epsilon)
    | {
      "data.center": True,
      "privacy.l2_clip_norm": 0.1,
      "client_optimizer.learning_rate": 0.02,
    }
  ),
  "scattering + linear": lambda epsilon: (
    _server(epsilon)
    | {
      "model.name": "scatter_linear",
      "privacy.l2_clip_norm": 0.05,
      "client_optimizer.learning_rate": 0.003,
    }
  ),
}


def _base() -> FedConfig:
  return FedConfig(
    data=FedDataConfig(name="mnist"),
    partition={"name": "iid", "num_clients": 2_000},
    model=ModelConfig(name="linear"),
    local=LocalConfig(batch_size=None, epochs=5),
    server_optimizer=ServerOptimizerConfig(
      rule={"name": "sgd", "momentum": 0.9}, learning_rate=1.0
    ),
    privacy=Central(epsilon=None, delta=1e-4),
    num_rounds=80,
    clients_per_round=500,
    eval_every=20,
    checkpoint_every=40,
    targets=(0.9, 0.95),
  )


def get_config() -> Sweep:
  """Two models over six epsilons, and without noise."""
  return Sweep(
    base=_base(),
    epsilons=[*EPSILONS],
    seeds=[0, 1, 2],
    series="variant",
    title="MNIST over 2,000 users, privacy per user, delta 1e-4",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  return over_epsilon(sweep.base, LINES, sweep.epsilons)
