"""Four algorithms over three degrees of label skew: MNIST, 100 clients, 2NN. Not private.

  python -m launch.sweep --config=configs/sweeps/fed_dirichlet.py --workdir=runs/fed_dirichlet

Dirichlet alpha in {0.1, 0.5, inf} (the NIID-Bench convention: labels AND sizes differ; inf is
IID) x {FedAvg, FedProx, FedNova, SCAFFOLD}; 100 clients of which 10 take part in a round,
E=5, B=10, 100 rounds, the same learning rate for all. table.md holds test accuracy after the
last round (and the rounds to 97 % and 99 % that the slowest alpha took; sweep.json has each
run's); curve.png draws alpha as a category. Clients are weighted by their examples, as their
papers have it, but for SCAFFOLD, which counts clients alike: where sizes differ as much as at
alpha 0.1 the two are not the same objective.

Hardware: 2 CPU cores, 30 to 70 s a run. Needs MNIST prepared by tensorflow-datasets.
"""

import math
from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep

ALGORITHMS: dict[str, dict[str, Any]] = {
  "FedAvg": {"algorithm": "fed_avg"},
  "FedProx": {"algorithm": "fed_prox", "algorithm.mu": 0.1},
  "FedNova": {"algorithm": "fed_nova"},
  "SCAFFOLD": {"algorithm": "scaffold", "weighting": "uniform"},
}


def get_config() -> Sweep:
  """Twelve runs of configs/fed/mnist_dirichlet.py."""
  from configs.fed import mnist_dirichlet

  return Sweep(
    base=mnist_dirichlet.get_config(),
    x="partition.alpha",
    series="variant",
    title="MNIST, 100 clients, Dirichlet label skew",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for name, changes in ALGORITHMS.items():
    for alpha in (0.1, 0.5, math.inf):
      changed = changes | {"partition.alpha": alpha}
      yield f"{name} @ {alpha:g}", fields.replace_all(sweep.base, changed)
