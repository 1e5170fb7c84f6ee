"""Rows that a step computes, and the noise that it needs, for batches of few rows.

    python -m benchmarks.padding > results/accounting/padding.csv

Poisson batches are padded to the smallest capacity that `Plan.for_data` may choose. Batches of a
fixed size are not padded, and cost more epsilon under add-or-remove-one.
"""

from __future__ import annotations

import csv
import sys
from typing import Any

import numpy as np

import dpjax
from dpjax.plan import Plan
from dpjax.sampling import FixedSizeSampler

NUM_EXAMPLES = 60_000
EPOCHS = 10
BATCHES = (64, 256, 1024)
COLUMNS = ("batch size", "sampler", "relation", "padded to", "of the batch", "noise")
_GUARANTEE: dict[str, Any] = {"epsilon": 3.0, "delta": 1e-6, "l2_clip_norm": 1.0}


def plans(batch_size: int) -> list[tuple[str, Plan]]:
  """Returns (name of the sampler, plan) of each way to draw batches of this size."""
  zeros = np.zeros((NUM_EXAMPLES, 1), np.float32)
  data = dpjax.data.from_arrays(zeros, np.zeros(NUM_EXAMPLES, int), num_classes=2)
  data = data.declared(NUM_EXAMPLES)
  poisson = Plan.for_data(data, batch_size=batch_size, epochs=EPOCHS, **_GUARANTEE)
  made = [("Poisson", poisson)]
  for relation in ("add_or_remove_one", "replace_one"):
    # Under add-or-remove-one the number is a bound, and one of two neighbours lacks a record.
    sampler = FixedSizeSampler(batch_size, NUM_EXAMPLES, relation == "replace_one")
    fixed = Plan.calibrated(
      sampler=sampler,
      normalize_by=batch_size,
      num_steps=poisson.num_steps,
      neighboring_relation=relation,
      **_GUARANTEE,
    )
    made.append(("fixed size", fixed))
  return made


def row(batch_size: int, name: str, plan: Plan) -> list[Any]:
  """Returns a row of the table, whose noise is the multiplier for epsilon 3 and delta 1e-6."""
  padded = plan.sampler.padded_batch_size
  relation = plan.neighboring_relation.replace("_", "-")
  shares = f"{padded / batch_size:.2f}", f"{plan.noise_multiplier:.4f}"
  return [batch_size, name, relation, padded, *shares]


def main() -> None:
  """Prints the table."""
  rows = csv.writer(sys.stdout, lineterminator="\n")
  rows.writerow(COLUMNS)
  for batch_size in BATCHES:
    for name, plan in plans(batch_size):
      rows.writerow(row(batch_size, name, plan))
      sys.stdout.flush()


if __name__ == "__main__":
  main()
