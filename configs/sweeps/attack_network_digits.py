"""Attack networks beside other membership attacks on digits: ten runs, with other halves each.

  python -m launch.sweep --config=configs/sweeps/attack_network_digits.py --workdir=runs/networks

A network for each class learns from the answers of shadow models (Shokri et al. 2017). Each run
trains 17 models without privacy on halves of 500 digits, and each model is once the target.

Hardware: 2 CPU cores beside very much other work; half a minute of processor time a run.
Seen: at 1 % false positives the networks find .0145 +- .0016 of the members, the loss .0114 +-
.0017, LiRA .086 +- .007, tuned RMIA .098 +- .007
(results/attacks/attack_network_digits/attacks.csv; runs.csv has each run).
"""

from __future__ import annotations

from collections.abc import Iterator

from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.members import Membership
from dpjax.experiments.kinds.central.config import (
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  Sgd,
  TrainConfig,
)
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """The attack, ten times."""
  methods = ("attack_network", "loss", "lira_fixed", "bavaria", "rmia_tuned")
  base = AttackConfig(
    attack=Membership(methods=methods),
    target=TrainConfig(
      data=DataConfig(name="digits", center=True, limit=500),
      model=ModelConfig(name="mlp", options={"features": (64,)}),
      privacy=Sgd(sampling_prob=0.2),
      optimizer=OptimizerConfig(learning_rate=0.5),
      num_steps=150,
    ),
  )
  return Sweep(base=base, seeds=[*range(10)])


def get_configs(sweep: Sweep) -> Iterator[tuple[str, AttackConfig]]:
  """The one training that is attacked."""
  yield "membership, as configured", sweep.base
