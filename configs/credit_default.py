"""Finance: who defaults on a credit card, by a linear model on student, balance and income.

  pip install --no-deps islp==0.6.0
  python -m launch.train --config=configs/credit_default.py --workdir=runs/credit_default

DOC
"""

from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  PrivacyConfig,
  TrainConfig,
)


def get_config() -> TrainConfig:
  return TrainConfig(
    data=DataConfig(name="credit_default", center=True),
    model=ModelConfig(name="linear"),
    privacy=PrivacyConfig(epsilon=3.0, delta=1e-5, sampling_prob=0.2, l2_clip_norm=1.0),
    optimizer=OptimizerConfig(learning_rate=16.0),
    num_steps=200,
    eval_every=100,
    checkpoint_every=200,
    ema_decay=0.95,
  )
