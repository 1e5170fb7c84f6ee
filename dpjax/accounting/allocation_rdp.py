"""Renyi DP of random allocation: one pass of T Gaussian sums, in both directions.

`random_allocation` proves that the likelihood ratio L = (X_1 + .. + X_T) / T dominates a pass, for
every convex function of L. The X_t are independent lognormals of mean 1. Renyi DP of order a needs
two such functions, for a record that is removed and for one that is added:

  removed  (a - 1) D_a(P | Q) = log E_Q L^a      added  (a - 1) D_a(Q | P) = log E_Q L^(1 - a)

Removed: at integers a, E_Q L^a is computed exactly. With s = 1 / noise multiplier,
E X^k = exp(s^2 k (k - 1) / 2), and E (X_1 + .. + X_T)^a / a! is the coefficient of y^a in
(sum_k E X^k y^k / k!)^T. This power replaces the sum over all multinomials of Feldman and Shenfeld
(2025, arXiv:2502.08202, section 4).
All of its terms are positive. Between integers (a - 1) D_a is convex in a, so it is below its
chord.

Added: with b = a - 1 > 0 and phi(c) = E exp(-c X),

  E L^-b = 1 / Gamma(b) int t^(b - 1) phi(t / T)^T dt,  over u = log t:  int exp(b u) phi^T du,

is computed by the trapezoid rule, whose error is bounded (Trefethen and Weideman 2014, theorem
5.1). Off the
real line by an angle d < pi / 2 the integrand is at most that at t cos d, so the integral there is
at most cos(d)^-b times the real one. The same rule gives phi: off the line by i y, y <= pi / (2 s),
the integrand is at most exp(y^2 / 2) times the normal density. log phi(e^u) is concave in u (a
convolution of log-concave functions), so beyond the grid the integrand is below a geometric
sequence. If this sequence does not fall, the bound is infinite, and that of one Gaussian sum holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

from dpjax import validate
from dpjax.accounting.noise_profiles import UNIT

# Step of u = log t. With it the trapezoid rule errs by less than 1e-12 of its value, for orders up
# to 1100.
_STEP = 0.02
# Range of log c on the grid of phi. For noise multipliers above 1/2, phi(c) < exp(-280) long before
# this range ends. For smaller ones a geometric series covers what lies beyond the range.
_FIRST = -42.0
_LAST = 60.0
# Smallest log phi that is used, since the quadrature for phi errs by e^-300.
_LOWEST = -280.0


def allocation_rdp(
  num_steps: int, noise_multiplier: float, *, orders: Sequence[float]
) -> np.ndarray:
  """Returns a bound on the Renyi divergence of one pass at each order, in both directions.

  Args:
    num_steps: number T of steps of the pass.
    noise_multiplier: std of the noise / l2_clip_norm.
    orders: Renyi orders above 1, [k]. The result has the same shape.

  Guarantee: an upper bound for an adaptive pass under add_or_remove_one and replace_special. It is
  exact up to rounding at integer orders where removing a record costs more than adding one, unless
  the noise multiplier is below 1 / 30.
  Divergences of several passes add up if each pass draws its steps anew.

  >>> rdp = allocation_rdp(1, 2.0, orders=[2.0, 8.0])  # a Gaussian: a / (2 z^2)
  >>> [round(float(value), 9) for value in rdp]
  [0.25, 1.0]
  >>> bool(allocation_rdp(100, 2.0, orders=[8.0]) < 0.02)
  True
  """
  validate.integer_at_least(1, num_steps=num_steps)
  validate.positive(noise_multiplier=noise_multiplier)
  wanted = np.asarray(orders, float)
  shift = 1 / noise_multiplier
  gaussian = wanted * shift**2 / 2  # of one Gaussian sum, whose divergence bounds a pass
  # One step is one Gaussian sum. With a noise multiplier below 1 / 30, amplification would save
  # almost nothing, so the bound claims none.
  if num_steps == 1 or shift > 30:
    return gaussian
  bounds = np.maximum(
    _removal_bounds(num_steps, shift, wanted),
    _addition_bounds(num_steps, shift, wanted - 1),
  )
  return np.minimum(bounds, gaussian)


def _removal_bounds(num_steps: int, shift: float, orders: np.ndarray) -> np.ndarray:
  """Returns upper bounds on D_a(P | Q) at orders a > 1, [orders]."""
  top = math.ceil(orders.max())
  counts = np.arange(top + 1)
  log_term = shift**2 * counts * (counts - 1) / 2 - special.gammaln(counts + 1)
  total = log_term
  # Repeated squaring gives the T-th power in at most 2 log2(T) products of series, in place of T.
  for bit in bin(num_steps)[3:]:
    total = _multiply(total, total)
    total = _multiply(total, log_term) if bit == "1" else total
  sizes = 1 + np.abs(log_term) + counts * math.log(num_steps)  # of the logarithms
  # Each product sums positive terms, so its errors are relative. A bound on all errors is added
  # to the log moments.
  rounding = 64 * UNIT * counts * (2 + math.log2(num_steps)) * np.maximum.accumulate(sizes)
  moments = total + special.gammaln(counts + 1) - counts * math.log(num_steps)
  # (a - 1) D_a is zero at the orders 0 and 1.
  moments[:2] = 0.0
  moments[2:] += rounding[2:]
  # The log moment is convex in the order, so between integers its chord is an upper bound.
  return np.interp(orders, counts, moments) / (orders - 1)


def _multiply(left: np.ndarray, right: np.ndarray) -> np.ndarray:
  """Returns the log coefficients of a product of two power series, cut to the factors' length."""
  size = len(left)
  padded = np.append(np.full(size - 1, -np.inf), right)[::-1]  # right[n - j] at [n, j]
  shifted = np.lib.stride_tricks.sliding_window_view(padded, size)[::-1]
  terms = left + shifted  # [n, j]
  # The largest term is taken out before exp, since the coefficients themselves would overflow.
  most = terms.max(axis=1)
  return most + np.log(np.exp(terms - most[:, None]).sum(axis=1))


def _addition_bounds(num_steps: int, shift: float, powers: np.ndarray) -> np.ndarray:
  """Returns upper bounds on D_a(Q | P) = log(E L^-b) / b for powers b = a - 1 > 0, [powers]."""
  rates, logs = _laplace(shift)
  times = rates + math.log(num_steps)  # [u]
  logs = num_steps * logs
  log_moments = np.empty(len(powers))
  for place, power in enumerate(powers):
    values = power * times + logs
    last = values[-1] - values[-2]
    # Below the grid phi is at most 1, so a geometric series bounds the integrand.
    before = power * times[0] - math.log(math.expm1(power * _STEP))
    # log phi is concave, so above the grid each ratio of neighbouring values is at most the last
    # ratio on the grid.
    beyond = values[-1] + last - math.log(-math.expm1(last)) if last < 0 else math.inf
    total = special.logsumexp([special.logsumexp(values), before, beyond])
    log_moments[place] = total + math.log(_STEP) - special.gammaln(power)
  # The last term covers the error of the trapezoid rule.
  return log_moments / powers + 1e-12 * (1 + 1 / powers)


@functools.lru_cache(maxsize=4)
def _laplace(shift: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns rising values log c, [u], and log phi(c) = log E exp(-c X) at each of them, [u].

  X is lognormal with mean 1. Both arrays end before phi is too small to be accurate.
  """
  rates = np.arange(_FIRST, _LAST, _STEP)
  step = min(0.04, math.pi**2 / (300 * shift))
  z = np.arange(-26, 26, step)
  density = np.exp(-z * z / 2)
  # The weights are scaled to sum 1, so that the quadrature over z integrates constants exactly.
  density /= density.sum()
  log_masses = np.empty(0)
  # c is taken in blocks, since the whole table [u, z] would be too large.
  for start in range(0, len(rates), 256):
    block = rates[start : start + 256, None]
    terms = np.exp(block + shift * z - shift**2 / 2)  # c X at [u, z]
    with np.errstate(divide="ignore"):
      # For small c, phi is near 1. A sum of expm1 keeps all digits of 1 - phi.
      if block.max() < -1:
        logs = np.log1p(np.expm1(-terms) @ density)
      else:
        logs = np.log(np.exp(-terms) @ density)
    log_masses = np.append(log_masses, logs)
    if log_masses[-1] < _LOWEST:
      break
  known = log_masses > _LOWEST
  return rates[: len(log_masses)][known], log_masses[known]
