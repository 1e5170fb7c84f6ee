"""The learning rate chosen privately: the best of about ten runs, all of them accounted.

  python -m launch.sweep --config=configs/sweeps/learning_rate.py --workdir=runs/best

Hardware: 2 CPU cores. Time: 5 s a run, of which there is a random number, 10 on average.
Expected: best/result.json with the winning learning rate and two epsilons, add/remove-one,
per example: one run costs 1.00 at delta 1e-5 (PLD); the choice among any number of learning
rates 2.31 at delta 2.4e-5 (RDP), where ten accounted runs would cost 10 at delta 1e-4. Test
accuracy .91 in one draw; another draw tries other learning rates.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Selection, Sweep


def get_config() -> Sweep:
  """configs/quickstart.py at epsilon 1."""
  from configs import quickstart

  base = quickstart.get_config()
  base.privacy.epsilon = 1.0
  return Sweep(base=base, selection=Selection(mean_trials=10.0))


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  """Eight learning rates."""
  for rate in (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 4.0):
    yield f"rate {rate:g}", fields.replace(sweep.base, "optimizer.learning_rate", rate)
