"""Data-dependent Renyi divergences of noisy votes, and the smooth sensitivity of these divergences.

Teachers that agree are likely to agree on a neighbouring data set, too. Then an answer costs
less than its data-independent bound. How much less depends on the votes, so this cost is itself
private, and `epsilon` of a run never uses it. The holder of the data may see it. To publish it,
add the noise of `SmoothSensitivity`, which has a privacy cost of its own.

A neighbour is a data set in which ONE teacher votes differently: one count is lower by one and
another higher by one. `orders` are Renyi orders above 1, and `std` is the standard deviation of the
noise on each count.

Source: Papernot, Song, Mironov, Raghunathan, Talwar and Erlingsson 2018, arXiv:1802.08908.
Theorems and algorithms below have the numbers of this paper. Bounds on one answer agree with the
authors' code (tensorflow/privacy, research/pate_2018) to 1e-9. The cost of a release does not: see
`SmoothSensitivity`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special, stats

from dpjax import validate
from dpjax.validate import UserError

# Number of points at which the conditions of algorithm 3 are checked, on each side of its q1.
_CHECKED = 2_000
# Largest number whose exponential is used, below that of the largest float64, 709.
_LARGEST_LOG = 700.0


def log_prob_of_others(counts: Sequence[float] | np.ndarray, std: float) -> float:
  """Returns a bound on the log probability that noisy and exact votes elect different classes.

  It is a union bound over the other classes (proposition 7).

  Args:
    counts: votes for each class, [K].
    std: standard deviation of the Gaussian noise on each count.

  >>> round(log_prob_of_others([40, 10, 0], std=10.0), 3)
  -3.948
  """
  counts = _counts(counts)
  validate.positive(std=std)
  winner = int(np.argmax(counts))
  gaps = counts[winner] - np.delete(counts, winner)
  pairs = stats.norm.logsf(gaps, scale=math.sqrt(2) * std)
  # The class with most votes wins at least as often as any other class, so with a chance of at
  # least 1 / K.
  union: Any = special.logsumexp(pairs)
  return min(float(union), math.log1p(-1 / len(counts)))


def gaussian_votes_rdp(
  log_q: float, std: float, orders: Sequence[float] | np.ndarray
) -> np.ndarray:
  """Bounds the Renyi divergence of a noisy plurality vote that has a likely answer.

  The bound is theorem 6 with the orders of proposition 10, or the data-independent order / std^2
  where theorem 6 does not apply or is worse. It holds for D(M(votes) || M(neighbour)), for these
  votes and any neighbour.

  Args:
    log_q: upper bound on the log probability that the answer is not the likely one.
    std: standard deviation of the noise on each of two counts that a neighbour changes by one. For
      a single number that changes by one, pass sqrt(2) times the standard deviation of its noise.

  Returns:
    Divergences [len(orders)].

  >>> orders = np.array([4.0, 20.0])
  >>> gaussian_votes_rdp(-30.0, 10.0, orders).round(6), orders / 10.0**2
  (array([0.e+00, 7.e-06]), array([0.04, 0.2 ]))
  """
  orders = _orders(orders)
  validate.positive(std=std)
  if not log_q <= 0:
    raise UserError("must be a log probability, <= 0", field="log_q", value=log_q)
  independent = orders / std**2
  if log_q == -math.inf:
    # An answer that is certain reveals nothing.
    return np.zeros(len(orders))
  applies = _applies(log_q, std, orders)
  if not applies.any():
    return independent
  rdp = independent.copy()
  rdp[applies] = np.minimum(independent, _theorem_6(log_q, std, orders))[applies]
  return np.maximum(rdp, 0.0)


def threshold_rdp(
  count: float, threshold: float, std: float, orders: Sequence[float] | np.ndarray
) -> np.ndarray:
  """Bounds the Renyi divergence of the answer whether count + noise reaches a threshold.

  Returns the bounds at `orders`, [len(orders)].

  Args:
    count: largest number of votes for one class; a neighbour's count differs by at most one.
    threshold: public number of votes.
    std: standard deviation of the noise on `count`.

  >>> threshold_rdp(250, 200, 10.0, [8.0]).round(6) <= 8.0 / (2 * 10.0**2)
  array([ True])
  """
  log_above = float(stats.norm.logsf(threshold - count, scale=std))
  log_below = float(stats.norm.logcdf(threshold - count, scale=std))
  # A single number that changes by one has sensitivity 1, but the two counts of the bound have
  # sqrt(2). So the noise is scaled by sqrt(2).
  return gaussian_votes_rdp(min(log_above, log_below, 0.0), math.sqrt(2) * std, orders)


def _counts(counts: Sequence[float] | np.ndarray) -> np.ndarray:
  histogram = np.asarray(counts, np.float64)
  if (
    histogram.ndim != 1
    or len(histogram) < 2
    or not np.isfinite(histogram).all()
    or histogram.min() < 0
  ):
    raise UserError("must be finite votes >= 0 for two classes or more", field="counts")
  return histogram


def _orders(orders: Sequence[float] | np.ndarray) -> np.ndarray:
  alphas = np.asarray(orders, np.float64).reshape(-1)
  if not len(alphas) or not (alphas > 1).all():
    raise UserError("must be numbers above 1", field="orders")
  return alphas


def _applies(log_q: float, std: float, orders: np.ndarray) -> np.ndarray:
  """Returns whether theorem 6 holds at each order, [len(orders)]."""
  high_2 = std * math.sqrt(-log_q)
  high_1 = high_2 + 1
  if high_2 <= 1:
    return np.zeros(len(orders), bool)
  at_2 = high_2 / std**2
  # By lemma 9 the bound rises with log q up to `limit`. A larger q would need another proof.
  limit = (high_2 - 1) * at_2 - high_2 * (
    math.log1p(1 / (high_1 - 1)) + math.log1p(1 / (high_2 - 1))
  )
  if log_q > limit or -log_q <= at_2:
    return np.zeros(len(orders), bool)
  return orders < high_1


def _theorem_6(log_q: float, std: float, orders: np.ndarray) -> np.ndarray:
  """Returns the bound of theorem 6, [len(orders)], which is valid at the orders of `_applies`."""
  high_2 = std * math.sqrt(-log_q)
  high_1 = high_2 + 1
  at_1 = high_1 / std**2
  at_2 = high_2 / std**2
  log_1q = _log_1m_exp(log_q)
  log_a = (orders - 1) * (log_1q - _log_1m_exp((log_q + at_2) * (1 - 1 / high_2)))
  log_b = (orders - 1) * (at_1 - log_q / (high_1 - 1))
  # Logarithms are added, since the powers overflow at the orders that matter.
  return np.logaddexp(log_1q + log_a, log_q + log_b) / (orders - 1)


def _log_1m_exp(x: float) -> float:
  """Returns log(1 - e^x) for x <= 0 with all its digits."""
  if x >= 0:
    return -math.inf
  return math.log1p(-math.exp(x)) if x < -1 else math.log(-math.expm1(x))


# --- smooth sensitivity


def _cost(log_q: float, std: float, order: float) -> float:
  """Returns the cost of one answer: the number that a run publishes, and nothing else."""
  return float(gaussian_votes_rdp(log_q, std, [order])[0])


@functools.lru_cache(maxsize=4096)
def _log_q0(std: float, order: float) -> float:
  """Returns the least log probability q from which on the cost is the data-independent bound.

  Here q is the chance of another answer than the likely one. Raises UserError if none is found."""
  independent = order / std**2
  low = -1e-3
  high = 0.0
  while _cost(low, std, order) >= independent:
    high = low
    low *= 1.5
    if low < -10_000:
      raise UserError(
        f"no votes are so clear that their bound is better at std={std:g}",
        field="order",
        value=order,
      )
  # Theorem 6 may still be better where its range ends. So this is a bisection for the place at
  # which the cost stops to depend on q, not for a root.
  while low < (middle := (low + high) / 2) < high:
    if _cost(middle, std, order) < independent:
      low = middle
    else:
      high = middle
  return high


def _neighbor_bound(log_q: float, std: float, num_classes: int, by: int) -> float:
  """Returns the bound on log q, the log chance of another answer, after one teacher's vote changed.

  With `by` 1 the likely answer becomes less likely, with `by` -1 more likely."""
  shift = math.log(num_classes - 1)
  # This is proposition 7 for gaps that are two votes wider or narrower, in all pairs at once.
  height = special.ndtri_exp(log_q - shift) + by * math.sqrt(2) / std
  return min(0.0, float(special.log_ndtr(height)) + shift)


def _steepest(std: float, num_classes: int, order: float) -> tuple[float, float]:
  """Returns (log q1, log q0), a range of q from which one teacher can raise the cost to its top."""
  log_q0 = _log_q0(std, order)
  # The cost may jump at q0. So q1 is lowered by more than the rounding of the way there and back.
  return _neighbor_bound(log_q0, std, num_classes, -1) * (1 + 1e-12), log_q0


def _local(log_q: float, std: float, num_classes: int, order: float) -> float:
  """Returns a bound on the local sensitivity of one answer's cost (algorithm 3, proposition 13)."""
  log_q1, log_q0 = _steepest(std, num_classes, order)
  in_range = log_q1 <= log_q <= log_q0
  log_q = log_q1 if in_range else log_q
  here = _cost(log_q, std, order)
  moved = 0.0 if in_range else _neighbor_bound(log_q, std, num_classes, 1)
  worse = _cost(moved, std, order)
  better = _cost(_neighbor_bound(log_q, std, num_classes, -1), std, order)
  return max(worse - here, here - better)


def votes_sensitivity(
  counts: Sequence[float] | np.ndarray, *, num_teachers: int, std: float, order: float
) -> np.ndarray:
  """Bounds the local sensitivity of one answer's cost at every distance (algorithms 4 and 5).

  Args:
    counts: integer votes, [K], whose sum is `num_teachers`.
    num_teachers: number of teachers, who have one vote each.
    std: standard deviation of the noise on each count.
    order: Renyi order of the cost.

  Returns:
    Bounds, [num_teachers + 1]. Entry d holds for all votes that a change by d teachers can give. It
    bounds the difference between the cost of these votes and the cost of a neighbour.

  Raises:
    UserError: votes that are no integers, or whose sum is not `num_teachers`.

  >>> votes_sensitivity([30, 0, 0], num_teachers=30, std=4.0, order=6.0).round(4)[:3]
  array([0.0017, 0.0042, 0.01  ])
  """
  votes = sorted(_counts(counts), reverse=True)
  validate.integer_at_least(1, num_teachers=num_teachers)
  if any(vote != round(vote) for vote in votes) or sum(votes) != num_teachers:
    raise UserError(f"must be integers of sum {num_teachers}", field="counts")
  order = float(_orders([order])[0])
  num_classes = len(votes)
  log_q1, log_q0 = _steepest(std, num_classes, order)
  log_q = log_prob_of_others(votes, std)
  plateau = _local(log_q1, std, num_classes, order)
  sensitivities = np.full(num_teachers + 1, plateau)
  if log_q1 <= log_q <= log_q0:
    return sensitivities
  sensitivities[0] = _local(log_q, std, num_classes, order)
  clearer = log_q > log_q0
  # The largest sensitivity lies between q1 and q0. So the votes move towards this range, one
  # teacher at a time, by the moves that come nearest to the range.
  for distance in range(1, num_teachers):
    if clearer and (log_q <= log_q0 or votes[1] <= 0):
      break
    if not clearer and log_q >= log_q1:
      break
    votes[0] += 1 if clearer else -1
    votes[1] += -1 if clearer else 1
    votes.sort(reverse=True)
    log_q = log_prob_of_others(votes, std)
    sensitivities[distance] = _local(log_q, std, num_classes, order)
  return sensitivities


@functools.lru_cache(maxsize=64)
def conditions_hold(*, std: float, num_classes: int, order: float) -> bool:
  """Returns whether conditions C5 and C6 of algorithm 3 hold at 4,000 probabilities q.

  The cost must not fall as q rises. The change of the cost by one teacher must not fall as q
  rises to q1. The paper, too, checks both conditions numerically: neither is proved for all
  settings.

  >>> conditions_hold(std=40.0, num_classes=10, order=14.0)
  True
  """
  log_q1, _ = _steepest(std, num_classes, order)

  def rises(values: list[float]) -> bool:
    steps = np.diff(values)
    return bool((steps >= -1e-12 * np.abs(values[:-1])).all())

  low = np.linspace(4 * log_q1, log_q1, _CHECKED)
  costs = [_cost(q, std, order) for q in (*low, *np.linspace(log_q1, 0.0, _CHECKED))]
  changes = [
    _cost(_neighbor_bound(q, std, num_classes, 1), std, order) - _cost(q, std, order)
    for q in low
  ]
  return rises(costs) and rises(changes)


@dataclasses.dataclass(frozen=True)
class SmoothSensitivity:
  """Gaussian noise for publishing a number about votes, relative to its smooth sensitivity.

  Guarantee: Renyi DP of every order in (1, 1 / (1 - e^(-2 beta))), under a relation by which one
  record changes one teacher. It is exact: no smaller divergence holds for every number with such
  noise.

  Proof. The smooth sensitivities of two neighbours differ by a factor t of at most e^beta, and
  their numbers by at most the smaller of the two (Nissim, Raskhodnikova and Smith 2007). In units
  of the smaller one times z, the noise multiplier, the outputs are N(0, s^2) and N(d, r^2) with
  d <= 1 / z. Let a be the order and v = (1 - a) s^2 + a r^2. The divergence of two Gaussians is

    a d^2 / (2 v) + log(r / s) + log(r^2 / v) / (2 (a - 1)),   infinite where v <= 0,

  so the largest shift d is the worst. Let u = t^2 - 1 >= 0. The first output is the wider one
  (s = t, r = 1, v = 1 - (a - 1) u), or the narrower one (s = 1, r = t, v = 1 + a u). The shift's
  term is larger for the wider one, and rises with u. The terms of the widths, times 2 (a - 1), are
  0 at u = 0. Their derivatives in u are

    a (a - 1) u / ((1 + u) (1 - (a - 1) u))   and   a (a - 1) u / ((1 + u) (1 + a u)).

  Both are >= 0, and the first is the larger. So the worst pair of every order has the wider output
  first and t = e^beta. No ratio in between is worse.

  The formula of Papernot et al. 2018, theorem 23, is another one. It is smaller than the divergence
  of this pair at orders above about 1 + 1 / (4 beta).

  Args:
    beta: rate > 0; the sensitivity at distance d is multiplied by e^(-beta d).
    noise_multiplier: standard deviation of the noise / smooth sensitivity.

  >>> SmoothSensitivity(beta=0.02, noise_multiplier=8.0).sensitivity(np.array([0.1, 0.3]))
  0.2940...
  """

  beta: float
  noise_multiplier: float

  def __post_init__(self) -> None:
    validate.positive(beta=self.beta, noise_multiplier=self.noise_multiplier)

  def sensitivity(self, local: np.ndarray) -> float:
    """Returns the smooth sensitivity of a number; local[d] is its sensitivity at distance d."""
    discounts = np.exp(-self.beta * np.arange(len(local)))
    return float(np.max(local * discounts))

  def rdp(self, orders: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns the largest Renyi divergence of two neighbours at each order; it may be infinite."""
    orders = _orders(orders)
    rdp = np.full(len(orders), math.inf)
    # v of the proof is 1 - widths. The factor covers the rounding of widths, which matters as v
    # goes to 0.
    widths = (orders - 1) * math.expm1(min(2 * self.beta, _LARGEST_LOG)) * (1 + 1e-15)
    inside = widths < 1
    order = orders[inside]
    narrowed = np.log1p(-widths[inside])
    rdp[inside] = order / (2 * self.noise_multiplier**2 * np.exp(narrowed)) - (
      self.beta + narrowed / (2 * (order - 1))
    )
    return rdp
