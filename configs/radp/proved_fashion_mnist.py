"""RADP with a proof beside DP-SGD on fashion_mnist, all under replace_one, at the paper's
epsilons.

  python -m launch.relevance --config=configs/radp/proved_fashion_mnist.py \\
    --workdir=runs/proved_fashion_mnist --config.seeds=[0,1,2]

More epochs: --config.base.num_epochs=40. delta 1e-5. What the methods are stands in proved_mnist.

Hardware: one of 2 CPU cores, 12 minutes a seed. Seen at 1.5 / 3 / 5 (mean of three seeds,
last epoch): RADP .45 / .51 / .50, RADP + DP-SGD .809 / .814 / .813, DP-SGD .808 / .815 / .816,
tempered sigmoid .812 / .815 / .813.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  return common.proved("fashion_mnist")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  yield from common.lines(sweep, common.PROVED)
