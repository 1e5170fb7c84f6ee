"""A record that stands in 200 of 600 lines: what an epsilon for a line is worth to it. Ten runs.

  python -m launch.sweep --config=configs/sweeps/text_extraction_copies.py --workdir=runs/copies

As configs/attack/text_extraction.py, with one record in each group: one stands there once, one 16
times, one 200 times. An epsilon holds for one line, so these groups have weaker guarantees.

Hardware: 2 CPU cores beside very much other work; some 20 s of processor time for each training.
Seen: the first 10 lines by perplexity over zlib hold the record of 200 lines in all ten runs
without a defence and at epsilon 8, in none at epsilon 1, which allows it, too. The record of one
line was never read (results/attacks/text_extraction_copies/runs.csv).
"""

from __future__ import annotations

from collections.abc import Iterator

from configs.attack import text_extraction
from dpjax.experiments.config import fields
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.sweeps.sweep import Sweep


def get_config() -> Sweep:
  """One record in 1, 16 and 200 lines each, ten times."""
  base = text_extraction.get_config()
  one_each = {"attack.copies": (0, 1, 16, 200), "attack.records_each": 1}
  return Sweep(base=fields.replace_all(base, one_each), seeds=[*range(10)])


def get_configs(sweep: Sweep) -> Iterator[tuple[str, AttackConfig]]:
  """Without a defence, and with two proved epsilons for a line."""
  private = {"target.privacy": "dp_sgd", "target.privacy.l2_clip_norm": 0.5}
  yield "text extraction, none", sweep.base
  for epsilon in (8.0, 1.0):
    changes = private | {"target.privacy.epsilon": epsilon}
    name = f"text extraction, epsilon {epsilon:g}"
    yield name, fields.replace_all(sweep.base, changes)
