"""Five hospitals at epsilon 1, 3, 8 and without noise, three seeds.

  python -m launch.sweep --config=configs/sweeps/hospitals.py --workdir=runs/hospitals_sweep

Hardware: 2 busy CPU cores, 2 minutes. Numbers: results/hospitals, and in configs/fed/hospitals.py.
"""

import math

from configs.fed import hospitals
from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  return SweepConfig(
    base=hospitals.get_config(),
    grid={"privacy.epsilon": [1.0, 3.0, 8.0, math.inf]},
    seeds=[0, 1, 2],
    title="Five hospitals, private for each of them",
  )
