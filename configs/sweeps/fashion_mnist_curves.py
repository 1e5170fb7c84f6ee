"""Fashion-MNIST over epsilon .1 to 8 and without noise: the lines of mnist_curves.

  python -m launch.sweep --config=configs/sweeps/fashion_mnist_curves.py \\
    --workdir=runs/fashion_curves

Needs Fashion-MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or
--config.base.data.data_dir). Hardware: 2 CPU cores, half a minute a run, 3 to 23 of the CNNs;
it goes on where it was stopped.
Numbers: results/fashion_mnist_curves.
"""

from collections.abc import Iterator
from typing import Any

from configs.sweeps import mnist_curves
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  sweep = mnist_curves.get_config()
  sweep.base.data.name = "fashion_mnist"
  sweep.references = [
    ("Papernot et al. 2021", 2.7, 0.861),
    ("Tramèr and Boneh 2021", 3.0, 0.897),
  ]
  sweep.title = "Fashion-MNIST, delta 1e-5"
  return sweep


def whitened(epsilon: float) -> dict | None:
  """The settings of configs/fashion_mnist_whitened.py."""
  changes = mnist_curves.whitened(epsilon)
  if changes is None:
    return None
  rate = changes["optimizer.learning_rate"] * 100 / 64
  return changes | {"optimizer.learning_rate": rate, "ema_decay": 0.95}


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  """The lines of MNIST, but for the whitened one."""
  lines = mnist_curves.LINES | {"whitened scattering + linear": whitened}
  return mnist_curves.over_epsilon(sweep.base, lines, sweep.epsilons)
