"""An architecture chosen privately: the best of about four networks, all of them accounted.

  python -m launch.sweep --config=configs/sweeps/architecture.py --workdir=runs/architecture

A search that reads private accuracies spends privacy with every network that it trains. Here their
number is random, and the choice has one epsilon (Papernot and Steinke 2022), which does not grow
with the number of architectures to choose from.

Hardware: 2 CPU cores. Time: 5 s a run, of which there is a random number, 4 on average.
Expected: best/result.json with the winner and two epsilons, add/remove-one, per example: one run
costs 1.00 at delta 1e-5 (PLD), the choice 1.995 at delta 1.4e-5 (RDP). Seen in ten choices with
fresh keys (python -m benchmarks.architecture): test accuracy .913 +- .015; the linear model was
chosen 5 times, tanh of width 64 and of 64-64 twice each, of 16 once.
"""

from collections.abc import Iterator
from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.sweeps.sweep import Selection, Sweep


def get_config() -> Sweep:
  """configs/quickstart.py at epsilon 1, and a learning rate for its noise."""
  from configs import quickstart

  base = quickstart.get_config()
  base.privacy.epsilon = 1.0
  base.optimizer.learning_rate = 0.1
  return Sweep(base=base, selection=Selection(mean_trials=4.0))


def get_configs(sweep: Sweep) -> Iterator[tuple[str, Any]]:
  """A linear model, and networks of three widths, two depths and two activations."""
  yield (
    "linear",
    fields.replace_all(sweep.base, {"model.name": "linear", "model.options": {}}),
  )
  for features in ((16,), (64,), (256,), (64, 64)):
    for activation in ("tanh", "relu"):
      options = {"features": features, "activation": activation}
      changes = {"model.name": "mlp", "model.options": options}
      name = f"{activation} {'-'.join(map(str, features))}"
      yield name, fields.replace_all(sweep.base, changes)
