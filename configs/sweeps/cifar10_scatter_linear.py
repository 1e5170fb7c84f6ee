"""CIFAR-10, scattering features and a linear model at epsilon 3, three seeds.

  python -m launch.sweep --config=configs/sweeps/cifar10_scatter_linear.py \\
    --workdir=runs/cifar10_scatter_sweep

The features are computed once for all runs. Hardware: 2 CPU cores, 5 GB, 10 minutes.
Numbers: results/cifar10_scatter_linear.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Three runs of configs/cifar10_scatter_linear.py."""
  from configs import cifar10_scatter_linear

  return Sweep(
    base=cifar10_scatter_linear.get_config(),
    epsilons=[3.0],
    seeds=[0, 1, 2],
    references=[("Tramèr and Boneh 2021", 3.0, 0.670)],
    title="CIFAR-10, scattering + linear",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for epsilon in sweep.epsilons:
    yield f"epsilon {epsilon:g}", fields.replace(sweep.base, "privacy.epsilon", epsilon)
