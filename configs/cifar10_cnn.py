"""CIFAR-10: the tanh CNN of Papernot et al. 2021 (550,570 parameters), DP-SGD.

  python -m launch.train --config=configs/cifar10_cnn.py --workdir=runs/cifar10_cnn

Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir).
Hardware: 2 CPU cores. Nine passes over the data, an hour and a quarter beside much else to do;
the paper trains longer (.662). Expected: test accuracy .579 (one seed) at a proved epsilon of 7.53
(delta 1e-5, Poisson, add/remove-one, per example).
"""

from configs import mnist_cnn
from dpjax.experiments.kinds.central.config import TrainConfig


def get_config() -> TrainConfig:
  """The settings of configs/mnist_cnn.py, changed for CIFAR-10."""
  config = mnist_cnn.get_config()
  config.data.name, config.model.name = "cifar10", "cifar_cnn"
  config.privacy.epsilon, config.privacy.sampling_prob = 7.53, 512 / 50000
  config.optimizer.learning_rate = 3.0
  config.num_steps = 900
  config.eval_every = config.checkpoint_every = 100
  return config
