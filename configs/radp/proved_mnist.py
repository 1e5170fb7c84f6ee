"""RADP with a proof beside DP-SGD on mnist, all under replace_one, at the paper's epsilons.

  python -m launch.relevance --config=configs/radp/proved_mnist.py \\
    --workdir=runs/proved_mnist --config.num_seeds=3

More epochs: --config.num_epochs=40. delta 1e-5. "RADP, proved" noises each record once
(weighted L1 clip, 4 x 4 pooled), its label by randomised response, and hides the records
behind a shuffler; relevance comes from a tenth of the records. "RADP + DP-SGD" spends
epsilon 0.1 on relevance.

Hardware: one of 2 CPU cores, 11 minutes. Seen at 0.5 / 1.5 / 2 (one seed, last epoch): RADP
.54 / .70 / .69, RADP + DP-SGD .747 / .944 / .947 (at 0.5 with --config.private.epsilon_b=0.02:
.822), DP-SGD .851 / .940 / .952, tempered sigmoid .848 / .943 / .952.
"""

from configs.radp import common
from dpjax.experiment.relevance_config import RelevanceConfig


def get_config() -> RelevanceConfig:
  return common.on("mnist", curves=common.PROVED, title="With a proof: mnist")
