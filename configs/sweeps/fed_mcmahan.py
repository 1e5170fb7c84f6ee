"""Rounds to a target accuracy on MNIST over 100 clients: three rows of McMahan et al. 2017.

  python -m launch.sweep --config=configs/sweeps/fed_mcmahan.py --workdir=runs/fed_mcmahan

| line                | target | the paper's rounds                     |
| ------------------- | ------ | -------------------------------------- |
| 2NN, IID            | 97 %   | 87 (table 1: E=1, B=10, C=0.1)         |
| 2NN, two shards     | 97 %   | 664 (the same)                         |
| CNN, IID            | 99 %   | 20 (table 2: E=5, B=10, C=0.1)         |

Hardware: one of 2 CPU cores, eight minutes. With seed 0 it takes 53, 205 and 23 rounds
(results/fed_mcmahan). The CNN's last tenth of a percent is luck: other cohorts took 17 rounds at
this learning rate, 20 at 0.15 and 25 at 0.1.

Each run ends at its first evaluation, one after every round, that reaches the target. The
paper took the best learning rate of a grid for each row, and so are those below chosen, on
the same test data. table.md holds the rounds of each seed's slowest; not private. The CNN on
two shards (350 rounds in the paper) wants an accelerator, and a row of `NETWORKS`:
partition="shards", num_rounds=400, stop_at_accuracy=0.99.
Needs MNIST prepared by tensorflow-datasets.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep

_2NN = {
  "model.name": "mlp",
  "model.options": {"features": (200, 200), "activation": "relu"},
  "local.epochs": 1,
  "stop_at_accuracy": 0.97,
}
NETWORKS: dict[str, dict[str, Any]] = {
  "2NN, IID": {
    **_2NN,
    "num_rounds": 200,
  },
  "2NN, two shards": {
    **_2NN,
    "partition": "shards",
    "num_rounds": 1000,
  },
  "CNN, IID": {
    "client_optimizer.learning_rate": 0.2,
    "stop_at_accuracy": 0.99,
  },
}


def get_config() -> Sweep:
  """Three runs of configs/fed/mnist_iid.py."""
  from configs.fed import mnist_iid

  base = mnist_iid.get_config()
  base.num_rounds = 60
  return Sweep(
    base=base,
    x="num_steps",  # rounds until the target
    series="variant",
    title="MNIST, 100 clients: rounds to a target accuracy",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for name, changes in NETWORKS.items():
    yield name, fields.replace_all(sweep.base, changes)
