"""Ten runs of configs/attack/text_extraction.py: other records, parameters, batches and noise.

  python -m launch.sweep --config=configs/sweeps/text_extraction.py --workdir=runs/text_ten

Hardware: 2 CPU cores beside very much other work; 17 s of processor time for each training.
Seen: results/attacks/text_extraction/attacks.csv has means and standard deviations, runs.csv each
run. Of the eight records that the text holds 16 times 4.9 +- 1.5 are read out without a defence,
7.5 +- .8 with clipping, none in any run at epsilon 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """The attack as published, ten times."""
  from configs.attack import text_extraction

  return Sweep(base=text_extraction.get_config(), seeds=[*range(10)])


def get_configs(sweep: Sweep) -> Iterator[tuple[str, AttackConfig]]:
  """Without a defence, with clipping alone, and with a proved epsilon."""
  from configs.attack import text_extraction

  yield from text_extraction.get_configs(sweep.base)
