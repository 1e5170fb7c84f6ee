"""MNIST over 100 clients with Dirichlet label skew (the NIID-Bench convention), the 2NN of
McMahan et al. 2017, E=5, B=10, C=0.1. Not private.

  python -m launch.federate --config=configs/fed/mnist_dirichlet.py --workdir=runs/fed_dir \\
    --config.partition.alpha=0.1 --config.algorithm=fed_prox

SCAFFOLD counts clients alike, so it wants --config.weighting=uniform as well.
The table of heterogeneity is alpha in {0.1, 0.5, inf} x algorithm in {fed_avg, fed_prox,
fed_nova, scaffold}. Needs MNIST prepared by tensorflow-datasets.
"""

from configs.fed import mnist_shards
from dpjax.experiments.kinds.federated.config import FedConfig


def get_config() -> FedConfig:
  config = mnist_shards.get_config()
  config.partition = "dirichlet"
  config.num_rounds = 100
  config.eval_every = 5
  return config
