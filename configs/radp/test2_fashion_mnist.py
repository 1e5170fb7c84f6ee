"""Test 2 of Kang and Wang 2024 (figures 5 and 6): fashion_mnist, four methods and No_DP,
three epsilons.

  python -m launch.relevance --config=configs/radp/test2_fashion_mnist.py \\
    --workdir=runs/test2_fashion_mnist --config.seeds=[0,1,2]

More epochs: --config.base.num_epochs=40. The paper's numbers, the largest over epochs: at
epsilon 5 (panel c), RADP .858, AdLM .84, DPSGD .823, DPDLIGDO .818. RADP and AdLM are
claimed there and here; DPSGD and DPDLIGDO are proved here (add/remove-one, delta 1e-5).
Data: prepare it first, see `python -m launch.prepare --help`.

Hardware: one of 2 CPU cores, 18 minutes a seed. Seen at epsilon 5 (mean of three seeds, last
epoch): RADP .811, AdLM .327, DPSGD .865, DPDLIGDO .842; losses .492, 2.39, .552, .572.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  return common.test(2, "fashion_mnist")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  yield from common.lines(sweep, common.COMPARED)
