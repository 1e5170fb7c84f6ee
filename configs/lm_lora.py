"""Low-rank adapters of a public character model, trained privately on Shakespeare's other plays.

  python -m launch.train --config=configs/lm_base.py --workdir=runs/lm_base
  python -m launch.train --config=configs/lm_lora.py --workdir=runs/lm_lora \\
    --config.pretrained=runs/lm_base/params.npz

private per LINE of a history or a tragedy; per ROLE, with all lines that it keeps:

  ... --config.data.name=shakespeare_roles \\
    --config.privacy.sampling_prob=0.05 --config.privacy.delta=1e-4

Its epsilon is claimed, not proved, for the one reason that the statement names: that no private
line is among the public ones. (Lines of one author, declared public and private for an
experiment, do repeat each other.)
Hardware: 2 CPU cores; 261 to 311 s a run, partly beside other work.
Expected, seed 0: perplexity a character of the private test lines 6.00
before, 5.94 at epsilon 1, 5.93 at epsilon 3, 5.91 at epsilon 8, 5.78 without privacy.
All of them: configs/sweeps/lm_lora.py.
"""

from configs import lm_base
from dpjax.experiments.kinds.central.config import (
  DpSgd,
  LowRank,
  OptimizerConfig,
  TrainConfig,
)


def get_config() -> TrainConfig:
  """DP-SGD with Adam on adapters of all matrices, some 256 lines a step."""
  config = lm_base.get_config()
  config.data.name = "shakespeare_lines"
  config.trainable = LowRank(rank=4, alpha=8.0, pattern="*/kernel")
  config.privacy = DpSgd(epsilon=3.0, delta=1e-5, sampling_prob=256 / 53801)
  config.optimizer = OptimizerConfig(rule="adam", learning_rate=3e-3)
  config.num_steps = 200
  config.eval_every = config.checkpoint_every = 100
  return config
