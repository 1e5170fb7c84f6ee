"""The curve of a minute: digits, epsilon 0.5 to 8, two seeds.

python -m launch.sweep --config=configs/sweeps/quickstart.py --workdir=runs/quickstart_sweep
"""

from dpjax.experiment.sweep import SweepConfig


def get_config() -> SweepConfig:
  """Ten runs of configs/quickstart.py."""
  from configs import quickstart

  return SweepConfig(
    base=quickstart.get_config(),
    grid={"privacy.epsilon": [0.5, 1.0, 2.0, 4.0, 8.0]},
    seeds=[0, 1],
    title="digits",
  )
