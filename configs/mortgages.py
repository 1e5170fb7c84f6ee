"""Finance: who is denied a mortgage in Boston, by a linear model; black applicants scored apart.

pip install -e '.[data]'
python -m launch.train --config=configs/mortgages.py --workdir=runs/mortgages
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
    data=DataConfig(name="mortgages"),
    model=ModelConfig(name="linear"),
    # Inputs lie in [0, 1]. A clip norm near usual gradients keeps probabilities right.
    privacy=DpSgd(epsilon=3.0, delta=1e-5, sampling_prob=1.0, l2_clip_norm=3.0),
    optimizer=OptimizerConfig(learning_rate=0.3),
    num_steps=60,
    eval_every=60,
    checkpoint_every=60,
    ema_decay=0.9,
  )
