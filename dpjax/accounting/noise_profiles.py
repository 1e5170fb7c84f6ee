"""Hockey-stick divergences of noisy sums at epsilons >= 0, as arrays that are rounded up.

A function of this module returns delta at each epsilon, [n]: the divergence of P from Q. It is
never below the true one. docs/design/loss_grid.md has the bounds on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special

# Unit roundoff of float64.
UNIT = 2.0**-53
# Number of roundings that one special function of SciPy may lose. The largest loss seen is 6
# (against 40 digits, at 4e4 points).
_ROUNDINGS = 16

# (y >= 0, [n]) -> (delta at y; a bound on P(loss > y)), both rounded up. P from Q and Q from P have
# the same divergences.
Noise = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def gaussian(shift: float) -> Noise:
  """Returns the divergences of two unit normals that are `shift` apart.

  >>> gaussian(1.0)(np.array([1.0]))[0].round(4)
  array([0.1269])
  """

  def deltas(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # With m the Mills ratio (tail / density), delta = Phi(-a) - e^y Phi(-a - shift) is
    # density(a) (m(a) - m(a + shift)). Its two terms have one common factor, the density.
    a = y / shift - shift / 2
    density = np.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    tail = np.where(a < 0, special.ndtr(-a), density * _mills(np.maximum(a, 0.0)))
    delta = np.maximum(tail - density * _mills(a + shift), 0.0)
    far = np.where(a > 0, a * a, 0.0)
    tail = tail * (1 + (_ROUNDINGS + far) * UNIT)
    # An error of y or of `a` shifts the loss; `tail` bounds the slope of delta.
    lost = (_ROUNDINGS + 8 * y + 4 * shift**2) * UNIT * tail
    return delta * (1 + (_ROUNDINGS + far) * UNIT) + np.where(tail > 0, lost, 0.0), tail

  return deltas


def _mills(a: np.ndarray) -> np.ndarray:
  """Returns P(Z > a) / density(a) of a unit normal Z, for a >= 0."""
  return math.sqrt(math.pi / 2) * special.erfcx(a / math.sqrt(2))


def laplace(largest: float) -> Noise:
  """Returns the divergences of two Laplace distributions, whose losses are at most `largest`.

  >>> laplace(1.0)(np.array([0.0, 1.0]))[0].round(4)
  array([0.3935, 0.    ])
  """

  def deltas(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    # The largest loss has a mass of 1 / 2, so the tail does not tend to 0.
    inside = y <= largest * (1 + 4 * UNIT)
    half = np.minimum(y - largest, 0.0) / 2
    lost = (_ROUNDINGS + 4 * largest + 8 * np.minimum(y, largest)) * UNIT
    return np.where(inside, lost - np.expm1(half), 0.0), np.where(inside, 1.0, 0.0)

  return deltas


def removal_deltas(
  epsilons: np.ndarray, *, sampling_prob: float, noise: Noise
) -> np.ndarray:
  """Returns delta of the noise on a Poisson sample with the record, against that without it.

  It is also a bound for exchanging a record (`dpjax.accounting.exchanged_sample`).

  With e^epsilon = 1 + q (e^y - 1), delta at epsilon is q times that of the noise at y.

  >>> removal_deltas(np.array([1.0]), sampling_prob=0.5, noise=gaussian(1.0)).round(4)
  array([0.0289])
  """
  # A large y is epsilon - log q + log(1 - (1 - q) e^-epsilon), which does not overflow.
  small = np.log1p(np.expm1(np.minimum(epsilons, 30.0)) / sampling_prob)
  large = (
    epsilons
    - math.log(sampling_prob)
    + np.log1p(-(1 - sampling_prob) * np.exp(-np.maximum(epsilons, 1.0)))
  )
  delta, tail = noise(np.where(epsilons < 30, small, large))
  return np.minimum(sampling_prob * (delta + 4 * UNIT * tail), 1.0)


def addition_deltas(
  epsilons: np.ndarray, *, sampling_prob: float, noise: Noise
) -> np.ndarray:
  """Returns delta of the noise without the record, against a sample with it.

  With e^-epsilon = 1 - q (1 - e^-y), delta at epsilon is q e^(epsilon - y) times that of the noise
  at y. No loss is above -log(1 - q).

  >>> addition_deltas(np.array([0.0, 1.0]), sampling_prob=0.5, noise=gaussian(1.0)).round(4)
  array([0.1915, 0.    ])
  """
  # e^-y, which errs by at most 4 roundings. Delta rises with it, and may jump (`laplace`).
  share = 1 + np.expm1(-epsilons) / sampling_prob + 4 * UNIT
  deltas = np.zeros(len(epsilons))
  near = share > 0
  kept = share[near]
  delta, tail = noise(-np.log(np.clip(kept, 32 * UNIT, 1.0)))
  # An error of `share` is e^-y times the error of y. Below 32 roundings it is the whole `share`.
  scale = sampling_prob * np.exp(epsilons[near])
  deltas[near] = scale * (kept * delta + 64 * UNIT * tail)
  return np.minimum(deltas, 1.0)


def distance_deltas(epsilons: np.ndarray, *, prob: float, shift: float) -> np.ndarray:
  """Returns delta of (1 - q) N(0) + q N(shift) against (1 - q) N(0) + q N(-shift).

  >>> distance_deltas(np.array([1.0]), prob=1.0, shift=0.5).round(4)
  array([0.1269])
  """
  # The loss rises in x. It is epsilon where X = e^(shift x) solves X^2 - A (e^eps - 1) X = e^eps
  # with A = e^(shift^2 / 2) (1 - q) / q. Any other point would give a smaller value, by its error
  # squared.
  at = epsilons / 2
  if prob < 1:
    log_ratio = shift**2 / 2 + math.log1p(-prob) - math.log(prob)
    with np.errstate(divide="ignore", over="ignore"):
      exponent = log_ratio + at + np.log(-np.expm1(-2 * at) / 2)  # of A sinh(epsilon / 2)
    # asinh(e^u) = log(e^u + sqrt(e^2u + 1))
    at = at + np.logaddexp(exponent, np.logaddexp(2 * exponent, 0.0) / 2)
  at = at / shift
  apart = special.ndtr(shift - at)
  middle, behind = special.log_ndtr(-at), special.log_ndtr(-at - shift)
  with np.errstate(over="ignore", invalid="ignore"):
    lower = (1 - prob) * np.exp(middle) * np.expm1(np.minimum(epsilons, 700.0))
    lower = lower + prob * np.exp(np.minimum(epsilons + behind, 0.0))
  delta = np.maximum(prob * apart - np.nan_to_num(lower, posinf=1.0), 0.0)
  # Both terms are at most `prob * apart`, and exponents of e are rounded.
  size = _ROUNDINGS * 2 + 4 * epsilons + 8 * np.minimum(-behind, 1e3) + 4 * shift**2
  return np.minimum(delta + size * UNIT * prob * apart, 1.0)
