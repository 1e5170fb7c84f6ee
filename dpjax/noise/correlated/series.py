"""Power series of Toeplitz strategies: their error on prefix sums, and the best series.

A lower-triangular Toeplitz matrix is a power series c(x); products of matrices are products of
series. All is computed with NumPy in float64, once, before training.

The error of a strategy is that of the noise in the prefix sums x_1 + .. + x_t, which SGD with a
constant rate applies. It is the squared norm of each row of A C^{-1}, where A has ones on and below
the diagonal. With (c(x) (1 - x))^{-1} = sum_s b_s x^s, error_t = b_0^2 + .. + b_{t-1}^2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import optimize, signal

from dpjax import validate

OBJECTIVES = ("mean", "max")


def square_root(num_steps: int) -> np.ndarray:
  """Returns the first `num_steps` coefficients of (1 - x)^{-1/2}.

  They give the Toeplitz matrix that minimises the largest prefix error under one participation
  (Fichtenberger et al. 2022; Dvijotham et al. 2024).

  >>> square_root(4)
  array([1.    , 0.5   , 0.375 , 0.3125])
  """
  k = np.arange(1, num_steps)
  return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


def prefix_noise(coefficients: np.ndarray, num_steps: int) -> np.ndarray:
  """Returns the first column b_0 .. b_{num_steps - 1} of A C^{-1}, where A sums prefixes.

  >>> prefix_noise(np.array([1.0, 0.5]), 3)
  array([1.  , 0.5 , 0.75])
  """
  # `ones` has the type of the coefficients, which are complex when gradients use complex steps.
  ones = np.ones(num_steps, coefficients.dtype)
  return np.asarray(signal.lfilter([1.0], coefficients, ones))


def objective_weights(num_steps: int, objective: str) -> np.ndarray:
  """Returns weights of b_s^2, [num_steps], for the mean error over prefixes, or the largest error.

  The last prefix has the largest error."""
  validate.one_of(OBJECTIVES, objective=objective)
  if objective == "max":
    return np.ones(num_steps)
  return 1 - np.arange(num_steps) / num_steps


def prefix_error(coefficients, num_steps: int, objective: str = "mean") -> float:
  """Returns the mean or largest variance of noise in prefix sums, for white noise z of variance 1.

  >>> print(prefix_error(np.array([1.0]), 4, "max"), prefix_error(np.array([1.0]), 4))
  4.0 2.5
  """
  coefficients = np.asarray(coefficients)[:num_steps]
  noise = prefix_noise(coefficients, num_steps)
  return (objective_weights(num_steps, objective) * noise**2).sum()


def comb_norm_squared(
  coefficients: np.ndarray, num_steps: int, steps_apart: int, times: int
):
  """Returns the squared sensitivity |C (e_0 + e_b + ..)|^2 with `times` terms, b = steps_apart.

  It holds for `times` participations or fewer that are b steps apart or more, if the coefficients
  fall and are not negative (Kalinin and Lampert 2024, arXiv:2405.13763, theorem 2).

  >>> print(comb_norm_squared(np.array([1.0, 0.5]), 4, 2, 2))
  2.5
  """
  comb = np.zeros(num_steps)
  comb[: steps_apart * times : steps_apart] = 1
  padded = np.zeros(num_steps, coefficients.dtype)
  kept = min(num_steps, len(coefficients))
  padded[:kept] = coefficients[:kept]
  total = padded.copy()
  starts = np.flatnonzero(comb)[1:]
  # C is Toeplitz, so its columns are one column, shifted.
  for start in starts:
    total[start:] = total[start:] + padded[: num_steps - start]
  return (total**2).sum()


def optimized_bands(num_steps: int, bands: int, objective: str = "mean") -> np.ndarray:
  """Returns the `bands` coefficients that minimise error times squared sensitivity; the first is 1.

  The sensitivity is right if an example's participations are at least `bands` steps apart, so that
  their columns do not overlap (Choquette-Choo et al. 2023). The search is L-BFGS with the exact
  gradient, from the square root's coefficients.

  >>> optimized_bands(64, 1)
  array([1.])
  """
  weights = objective_weights(num_steps, objective)

  def loss(tail: np.ndarray) -> tuple[float, np.ndarray]:
    c = np.concatenate([[1.0], tail])
    noise = prefix_noise(c, num_steps)
    # noise = 1 / (c(x) (1 - x)), so d noise / d c_j = -x^j noise / c(x) = -x^j slope.
    slope = signal.lfilter([1.0], c, noise)
    error = (weights * noise**2).sum()
    norm = (c**2).sum()
    pull = weights * noise
    overlaps = [pull[j:] @ slope[: num_steps - j] for j in range(1, bands)]
    gradient = -2 * np.array(overlaps) / error + 2 * tail / norm
    # The gradient of log(error * norm) is the sum of the gradients of both logarithms.
    return np.log(error) + np.log(norm), gradient

  start = square_root(bands)[1:]
  if not start.size:
    return np.ones(1)
  minimum = optimize.minimize(
    loss, start, jac=True, method="L-BFGS-B", bounds=[(0.0, 1.0)] * start.size,
    options={"maxiter": 500, "ftol": 1e-12, "gtol": 1e-9},
  )  # fmt: skip
  # The sensitivity theorem needs coefficients that never rise, and the search may end with a rise.
  falling = np.minimum.accumulate(minimum.x)
  return np.concatenate([[1.0], falling])


def buffered_coefficients(
  scales: np.ndarray, decays: np.ndarray, num_steps: int
) -> np.ndarray:
  """Returns coefficients 1, sum_i w_i, sum_i w_i d_i, sum_i w_i d_i^2, .. for scales w, decays d.

  >>> buffered_coefficients(np.array([0.5]), np.array([0.5]), 4)
  array([1.   , 0.5  , 0.25 , 0.125])
  """
  powers = decays[:, None] ** np.arange(num_steps - 1)
  return np.concatenate([np.ones(1, scales.dtype), scales @ powers])


def optimized_buffers(
  num_steps: int, buffers: int, steps_apart: int, times: int, objective: str = "mean"
) -> tuple[np.ndarray, np.ndarray]:
  """Returns (scales, decays) that minimise error times squared sensitivity (McMahan et al. 2024,
  arXiv:2408.08868), by L-BFGS over their logits with complex-step gradients."""

  def unpack(free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shares = np.exp(free[:buffers])
    gaps = 1 / (1 + np.exp(-free[buffers:]))
    # The scales have a sum below 1, and the decays are below 1, so the coefficients fall from 1 on.
    return shares / (1 + shares.sum()), 1 - gaps

  def log_loss(free: np.ndarray):
    scales, decays = unpack(free)
    c = buffered_coefficients(scales, decays, num_steps)
    noise = _buffered_prefix_noise(scales, decays, num_steps)
    error = (objective_weights(num_steps, objective) * noise**2).sum()
    return np.log(error) + np.log(comb_norm_squared(c, num_steps, steps_apart, times))

  gaps = np.minimum(num_steps ** -np.linspace(0.1, 0.9, buffers), 0.9)
  start = np.concatenate([np.full(buffers, -np.log(buffers)), np.log(gaps / (1 - gaps))])
  minimum = optimize.minimize(
    _with_gradient(log_loss), start, jac=True, method="L-BFGS-B",
    bounds=[(-12.0, 12.0)] * start.size, options={"maxiter": 500, "ftol": 1e-12},
  )  # fmt: skip
  return unpack(minimum.x)


def _buffered_prefix_noise(
  scales: np.ndarray, decays: np.ndarray, num_steps: int
) -> np.ndarray:
  """Returns `prefix_noise` of `buffered_coefficients`, as the ratio of two short polynomials."""
  below = np.ones(1, decays.dtype)
  for decay in decays:
    below = np.convolve(below, [1.0, -decay])
  above = np.zeros_like(below)
  for i, scale in enumerate(scales):
    others = np.ones(1, decays.dtype)
    for decay in np.delete(decays, i):
      others = np.convolve(others, [1.0, -decay])
    above[1:] += scale * others
  ones = np.ones(num_steps, decays.dtype)
  return np.asarray(signal.lfilter(below, below + above, ones))


def _with_gradient(loss: Callable) -> Callable:
  """Returns a function point -> (loss, gradient), with a gradient by complex steps.

  This gradient is exact up to rounding."""
  # No difference is taken, so nothing cancels, however small the step.
  step = 1e-30

  def both(free: np.ndarray) -> tuple[float, np.ndarray]:
    sides = free + 1j * step * np.eye(free.size)
    return float(loss(free)), np.array([loss(side).imag / step for side in sides])

  return both
