"""Which reading of the paper gives its numbers? Presets P3 to P5 on cifar10, paper mode.

  python -m launch.relevance --config=configs/radp/presets_cifar10.py \\
    --workdir=runs/presets_cifar10

As presets_mnist, without P1 and P2, which leave nothing to learn. 6 epochs in batches of 100,
which is as many steps as 60 epochs of the batches that DP-SGD has here.

Hardware: 2 CPU cores with two other runs, 12 minutes. Seen (one seed, last epoch; losses, the
paper's least over epochs 1.124): P3 1.31, P4 1.32, P3 fresh 1.35, P5 1.85, P3 low floor 1.94;
accuracies .534, .534, .523, .382, .346.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  return common.presets("cifar10", num_epochs=6)


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  without = ("P1", "P2")
  readings = {name: it for name, it in common.READINGS.items() if name not in without}
  yield from common.lines(sweep, readings)
