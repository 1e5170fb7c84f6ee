"""MNIST, scattering features and a linear model: four private algorithms, epsilon 1, 2, 8.

  python -m launch.sweep --config=configs/sweeps/mnist_algorithms.py \\
    --workdir=runs/mnist_algorithms

Same data passes, clip norm and adjacency (replace_special, delta 1e-5, per example) for all.
DP-SGD, DP-Adam and DP-SGLD rest on secret Poisson sampling; DP-FTRL's batches come in a
fixed, public order and its noise is correlated instead.

Hardware: 2 CPU cores. Time: 113 to 293 s a run, before freed memory was kept. Measured, one seed,
at epsilon 1 / 2 / 8: DP-SGD .981 / .986 / .988, DP-FTRL .980 / .985 / .988, DP-Adam .978 / .983 /
.990, DP-SGLD .980 / .985 / .989.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep

ALGORITHMS: dict[str, dict[str, Any]] = {
  "DP-SGD": {},
  "DP-FTRL, banded": {"privacy": "dp_ftrl", "privacy.strategy.bands": 15},
  "DP-Adam": {
    "optimizer.rule": "dp_adam",
    "optimizer.learning_rate": 0.003,
  },
  "DP-SGLD": {
    "optimizer.rule": "dp_sgld",
    "optimizer.learning_rate": 40.0,  # that of DP-SGD / (1 - its momentum)
  },
}


def get_config() -> Sweep:
  """Twelve runs of configs/mnist_scatter_ftrl.py."""
  from configs import mnist_scatter_ftrl

  return Sweep(
    base=fields.replace(mnist_scatter_ftrl.get_config(), "privacy", "dp_sgd"),
    epsilons=[1.0, 2.0, 8.0],
    series="variant",
    title="MNIST, scattering + linear: four private algorithms, equal passes",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for name, changes in ALGORITHMS.items():
    for epsilon in sweep.epsilons:
      changed = changes | {"privacy.epsilon": epsilon}
      yield f"{name} @ {epsilon:g}", fields.replace_all(sweep.base, changed)
