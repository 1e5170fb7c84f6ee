"""A table of your own: a linear model with settings that spoil no probabilities.

  python -m launch.train --config=configs/table.py --workdir=runs/people \\
    --config.data.name=people.csv

Without a data name it trains on breast cancer.
Hardware: 2 CPU cores, 3 s of training after 10 s of compilation.
Expected: a test log loss below that of answering the shares of the classes, at an epsilon of 1, 3
and 8 on five tables of 146 to 4,628 rows (docs/your_data.md); on tables with nothing to learn at
most .04 nats above it. The settings of the digits lose up to 10.7 nats. These here are cautious:
with more than 5,000 rows a larger learning rate and more steps do better.
"""

from dpjax.experiments.kinds.central.config import (
  DataConfig,
  DpSgd,
  ModelConfig,
  OptimizerConfig,
  TrainConfig,
)


def get_config() -> TrainConfig:
  return TrainConfig(
    data=DataConfig(name="breast_cancer"),
    model=ModelConfig(name="linear"),
    # Inputs of a table lie in [0, 1]. A clip norm below usual gradients would make rows with small
    # and large errors pull alike, and probabilities too sure.
    privacy=DpSgd(epsilon=3.0, delta=1e-5, sampling_prob=0.2, l2_clip_norm=2.5),
    # At a fixed epsilon, noise moves the model by rate x clip norm x steps. So all are small.
    optimizer=OptimizerConfig(learning_rate=0.06),
    num_steps=120,
    eval_every=60,
    checkpoint_every=60,
    ema_decay=0.9,
  )
