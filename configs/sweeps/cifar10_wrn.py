"""CIFAR-10, a WRN-16-4 at epsilon 1, 2, 4 and 8, for a GPU (De et al. 2022).

  python -m launch.sweep --config=configs/sweeps/cifar10_wrn.py --workdir=runs/cifar10_wrn_sweep

Each epsilon has its own number of steps: those with which the paper's noise multipliers (10, 6, 4
and 3) reach epsilons 1, 2 and 4 by RDP; of 8, the most of its table. Another epsilon has the steps
of the base. Not run here.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep

STEPS = {1.0: 875, 2.0: 1125, 4.0: 1687, 8.0: 2468}


def get_config() -> Sweep:
  """Four runs of configs/cifar10_wrn.py."""
  from configs import cifar10_wrn

  references = [(1.0, 0.568), (2.0, 0.649), (4.0, 0.719), (8.0, 0.795)]
  return Sweep(
    base=cifar10_wrn.get_config(),
    epsilons=list(STEPS),
    references=[("De et al. 2022", *point) for point in references],
    title="CIFAR-10, WRN-16-4",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for epsilon in sweep.epsilons:
    num_steps = STEPS.get(epsilon, sweep.base.num_steps)
    changes = {"privacy.epsilon": epsilon, "num_steps": num_steps}
    yield f"epsilon {epsilon:g}", fields.replace_all(sweep.base, changes)
