"""A table with several rows of one person: a linear model, private for each PERSON.

  python -m launch.federate --config=configs/fed/people.py --workdir=runs/people \\
    --config.data.name=people.csv --config.data.num_users=900 --config.clients_per_round=180 \\
    --config.partition=natural --config.partition.client_id=person

Without these flags each row of breast cancer is one person. In each step a fifth of the people send
the mean gradient of their rows: configs/table.py, of people in place of rows. `num_users` is a
public number near theirs.
Hardware: 2 CPU cores, 15 s.
Expected: a log loss of .22 to .23 on breast cancer, where the shares of the classes have .66, at a
proved epsilon of 3 (two runs; Poisson, add/remove-one, per USER).
"""

from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import (
  Central,
  FedConfig,
  FedDataConfig,
  ServerOptimizerConfig,
)


def get_config() -> FedConfig:
  return FedConfig(
    data=FedDataConfig(name="breast_cancer"),
    partition={"name": "iid", "num_clients": 457},
    model=ModelConfig(name="linear"),
    algorithm="fed_sgd",
    server_optimizer=ServerOptimizerConfig(learning_rate=0.5),
    privacy=Central(epsilon=3.0, delta=1e-5, l2_clip_norm=2.5),
    num_rounds=120,
    clients_per_round=91,
    eval_every=60,
    checkpoint_every=60,
  )
