"""Privacy for each of 2,000 users: Fashion-MNIST, epsilon .1 to 8; the lines of fed_user_level.

  python -m launch.sweep --config=configs/sweeps/fed_user_level_fashion_mnist.py \\
    --workdir=runs/fed_user_level_fashion_mnist

Hardware: 2 CPU cores, 35 to 100 s a run. Numbers: results/fed_user_level_fashion_mnist.
Needs Fashion-MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or
--config.base.data.data_dir).
"""

from collections.abc import Iterator
from typing import Any

from configs.sweeps import fed_user_level
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """The lines and the settings of MNIST; no rate was chosen on these data."""
  sweep = fed_user_level.get_config()
  sweep.base.data.name = "fashion_mnist"
  sweep.base.targets = (0.75, 0.8)
  sweep.title = "Fashion-MNIST over 2,000 users, privacy per user, delta 1e-4"
  return sweep


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  return fed_user_level.get_configs(sweep)
