"""Which reading of the paper gives its numbers? Presets P3 to P5 on cifar10, paper mode.

  python -m launch.relevance --config=configs/radp/presets_cifar10.py \\
    --workdir=runs/presets_cifar10 --config.num_seeds=3

At the epsilon whose numbers the text states. P1, Algorithm 3 as printed, leaves nothing to
learn (see presets_mnist); P3 to P5 are the noise that the code of AdLM, its ancestor, really
adds; "P3, fresh" draws it anew in each epoch. 6 epochs in batches of 100: the paper names
neither, the noise of P3 to P5 depends on neither, and it is as many steps as 60 epochs of
the batches that DP-SGD has here.

Hardware: 2 CPU cores with two other runs, 12 minutes. Seen (one seed, last epoch; losses, the
paper's least over epochs 1.124): P3 1.31, P4 1.32, P3 fresh 1.35, P5 1.85, P3 low floor 1.94;
accuracies .534, .534, .523, .382, .346.
"""

from configs.radp import common
from dpjax.runs.relevance.config import RelevanceConfig


def get_config() -> RelevanceConfig:
  curves = {k: v for k, v in common.READINGS.items() if k not in ("P1", "P2")}
  epsilons = [common.LAST["cifar10"]]
  return common.on(
    "cifar10",
    **common.paper("cifar10"),
    curves=curves,
    epsilons=epsilons,
    batch_size=100,
    num_epochs=6,
    title="Presets: cifar10",
  )
