"""Five hospitals at epsilon 1, 3, 8 and without noise, five seeds.

  python -m launch.sweep --config=configs/sweeps/hospitals.py --workdir=runs/hospitals_sweep

Hardware: 2 busy CPU cores, 2 minutes. Numbers: results/hospitals, and in configs/fed/hospitals.py.
"""

import math
from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Three epsilons of configs/fed/hospitals.py, and without noise."""
  from configs.fed import hospitals

  return Sweep(
    base=hospitals.get_config(),
    epsilons=[1.0, 3.0, 8.0, math.inf],
    seeds=[*range(5)],
    title="Five hospitals, private for each of them",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for epsilon in sweep.epsilons:
    yield f"epsilon {epsilon:g}", fields.replace(sweep.base, "privacy.epsilon", epsilon)
