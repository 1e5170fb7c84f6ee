"""A sum with masks that cancel, for tests of the join alone; no cryptography."""

from typing import NamedTuple

import numpy as np

from dpjax.secure.aggregation import check_survivors, uploading
from dpjax.secure.sums.interface import NO_DROPS, Cost, Summed


class Masked(NamedTuple):
  min_survivors: int = 2
  name: str = "masked"
  bits: int = 32

  def sum(self, vectors, drops=NO_DROPS):
    kept = uploading(vectors, drops)
    check_survivors(self, kept, drops)
    kind = np.uint32 if self.bits == 32 else np.uint64
    rng, total, held = np.random.default_rng(len(kept)), None, None
    for client in kept:
      vector = vectors[client]
      assert vector.dtype == kind and vector.ndim == 1
      mask = rng.integers(0, 2**32, vector.size).astype(kind)
      held = mask if held is None else held + mask
      total = vector + mask if total is None else total + vector + mask
    return Summed(total - held, tuple(kept), Cost(8 * total.size, 0, 0, 0, 0.0))
