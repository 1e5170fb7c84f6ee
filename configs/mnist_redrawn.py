"""MNIST: pixels and a linear model, DP-FTRL whose noise keeps nothing in memory.

  python -m launch.train --config=configs/mnist_redrawn.py --workdir=runs/mnist_redrawn

Needs MNIST prepared by tensorflow-datasets (TFDS_DATA_DIR or --config.data.data_dir).
Hardware: 2 CPU cores. Time: a minute and a half, beside much other work.
Expected: test accuracy .904 at a proved epsilon of 1 (delta 1e-5, replace_special, per example; one
seed, whose file is not kept).

Batches come in a fixed, public order, 10 passes of 15 steps. Each step's noise is a sum of four
white draws (`noise.correlated.BandInvMf`). Those of earlier steps are drawn again, which takes no
memory. This model is small: --config.privacy.strategy.redraw=false would be quicker.
"""

from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpFtrl,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)
from dpjax.noise.correlated import BandInvMf


def get_config() -> TrainConfig:
  return TrainConfig(
    data=DataConfig(name="mnist"),
    model=ModelConfig(name="linear"),
    privacy=DpFtrl(
      epsilon=1.0,
      delta=1e-5,
      sampling_prob=1 / 15,
      l2_clip_norm=1.0,
      neighboring_relation="replace_special",
      strategy=BandInvMf(bands=4, redraw=True),
      sampler="cyclic",
    ),
    optimizer=OptimizerConfig(learning_rate=0.5),
    num_steps=150,
    eval_every=150,
    checkpoint_every=150,
  )
