"""CIFAR-10 over epsilon .1 to 8 and without noise: scattering + linear, three seeds.

  python -m launch.sweep --config=configs/sweeps/cifar10_curves.py --workdir=runs/cifar10_curves

The runs are those of configs/cifar10_scatter_linear.py, with the price of the channels'
statistics in proportion to epsilon, and a smaller learning rate below epsilon 1.
Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.base.data.data_dir) and
17 GB of memory. Hardware: 2 CPU cores, two minutes a run; it goes on where it was stopped.
Numbers: results/cifar10_curves.
"""

from configs.sweeps.mnist_curves import curves, paid
from dpjax.runs.central.config import PrivacyConfig
from dpjax.sweeps.grid import SweepConfig


def opponent(epsilon: float) -> dict:
  return {
    "privacy.normalization": paid("private_statistics", epsilon),
    "optimizer.learning_rate": 4.0 * min(1.0, epsilon),
  }


def get_config() -> SweepConfig:
  """One line."""
  from configs import cifar10_scatter_linear

  base = cifar10_scatter_linear.get_config()
  base.privacy.normalization = PrivacyConfig().normalization  # the line has its own
  references = [
    ("Tramèr and Boneh 2021, linear", 3.0, 0.670),
    ("Tramèr and Boneh 2021, CNN", 3.0, 0.693),
    ("De et al. 2022, WRN-16-4", 1.0, 0.568),
    ("De et al. 2022, WRN-16-4", 2.0, 0.649),
    ("De et al. 2022, WRN-16-4", 4.0, 0.719),
    ("De et al. 2022, WRN-16-4", 8.0, 0.795),
  ]
  lines = {"opponent scattering + linear": opponent}
  return curves(base, lines, references, "CIFAR-10, delta 1e-5")
