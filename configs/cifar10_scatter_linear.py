"""CIFAR-10: scattering features and a linear model, trained with DP-SGD (Tramèr & Boneh 2021).

  python -m launch.train --config=configs/cifar10_scatter_linear.py \\
    --workdir=runs/cifar10_scatter

Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir) and
8 GB of memory: the features take 3.7.
Hardware: 2 CPU cores. Time: 100 s of training after a minute of features.
Expected: test accuracy .629 (.627-.632 over three seeds) at a proved epsilon of 3 (delta
1e-5, Poisson, add/remove-one, per example); .606 after 100 steps, at 1.44. The paper's .670
normalises by private statistics of the data.
"""

from configs import mnist_scatter_linear
from dpjax.runs.central.config import TrainConfig


def get_config() -> TrainConfig:
  """The MNIST run on colour images: half the steps, averaged, at twice the learning rate."""
  config = mnist_scatter_linear.get_config()
  config.data.name = "cifar10"
  config.privacy.sampling_prob = 4096 / 50000
  config.optimizer.learning_rate = 8.0
  config.num_steps = 400
  config.ema_decay = 0.99
  config.eval_every = 100
  config.checkpoint_every = 200
  return config
