"""Tables of medicine and finance at epsilon 1, 3, 8 and without noise, three seeds.

  pip install --no-deps islp==0.6.0
  python -m launch.sweep --config=configs/sweeps/small_tables.py --workdir=runs/small_tables

Hardware: 2 busy CPU cores, 6 minutes. Numbers: results/small_tables, and in
configs/breast_cancer.py and configs/credit_default.py.
"""

import math
from collections.abc import Iterator
from typing import Any

from configs import breast_cancer, credit_default
from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  return Sweep(
    base=breast_cancer.get_config(),
    epsilons=[1.0, 3.0, 8.0, math.inf],
    seeds=[0, 1, 2],
    series="variant",
    title="Tables of medicine and finance, linear models",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  """The table of the sweep's base, and the one of credits with its own settings."""
  credit = credit_default.get_config()
  changes = {
    "data.name": credit.data.name,
    "data.center": True,
    "privacy.sampling_prob": fields.get(credit, "privacy.sampling_prob"),
    "privacy.l2_clip_norm": fields.get(credit, "privacy.l2_clip_norm"),
    "optimizer.learning_rate": credit.optimizer.learning_rate,
    "num_steps": credit.num_steps,
    "eval_every": credit.num_steps,
    "checkpoint_every": credit.checkpoint_every,
    "ema_decay": credit.ema_decay,
  }
  for name, of_table in (("breast cancer", {}), ("credit default", changes)):
    for epsilon in sweep.epsilons:
      changed = of_table | {"privacy.epsilon": epsilon}
      yield f"{name} @ {epsilon:g}", fields.replace_all(sweep.base, changed)
