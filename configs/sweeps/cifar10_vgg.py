"""CIFAR-10 over epsilon .1 to 8 on features of a public VGG16, three seeds.

  python -m launch.sweep --config=configs/sweeps/cifar10_vgg.py --workdir=runs/cifar10_vgg

One line is configs/cifar10_vgg.py. The other is least squares on 1,000 random directions of the
same features, up to epsilon 1. All epsilons are claimed, since the weights know ImageNet; a curve
without public data is that of configs/sweeps/cifar10_patches.py. Needs what that config needs.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import OptimizerConfig
from dpjax.experiments.sweeps.sweep import Sweep

# Of the rate at epsilon 1. The noise falls as epsilon grows, so steps may be longer.
RATE = 0.004


def get_config() -> Sweep:
  """Eighteen runs of configs/cifar10_vgg.py, and nine by least squares."""
  from configs import cifar10_vgg

  base = cifar10_vgg.get_config()
  base.optimizer = OptimizerConfig()
  return Sweep(
    base=base,
    epsilons=[0.1, 0.5, 1.0, 2.0, 3.0, 8.0],
    seeds=[0, 1, 2],
    series="variant",
    title="CIFAR-10, features of ImageNet's VGG16 + linear",
  )


def runs(sweep: Sweep, network: str) -> Iterator[tuple[str, Any]]:
  """Yields the runs of both lines on the features of a network of that name."""
  for epsilon in sweep.epsilons:
    changes = {"privacy.epsilon": epsilon, "optimizer.learning_rate": RATE * epsilon}
    yield f"{network} + linear @ {epsilon:g}", fields.replace_all(sweep.base, changes)
  for epsilon in sweep.epsilons:
    if epsilon <= 1.0:
      changes = {"privacy": "least_squares", "privacy.directions": 1000}
      changes["privacy.epsilon"] = epsilon
      name = f"{network}, least squares @ {epsilon:g}"
      yield name, fields.replace_all(sweep.base, changes)


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  return runs(sweep, "VGG16")
