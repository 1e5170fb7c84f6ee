"""Medicine: how far diabetes goes on in a year, by linear regression on ten columns.

  python -m launch.train --config=configs/diabetes.py --workdir=runs/diabetes

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
    data=DataConfig(name="diabetes", center=True),
    model=ModelConfig(name="linear"),
    privacy=PrivacyConfig(epsilon=3.0, delta=1e-5, sampling_prob=0.5, l2_clip_norm=1.0),
    optimizer=OptimizerConfig(learning_rate=0.04),
    num_steps=60,
    eval_every=60,
    checkpoint_every=60,
    ema_decay=0.9,
  )
