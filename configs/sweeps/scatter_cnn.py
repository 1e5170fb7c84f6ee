"""MNIST and Fashion-MNIST, scattering features and a CNN of tempered sigmoids; three seeds.

  python -m launch.sweep --config=configs/sweeps/scatter_cnn.py --workdir=runs/scatter_cnn

The runs of configs/mnist_scatter_cnn.py, at the epsilons of Papernot et al. 2021, whose network
of the same activation is on pixels.
Hardware: 2 CPU cores, 233 to 315 s a run beside others. Numbers: results/scatter_cnn.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep

# Data set -> the epsilon of Papernot et al. 2021.
DATA = {"MNIST": ("mnist", 2.93), "Fashion-MNIST": ("fashion_mnist", 2.7)}


def get_config() -> Sweep:
  """Both data sets with three seeds."""
  from configs import mnist_scatter_cnn

  return Sweep(
    base=mnist_scatter_cnn.get_config(),
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


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for name, (dataset, epsilon) in DATA.items():
    changes = {"data.name": dataset, "privacy.epsilon": epsilon}
    yield name, fields.replace_all(sweep.base, changes)
