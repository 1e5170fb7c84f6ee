"""Which reading of the paper gives its numbers? Presets P1 to P5 on mnist, paper mode.

  python -m launch.relevance --config=configs/radp/presets_mnist.py \\
    --workdir=runs/presets_mnist --config.seeds=[0,1,2]

At the epsilon whose numbers the text states. P1 is Algorithm 3 as printed; P3 to P5 are the
noise that the code of AdLM, its ancestor, really adds; "P3, fresh" draws it anew in each
epoch. 10 epochs in batches of 100: the paper names neither, the noise of P3 to P5 depends on
neither, and it is as many steps as 60 epochs of the batches that DP-SGD has here.

Hardware: one of 2 CPU cores, 9 minutes a seed. Seen (three seeds, last epoch, the paper has
.949 for RADP): P3 .931, fresh .938, P4 .924, low floor .902, P5 .26 to .63, P1 and P2 chance.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  return common.presets("mnist", num_epochs=10)


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  yield from common.lines(sweep, common.READINGS)
