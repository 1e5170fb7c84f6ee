"""Breast cancer at epsilon 1, 3, 8 and without noise: three seeds.

  python -m launch.sweep --config=configs/sweeps/breast_cancer.py --workdir=runs/breast_cancer_sweep

NUMBERS
"""

import math

from configs import breast_cancer
from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  return SweepConfig(
    base=breast_cancer.get_config(),
    grid={"privacy.epsilon": [1.0, 3.0, 8.0, math.inf]},
    seeds=[0, 1, 2],
    title="Breast cancer (Wisconsin), linear model",
  )
