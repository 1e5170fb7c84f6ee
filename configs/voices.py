"""Speech: which of nine men says "ae", by a linear model on 48 numbers of an utterance.

pip install --no-deps aeon==1.6.0
python -m launch.train --config=configs/voices.py --workdir=runs/voices
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
    data=DataConfig(name="voices"),
    model=ModelConfig(name="linear"),
    # 270 records are few, so each step takes all of them.
    privacy=DpSgd(epsilon=8.0, delta=1e-5, sampling_prob=1.0, l2_clip_norm=1.0),
    optimizer=OptimizerConfig(learning_rate=1.0),
    num_steps=60,
    eval_every=60,
    checkpoint_every=60,
    ema_decay=0.9,
  )
