"""CIFAR-10: scattering features and a linear model, trained with DP-SGD (Tramèr & Boneh 2021).

  python -m launch.train --config=configs/cifar10_scatter_linear.py \\
    --workdir=runs/cifar10_scatter

Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir) and
12 GB of memory (2.5 GB of it features in float32).
"""

from configs import mnist_scatter_linear
from dpjax.runs.central.config import PrivateStatistics, TrainConfig


def get_config() -> TrainConfig:
  """The MNIST run on colour images, whose channels are normalised by private statistics of
  the training data, paid from the same epsilon; large batches and momentum."""
  config = mnist_scatter_linear.get_config()
  config.data.name = "cifar10"
  config.model.options = {}
  config.privacy.normalization = PrivateStatistics(
    noise_multiplier=8.0, median_epsilon=0.02
  )
  config.privacy.sampling_prob = 8192 / 50000
  config.optimizer.learning_rate = 4.0
  config.num_steps = 600
  config.eval_every = 120
  config.checkpoint_every = 300
  return config
