"""InfoRMIA: the relative attack, with information in place of a count (Tao and Shokri 2025).

`rmia` counts the records that x beats, so records that beat equally many others are tied. InfoRMIA
takes the mean margin of x over all other records, in nats, and needs no gamma.
"""

from __future__ import annotations

import numpy as np

from dpjax.attacks.membership import Evidence, compared_records, relative_confidence
from dpjax.types import HostArray


def informia(
  evidence: Evidence,
  *,
  population: HostArray | None = None,
  temperature: float = 2.0,
  offline: bool = False,
  offline_a: float = 0.3,
) -> np.ndarray:
  """Returns the mean over other records z of log[(p(x) / P(x)) / (p(z) / P(z))]: [n], in nats.

  p and P are those of `relative_confidence`. Source: arXiv 2510.05582; the paper's average is taken
  here over the records other than x.

  Args:
    population: bool [n], which records serve as z; None: all. A record is never compared to itself.
    temperature: temperature of the confidences; above 1 for models that are sure of most records.
    offline, offline_a: as in `relative_confidence`.

  Raises UserError as `rmia` does.

  >>> held = np.array([[True, False, True], [False, True, False]])
  >>> informia(Evidence([4.0, 0.0, -4.0], np.zeros((2, 3)), held)).round(2)
  array([ 1.28,  0.43, -1.72])
  """
  compared = compared_records(population, evidence.target.size)
  ratio = relative_confidence(
    evidence, temperature=temperature, offline=offline, offline_a=offline_a
  )
  # The average leaves out x. The term of x is 0, so only the number of terms changes.
  others = np.maximum(compared.sum() - compared, 1)
  return (compared.sum() * ratio - ratio[compared].sum()) / others
