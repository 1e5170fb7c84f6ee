"""CIFAR-10 at epsilon 1 and 8 in 20 passes: DP-SGD beside three ways to correlate noise.

  python -m launch.sweep --config=configs/sweeps/correlated_noise_cifar10.py \\
    --workdir=runs/correlated_noise_cifar10

The lines are those of configs/sweeps/correlated_noise.py. Features are opponent-colour scattering,
each example's channels normalised by themselves, which costs nothing.
Needs CIFAR-10 prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.base.data.data_dir) and
3 GB of memory. Hardware: 2 CPU cores, one to two minutes a run.
"""

from collections.abc import Iterator
from typing import Any

from configs.sweeps.correlated_noise import compared, runs
from dpjax.experiments.kinds.central.config import DpSgd
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """The four lines on CIFAR-10's scattering features."""
  from configs import cifar10_scatter_linear

  base = cifar10_scatter_linear.get_config()
  base.privacy.normalization = DpSgd().normalization
  base.model.options = {"num_groups": 27}
  title = "CIFAR-10, scattering + linear, 20 passes, delta 1e-5"
  sweep = compared(base, steps_per_pass=12, title=title)
  sweep.epsilons = [1.0, 8.0]
  return sweep


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  return runs(sweep, steps_per_pass=12)
