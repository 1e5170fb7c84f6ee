"""Perplexity by epsilon: adapters of a public model, private per line and without privacy.

  python -m launch.train --config=configs/lm_base.py --workdir=runs/lm_base
  python -m launch.sweep --config=configs/sweeps/lm_lora.py --workdir=runs/lm_lora_sweep \\
    --config.base.pretrained=runs/lm_base/params.npz

Private per role, its 16 first lines:

  ... --config.base.data.name=shakespeare_roles \\
    --config.base.privacy.sampling_prob=0.05 --config.base.privacy.delta=1e-4

Hardware: 2 CPU cores, 18 minutes. Numbers: results/lm_lora.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.kinds.central.config import Sgd
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  from configs import lm_lora

  return Sweep(
    base=lm_lora.get_config(),
    epsilons=[1.0, 3.0, 8.0],
    y="test_perplexity",
    # It saw no private data: measured once, before the first step.
    references=[("the public model, untouched", 0.0, 5.996)],
    title="Shakespeare by line: adapters of a public character model",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  """Runs of configs/lm_lora.py: one for each epsilon, and one that is not private."""
  for epsilon in sweep.epsilons:
    yield f"epsilon {epsilon:g}", fields.replace(sweep.base, "privacy.epsilon", epsilon)
  plain = {"privacy": "sgd", "privacy.delta": Sgd.delta}
  yield "not private", fields.replace_all(sweep.base, plain)
