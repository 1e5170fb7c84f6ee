"""Finance: which customer of an insurer insures a caravan, by a linear model on 85 codes.

pip install --no-deps islp==0.6.0
python -m launch.train --config=configs/insurance.py --workdir=runs/insurance
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
    data=DataConfig(name="insurance"),
    model=ModelConfig(name="linear"),
    # Inputs lie in [0, 1]. A clip norm near usual gradients keeps probabilities right.
    privacy=DpSgd(epsilon=3.0, delta=1e-5, sampling_prob=1.0, l2_clip_norm=3.0),
    optimizer=OptimizerConfig(learning_rate=0.3),
    num_steps=60,
    eval_every=60,
    checkpoint_every=60,
    ema_decay=0.9,
  )
