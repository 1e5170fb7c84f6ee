"""CIFAR-10 over epsilon .1 to 8 and without noise: scattering + linear, three seeds.

  python -m launch.sweep --config=configs/sweeps/cifar10_curves.py --workdir=runs/cifar10_curves

The runs are those of configs/cifar10_scatter_linear.py, with the price of the channels'
statistics in proportion to epsilon, and a smaller learning rate below epsilon 1.
Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.base.data.data_dir) and
17 GB of memory. Hardware: 2 CPU cores, two minutes a run; it goes on where it was stopped.
Numbers: results/cifar10_curves, of seed 0 and, at epsilon 1, seed 1.
"""

from configs.sweeps.mnist_curves import EPSILONS
from dpjax.runs.central.config import OptimizerConfig, PrivacyConfig
from dpjax.sweeps.grid import SweepConfig


def opponent(epsilon: float) -> dict:
  """The statistics are paid from the same epsilon: the less of it, the more noise is in them."""
  share = min(epsilon, 3.0) / 3.0
  return {
    "privacy.epsilon": epsilon,
    "privacy.normalization": {
      "name": "private_statistics",
      "noise_multiplier": 16.0 / share,
      "median_epsilon": 0.02 * share,
    },
    "optimizer.learning_rate": 4.0 * min(1.0, epsilon),
  }


def get_config() -> SweepConfig:
  """A run for each epsilon and seed."""
  from configs import cifar10_scatter_linear

  base = cifar10_scatter_linear.get_config()
  base.privacy.epsilon = None  # the variants have it, the price of the statistics
  base.privacy.normalization = PrivacyConfig().normalization
  base.optimizer = OptimizerConfig()  # and the learning rate
  variants = {
    f"opponent scattering + linear @ {epsilon:g}": opponent(epsilon) for epsilon in EPSILONS
  }
  return SweepConfig(
    base=base,
    variants=variants,
    seeds=[0, 1, 2],
    series="variant",
    references=[
      ("Tramèr and Boneh 2021, linear", 3.0, 0.670),
      ("Tramèr and Boneh 2021, CNN", 3.0, 0.693),
      ("De et al. 2022, WRN-16-4", 1.0, 0.568),
      ("De et al. 2022, WRN-16-4", 2.0, 0.649),
      ("De et al. 2022, WRN-16-4", 4.0, 0.719),
      ("De et al. 2022, WRN-16-4", 8.0, 0.795),
    ],
    title="CIFAR-10, delta 1e-5",
  )
