"""CIFAR-10, scattering features and a linear model at epsilon 3, three seeds.

  python -m launch.sweep --config=configs/sweeps/cifar10_scatter_linear.py \\
    --workdir=runs/cifar10_scatter_sweep

The features are computed once for all runs. Hardware: 2 CPU cores, 17 GB, 10
minutes; with GLIBC_TUNABLES= before the command 15 GB, 20 minutes (docs/machines.md).
Numbers: results/cifar10_scatter_linear.
"""

from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """Three runs of configs/cifar10_scatter_linear.py."""
  from configs import cifar10_scatter_linear

  base = cifar10_scatter_linear.get_config()
  base.privacy.epsilon = None  # the grid has it
  return SweepConfig(
    base=base,
    grid={"privacy.epsilon": [3.0]},
    seeds=[0, 1, 2],
    references=[("Tramèr and Boneh 2021", 3.0, 0.670)],
    title="CIFAR-10, scattering + linear",
  )
