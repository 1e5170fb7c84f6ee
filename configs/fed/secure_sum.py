"""Noise inside a secure sum: 100 users, each adds a share, on the embedded digits, offline.

  python -m launch.federate --config=configs/fed/secure_sum.py --workdir=runs/secure_sum

The server sees the sum of the users' integers alone, modulo 2^16, and every user adds a share
of Skellam noise: nobody is trusted with a message. All users take part in every round; a tenth
of them falls silent in some phase, and a round that leaves fewer than 70 is refused and
charged. The sum is simulated (and says so); --config.secure_sum.simulated=false runs SecAgg in
every round.

Hardware: 2 busy CPU cores, 9 s. Seen: test accuracy .917 at a proved epsilon of 8 (delta 1e-3,
zero-out, per user, every round accounted, nothing amplified).
"""

from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  ClientOptimizerConfig,
  Distributed,
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
    secure_sum={"name": "secagg", "bits": 16, "threshold": 0.7, "dropout_prob": 0.1},
    local=LocalConfig(batch_size=None, epochs=5),
    client_optimizer=ClientOptimizerConfig(learning_rate=0.1),
    server_optimizer=ServerOptimizerConfig(
      rule={"name": "sgd", "momentum": 0.9}, learning_rate=1.0
    ),
    privacy=Distributed(epsilon=8.0, delta=1e-3, l2_clip_norm=0.15),
    num_rounds=20,
    clients_per_round=100,
    eval_every=5,
    checkpoint_every=10,
  )
