"""Which reading of the paper gives its numbers? Presets P3 to P5 on cifar10, paper mode.

  python -m launch.relevance --config=configs/radp/presets_cifar10.py \\
    --workdir=runs/presets_cifar10 --config.num_seeds=3

At the epsilon whose numbers the text states. P1, Algorithm 3 as printed, leaves nothing to
learn (see presets_mnist); P3 to P5 are the noise that the code of AdLM, its ancestor, really
adds; "P3, fresh" draws it anew in each epoch. 6 epochs in batches of 100: the paper names
neither, the noise of P3 to P5 depends on neither, and it is as many steps as 60 epochs of
the batches that DP-SGD has here.
"""

from configs.radp import common
from dpjax.experiment.relevance_config import RelevanceConfig


def get_config() -> RelevanceConfig:
  curves = {k: v for k, v in common.READINGS.items() if k not in ("P1", "P2")}
  epsilons = [common.LAST["cifar10"]]
  return common.on(
    "cifar10",
    curves=curves,
    epsilons=epsilons,
    batch_size=100,
    num_epochs=6,
    title="Presets: cifar10",
  )
