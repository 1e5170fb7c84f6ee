"""Bounds for a replaced record, from proofs for removing one and adding one.

Let P be the run with a record, R the run with another in its place, and Q the run with neither;
all else, and its randomness, is the same. For every set E of outputs

  P(E) <= e^e1 Q(E) + d(e1)  and  Q(E) <= e^e2 R(E) + d(e2), so
  P(E) <= e^(e1 + e2) R(E) + d(e1) + e^e1 d(e2),

where d(e) is the delta at e of removing or adding a record, for the whole run. Any e1 + e2 =
epsilon is sound; the best of a few is taken. Q need not be a run that anybody could have: two
Gaussian sums that are two clip norms apart have a midpoint within one clip norm of each.

A direct pair for random allocation would be tighter, by a factor of up to sqrt(2) if privacy losses
are small. Its likelihood ratio is (X_1 + .. + X_T) / (Y_1 + .. + Y_T), with X_t of one record as in
`random_allocation`, and Y_t of the other. That such a pair dominates is not proved here: the convex
order of `random_allocation` is about one sum, and two sums of the same normals are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

# Shares of delta tried for the first of the two bounds, and number of splits of epsilon tried.
# Every split gives a valid bound, and more splits save little.
_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
_SPLITS = 33


def epsilon_of_both(
  epsilon_of: Callable[[float], float], delta: float, *, least: float
) -> float:
  """Returns epsilon of replacing a record, or inf if no split of delta gives a bound.

  Args:
    epsilon_of: delta -> epsilon of removing or adding a record.
    delta: delta of replacing a record.
    least: smallest delta for which `epsilon_of` is defined.

  >>> epsilon_of_both(lambda delta: 0.5, 1e-5, least=1e-12)
  1.0
  """
  best = math.inf
  for share in _SHARES:
    if share * delta < least:
      continue
    first = epsilon_of(share * delta)
    # The bound multiplies the second delta by e^first, so what remains of delta is divided by
    # e^first.
    remaining = (1 - share) * delta * math.exp(-first)
    if remaining >= least and first < best:
      best = min(best, first + epsilon_of(remaining))
  return best


def delta_of_both(
  deltas_of: Callable[[list[float]], Sequence[float] | np.ndarray], epsilon: float
) -> float:
  """Returns delta of replacing a record at one epsilon, at most 1.

  Args:
    deltas_of: epsilons -> deltas of removing or adding a record.
    epsilon: epsilon of replacing a record, at least 0.

  >>> delta_of_both(lambda epsilons: [0.0 if e >= 1 else 1.0 for e in epsilons], 2.0)
  0.0
  """
  first = np.linspace(0, epsilon, _SPLITS if epsilon else 1)
  deltas = np.asarray(deltas_of(first.tolist()), float)
  with np.errstate(over="ignore", invalid="ignore"):
    # e^first may overflow where the other delta is 0. There the product is 0, not NaN.
    both = deltas + np.where(deltas[::-1] > 0, np.exp(first) * deltas[::-1], 0.0)
  return float(min(1.0, both.min()))
