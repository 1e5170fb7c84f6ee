"""CIFAR-10 over epsilon .1 to 8 on features of patches, three seeds; no public images.

  python -m launch.sweep --config=configs/sweeps/cifar10_patches.py --workdir=runs/cifar10_patches

The line is configs/cifar10_patches.py. Its epsilons are proved, since the features know no data.
Needs what that config needs. The lines on scattering features are those of
configs/sweeps/cifar10_curves.py.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import OptimizerConfig
from dpjax.experiments.sweeps.sweep import Sweep

# Epsilon -> (steps, learning rate). Noise falls as epsilon grows, so steps may be longer.
SETTINGS = {
  0.1: (50, 0.0056),
  0.5: (200, 0.005),
  1.0: (200, 0.0078),
  2.0: (200, 0.0144),
  3.0: (200, 0.021),
  4.0: (200, 0.029),
  8.0: (200, 0.056),
}


def get_config() -> Sweep:
  """Twenty-one runs of configs/cifar10_patches.py."""
  from configs import cifar10_patches

  base = cifar10_patches.get_config()
  base.optimizer = OptimizerConfig()
  return Sweep(
    base=base,
    epsilons=list(SETTINGS),
    seeds=[0, 1, 2],
    series="variant",
    title="CIFAR-10, features of patches + linear",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for epsilon in sweep.epsilons:
    usual = (sweep.base.num_steps, sweep.base.optimizer.learning_rate)
    steps, rate = SETTINGS.get(epsilon, usual)
    yield f"patches + linear @ {epsilon:g}", fields.replace_all(sweep.base, {
      "privacy.epsilon": epsilon, "num_steps": steps, "optimizer.learning_rate": rate
    })  # fmt: skip
