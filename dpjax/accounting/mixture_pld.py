"""Privacy loss of a mixture of Gaussians against one Gaussian.

P = sum_i p_i N(s_i) and Q = N(0), with unit noise and shifts s_i >= 0. The loss

  L(x) = log sum_i p_i exp(s_i x - s_i^2 / 2)

rises with x and is convex. So each epsilon has one threshold, which Newton's method finds from
above, and both directions of the hockey-stick divergence are sums of normal tails. Any threshold
gives a divergence no larger than the true one. The error of a threshold enters only squared.
"""

from __future__ import annotations

import functools

import numpy as np
from scipy import special, stats

from dpjax.accounting.loss_grid import LossMasses, connect
from dpjax.accounting.noise_profiles import UNIT

# Number of standard deviations beyond which a normal variable has a mass below 1e-23.
_TAIL = 10.0
_LEAST_MASS = 1e-23
_NEWTON = 100
# On a long grid, thresholds are first found for every 256th loss. From them Newton's method starts
# for all other losses.
_KNOT_DISTANCE = 256
_MOST_COUNTS = 256
# If a binomial has more numbers of successes than this, its largest numbers are merged into one.
# The total chance of these numbers is at most `_RARE`.
_FEW = 16
_RARE = 1e-25
_LARGEST_PAIR = 50.0
# Allowance for the relative error of SciPy's chances of a binomial.
_CHANCE_ERROR = 1e-11


def binomial_counts(trials: int, prob: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns numbers of successes, [k], and their chances, [k], with k < 260.

  If there are more than 16 numbers, the largest ones, of total chance at most 1e-25, are merged
  into the largest of them. A larger number moves the sum further, so this costs no less privacy.

  Args:
    trials: number of trials, at most 256 unless `trials * prob` is at most 1.
    prob: chance that one trial succeeds.

  >>> binomial_counts(2, 0.5)
  (array([0., 1., 2.]), array([0.25, 0.5 , 0.25]))
  """
  counts = np.arange(min(trials, _MOST_COUNTS) + 1)
  chances = np.asarray(stats.binom.pmf(counts, trials, prob), float)
  # Chances below 1e-300 are left out: they are far below any delta, and have infinite logarithms if
  # they underflow to 0.
  kept = chances > 1e-300
  counts = counts[kept].astype(float)
  chances = chances[kept] / chances[kept].sum()
  if counts[0] == 0 and len(counts) > 1:
    chances[1:] *= 1 + _CHANCE_ERROR
    chances[0] = max(chances[0] - _CHANCE_ERROR * (1 - chances[0]), 1e-300)
  if len(counts) <= _FEW:
    return counts, chances
  # The large numbers of successes that are rare count as the largest number. This moves the sum
  # further, so it costs no less privacy.
  beyond = np.cumsum(chances[::-1])[::-1]
  usual = max(_FEW, int((beyond > _RARE).sum()))
  if usual >= len(counts) - 1:
    return counts, chances
  return (
    np.append(counts[:usual], counts[-1]),
    np.append(chances[:usual], chances[usual:].sum()),
  )


def typical_renyi_two(*, chances: np.ndarray, shifts: np.ndarray) -> float:
  """Returns roughly the mixture's Renyi divergence of order 2, which only helps to choose a grid.

  >>> round(typical_renyi_two(chances=np.array([1.0]), shifts=np.array([0.5])), 6)
  0.25
  """
  logs: np.ndarray = np.log(chances)
  # Losses are capped: rare batches with very many records would make the grid too coarse for all
  # other batches.
  losses = np.minimum(np.outer(shifts, shifts), _LARGEST_PAIR)
  return max(float(np.asarray(special.logsumexp(logs[:, None] + logs + losses))), 1e-30)


def mixture_pld(
  *, chances: np.ndarray, shifts: np.ndarray, interval: float
) -> list[LossMasses]:
  """Returns the privacy loss distribution of P = sum_i p_i N(s_i) and Q = N(0), in both directions.

  Guarantee: an upper bound at any interval.

  Args:
    chances: weights p_i of the mixture, above 0 and of sum 1, [k].
    shifts: means s_i in standard deviations of the noise, rising, at least 0, [k].
    interval: distance between neighbouring losses of the grid.

  >>> from dpjax.accounting.loss_grid import pld_of
  >>> pld = mixture_pld(chances=np.array([1.0]), shifts=np.array([1.0]), interval=1e-3)
  >>> round(float(pld_of(pld).get_delta_for_epsilon(1.0)), 4)  # of a Gaussian of noise multiplier 1
  0.1269
  """
  log_chances = np.log(chances)
  # No loss of an added record is above minus the loss at the lowest point.
  lowest = _losses(np.array([-_TAIL]), log_chances, shifts).item()
  return connect(
    functools.partial(_deltas, log_chances=log_chances, shifts=shifts, removed=True),
    functools.partial(_deltas, log_chances=log_chances, shifts=shifts, removed=False),
    interval=interval,
    largest=largest_loss(chances=chances, shifts=shifts),
    largest_added=-lowest,
  )


def largest_loss(*, chances: np.ndarray, shifts: np.ndarray) -> float:
  """Returns a loss that the mixture P exceeds with a chance of at most 1e-23."""
  low = -_TAIL
  high = shifts[-1] + _TAIL
  for _ in range(60):
    middle = (low + high) / 2
    beyond = float(special.ndtr(shifts - middle) @ chances)
    low, high = (middle, high) if beyond > _LEAST_MASS else (low, middle)
  return _losses(np.array([high]), np.log(chances), shifts).item()


def _losses(points: np.ndarray, log_chances: np.ndarray, shifts: np.ndarray) -> np.ndarray:
  losses, _ = _losses_and_slopes(points, log_chances, shifts)
  return losses


def _losses_and_slopes(
  points: np.ndarray, log_chances: np.ndarray, shifts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the loss L at each point and its derivative there, [n] each."""
  # `exponents` is log(p_i N(s_i) / N(0)). It has one row for each shift, so that the sums run over
  # long rows.
  exponents = (log_chances - shifts**2 / 2)[:, None] + shifts[:, None] * points
  largest = exponents.max(axis=0)
  # Terms are taken relative to the largest term, so that nothing overflows.
  shares = np.exp(exponents - largest)
  sums = shares.sum(axis=0)
  return largest + np.log(sums), (shifts @ shares) / sums


def _thresholds(
  losses: np.ndarray, log_chances: np.ndarray, shifts: np.ndarray
) -> np.ndarray:
  """Returns the points at which the mixture's loss L has the values `losses`, [n].

  Args:
    losses: values, rising or falling, [n]. For a value that L never has, the point is far outside.
  """
  far = shifts[-1] + 2 * _TAIL
  starts = np.full(len(losses), far)
  if len(losses) > 4 * _KNOT_DISTANCE:
    # Newton's method takes about twenty steps from far away, but only three from a start nearby.
    rising = losses[0] <= losses[-1]
    ordered = losses if rising else losses[::-1]
    starts = _starts_above(ordered, log_chances, shifts)
    starts = starts if rising else starts[::-1]
  return _newton(starts, losses, log_chances, shifts)


def _starts_above(
  losses: np.ndarray, log_chances: np.ndarray, shifts: np.ndarray
) -> np.ndarray:
  """Returns points slightly above the thresholds of rising losses, [n]."""
  far = shifts[-1] + 2 * _TAIL
  places = np.arange(0, len(losses), _KNOT_DISTANCE)
  knots = _newton(np.full(len(places), far), losses[places], log_chances, shifts)
  knot_losses, knot_slopes = _losses_and_slopes(knots, log_chances, shifts)
  before = np.arange(len(losses)) // _KNOT_DISTANCE
  # L is convex, so a tangent lies below L, and reaches a loss at a point above the threshold.
  with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
    tangents = knots[before] + (losses - knot_losses[before]) / knot_slopes[before]
  # L rises, so the threshold of the next knot's larger loss is above the threshold, too.
  nexts = np.append(knots, far)[before + 1]
  # A flat tangent reaches no loss. Then the threshold of the next knot is the start.
  tangents = np.where(np.isfinite(tangents), tangents, far)
  return np.minimum(np.maximum(tangents, knots[before]), nexts)


def _newton(
  points: np.ndarray, losses: np.ndarray, log_chances: np.ndarray, shifts: np.ndarray
) -> np.ndarray:
  """Returns the thresholds of the losses, [n], by Newton's method from `points` above them."""
  far = shifts[-1] + 2 * _TAIL
  for _ in range(_NEWTON):
    values, slopes = _losses_and_slopes(points, log_chances, shifts)
    # L is convex and the start is above the root, so steps go down, and never below the root.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
      steps = np.where(slopes > 0, (values - losses) / slopes, np.inf)
    moved = np.clip(points - np.maximum(steps, 0.0), -far, far)
    if np.allclose(moved, points, rtol=0, atol=1e-12):
      break
    points = moved
  return points


def removed_deltas(
  epsilons: np.ndarray, *, chances: np.ndarray, shifts: np.ndarray
) -> np.ndarray:
  """Returns upper bounds on delta of P = sum_i p_i N(s_i) against Q = N(0), [n].

  Args:
    epsilons: losses at which delta is computed, rising, [n].
    chances: weights p_i, as for `mixture_pld`, [k].
    shifts: means s_i, as for `mixture_pld`, [k].

  >>> removed_deltas(np.array([1.0]), chances=np.array([1.0]), shifts=np.array([1.0])).round(4)
  array([0.1269])
  """
  return _deltas(epsilons, log_chances=np.log(chances), shifts=shifts, removed=True)


def _deltas(
  epsilons: np.ndarray, *, log_chances: np.ndarray, shifts: np.ndarray, removed: bool
) -> np.ndarray:
  """Returns the hockey-stick divergence of P from Q (`removed`), or of Q from P, at rising
  epsilons >= 0, rounded up, [n]."""
  sign = 1.0 if removed else -1.0
  at = _thresholds(sign * epsilons, log_chances, shifts)
  of_p = np.exp(log_chances) @ special.ndtr(sign * (shifts[:, None] - at))
  log_q = special.log_ndtr(-sign * at)
  with np.errstate(over="ignore", invalid="ignore"):
    if removed:
      first, second = of_p, np.exp(epsilons + log_q)
    else:
      first, second = np.exp(log_q), np.where(of_p > 0, np.exp(epsilons) * of_p, 0.0)
  deltas = np.nan_to_num(first - second, nan=0.0, neginf=0.0)
  # Both terms are at most the first, up to rounding. A tail at x loses up to x^2 roundings.
  farthest = np.abs(at) + (0.0 if removed else shifts[-1])
  rounding = (32 + 2 * len(shifts) + 4 * epsilons + 4 * farthest**2) * UNIT
  return np.minimum(np.maximum(deltas, 0.0) + rounding * first, 1.0)
