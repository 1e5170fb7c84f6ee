"""Federated quickstart: user-level DP-FedAvg on the embedded digits, 100 users, offline.

  python -m launch.federate --config=configs/fed/quickstart.py --workdir=runs/fed_quickstart

Hardware: 2 CPU cores, 7 s of training and a few seconds of compilation. Test accuracy .941 +-
.009 (ten runs, each with its own keys; a new run lies in [.920, .962] with 95 %) at a proved
epsilon of 4 (delta 1e-3, Poisson sampling of users, add/remove-one, per USER: about 14 images
each). Delta is below 1 / 100 users; with so
few users a much smaller one would leave little to learn.
"""

from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  Central,
  ClientOptimizerConfig,
  FedConfig,
  FedDataConfig,
  LocalConfig,
  ServerOptimizerConfig,
)


def get_config() -> FedConfig:
  return FedConfig(
    data=FedDataConfig(name="digits", center=True),
    partition="iid",
    model=ModelConfig(name="linear"),
    local=LocalConfig(batch_size=None, epochs=5),
    client_optimizer=ClientOptimizerConfig(learning_rate=0.1),
    server_optimizer=ServerOptimizerConfig(
      rule={"name": "sgd", "momentum": 0.9}, learning_rate=1.0
    ),
    privacy=Central(epsilon=4.0, delta=1e-3, l2_clip_norm=0.15),
    num_rounds=40,
    clients_per_round=50,
    eval_every=5,
    checkpoint_every=20,
  )
