"""Test 1 of Kang and Wang 2024 (figures 3 and 4): mnist, four methods and No_DP, three
epsilons.

  python -m launch.relevance --config=configs/radp/test1_mnist.py \\
    --workdir=runs/test1_mnist --config.seeds=[0,1,2]

More epochs: --config.base.num_epochs=40. The paper's numbers, the largest over epochs: at
epsilon 2 (panel c), RADP .949, DPDLIGDO .921, AdLM .914, DPSGD .903; losses .367, .392,
about 50 (another loss), .736. RADP and AdLM are claimed there and here; DPSGD and DPDLIGDO
are proved here (add/remove-one, delta 1e-5). Data: prepare it first, see `python -m
launch.prepare --help`.

Hardware: one of 2 CPU cores, 16 minutes a seed. Seen at epsilon 2 (mean of three seeds, last
epoch): RADP .932, DPDLIGDO .956, AdLM .166, DPSGD .964; losses .218, .154, 4.5, .141.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  return common.test(1, "mnist")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  yield from common.lines(sweep, common.COMPARED)
