"""Linear regression of diabetes at epsilon 1, 3, 8 and without noise, three seeds.

  python -m launch.sweep --config=configs/sweeps/diabetes.py --workdir=runs/diabetes_sweep

Hardware: 2 busy CPU cores, 3 minutes. Numbers: results/diabetes, and in configs/diabetes.py.
"""

import math
from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Three epsilons of configs/diabetes.py, and without noise."""
  from configs import diabetes

  return Sweep(
    base=diabetes.get_config(),
    epsilons=[1.0, 3.0, 8.0, math.inf],
    seeds=[0, 1, 2],
    y="test_rmse",
    title="Progression of diabetes, linear regression",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for epsilon in sweep.epsilons:
    yield f"epsilon {epsilon:g}", fields.replace(sweep.base, "privacy.epsilon", epsilon)
