"""Digits at epsilon 3, with coordinates scaled by earlier noisy gradients and without.

  python -m launch.sweep --config=configs/sweeps/scaled_coordinates.py --workdir=runs/scaled

All have one epsilon, clip norm and noise multiplier; the learning rate is in the grid, because
scaling changes the size of a step. Hardware: 2 CPU cores. Time: 35 minutes beside much other work.
Numbers: results/scaled_coordinates.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep

SCALINGS: dict[str, dict[str, Any]] = {
  "not scaled": {"privacy.scaling": "none"},
  "scaled, floor .1": {"privacy.scaling": "by_outputs"},
  "scaled, floor .5": {"privacy.scaling": "by_outputs", "privacy.scaling.floor": 0.5},
}


def get_config() -> Sweep:
  """Three ways of scaling, each at four learning rates."""
  from configs import quickstart

  base = quickstart.get_config()
  base.eval_every = 150
  base.checkpoint_every = 150
  return Sweep(
    base=base,
    seeds=[0, 1, 2],
    x="optimizer.learning_rate",
    series="variant",
    title="digits, epsilon 3",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for name, changes in SCALINGS.items():
    for rate in (0.125, 0.25, 0.5, 1.0):
      changed = changes | {"optimizer.learning_rate": rate}
      yield f"{name} @ {rate:g}", fields.replace_all(sweep.base, changed)
