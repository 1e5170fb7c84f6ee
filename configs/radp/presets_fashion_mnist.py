"""Which reading of the paper gives its numbers? Presets P3 to P5 on fashion_mnist, paper
mode.

  python -m launch.relevance --config=configs/radp/presets_fashion_mnist.py \\
    --workdir=runs/presets_fashion_mnist

As presets_mnist, without P1 and P2, which leave nothing to learn. 6 epochs in batches of 100,
which is as many steps as 36 epochs of the batches that DP-SGD has here.

Hardware: one of 2 CPU cores, 9 minutes a seed. Seen (one seed, last epoch, the paper has .858
for RADP): P3 .838, fresh .833, P4 .823, P5 .742, low floor .711.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  return common.presets("fashion_mnist", num_epochs=6)


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  without = ("P1", "P2")
  readings = {name: it for name, it in common.READINGS.items() if name not in without}
  yield from common.lines(sweep, readings)
