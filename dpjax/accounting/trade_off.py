"""Bounds on membership tests that follow from a proof: true positive rates, mu of Gaussian DP.

A run satisfies many pairs (epsilon, delta) at once. Together they bound every test that tells a
run with a record from one without it (Dong, Roth and Su 2022, Proposition 2.12):

  TPR <= e^epsilon FPR + delta    and    1 - FPR <= e^epsilon (1 - TPR) + delta
"""

from __future__ import annotations

import math
from typing import NamedTuple, Unpack

import numpy as np
from scipy import special

from dpjax import validate
from dpjax.accounting.epsilon import Counting, epsilon, privacy_profile
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.loss_grid import Profile

# Epsilons of `all_pairs`, and some of those of `pairs_of`. Each pair bounds true positive rates
# by a line. A finer grid would lower the bound of `all_pairs` by less than 1e-3.
_EPSILONS = (*np.linspace(0, 8, 81), *np.geomspace(8.2, 200, 60))
# Number of epsilons of the curve of `trade_off`, from 0 to the epsilon at which delta is the slack.
_POINTS = 129
# Last epsilon of a curve if delta is above the slack at every smaller epsilon.
_WIDEST = 100.0
_MOST = 1e4  # largest mu
# The rounding of a Gaussian's delta is at most this times (1 + epsilon).
_ROUNDING = 1e-14


class TradeOff(NamedTuple):
  """Pairs (epsilon, delta) that hold at once, in both directions of the neighbouring relation."""

  epsilons: np.ndarray  # [k], rising, none below 0
  deltas: np.ndarray  # [k], each an upper bound

  def true_positive_rate(self, fpr: np.ndarray) -> np.ndarray:
    """Returns a bound on the true positive rate of any test, for each false positive rate in `fpr`.

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
    """Returns a lower bound on the false positive rate of any test, for each true positive rate in
    `tpr`.

    This is the inverse of `true_positive_rate`.

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
    """Returns an upper bound v on TPR - FPR of any test.

    If the record is there with probability 1/2, a test is right with probability at most
    (1 + v) / 2.

    >>> round(TradeOff(np.log([3.0]), np.zeros(1)).total_variation, 6)  # at FPR 1/4
    0.5
    """
    odds = np.exp(-self.epsilons)
    return float(np.min((1 - odds + 2 * self.deltas * odds) / (1 + odds)))

  def mu(self, slack: float) -> float:
    """Returns a mu such that every test has TPR <= Phi(Phi^-1(FPR) + mu) + slack, or inf.

    It is the smallest mu that the search proves from the pairs; inf means that they prove none.

    Guarantee: an upper bound. Delta is convex in e^epsilon, so delta is below the chord between two
    pairs. The delta of a Gaussian is above its tangents. The slack must be above 0, since the pairs
    end at a largest epsilon.
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

  def points(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns the corners of the trade-off curve: false positive rates, [k], and the least false
    negative rate at each, [k]. False positive rates rise from 0 to 1.

    Each pair gives two lines, and the curve is the largest value of all lines at each rate. So the
    curve is straight between two corners, and straight lines between the corners are the proved
    bound itself, also where a delta rises with epsilon. Lines that matter only at rates below 1e-12
    are left out, which claims less.

    >>> pair = TradeOff(np.log([4.0]), np.zeros(1))
    >>> [values.round(4).tolist() for values in pair.points()]  # slopes -4 and -1 / 4
    [[0.0, 0.2, 1.0], [1.0, 0.2, 0.0]]
    """
    corners = [0.0, 1.0]
    odds, deltas = self._hull()
    # Lines 1 - delta - e^epsilon x of two successive pairs (epsilon, delta) meet at these rates x.
    # A mirrored line has its two rates exchanged. Mirrored lines meet at the mirrored points. A
    # line meets its own mirror image where both rates are equal.
    meet = -np.diff(deltas) / np.diff(odds)
    corners += meet.tolist()
    corners += (1 - deltas[:-1] - odds[:-1] * meet).tolist()
    corners.append(float(np.max((1 - deltas) / (1 + odds))))
    # At this rate the flattest line reaches a false negative rate of 0.
    corners.append(float(1 - deltas[-1]))
    alphas = np.unique(np.clip(corners, 0.0, 1.0))
    # Rates at the corners come from the hull's lines alone. The lines that are left out could put a
    # corner so high that a straight line to this corner would be no proved bound.
    hull = TradeOff(np.log(odds), deltas)
    return alphas, np.clip(1 - hull.true_positive_rate(alphas), 0.0, 1.0)

  def _hull(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns e^epsilon, [m], and delta, [m], of the pairs on the lower convex hull.

    Delta is convex in e^epsilon, so the hull of upper bounds is an upper bound, too. Pairs above
    the hull add nothing to the curve.
    """
    kept: list[tuple[float, float]] = []
    # Lines of pairs after the first delta of at most 1e-12, or with an epsilon above 40, do not
    # matter in float64.
    last = int(np.argmax(np.append(self.deltas <= 1e-12, True))) + 1
    useful = self.epsilons[:last] <= 40
    # A delta that holds at one epsilon holds at every larger one, too.
    deltas = np.minimum.accumulate(self.deltas)[:last][useful]
    for x, y in zip(np.exp(self.epsilons[:last][useful]), deltas):
      while len(kept) > 1:
        (x0, y0), (x1, y1) = kept[-2:]
        if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
          break
        kept.pop()
      kept.append((float(x), float(y)))
    odds, deltas = np.array(kept).reshape(-1, 2).T
    return odds, deltas

  def _within(self, mu: float, slack: float) -> bool:
    """Returns whether delta <= (delta of mu-GDP) + slack from the first epsilon to the last."""
    x = np.exp(self.epsilons)  # [k]
    far = special.ndtr(-self.epsilons / mu - mu / 2)  # minus the slope in x
    intercepts = special.ndtr(-self.epsilons / mu + mu / 2) - x * far
    intercepts = intercepts + slack - _ROUNDING * (1 + self.epsilons)
    width = np.diff(x)  # [k - 1]
    risen = np.diff(intercepts)
    fallen = np.diff(self.deltas)
    first = -far[:-1] * width
    last = -far[1:] * width
    bend = np.maximum(last - first, np.finfo(float).tiny)
    # Point at which the tangents of both ends meet, as a share of the width.
    meet = np.clip((last - risen) / bend, 0.0, 1.0)
    tangents = np.maximum(
      intercepts[:-1] + first * meet, intercepts[1:] - last * (1 - meet)
    )
    between = tangents >= self.deltas[:-1] + fallen * meet
    return bool((intercepts >= self.deltas).all() and between.all())


def trade_off(event: DpEvent, *, slack: float, **counting: Unpack[Counting]) -> TradeOff:
  """Returns pairs (epsilon, delta) proved for an event, at epsilons from 0 to a last one.

  The last epsilon is the smallest one with delta <= `slack`, or 100 if that is smaller.

  Args:
    event: event of the whole run.
    slack: smallest delta of interest, in (0, 1).
    counting: relation and accountant, as in `epsilon`.

  Raises UserError as `epsilon` does.

  >>> from dpjax.accounting import gaussian_event
  >>> curve = trade_off(gaussian_event(2.0), slack=1e-5)  # which is .5-Gaussian DP
  >>> round(curve.mu(1e-5), 3), curve.true_positive_rate(np.array(0.01)).round(4)
  (0.5, np.float64(0.0339))
  """
  last = epsilon(event, delta=slack, **counting)
  epsilons = np.linspace(0, min(last, _WIDEST), _POINTS if last else 1)
  deltas = privacy_profile(event, **counting)(epsilons)
  if epsilons[-1] == last:
    # The last epsilon was found for this slack, so its delta is at most the slack.
    deltas[-1] = min(deltas[-1], slack)
  return TradeOff(epsilons, deltas)


def pairs_of(profile: Profile, slack: float) -> TradeOff:
  """Returns pairs of a privacy profile at epsilons from 0 to 200, denser where delta > `slack`.

  Args:
    profile: function epsilons -> deltas, such as `privacy_profile` returns.
    slack: smallest delta of interest, in (0, 1).

  >>> from dpjax.accounting.epsilon import privacy_profile
  >>> from dpjax.accounting import gaussian_event
  >>> profile = privacy_profile(gaussian_event(2.0))
  >>> round(pairs_of(profile, 1e-5).mu(1e-5), 3)
  0.5
  """
  validate.open_unit(slack=slack)
  coarse = np.array(_EPSILONS)
  enough = np.flatnonzero(profile(coarse) <= slack)
  last = coarse[enough[0]] if len(enough) else _WIDEST
  epsilons = np.union1d(np.linspace(0, last, 2 * _POINTS), coarse)
  return TradeOff(epsilons, np.minimum(profile(epsilons), 1.0))


def all_pairs(event: DpEvent, **counting: Unpack[Counting]) -> TradeOff:
  """Returns pairs (epsilon, delta) proved for an event, at many epsilons from 0 to 200.

  Args:
    event: event of the whole run.
    counting: relation and accountant, as in `epsilon`.

  Raises UserError as `privacy_profile` does.

  >>> from dpjax.accounting import gaussian_event
  >>> all_pairs(gaussian_event(1.0)).true_positive_rate(np.array(0.5)).round(3)  # Phi(1)
  np.float64(0.841)
  """
  return all_pairs_of(privacy_profile(event, **counting))


def all_pairs_of(profile: Profile) -> TradeOff:
  """Returns the pairs of a privacy profile at many epsilons from 0 to 200.

  >>> all_pairs_of(lambda epsilons: np.zeros(len(epsilons))).total_variation
  0.0
  """
  return TradeOff(np.array(_EPSILONS), np.minimum(profile(_EPSILONS), 1.0))
