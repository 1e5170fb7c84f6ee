"""MNIST and Fashion-MNIST, a CNN of tempered sigmoids on pixels; three seeds.

  python -m launch.sweep --config=configs/sweeps/mnist_cnn.py --workdir=runs/mnist_cnn_sweep

The runs of configs/mnist_cnn.py, at the epsilons of Papernot et al. 2021, whose network it is.
Hardware: 2 CPU cores, three to six minutes a run, two at a time 12. Numbers: results/mnist_cnn.
"""

from collections.abc import Iterator
from typing import Any

from configs import mnist_cnn
from configs.sweeps import scatter_cnn
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Both data sets, as for the CNN on features."""
  sweep = scatter_cnn.get_config()
  sweep.base = mnist_cnn.get_config()
  sweep.title = "Tempered-sigmoid CNN on pixels, delta 1e-5"
  sweep.references = [
    reference for reference in sweep.references if "Papernot" in reference[0]
  ]
  return sweep


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  return scatter_cnn.get_configs(sweep)
