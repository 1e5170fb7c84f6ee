"""CIFAR-10 over epsilon .5 to 8 on features of a public VGG16, three seeds.

  python -m launch.sweep --config=configs/sweeps/cifar10_vgg.py --workdir=runs/cifar10_vgg

The line is configs/cifar10_vgg.py. Its epsilons are claimed, since the weights know ImageNet; the
curve without public data is that of configs/sweeps/cifar10_curves.py. Needs what that config needs.
"""

from dpjax.experiments.kinds.central.config import OptimizerConfig
from dpjax.experiments.sweeps.grid import SweepConfig

EPSILONS = (0.5, 1.0, 2.0, 3.0, 8.0)
# Of the rate at epsilon 1. The noise falls as epsilon grows, so steps may be longer.
RATE = 0.004


def get_config() -> SweepConfig:
  """Fifteen runs of configs/cifar10_vgg.py."""
  from configs import cifar10_vgg

  base = cifar10_vgg.get_config()
  # The variants have these.
  base.privacy.epsilon = None
  base.optimizer = OptimizerConfig()
  return SweepConfig(
    base=base,
    variants={
      f"VGG16 + linear @ {epsilon:g}": {
        "privacy.epsilon": epsilon,
        "optimizer.learning_rate": RATE * epsilon,
      }
      for epsilon in EPSILONS
    },
    seeds=[0, 1, 2],
    series="variant",
    title="CIFAR-10, features of ImageNet's VGG16 + linear",
  )
