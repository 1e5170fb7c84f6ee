"""An event that samplers state and accounting reads: one pass of random allocation."""

from __future__ import annotations

import dataclasses

import dp_accounting as dpa


@dataclasses.dataclass(frozen=True)
class RandomAllocationDpEvent(dpa.DpEvent):
  """Event of one pass of `num_steps` Gaussian sums, where a record is in one of them.

  Which one is drawn uniformly and independently of the other records, and kept secret.
  Fewer steps of a pass cost no more than all. The next pass draws anew.
  """

  num_steps: int
  noise_multiplier: float
