"""RADP with a proof beside DP-SGD on fashion_mnist, all under replace_one, at the paper's
epsilons.

  python -m launch.relevance --config=configs/radp/proved_fashion_mnist.py \\
    --workdir=runs/proved_fashion_mnist --config.num_seeds=3

More epochs: --config.num_epochs=40. delta 1e-5. "RADP, proved" noises each record once
(weighted L1 clip, 4 x 4 pooled), its label by randomised response, and hides the records
behind a shuffler; relevance comes from a tenth of the records. "RADP + DP-SGD" spends
epsilon 0.1 on relevance.

Hardware: one of 2 CPU cores, 13 minutes. Seen at 1.5 / 3 / 5 (one seed, last epoch): RADP
.45 / .48 / .51, RADP + DP-SGD .802 / .805 / .800, DP-SGD .803 / .809 / .812, tempered sigmoid
.808 / .806 / .810.
"""

from configs.radp import common
from dpjax.experiment.relevance_config import RelevanceConfig


def get_config() -> RelevanceConfig:
  return common.on(
    "fashion_mnist", curves=common.PROVED, title="With a proof: fashion_mnist"
  )
