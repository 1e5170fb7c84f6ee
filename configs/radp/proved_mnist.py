"""RADP with a proof beside DP-SGD on mnist, all under replace_one, at the paper's epsilons.

  python -m launch.relevance --config=configs/radp/proved_mnist.py \\
    --workdir=runs/proved_mnist --config.seeds=[0,1,2]

More epochs: --config.base.num_epochs=40. delta 1e-5. "RADP, proved" noises each record once
(weighted L1 clip, 4 x 4 pooled), its label by randomised response, and hides the records
behind a shuffler; relevance comes from a tenth of the records. "RADP + DP-SGD" spends
epsilon 0.01 on the relevance of 4 x 4 blocks, which weights the inputs.

Hardware: one of 2 CPU cores, 11 minutes a seed. Seen at 0.5 / 1.5 / 2 (mean of three seeds,
last epoch): RADP .55 / .67 / .67, RADP + DP-SGD .832 / .940 / .946, DP-SGD .826 / .935 / .945,
tempered sigmoid .840 / .940 / .943; seeds differ by .01 to .04.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  return common.proved("mnist")


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  yield from common.lines(sweep, common.PROVED)
