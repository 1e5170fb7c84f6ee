"""Draws accuracy over epsilon: a sweep is a Python list of configs.

  python -m launch.sweep --config=examples/sweep.py --workdir=runs/curve

Stop it at any time; the same command goes on. It writes curve.csv, curve.png and table.md.
Guarantee: each epsilon is that of ONE run. Releasing all models costs their sum, which the
sweep prints. Choosing the best on private data costs more: see `selection` in
docs/curves.md. Time: 20 s on two CPU cores.
"""

from collections.abc import Iterator

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Returns what flags may change, such as --config.epsilons=[1,8] or --config.seeds=[0]."""
  base = TrainConfig(
    data=DataConfig(name="digits", center=True),
    model=ModelConfig(name="mlp", options={"features": (64,)}),
    privacy=DpSgd(delta=1e-5, sampling_prob=0.2, l2_clip_norm=0.5),
    optimizer=OptimizerConfig(learning_rate=0.5),
    num_steps=100,
    eval_every=50,
  )
  return Sweep(
    base=base,
    # Infinity clips without noise, and is drawn as a horizontal line.
    epsilons=[1.0, 2.0, 4.0, float("inf")],
    # Seeds show how much of a difference is chance. One seed shows nothing of that.
    seeds=[0, 1],
    title="digits, a small network",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, TrainConfig]]:
  """Yields a name and a config for each point of the curve; each runs once for each seed."""
  for epsilon in sweep.epsilons:
    yield f"epsilon {epsilon:g}", fields.replace(sweep.base, "privacy.epsilon", epsilon)
