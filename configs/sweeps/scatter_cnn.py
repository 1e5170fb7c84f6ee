"""MNIST and Fashion-MNIST, scattering features and a CNN of tempered sigmoids; three seeds.

  python -m launch.sweep --config=configs/sweeps/scatter_cnn.py --workdir=runs/scatter_cnn

The runs of configs/mnist_scatter_cnn.py, at the epsilons of Papernot et al. 2021, whose network
of the same activation is on pixels.
Hardware: 2 CPU cores, 233 to 315 s a run beside others. Numbers: results/scatter_cnn.
"""

from dpjax.experiments.kinds.central.config import DataConfig
from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """A variant for each data set."""
  from configs import mnist_scatter_cnn

  base = mnist_scatter_cnn.get_config()
  base.data, base.privacy.epsilon = DataConfig(), None  # the variants have them
  return SweepConfig(
    base=base,
    variants={
      "MNIST": {"data.name": "mnist", "privacy.epsilon": 2.93},
      "Fashion-MNIST": {"data.name": "fashion_mnist", "privacy.epsilon": 2.7},
    },
    seeds=[0, 1, 2],
    series="variant",
    references=[
      ("Tramèr and Boneh 2021, MNIST", 3.0, 0.987),
      ("Tramèr and Boneh 2021, Fashion-MNIST", 3.0, 0.890),
      ("Papernot et al. 2021, MNIST", 2.93, 0.981),
      ("Papernot et al. 2021, Fashion-MNIST", 2.7, 0.861),
    ],
    title="Scattering + tempered-sigmoid CNN, delta 1e-5",
  )
