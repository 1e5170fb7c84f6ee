"""RADP with a proof beside DP-SGD on cifar10, all under replace_one, at the paper's
epsilons.

  python -m launch.relevance --config=configs/radp/proved_cifar10.py \\
    --workdir=runs/proved_cifar10 --config.num_seeds=3

More epochs: --config.num_epochs=40. delta 1e-5. "RADP, proved" noises each record once
(weighted L1 clip, 4 x 4 pooled), its label by randomised response, and hides the records
behind a shuffler; relevance comes from a tenth of the records. "RADP + DP-SGD" spends
epsilon 0.1 on relevance.

Hardware: one of 2 CPU cores, 16 minutes. Seen at 2 / 8 / 12 (one seed, last epoch): RADP .12 /
.10 / .12, RADP + DP-SGD .403 / .395 / .388, DP-SGD .410 / .407 / .405, tempered sigmoid .409 /
.404 / .409.
"""

from configs.radp import common
from dpjax.experiment.relevance_config import RelevanceConfig


def get_config() -> RelevanceConfig:
  return common.on("cifar10", curves=common.PROVED, title="With a proof: cifar10")
