"""Digits at epsilon 3 by clipping rule and first clip norm: which rule forgives a wrong norm.

  python -m launch.sweep --config=configs/sweeps/clip_rules.py --workdir=runs/clip_rules

Only rule and first norm change; the learning rate is that of configs/quickstart.py, for which .5 is
the right norm. Hardware: 2 CPU cores. Time: 2 minutes. Numbers: results/clip_rules.
"""

from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """Three rules, each from three first norms."""
  from configs import quickstart

  base = quickstart.get_config()
  base.privacy.l2_clip_norm = 1.0  # the grid has it
  return SweepConfig(
    base=base,
    variants={
      "constant": {"privacy.clipping": "flat"},
      "adaptive (quantile)": {"privacy.clipping": "adaptive"},
      "slack": {"privacy.clipping": "slack"},
    },
    grid={"privacy.l2_clip_norm": [0.05, 0.5, 5.0]},
    seeds=[0, 1, 2],
    x="privacy.l2_clip_norm",
    series="variant",
    title="digits, epsilon 3",
  )
