"""Digits, 1,437 images of 8x8: a linear model by least squares in one release, and by DP-SGD.

  python -m launch.sweep --config=configs/sweeps/least_squares.py --workdir=runs/least_squares

Hardware: 2 CPU cores. Time: a minute. Numbers: results/least_squares.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.sweeps.sweep import Sweep

METHODS: dict[str, dict[str, Any]] = {
  "least squares": {
    "privacy": "least_squares",
    "privacy.moment_weight": 0.5,
  },
  "DP-SGD": {
    "privacy.sampling_prob": 1.0,
    "privacy.l2_clip_norm": 0.5,
    "optimizer.learning_rate": 16.0,
    "ema_decay": 0.9,
    "num_steps": 20,
  },
}


def get_config() -> Sweep:
  """Runs of a linear model on the pixels, by two methods."""
  return Sweep(
    base=fields.replace(TrainConfig(), "model.name", "linear"),
    epsilons=[0.1, 0.2, 0.5, 1.0],
    series="variant",
    seeds=[0, 1, 2],
    title="digits, linear model",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for name, changes in METHODS.items():
    for epsilon in sweep.epsilons:
      changed = changes | {"privacy.epsilon": epsilon}
      yield f"{name} @ {epsilon:g}", fields.replace_all(sweep.base, changed)
