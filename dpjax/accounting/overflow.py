"""The cost in delta of a run that aborts on a batch above its capacity.

A run that aborts with probability at most B, on the data and on their neighbour, is within B
of the analysed one in total variation: (epsilon, d) becomes (epsilon, d + (1 + e^eps) B).
The cost grows with epsilon, hence as delta falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from dpjax import validate
from dpjax.accounting.loss_masses import Profile

# Largest share of delta reserved for Poisson draws above the capacity.
OVERFLOW_SHARE = 0.05
# Ratio of one trial amount to the next, in the search for the reserved part of delta.
LADDER = 1.01


def log_allowed(delta: float, epsilon: float, num_steps: int) -> float:
  """log of the largest per-draw overflow probability b with
  (1 + e^epsilon) * num_steps * b <= OVERFLOW_SHARE * delta.

  >>> round(log_allowed(1e-5, 2.0, 1000))
  -24
  """
  epsilon = epsilon if math.isfinite(epsilon) else 0.0
  share = math.log(OVERFLOW_SHARE) + math.log(delta) - math.log(max(num_steps, 1))
  # log(1 + e^epsilon) without overflow at large epsilon.
  return share - np.logaddexp(0.0, epsilon)


def set_aside(
  epsilon_at: Callable[[float], float],
  *,
  delta: float,
  log_abort_prob: float,
  least: float,
) -> float | None:
  """Returns the least x >= `least` on a fixed ladder with x >= (1 + e^epsilon_at(delta -
  x)) B.

  Guarantee: with such an x, (epsilon_at(delta - x), delta) holds with the aborts accounted for.

  Args:
    epsilon_at: accounted delta -> epsilon of the analysed run, falling in delta.
    delta: delta of the guarantee, in (0, 1).
    log_abort_prob: log B, B a bound on the chance of an abort, > 0.
    least: first rung of the ladder, > 0.

  Returns:
    x, or None where no x < delta is enough. What is needed grows with x, as less is left
    for the noise: from below, no rung that is enough is passed over, so that a smaller
    delta never gets a smaller epsilon.

  >>> set_aside(lambda left: 0.0, delta=1e-5, log_abort_prob=math.log(1e-7), least=2e-7)
  2e-07
  >>> set_aside(lambda left: 9.0, delta=1e-5, log_abort_prob=math.log(1e-7), least=2e-7)
  """
  validate.open_unit(delta=delta)
  validate.positive(least=least)
  rung = 0
  while (aside := least * LADDER**rung) < delta:
    log_cost = log_abort_prob + float(np.logaddexp(0.0, epsilon_at(delta - aside)))
    # The addend forgives rounding of the logarithm on the first rung.
    if log_cost <= math.log(aside) + 1e-12:
      return aside
    # No higher rung can help: epsilon only grows as less delta is left.
    if math.isinf(log_cost):
      return None
    # Lower rungs are below this need already, so no sufficient rung is skipped.
    rung = max(rung + 1, math.floor((log_cost - math.log(least)) / math.log(LADDER)))
  return None


def with_aborts(profile: Profile, *, aside: float, epsilon: float) -> Profile:
  """Returns the privacy profile of a run whose aborts cost `aside` of delta at `epsilon`.

  A run that aborts with probability B adds (1 + e^epsilon) B to delta at every epsilon.

  >>> deltas = with_aborts(lambda epsilons: np.zeros(len(epsilons)), aside=2e-6, epsilon=0.0)
  >>> deltas([0.0])
  array([2.e-06])
  """
  if not aside:
    return profile
  # Where no epsilon is finite, B was chosen as if epsilon were 0; see `log_allowed`.
  abort_prob = aside / (1 + math.exp(min(epsilon, 700.0) if epsilon < math.inf else 0.0))

  def deltas(epsilons: Sequence[float] | np.ndarray) -> np.ndarray:
    powers = np.exp(np.minimum(np.asarray(epsilons, float), 700.0))
    return np.minimum(1.0, profile(epsilons) + abort_prob * (1 + powers))

  return deltas
