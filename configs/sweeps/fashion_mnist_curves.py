"""Fashion-MNIST over epsilon .1 to 8 and without noise: the lines of mnist_curves.

  python -m launch.sweep --config=configs/sweeps/fashion_mnist_curves.py \\
    --workdir=runs/fashion_curves

Needs Fashion-MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or
--config.base.data.data_dir). Hardware: 2 CPU cores, half a minute a run, 3 to 23 of the CNNs;
it goes on where it was stopped.
Numbers: results/fashion_mnist_curves.
"""

from configs.sweeps import mnist_curves
from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """The lines of MNIST, but for the settings of configs/fashion_mnist_whitened.py."""
  config = mnist_curves.get_config()
  config.base.data.name = "fashion_mnist"
  for fields in config.variants.values():
    if "privacy.normalization" in fields:
      fields["optimizer.learning_rate"] *= 100 / 64
      fields["ema_decay"] = 0.95
  config.references = [
    ("Papernot et al. 2021", 2.7, 0.861),
    ("Tramèr and Boneh 2021", 3.0, 0.897),
  ]
  config.title = "Fashion-MNIST, delta 1e-5"
  return config
