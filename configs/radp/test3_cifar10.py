"""Test 3 of Kang and Wang 2024 (figures 7 and 8): cifar10, four methods and No_DP, three
epsilons.

  python -m launch.relevance --config=configs/radp/test3_cifar10.py \\
    --workdir=runs/test3_cifar10 --config.seeds=[0,1,2]

More epochs: --config.base.num_epochs=40. The paper's numbers, the largest over epochs: at
epsilon 12 (panel c), losses RADP 1.124, DPSGD 1.875, DPDLIGDO 2.01, AdLM about 120 (another
loss); no accuracy is stated. RADP and AdLM are claimed there and here; DPSGD and DPDLIGDO
are proved here (add/remove-one, delta 1e-5). Data: prepare it first, see `python -m
launch.prepare --help`.

Hardware: 2 CPU cores, 14 to 21 minutes a seed. Seen at epsilon 12 (mean of three seeds, last
epoch): losses RADP 1.49 (1.35 to 1.58), DPSGD 1.58, DPDLIGDO 1.67, AdLM 2.5: on average in
the paper's order; accuracies .476, .528, .470, .100.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  return common.test(3, "cifar10")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  yield from common.lines(sweep, common.COMPARED)
