"""Linear regression of diabetes at epsilon 1, 3, 8 and without noise, three seeds.

  python -m launch.sweep --config=configs/sweeps/diabetes.py --workdir=runs/diabetes_sweep

Hardware: 2 busy CPU cores, 3 minutes. Numbers: results/diabetes, and in configs/diabetes.py.
"""

import math

from configs import diabetes
from dpjax.experiments.kinds.central.config import DpSgd
from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  base = diabetes.get_config()
  # The grid sets it for each run.
  base.privacy.epsilon = DpSgd().epsilon
  return SweepConfig(
    base=base,
    grid={"privacy.epsilon": [1.0, 3.0, 8.0, math.inf]},
    seeds=[0, 1, 2],
    y="test_rmse",
    title="Progression of diabetes, linear regression",
  )
