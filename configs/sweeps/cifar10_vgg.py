"""CIFAR-10 over epsilon .5 to 8 on features of a public VGG16, three seeds.

  python -m launch.sweep --config=configs/sweeps/cifar10_vgg.py --workdir=runs/cifar10_vgg

The line is configs/cifar10_vgg.py. Its epsilons are claimed, since the weights know ImageNet; the
curve without public data is that of configs/sweeps/cifar10_curves.py. Needs what that config needs.
"""

from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """Fifteen runs of configs/cifar10_vgg.py."""
  from configs import cifar10_vgg

  base = cifar10_vgg.get_config()
  base.privacy.epsilon = None  # the grid has it
  return SweepConfig(
    base=base,
    grid={"privacy.epsilon": [0.5, 1.0, 2.0, 3.0, 8.0]},
    seeds=[0, 1, 2],
    title="CIFAR-10, features of ImageNet's VGG16 + linear",
  )
