"""Draws accuracy over epsilon: a sweep is one config, a grid of its fields, and seeds.

  python -m launch.sweep --config=examples/sweep.py --workdir=runs/curve

Stop it at any time; the same command goes on. It writes curve.csv, curve.png and table.md.
Guarantee: each epsilon is that of ONE run. Releasing all models costs their sum, which the
sweep prints. Choosing the best on private data costs more: see `selection` in
docs/curves.md. Time: 20 s on two CPU cores.
"""

from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """Returns three epsilons and a run without noise, with two seeds each."""
  base = TrainConfig(
    data=DataConfig(name="digits", center=True),
    model=ModelConfig(name="mlp", options={"features": (64,)}),
    # The grid sets epsilon, and each run finds its own noise for it.
    privacy=DpSgd(epsilon=None, delta=1e-5, sampling_prob=0.2, l2_clip_norm=0.5),
    optimizer=OptimizerConfig(learning_rate=0.5),
    num_steps=100,
    eval_every=50,
  )
  return SweepConfig(
    base=base,
    # Infinity clips without noise, and is drawn as a horizontal line.
    grid={"privacy.epsilon": [1.0, 2.0, 4.0, float("inf")]},
    # Seeds show how much of a difference is chance. One seed shows nothing of that.
    seeds=[0, 1],
    title="digits, a small network",
  )
