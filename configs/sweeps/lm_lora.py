"""Perplexity by epsilon: adapters of a public model, private per line and without privacy.

  python -m launch.train --config=configs/lm_base.py --workdir=runs/lm_base
  python -m launch.sweep --config=configs/sweeps/lm_lora.py --workdir=runs/lm_lora_sweep \\
    --config.base.pretrained=runs/lm_base/params.npz

Private per role, its 16 first lines:

  ... --config.base.data.name=shakespeare_roles --config.base.privacy.sampler=users \\
    --config.base.privacy.sampling_prob=0.05 --config.base.privacy.delta=1e-4

Hardware: 2 CPU cores, 18 minutes. Numbers: results/lm_lora.
"""

from dpjax.experiments.kinds.central.config import Sgd
from dpjax.experiments.sweeps.grid import SweepConfig


def get_config() -> SweepConfig:
  """Runs of configs/lm_lora.py: one for each epsilon, and one that is not private."""
  from configs import lm_lora

  base = lm_lora.get_config()
  base.privacy.epsilon = None  # the variants have it
  private = {f"epsilon {eps:g}": {"privacy.epsilon": eps} for eps in (1.0, 3.0, 8.0)}
  return SweepConfig(
    base=base,
    variants={
      **private,
      "not private": {"privacy": "sgd", "privacy.delta": Sgd.delta},
    },
    y="test_perplexity",
    # It saw no private data: measured once, before the first step.
    references=[("the public model, untouched", 0.0, 5.996)],
    title="Shakespeare by line: adapters of a public character model",
  )
