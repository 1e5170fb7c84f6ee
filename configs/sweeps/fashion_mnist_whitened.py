"""Fashion-MNIST, scattering features, whitened privately, and a linear model; three seeds.

  python -m launch.sweep --config=configs/sweeps/fashion_mnist_whitened.py \\
    --workdir=runs/fashion_whitened_sweep

Hardware: 2 CPU cores, 86 to 170 s a run. Numbers: results/fashion_mnist_whitened.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Runs of configs/fashion_mnist_whitened.py."""
  from configs import fashion_mnist_whitened

  return Sweep(
    base=fashion_mnist_whitened.get_config(),
    epsilons=[3.0],
    seeds=[0, 1, 2],
    references=[
      ("Papernot et al. 2021", 2.7, 0.861),
      ("Tramèr and Boneh 2021", 3.0, 0.897),
    ],
    title="Fashion-MNIST, whitened scattering features + linear",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for epsilon in sweep.epsilons:
    yield f"epsilon {epsilon:g}", fields.replace(sweep.base, "privacy.epsilon", epsilon)
