"""What do the repairs of RADP's paper mode decide? Preset P3 on mnist, one change at a time.

  python -m launch.relevance --config=configs/radp/departures_mnist.py \\
    --workdir=runs/departures_mnist --config.seeds=[0,1,2]

The published numbers of RADP rest on two floors that the paper does not have, on absolute
relevance where it has R / sum R, and on the relevance of 10,000 records where it takes all.
Each line undoes one of them; "1/d" and ".1/d" are floors of the noisy relevance. R / sum R
itself is not run: shares are negative there, and the noise has no scale.

Hardware: one of 2 busy CPU cores, 25 minutes a seed. Seen (one seed, last epoch): P3 .906, no
entropy floor .078, relevance floor .1/d .799, positive relevance .905, all records .954.
"""

from collections.abc import Iterator

from configs.radp import common
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.sweeps.sweep import Sweep

_CHANGES = {
  "P3": {},
  "no entropy floor": {"method.entropy_floor": 0.0},
  "relevance floor .1/d": {"method.floor": None},
  "positive relevance": {"method.rel_norm": "relu"},
  "all records": {"method.relevance_records": None},
}


def get_config() -> Sweep:
  base = common.on(
    "mnist", **common.paper("mnist"), batch_size=100, num_epochs=4, audit=None
  )
  title = "Repairs of the paper mode: mnist"
  return Sweep(base=base, epsilons=[common.LAST["mnist"]], title=title)


def get_configs(sweep: Sweep) -> Iterator[tuple[str, RelevanceConfig]]:
  yield from common.lines(sweep, _CHANGES)
