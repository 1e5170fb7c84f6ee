"""MNIST, scattering features, whitened privately, and a linear model; three seeds.

  python -m launch.sweep --config=configs/sweeps/mnist_whitened.py \\
    --workdir=runs/mnist_whitened_sweep

Hardware: 2 CPU cores, 77 to 131 s a run. Numbers: results/mnist_whitened.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Runs of configs/mnist_whitened.py."""
  from configs import mnist_whitened

  return Sweep(
    base=mnist_whitened.get_config(),
    epsilons=[3.0, 2.0],
    seeds=[0, 1, 2],
    references=[
      ("Papernot et al. 2021", 2.93, 0.981),
      ("Tramèr and Boneh 2021", 3.0, 0.987),
    ],
    title="MNIST, whitened scattering features + linear",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for epsilon in sweep.epsilons:
    yield f"epsilon {epsilon:g}", fields.replace(sweep.base, "privacy.epsilon", epsilon)
