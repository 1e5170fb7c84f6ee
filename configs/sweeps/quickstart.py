"""The curve of a minute: digits, epsilon 0.5 to 8, three seeds.

  python -m launch.sweep --config=configs/sweeps/quickstart.py --workdir=runs/sweep

Hardware: 2 CPU cores. Time: 50 s. Expected mean test accuracy (smallest to largest of the
seeds), each epsilon proved for its own run at delta 1e-5, add/remove-one, per example:
.50 (.46-.56) at 0.5; .78 (.74-.83) at 1; .92 (.91-.93) at 2; .95 (.95-.96) at 4;
.96 (.96-.98) at 8.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """Five epsilons of configs/quickstart.py, three seeds."""
  from configs import quickstart

  return Sweep(
    base=quickstart.get_config(),
    epsilons=[0.5, 1.0, 2.0, 4.0, 8.0],
    seeds=[0, 1, 2],
    title="digits",
  )


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  for epsilon in sweep.epsilons:
    yield f"epsilon {epsilon:g}", fields.replace(sweep.base, "privacy.epsilon", epsilon)
