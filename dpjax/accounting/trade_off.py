"""Consequences of a proof for membership tests: true positive rates, and mu of Gaussian DP.

A run keeps many pairs (epsilon, delta) at once. All of them together bound every test that
tells a run with a record from one without (Dong, Roth and Su 2022, Proposition 2.12):

  TPR <= e^epsilon FPR + delta    and    1 - FPR <= e^epsilon (1 - TPR) + delta
"""

from __future__ import annotations

import math
from typing import NamedTuple, Unpack

import numpy as np
from scipy import special

from dpjax import validate
from dpjax.accounting.epsilon import Counting, delta_curve, epsilon
from dpjax.accounting.event_kinds.kind import DpEvent

# Each pair is a tangent of the line; closer together they would lower it by less than 1e-3.
_EPSILONS = (*np.linspace(0, 8, 81), *np.geomspace(8.2, 200, 60))
# Points of a curve: each pair is a tangent of the line of true positives.
_POINTS = 129
# Largest epsilon of a curve where no epsilon is finite at the slack.
_WIDEST = 100.0
_MOST = 1e4  # of mu
# Rounding of a Gaussian's delta, times 1 + epsilon.
_ROUNDING = 1e-14


class TradeOff(NamedTuple):
  """Pairs (epsilon, delta) that hold at once, under both directions of their relation."""

  epsilons: np.ndarray  # [k], rising, none below 0
  deltas: np.ndarray  # [k], each an upper bound

  def true_positive_rate(self, fpr: np.ndarray) -> np.ndarray:
    """The largest true positive rate of any test at a false positive rate, [...] -> [...].

    Guarantee: an upper bound, at every rate.

    >>> pair = TradeOff(np.log([4.0]), np.zeros(1))
    >>> pair.true_positive_rate(np.array([0.0, 0.1, 0.8])).round(4)  # 4 * .1, 1 - .2 / 4
    array([0.  , 0.4 , 0.95])
    """
    x = np.asarray(fpr, float)[..., None]  # [..., 1] against the pairs
    with np.errstate(over="ignore", invalid="ignore"):
      # e^epsilon may overflow to infinity, whose product with 0 would be NaN.
      first = np.where(x > 0, np.exp(self.epsilons) * x, 0.0) + self.deltas
    second = 1 - np.exp(-self.epsilons) * (1 - self.deltas - x)
    return np.clip(np.min(np.minimum(first, second), axis=-1), x[..., 0], 1.0)

  def false_positive_rate(self, tpr: np.ndarray) -> np.ndarray:
    """The least false positive rate of any test at a true positive rate, [...] -> [...].
    The inverse of `true_positive_rate`.

    Guarantee: a lower bound, at every rate.

    >>> pair = TradeOff(np.log([4.0]), np.zeros(1))
    >>> pair.false_positive_rate(np.array([0.0, 0.4, 0.95])).round(4)
    array([0. , 0.1, 0.8])
    """
    y = np.asarray(tpr, float)[..., None]  # [..., 1] against the pairs
    with np.errstate(over="ignore", invalid="ignore"):
      first = np.exp(-self.epsilons) * (y - self.deltas)
      second = 1 - self.deltas - np.where(y < 1, np.exp(self.epsilons) * (1 - y), 0.0)
    return np.clip(np.max(np.maximum(first, second), axis=-1), 0.0, y[..., 0])

  @property
  def total_variation(self) -> float:
    """The largest TPR - FPR of any test. A test that guesses a fair coin is right with
    probability at most (1 + this) / 2.

    >>> round(TradeOff(np.log([3.0]), np.zeros(1)).total_variation, 6)  # at FPR 1/4
    0.5
    """
    odds = np.exp(-self.epsilons)
    return float(np.min((1 - odds + 2 * self.deltas * odds) / (1 + odds)))

  def mu(self, slack: float) -> float:
    """The smallest mu found for which no test has a true positive rate above
    Phi(Phi^-1(FPR) + mu) + slack; inf where the pairs bound none.

    Guarantee: an upper bound: delta(e^epsilon) is convex, so between two pairs it is below
    their chord, and that of a Gaussian is above its tangents. Without slack no mu could be
    read off a curve that ends.
    """
    validate.open_unit(slack=slack)
    enough = np.flatnonzero(self.deltas <= slack)
    if self.epsilons[0] or not len(enough):
      return math.inf
    if not enough[0]:
      return 0.0
    part = TradeOff(self.epsilons[: enough[0] + 1], self.deltas[: enough[0] + 1])
    low = 0.0
    high = 1.0
    while not part._within(high, slack):
      low = high
      high = 2 * high
      if high > _MOST:
        return math.inf
    while high - low > 1e-7 * high:
      middle = (low + high) / 2
      low, high = (low, middle) if part._within(middle, slack) else (middle, high)
    return high

  def _within(self, mu: float, slack: float) -> bool:
    """Whether delta <= (delta of mu-GDP) + slack from the first epsilon to the last."""
    x = np.exp(self.epsilons)  # [k]
    far = special.ndtr(-self.epsilons / mu - mu / 2)  # minus the slope in x
    own = special.ndtr(-self.epsilons / mu + mu / 2) - x * far
    own = own + slack - _ROUNDING * (1 + self.epsilons)
    width = np.diff(x)  # [k - 1]
    risen = np.diff(own)
    fallen = np.diff(self.deltas)
    first = -far[:-1] * width
    last = -far[1:] * width
    bend = np.maximum(last - first, np.finfo(float).tiny)
    # Point where the tangents of both ends meet.
    meet = np.clip((last - risen) / bend, 0.0, 1.0)
    tangents = np.maximum(own[:-1] + first * meet, own[1:] - last * (1 - meet))
    between = tangents >= self.deltas[:-1] + fallen * meet
    return bool((own >= self.deltas).all() and between.all())


def trade_off(event: DpEvent, *, slack: float, **counting: Unpack[Counting]) -> TradeOff:
  """Returns the proved curve of an event, from epsilon 0 to where delta is at most `slack`.

  Args:
    event: event of the whole run.
    slack: least delta of interest, in (0, 1).
    counting: relation and accountant, as in `epsilon`.

  UserError: as `epsilon`.

  >>> from dpjax.accounting import gaussian_event
  >>> curve = trade_off(gaussian_event(2.0), slack=1e-5)  # which is .5-Gaussian DP
  >>> round(curve.mu(1e-5), 3), curve.true_positive_rate(np.array(0.01)).round(4)
  (0.5, np.float64(0.0339))
  """
  last = epsilon(event, delta=slack, **counting)
  epsilons = np.linspace(0, min(last, _WIDEST), _POINTS if last else 1)
  deltas = delta_curve(event, epsilons.tolist(), **counting)
  if epsilons[-1] == last:
    # The last epsilon was found for this slack, so delta at it is no larger.
    deltas[-1] = min(deltas[-1], slack)
  return TradeOff(epsilons, deltas)


def all_pairs(event: DpEvent, **counting: Unpack[Counting]) -> TradeOff:
  """Returns the pairs (epsilon, delta) that are proved for an event, at many epsilons from
  0 to 200.

  Args:
    event: event of the whole run.
    counting: relation and accountant, as in `epsilon`.

  UserError: as `epsilon`.

  >>> from dpjax.accounting import gaussian_event
  >>> all_pairs(gaussian_event(1.0)).true_positive_rate(np.array(0.5)).round(3)  # Phi(1)
  np.float64(0.841)
  """
  deltas = delta_curve(event, _EPSILONS, **counting)
  return TradeOff(np.array(_EPSILONS), np.minimum(deltas, 1.0))
