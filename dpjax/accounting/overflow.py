"""The cost in delta of a run that aborts on a batch above its capacity.

The accountant analyses a run that never aborts. The same run with aborts, of probability at most B
on the data and on their neighbour, is within B of that run in total variation. So (epsilon, d)
becomes (epsilon, d + (1 + e^epsilon) B). The cost grows with epsilon, hence as delta falls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from dpjax import validate
from dpjax.accounting.loss_masses import Profile

# Share of a plan's delta that is reserved for draws above the capacity. At a delta below that of
# the plan, `set_aside` may reserve a larger share.
OVERFLOW_SHARE = 0.05
# Factor between neighbouring amounts of delta on the grid of `set_aside`.
LADDER = 1.01


def log_allowed(delta: float, epsilon: float, num_steps: int) -> float:
  """Returns log of the largest per-draw overflow probability b with
  (1 + e^epsilon) * num_steps * b <= OVERFLOW_SHARE * delta; an infinite epsilon counts as 0.

  >>> round(log_allowed(1e-5, 2.0, 1000))
  -24
  """
  epsilon = epsilon if math.isfinite(epsilon) else 0.0
  share = math.log(OVERFLOW_SHARE) + math.log(delta) - math.log(max(num_steps, 1))
  # logaddexp gives log(1 + e^epsilon) without overflow at a large epsilon.
  return share - np.logaddexp(0.0, epsilon)


def set_aside(
  epsilon_at: Callable[[float], float],
  *,
  delta: float,
  log_abort_prob: float,
  least: float,
) -> float | None:
  """Returns the amount x of delta to reserve for aborts: the smallest sufficient one on a grid.

  The grid is least, 1.01 least, 1.01^2 least, .. An amount x covers aborts of a probability up to B
  if x >= (1 + e^epsilon_at(delta - x)) B.

  Guarantee: with the returned x, (epsilon_at(delta - x), delta) holds for the run with its aborts.

  Args:
    epsilon_at: delta -> epsilon of the run without aborts, falling in delta.
    delta: delta of the guarantee, in (0, 1).
    log_abort_prob: log B, where B > 0 is a bound on the chance of an abort.
    least: smallest amount to reserve, > 0.

  Returns:
    The amount x, or None if no x < delta is enough. No sufficient amount is skipped, so that a
    smaller delta never gets a smaller epsilon.

  >>> set_aside(lambda left: 0.0, delta=1e-5, log_abort_prob=math.log(1e-7), least=2e-7)
  2e-07
  >>> set_aside(lambda left: 9.0, delta=1e-5, log_abort_prob=math.log(1e-7), least=2e-7)
  """
  validate.open_unit(delta=delta)
  validate.positive(least=least)
  rung = 0
  while (aside := least * LADDER**rung) < delta:
    log_cost = log_abort_prob + float(np.logaddexp(0.0, epsilon_at(delta - aside)))
    # The addend covers the rounding of the logarithms where the first amount is exactly enough.
    if log_cost <= math.log(aside) + 1e-12:
      return aside
    # If the cost is infinite, no larger amount can help: epsilon only grows as less delta is left.
    if math.isinf(log_cost):
      return None
    # Amounts below this cost cannot be enough, so no sufficient amount is skipped.
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
  # For an infinite epsilon, B was chosen as if epsilon were 0; see `log_allowed`.
  abort_prob = aside / (1 + math.exp(min(epsilon, 700.0) if epsilon < math.inf else 0.0))

  def deltas(epsilons: Sequence[float] | np.ndarray) -> np.ndarray:
    powers = np.exp(np.minimum(np.asarray(epsilons, float), 700.0))
    return np.minimum(1.0, profile(epsilons) + abort_prob * (1 + powers))

  return deltas
