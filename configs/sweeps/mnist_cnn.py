"""MNIST and Fashion-MNIST, a CNN of tempered sigmoids on pixels; three seeds.

  python -m launch.sweep --config=configs/sweeps/mnist_cnn.py --workdir=runs/mnist_cnn_sweep

The runs of configs/mnist_cnn.py, at the epsilons of Papernot et al. 2021, whose network it is.
Hardware: 2 CPU cores, three to six minutes a run, two at a time 12. Numbers: results/mnist_cnn.
"""

from configs import mnist_cnn
from configs.sweeps import scatter_cnn
from dpjax.experiments.kinds.central.config import DataConfig
from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """A variant for each data set, as for the CNN on features."""
  config, base = scatter_cnn.get_config(), mnist_cnn.get_config()
  base.data, base.privacy.epsilon = DataConfig(center=True), None  # the variants have them
  config.base, config.title = base, "Tempered-sigmoid CNN on pixels, delta 1e-5"
  config.references = [
    reference for reference in config.references if "Papernot" in reference[0]
  ]
  return config
