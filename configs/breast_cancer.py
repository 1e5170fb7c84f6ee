"""Medicine: tumours of the breast, malignant or benign, by a linear model on 30 numbers.

  python -m launch.train --config=configs/breast_cancer.py --workdir=runs/breast_cancer

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
    data=DataConfig(name="breast_cancer"),
    model=ModelConfig(name="linear"),
    privacy=PrivacyConfig(epsilon=3.0, delta=1e-5, sampling_prob=0.5, l2_clip_norm=0.5),
    optimizer=OptimizerConfig(learning_rate=4.0),
    num_steps=60,
    eval_every=60,
    checkpoint_every=60,
    ema_decay=0.9,
  )
