"""MNIST over 100 clients with two label shards each (the pathological split of McMahan et al.
2017): the paper's 2NN (784-200-200-10), E=5, B=10, C=0.1. Not private.

  python -m launch.federate --config=configs/fed/mnist_shards.py --workdir=runs/fed_shards

The CNN of `mnist_iid.py` wants an accelerator for its 350 rounds here.
Needs MNIST prepared by tensorflow-datasets. The paper's rounds are 664 to 97 % with the 2NN at
E=1 (configs/sweeps/fed_mcmahan.py runs that row) and 350 to 99 % with the CNN at E=5.
"""

from configs.fed import mnist_iid
from dpjax.experiments.kinds.central.config import ModelConfig
from dpjax.experiments.kinds.federated.config import FedConfig


def get_config() -> FedConfig:
  config = mnist_iid.get_config()
  config.partition = "shards"
  config.model = ModelConfig("mlp", {"features": (200, 200), "activation": "relu"})
  config.client_optimizer.learning_rate = 0.05
  config.num_rounds = 700
  config.checkpoint_every = 50
  return config
