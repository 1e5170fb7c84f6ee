"""CIFAR-10 over epsilon .1 to 8 on features of a public VGG16, three seeds.

  python -m launch.sweep --config=configs/sweeps/cifar10_vgg.py --workdir=runs/cifar10_vgg

One line is configs/cifar10_vgg.py. The other is least squares on 1,000 random directions of the
same features, up to epsilon 1. All epsilons are claimed, since the weights know ImageNet; a curve
without public data is that of configs/sweeps/cifar10_patches.py. Needs what that config needs.
"""

from dpjax.experiments.kinds.central.config import OptimizerConfig
from dpjax.experiments.sweeps.grid import SweepConfig

EPSILONS = (0.1, 0.5, 1.0, 2.0, 3.0, 8.0)
# Of the rate at epsilon 1. The noise falls as epsilon grows, so steps may be longer.
RATE = 0.004


def get_config() -> SweepConfig:
  """Eighteen runs of configs/cifar10_vgg.py, and nine by least squares."""
  from configs import cifar10_vgg

  base = cifar10_vgg.get_config()
  # The variants have these.
  base.privacy.epsilon = None
  base.optimizer = OptimizerConfig()
  by_steps = {
    f"VGG16 + linear @ {epsilon:g}": {
      "privacy.epsilon": epsilon,
      "optimizer.learning_rate": RATE * epsilon,
    }
    for epsilon in EPSILONS
  }
  by_sums = {
    f"VGG16, least squares @ {epsilon:g}": {
      "privacy.epsilon": epsilon,
      "privacy": "least_squares",
      "privacy.directions": 1000,
    }
    for epsilon in EPSILONS
    if epsilon <= 1.0
  }
  return SweepConfig(
    base=base,
    variants=by_steps | by_sums,
    seeds=[0, 1, 2],
    series="variant",
    title="CIFAR-10, features of ImageNet's VGG16 + linear",
  )
