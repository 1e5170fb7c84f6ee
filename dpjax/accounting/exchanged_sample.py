"""Privacy loss of one noisy sum over a uniform subset, where one record is exchanged.

A step draws b of n records, all subsets equally likely, and adds Gaussian noise to the sum of their
clipped gradients. Norms are in multiples of the clip norm, and z is the noise multiplier.

Let q = b / n, and let the neighbours hold x or y in one place. Draw a set S of b - 1 of the other
records, and one more record j out of those left. The batch is S with the place, with probability
q, else S with j. Given S and j the neighbours' outputs are

  P = (1 - q) N(a) + q N(x)  and  Q = (1 - q) N(a) + q N(y),

with a the contribution of j, and all three of norm at most 1. By advanced joint convexity (Balle,
Barthe and Gaboardi 2018, arXiv:1807.01647, theorem 2) the hockey-stick divergence at
g = 1 + q (g' - 1) >= 1 is, with B = g / g',

  H_g(P, Q) = q H_g'(N(x), (1 - B) N(a) + B N(y)) <= q H_g'(N(2), N(0)),

since x is at most 2 away from a and from y. The same bound holds with P and Q exchanged, and, as
divergences are jointly convex, for the mean over S and j. Hence the profile

  h(g) = q H_g'(N(2), N(0))   for g >= 1,
  h(g) = 1 - g + g h(1 / g)   for g < 1

is at least H_g(P, Q) at every g > 0. It is convex, so it is the profile of a pair, which composes
adaptively (Zhu, Dong and Wang 2022, arXiv:2106.08567, theorem 10). At one step it is exact, for
a = y = -x of norm 1. Over many steps no single pair of data sets is known to reach it (Lebeda et
al. 2024, arXiv:2405.20769).
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpjax.accounting import noise_profiles

# Number of standard deviations beyond which a normal variable has a mass below 1e-23.
_TAIL = 10.0
# For a larger shift (z < 1 / 5) RDP claims no amplification, since it would save almost nothing.
_LARGEST_SHIFT = 10.0
# If order * shift is at most this, the moment is integrated. For larger orders a binomial sum
# bounds the moment.
_FARTHEST = 60.0
_PANEL = 0.25
_NODES = 16
# Allowance for the relative error of the quadrature, which was at most 1e-10 against closed-form
# sums at 200 settings.
_QUADRATURE = 1e-9


def log_ratio(points: np.ndarray, *, sampling_prob: float, shift: float) -> np.ndarray:
  """Returns log((1 - q) + q N(shift) / N(0)), where N(s) is the density of a unit normal at mean s.

  Args:
    points: points at which the ratio is taken, in standard deviations of the noise.
    sampling_prob: chance q that one record is in the batch.
    shift: 2 / noise_multiplier.

  >>> log_ratio(np.array([1.0]), sampling_prob=0.5, shift=2.0)  # halfway: the ratio is 1
  array([0.])
  """
  exponents = shift * points - shift**2 / 2
  # log(1 - q + q e^t) has two forms: expm1 keeps the digits for a small t, and the second form does
  # not overflow for a large t.
  small = np.log1p(sampling_prob * np.expm1(np.minimum(exponents, 1.0)))
  unsampled = (1 - sampling_prob) * np.exp(-np.maximum(exponents, 1.0))
  large = exponents + np.log(sampling_prob + unsampled)
  return np.where(exponents < 1, small, large)


def profile(
  epsilons: np.ndarray, *, sampling_prob: float, noise_multiplier: float
) -> np.ndarray:
  """Returns delta of one step at each epsilon, [k].

  Guarantee: at least the hockey-stick divergence of any two neighbours, in both directions.

  Args:
    epsilons: losses >= 0 at which delta is computed, [k].
    sampling_prob: batch size / number of records.
    noise_multiplier: std of the noise / clip norm.

  >>> profile(np.array([0.0, 1.0]), sampling_prob=0.5, noise_multiplier=2.0).round(4)
  array([0.1915, 0.0289])
  """
  noise = noise_profiles.gaussian(2 / noise_multiplier)
  return noise_profiles.removal_deltas(
    np.asarray(epsilons, float), sampling_prob=sampling_prob, noise=noise
  )


def exchanged_rdp(
  *, sampling_prob: float, noise_multiplier: float, orders: np.ndarray
) -> np.ndarray:
  """Returns an upper bound on the Renyi divergence of one step at each order, [k].

  With r = (1 - q) + q N(shift) / N(0), the pair of the module's profile has

    e^((a - 1) D_a) = 1 + integral over r > 1 of N(0) (r^a + r^(1 - a) - r - 1).

  Args:
    sampling_prob: batch size / number of records.
    noise_multiplier: std of the noise / clip norm.
    orders: Renyi orders above 1, [k].

  >>> exchanged_rdp(sampling_prob=1.0, noise_multiplier=2.0, orders=np.array([2.0])).round(6)
  array([1.])
  """
  shift = 2 / noise_multiplier
  orders = np.asarray(orders, float)
  # Without sampling, the outputs are two Gaussians that are `shift` apart. Their divergence is an
  # upper bound.
  gaussian = orders * shift**2 / 2
  if shift > _LARGEST_SHIFT:
    return gaussian
  near = orders * shift <= _FARTHEST
  moments = np.empty(len(orders))
  if near.any():
    moments[near] = _moments(orders[near], sampling_prob, shift)
  if not near.all():
    moments[~near] = _high_moments(orders[~near], sampling_prob, shift)
  return np.minimum(gaussian, moments / (orders - 1))


def _high_moments(orders: np.ndarray, sampling_prob: float, shift: float) -> np.ndarray:
  """Returns upper bounds on `_moments`, [k], by binomial sums.

  The bound at order a is log(1 + integral over r > 1 of N(0) r^a)."""
  wanted = np.unique(np.concatenate([np.floor(orders), np.ceil(orders)]))
  logs = []
  # If every record is in the batch (q = 1), only the last term of the sum is not zero.
  log_remainder = math.log1p(-sampling_prob) if sampling_prob < 1 else -1e300
  for order in wanted:
    counts = np.arange(order + 1)
    binomial = special.gammaln(order + 1) - special.gammaln(counts + 1)
    binomial -= special.gammaln(order - counts + 1)
    others = (order - counts) * log_remainder
    # `tails` is the log of the integral over r > 1 of N(0) e^(k t), with t = shift x - shift^2 / 2.
    tails = special.log_ndtr((counts - 0.5) * shift)
    tails += counts * (counts - 1) * shift**2 / 2
    terms = binomial + others + counts * np.log(sampling_prob) + tails
    logs.append(np.logaddexp(0.0, special.logsumexp(terms)))
  # The log moment is convex in the order, so between integers its chord is an upper bound. The
  # factor covers the rounding of the sums.
  return np.interp(orders, wanted, logs) * (1 + 1e-12)


def _moments(orders: np.ndarray, sampling_prob: float, shift: float) -> np.ndarray:
  """Returns (a - 1) D_a of the pair at each order, [k], by the integral in `exchanged_rdp`."""
  # The integrand falls like a normal density away from 0 and from shift * order. Therefore
  # almost nothing of the integral lies beyond `end`.
  start = shift / 2
  end = max(start, shift * float(orders.max())) + _TAIL + 2
  edges = np.linspace(start, end, int(np.ceil((end - start) / _PANEL)) + 1)
  half = np.diff(edges)[:, None] / 2  # [panels, 1]
  nodes, weights = np.polynomial.legendre.leggauss(_NODES)
  points = (edges[:-1, None] + half * (1 + nodes)).ravel()
  log_weights = np.log(half * weights).ravel() - points**2 / 2 - np.log(2 * np.pi) / 2
  losses = log_ratio(points, sampling_prob=sampling_prob, shift=shift)
  powers = orders[:, None]
  # r^a + r^(1 - a) - r - 1 = (r^(a - 1) - 1) (r - r^(1 - a)), a form in which no digits cancel.
  lead = (powers - 1) * losses
  first = lead + np.log(-np.expm1(-lead))  # log(e^lead - 1) without overflow
  second = losses + np.log(-np.expm1(-powers * losses))
  logs = special.logsumexp(log_weights + first + second, axis=1)
  # The addend covers the error of the quadrature, and the integral beyond the last panel.
  return np.logaddexp(0.0, logs + _QUADRATURE)
