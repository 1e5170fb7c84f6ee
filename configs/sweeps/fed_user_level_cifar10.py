"""Privacy for each of 2,000 users: CIFAR-10, epsilon .1 to 8; the lines of fed_user_level.

  python -m launch.sweep --config=configs/sweeps/fed_user_level_cifar10.py \\
    --workdir=runs/fed_user_level_cifar10

25 images a user, 40 rounds. Hardware: 2 CPU cores, 34 to 85 s a run.
Numbers: results/fed_user_level_cifar10. Needs CIFAR-10 prepared by tensorflow-datasets
(TFDS_DATA_DIR or --config.base.data.data_dir).
"""

from collections.abc import Iterator
from typing import Any

from configs.sweeps import fed_user_level
from configs.sweeps.mnist_curves import over_epsilon
from dpjax.experiments.sweeps.sweep import Sweep


def _opponent(epsilon: float) -> dict:
  return fed_user_level.LINES["scattering + linear"](epsilon) | {
    "model.mirrored": True,
    "model.colours": "opponent",
  }


LINES = {
  "linear": fed_user_level.LINES["linear"],
  "opponent scattering + linear": _opponent,
}


def get_config() -> Sweep:
  """The rates and clipping norms of MNIST; none was chosen on these data."""
  sweep = fed_user_level.get_config()
  sweep.base.data.name = "cifar10"
  sweep.base.num_rounds = 40
  sweep.base.targets = (0.5, 0.6)
  sweep.title = "CIFAR-10 over 2,000 users, privacy per user, delta 1e-4"
  return sweep


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  return over_epsilon(sweep.base, LINES, sweep.epsilons)
