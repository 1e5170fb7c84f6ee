"""MNIST, scattering features, least squares by one noisy release; epsilon .1 to 1, three seeds.

  python -m launch.sweep --config=configs/sweeps/mnist_least_squares.py \\
    --workdir=runs/mnist_least_squares

Hardware: 2 CPU cores, beside much other work, 75 to 106 s a run.
Numbers: results/mnist_least_squares.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Runs of configs/mnist_least_squares.py."""
  from configs import mnist_least_squares

  return Sweep(
    base=mnist_least_squares.get_config(),
    epsilons=[0.1, 0.2, 0.5, 1.0],
    seeds=[0, 1, 2],
    title="MNIST, scattering features, least squares",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for epsilon in sweep.epsilons:
    yield f"epsilon {epsilon:g}", fields.replace(sweep.base, "privacy.epsilon", epsilon)
