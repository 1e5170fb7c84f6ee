"""Digits at epsilon 3 by clipping rule and first clip norm: which rule forgives a wrong norm.

  python -m launch.sweep --config=configs/sweeps/clip_rules.py --workdir=runs/clip_rules

Only rule and first norm change; the learning rate is that of configs/quickstart.py, for which .5 is
the right norm. Hardware: 2 CPU cores. Time: 2 minutes. Numbers: results/clip_rules.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep

RULES = {"constant": "flat", "adaptive (quantile)": "adaptive", "slack": "slack"}


def get_config() -> Sweep:
  """Three rules, each from three first norms."""
  from configs import quickstart

  return Sweep(
    base=quickstart.get_config(),
    seeds=[0, 1, 2],
    x="privacy.l2_clip_norm",
    series="variant",
    title="digits, epsilon 3",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for name, rule in RULES.items():
    for norm in (0.05, 0.5, 5.0):
      changes = {"privacy.clipping": rule, "privacy.l2_clip_norm": norm}
      yield f"{name} @ {norm:g}", fields.replace_all(sweep.base, changes)
