"""Epsilon of balls-in-bins sampling by simulation: a bound with a confidence, NOT a proof.

Choquette-Choo et al. 2024 (arXiv:2410.06266) show that correlated noise C^{-1} z, C lower
triangular and not negative, with an example in a random one of b bins, is dominated by the
pair: y = z m_J + noise against y = noise, where m_j = C (e_j + e_{j+b} + ..) and J is uniform.
The privacy loss has no closed form, but only the b products <m_j, y> enter it, so it is
cheap to draw. What is certified: delta at epsilon is the mean of a variable in [0, 1], which
Hoeffding's inequality bounds from N draws, in the form exp(-N kl(mean, bound)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special

from dpjax import validate
from dpjax.accounting.matrix import Strategy, turn_images
from dpjax.validate import UserError

_CHUNK = 4_000_000  # numbers drawn at a time
_GRID = 1e-3 * 1.005 ** np.arange(2800)  # epsilons that may be answered, to 1160


class MonteCarloEpsilon(NamedTuple):
  """An epsilon from simulated privacy losses; label it so wherever it is shown."""

  estimate: float  # where the mean itself reaches delta: no guarantee at all
  upper: (
    float  # at least the true epsilon with probability `confidence` over the simulation
  )
  confidence: float
  num_samples: int  # per direction


def balls_in_bins_epsilon(
  strategy: Strategy,
  *,
  noise_multiplier: float,
  num_steps: int,
  num_bins: int,
  delta: float,
  num_samples: int = 2_000_000,
  confidence: float = 0.99,
  seed: int = 0,
) -> MonteCarloEpsilon:
  """Monte-Carlo epsilon of `BallsInBinsSampler(num_bins)` with correlated noise, add/remove.

  Args:
    strategy: C, with no negative entry; white noise is `noise_multiplier` clip norms.
    num_samples: simulated losses in each direction (the example added, removed).
    confidence: that `upper` is at least the true epsilon, over the simulation's randomness.

  Guarantee: of the simulation only. The epsilons of a fixed grid are tested from the largest
  down, stopping at the first failure, so no correction for choosing among them is due.

  Raises:
    UserError: too few samples to certify delta at all: at least log(2 / (1 - confidence))
      / delta are needed.

  >>> from dpjax.noise.correlated import Independent
  >>> found = balls_in_bins_epsilon(Independent(), noise_multiplier=1.0, num_steps=4,
  ...   num_bins=4, delta=0.01, num_samples=10_000)
  >>> found.estimate < found.upper < 2.7  # a Gaussian without bins: 2.68 at delta 0.01
  True
  """
  validate.positive(noise_multiplier=noise_multiplier)
  validate.integer_at_least(1, num_samples=num_samples)
  validate.open_unit(delta=delta, confidence=confidence)
  log_miss = math.log(2 / (1 - confidence))  # half for either direction
  if num_samples * -math.log1p(-delta) < log_miss:
    raise UserError(
      f"num_samples={num_samples}: must be >= {math.ceil(log_miss / delta)} to certify "
      f"delta={delta!r} at confidence={confidence:g}"
    )
  images = turn_images(strategy, num_steps, num_bins)
  losses = _losses(images.T @ images, noise_multiplier, num_samples, seed)
  limit = _largest_mean(num_samples, delta, log_miss)
  at = lambda bar: max(_least_epsilon(loss, bar) for loss in losses)
  return MonteCarloEpsilon(at(delta), at(limit), confidence, num_samples)


def _losses(gram: np.ndarray, noise: float, number: int, seed: int) -> list[np.ndarray]:
  """Sorted log-likelihood ratios in favour of the drawn hypothesis, in both directions."""
  values, vectors = np.linalg.eigh(gram)
  root = vectors * np.sqrt(np.maximum(values, 0.0))  # root root^T = gram
  rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0xB1B5,)))
  bins, half = len(gram), np.diag(gram) / 2

  def ratio(number: int, present: bool) -> np.ndarray:
    products = noise * rng.standard_normal((number, bins)) @ root.T  # <m_j, y>
    if present:
      products += gram[rng.integers(bins, size=number)]
    exponents = (products - half) / noise**2
    return special.logsumexp(exponents, axis=1) - math.log(bins)

  def many(present: bool) -> np.ndarray:
    chunk = max(1, _CHUNK // bins)
    sizes = [min(chunk, number - start) for start in range(0, number, chunk)]
    return np.concatenate([ratio(size, present) for size in sizes])

  return [np.sort(many(True)), np.sort(-many(False))]


def _mean_delta(losses: np.ndarray, epsilon: float) -> float:
  """Mean of max(0, 1 - exp(epsilon - loss)) over sorted losses."""
  above = losses[np.searchsorted(losses, epsilon) :]
  return float(-np.expm1(epsilon - above).sum() / len(losses))


def _least_epsilon(losses: np.ndarray, limit: float) -> float:
  """The least epsilon of the grid whose mean delta is at most `limit`; it falls with
  epsilon, so bisection finds what a walk from the top would."""
  low, high = -1, len(_GRID) - 1
  if _mean_delta(losses, _GRID[high]) > limit:
    return math.inf
  while high - low > 1:
    middle = (low + high) // 2
    passes = _mean_delta(losses, _GRID[middle]) <= limit
    low, high = (low, middle) if passes else (middle, high)
  return float(_GRID[high])


def _largest_mean(number: int, delta: float, log_miss: float) -> float:
  """The largest mean m <= delta of N values in [0, 1] with exp(-N kl(m, delta)) <= the miss
  probability: were the true mean delta or more, so small a mean would be that rare."""

  def divergence(mean: float) -> float:
    other = (1 - mean) * math.log((1 - mean) / (1 - delta))
    return other + (mean * math.log(mean / delta) if mean > 0 else 0.0)

  return _bisect(lambda mean: number * divergence(mean) >= log_miss, 0.0, delta)


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
  """About the largest x in [low, high] with holds(x), given holds(low) and that it ends."""
  for _ in range(100):
    middle = (low + high) / 2
    low, high = (middle, high) if holds(middle) else (low, middle)
  return low
