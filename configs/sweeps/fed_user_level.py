"""Privacy for each of 2,000 users: MNIST, 30 images a user, epsilon 2 and 8. DP-FedAvg.

  python -m launch.sweep --config=configs/sweeps/fed_user_level.py --workdir=runs/fed_user_level

Every epsilon is proved, per USER (all 30 images of one user may come or go; add/remove-one),
delta 1e-4 < 1 / 2,000, Poisson sampling of users, 500 of them expected in a round. Two models:
a linear one on the pixels, and a linear one on scattering features, which are fixed and cost
no privacy.

Hardware: 2 CPU cores, 2 minutes. Measured, one seed: linear .904 at epsilon 2 and .910 at 8,
scattering .979 and .980.

The users are an IID split of MNIST, not people: what is measured is the price of the unit,
not of real heterogeneity. Needs MNIST prepared by tensorflow-datasets.
"""

from dpjax.runs.central.config import DataConfig, ModelConfig
from dpjax.runs.federated.config import (
  FedConfig,
  FedOptimizerConfig,
  FedPrivacyConfig,
  LocalConfig,
)
from dpjax.sweeps.grid import SweepConfig

VARIANTS = {
  "linear": {
    "data.center": True,
    "privacy.l2_clip_norm": 0.1,
    "client_optimizer.learning_rate": 0.02,
  },
  "scattering + linear": {
    "model.name": "scatter_linear",
    "privacy.l2_clip_norm": 0.05,
    "client_optimizer.learning_rate": 0.003,
  },
}


def _base() -> FedConfig:
  return FedConfig(
    data=DataConfig(name="mnist"),
    partition={"name": "iid", "num_clients": 2_000},
    model=ModelConfig(name="linear"),
    local=LocalConfig(batch_size=None, epochs=5),
    server_optimizer=FedOptimizerConfig(
      rule={"name": "sgd", "momentum": 0.9}, learning_rate=1.0
    ),
    privacy=FedPrivacyConfig(epsilon=8.0, delta=1e-4),
    num_rounds=80,
    clients_per_round=500,
    eval_every=20,
    checkpoint_every=40,
    targets=(0.9, 0.95),
  )


def get_config() -> SweepConfig:
  """Two models by two epsilons."""
  return SweepConfig(
    base=_base(),
    variants=VARIANTS,
    grid={"privacy.epsilon": [2.0, 8.0]},
    seeds=[0],
    series="variant",
    title="MNIST over 2,000 users, privacy per user",
  )
