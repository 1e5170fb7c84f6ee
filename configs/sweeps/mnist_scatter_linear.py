"""MNIST, scattering features and a linear model, epsilon 0.5 to 8, three seeds.

  python -m launch.sweep --config=configs/sweeps/mnist_scatter_linear.py \\
    --workdir=runs/mnist_scatter_sweep

Hardware: 2 CPU cores. Time: about 20 minutes. Expected mean test accuracy (smallest to
largest of the seeds): .968 (.967-.969) at 0.5; .980 (.979-.982) at 1; .986 (.985-.987) at
2; .987 (.987-.988) at 3; .988 (.988-.988) at 8. Results: results/mnist_scatter_linear/.

The features are computed once for all fifteen runs. Beside the curve: Papernot et al. 2021
(arXiv 2007.14191, tempered sigmoids) and Tramèr and Boneh 2021 (arXiv 2011.11660,
ScatterNet with a linear model), both at delta 1e-5.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Fifteen runs of configs/mnist_scatter_linear.py."""
  from configs import mnist_scatter_linear

  return Sweep(
    base=mnist_scatter_linear.get_config(),
    epsilons=[0.5, 1.0, 2.0, 3.0, 8.0],
    seeds=[0, 1, 2],
    references=[
      ("Papernot et al. 2021", 2.93, 0.981),
      ("Tramèr and Boneh 2021", 3.0, 0.987),
    ],
    title="MNIST, scattering + linear",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for epsilon in sweep.epsilons:
    yield f"epsilon {epsilon:g}", fields.replace(sweep.base, "privacy.epsilon", epsilon)
