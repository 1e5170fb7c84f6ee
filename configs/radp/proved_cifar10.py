"""RADP with a proof beside DP-SGD on cifar10, all under replace_one, at the paper's
epsilons.

  python -m launch.relevance --config=configs/radp/proved_cifar10.py \\
    --workdir=runs/proved_cifar10 --config.seeds=[0,1,2]

More epochs: --config.base.num_epochs=40. delta 1e-5. What the methods are stands in proved_mnist.

Hardware: one of 2 CPU cores, 12 minutes a seed. Seen at 2 / 8 / 12 (mean of three seeds, last
epoch): RADP .11 / .10 / .14, RADP + DP-SGD .412 / .409 / .406, DP-SGD .419 / .409 / .409,
tempered sigmoid .414 / .412 / .413.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  return common.proved("cifar10")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  yield from common.lines(sweep, common.PROVED)
