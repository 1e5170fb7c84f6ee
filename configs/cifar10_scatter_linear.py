"""CIFAR-10: scattering features and a linear model, trained with DP-SGD (Tramèr & Boneh 2021).

  python -m launch.train --config=configs/cifar10_scatter_linear.py \\
    --workdir=runs/cifar10_scatter

Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir) and
12 GB of memory. Channels of the features are normalised by their mean and variance over the
training data, which are released with noise first and paid from the same epsilon; each clip
norm is a private median, paid too.
Hardware: 2 CPU cores.
Expected: of seed 0, test accuracy .624 after 120 of the 600 steps, at a proved epsilon of
1.40; .643 after 240, at 1.90; .652 after 360, at 2.31 (delta 1e-5, Poisson, add/remove-one,
per example; statistics included). Per-example groups (model.options.num_groups=27,
privacy.normalization=per_example, 400 averaged steps of 4,096) reach .629 at 3.
"""

from configs import mnist_scatter_linear
from dpjax.runs.central.config import ByStatistics, TrainConfig


def get_config() -> TrainConfig:
  """The MNIST run on colour images, whose channels are normalised by private statistics of
  the training data, paid from the same epsilon; large batches and momentum."""
  config = mnist_scatter_linear.get_config()
  config.data.name = "cifar10"
  config.model.options = {}
  config.privacy.normalization = ByStatistics(noise_multiplier=16.0, median_epsilon=0.02)
  config.privacy.sampling_prob = 8192 / 50000
  config.optimizer.learning_rate = 4.0
  config.num_steps = 360
  config.eval_every = 120
  config.checkpoint_every = 120
  return config
