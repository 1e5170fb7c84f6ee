"""Epsilon of balls in bins and b-min-sep sampling by simulation: an upper bound with a
confidence, NOT a proof.

The noise is C^{-1} z, with white noise z, and C lower triangular without negative entries. An
example is in a random set S of steps, drawn independently of the other examples. The pair
y = z + C 1_S against y = z dominates the run. For balls in bins see Choquette-Choo et al. (2024,
arXiv:2410.06266). For any distribution of S this follows from steps 1. and 2. of the proof in
`bins`, which take any mean over S.

For balls in bins S is a bin, and only the b products of the bins' images with y enter the loss, so
a loss is cheap to draw. (`bins` has a proved bound.) For b-min-sep (as in arXiv:2602.09338), with
at most b bands, the columns of one S share no row. So the sum over all S is computed step by step;
its state is the step from which the example may take part again.

The confidence: the true delta at an epsilon is the mean of a variable in [0, 1]. If this mean is
at least the requested delta, N draws have a mean of at most m < delta with a chance of at most
exp(-N kl(m, delta)), by Hoeffding's inequality.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import numpy as np
from scipy import special

from dpjax import validate
from dpjax.accounting.matrix import Strategy, turn_images
from dpjax.validate import UserError, Verbatim

# Largest steps_apart or number of bins: each simulated run keeps that many numbers.
MOST_APART = 10**6
_MOST_SAMPLES = 10**10
# Largest count of random numbers drawn at a time, unless one simulated run needs more. It bounds
# the memory.
_CHUNK = 4_000_000
# Finite epsilons that may be returned, up to 1156. The grid must not depend on the draws: the
# confidence holds for a fixed grid only.
_GRID = 1e-3 * 1.005 ** np.arange(2800)


class MonteCarloEpsilon(NamedTuple):
  """An epsilon from simulated privacy losses. Wherever it is shown, say that it is simulated."""

  estimate: float  # least epsilon whose simulated delta is at most `delta`: no guarantee
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
  """Returns a simulated epsilon of `BallsInBinsSampler(num_bins)` with correlated noise, under
  add_or_remove_one. NOT a proof.

  Args:
    strategy: matrix C of the correlated noise, without negative entries.
    noise_multiplier: standard deviation of the white noise z, in clip norms.
    num_samples: number of simulated losses in each direction (the example added, or removed).
    confidence: least probability, over the simulation, that `upper` is a true upper bound.

  The confidence is about the simulation only. The result is the same as if epsilons of a fixed grid
  were tested from the largest down, until one fails. So several tests need no correction.

  Raises:
    UserError: too few samples to certify delta at all: about log(2 / (1 - confidence)) / delta
      samples are needed.

  >>> from dpjax.noise.correlated import Independent
  >>> simulated = balls_in_bins_epsilon(Independent(), noise_multiplier=1.0, num_steps=4,
  ...   num_bins=4, delta=0.01, num_samples=10_000)
  >>> simulated.estimate < simulated.upper < 2.7
  True
  """
  _check_simulation(noise_multiplier, delta, num_samples, confidence)
  images = turn_images(strategy, num_steps, num_bins)
  losses = _losses(images.T @ images, noise_multiplier, num_samples, seed)
  return _certify(losses, delta, confidence)


def _check_simulation(
  noise_multiplier: float, delta: float, num_samples: int, confidence: float
) -> None:
  validate.positive(noise_multiplier=noise_multiplier)
  validate.integer_in(1, _MOST_SAMPLES, num_samples=num_samples)
  validate.open_unit(delta=delta, confidence=confidence)
  # Each direction gets half of the miss probability.
  log_miss = math.log(2 / (1 - confidence))
  if num_samples * -math.log1p(-delta) < log_miss:
    raise UserError(
      f"must be >= {math.ceil(log_miss / delta)} to certify delta={delta!r} at "
      f"confidence={confidence:g}",
      field="num_samples",
      value=num_samples,
    )


def _certify(
  losses: list[np.ndarray], delta: float, confidence: float
) -> MonteCarloEpsilon:
  """Returns the estimated and the certified epsilon from sorted losses in both directions."""
  number = len(losses[0])
  # A simulated mean of at most `limit` shows, with the confidence, that the true mean is below
  # delta.
  limit = _largest_mean(number, delta, math.log(2 / (1 - confidence)))
  at = lambda bar: max(_least_epsilon(loss, bar) for loss in losses)
  return MonteCarloEpsilon(at(delta), at(limit), confidence, number)


def min_sep_epsilon(
  strategy: Strategy,
  *,
  noise_multiplier: float,
  num_steps: int,
  turn_prob: float,
  steps_apart: int,
  delta: float,
  num_samples: int = 2_000_000,
  confidence: float = 0.99,
  seed: int = 0,
) -> MonteCarloEpsilon:
  """Returns a simulated epsilon of `MinSepSampler(turn_prob, steps_apart)` with correlated noise,
  under add_or_remove_one. NOT a proof.

  Args:
    strategy: matrix C without negative entries, and with at most `steps_apart` bands.
    turn_prob: chance that an example takes part in a step in which it may take part.
    num_samples, confidence: as in `balls_in_bins_epsilon`, which also says what the confidence
      is about. The time is proportional to num_samples * num_steps.

  Raises:
    UserError: too few samples, or more bands than steps_apart. With more bands, steps of one
      example share rows, so the sum over all sets of steps cannot be computed step by step.

  >>> from dpjax.noise.correlated import Independent
  >>> simulated = min_sep_epsilon(Independent(), noise_multiplier=1.0, num_steps=4,
  ...   turn_prob=0.1, steps_apart=4, delta=0.01, num_samples=10_000)
  >>> simulated.estimate < simulated.upper < 2.7
  True
  """
  _check_simulation(noise_multiplier, delta, num_samples, confidence)
  validate.probability(turn_prob=turn_prob)
  validate.integer_in(1, MOST_APART, steps_apart=steps_apart)
  validate.integer_at_least(1, num_steps=num_steps)
  if strategy.bands is None or strategy.bands > steps_apart:
    raise UserError(
      f"has {strategy.bands or 'no'} bands; the simulation takes noise of at "
      f"most steps_apart={steps_apart} bands",
      field="correlation",
      value=Verbatim(type(strategy).__name__),
    )
  run = _MinSep(_columns(strategy, num_steps), noise_multiplier, turn_prob, steps_apart)
  # This spawn key differs from that of balls in bins, since both simulations may get the same seed.
  rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0xB5EB,)))
  chunk = max(1, _CHUNK // (num_steps + steps_apart))
  sizes = [min(chunk, num_samples - start) for start in range(0, num_samples, chunk)]
  many = lambda present: np.concatenate([run.losses(rng, n, present) for n in sizes])
  losses = [np.sort(many(True)), np.sort(-many(False))]
  return _certify(losses, delta, confidence)


def _columns(strategy: Strategy, num_steps: int) -> np.ndarray:
  """Returns all entries of a banded C, [bands, steps]: C[t + k, t] at [k, t], or 0 beyond C."""
  bands = min(strategy.bands or 1, num_steps)
  # Columns that are `bands` apart share no row, so one image holds the entries of all of them.
  images = turn_images(strategy, num_steps, bands)
  padded = np.vstack([images, np.zeros((bands, images.shape[1]))])
  steps = np.arange(num_steps)
  return np.array([padded[steps + k, steps % bands] for k in range(bands)])


class _MinSep(NamedTuple):
  """Simulates outputs with and without one example (b-min-sep sampling), and privacy losses."""

  columns: np.ndarray  # [bands, steps]
  noise: float
  turn_prob: float
  steps_apart: int

  def losses(self, rng: np.random.Generator, number: int, present: bool) -> np.ndarray:
    """Returns log dP/dQ of `number` outputs, drawn under P (`present`) or Q: [number]."""
    bands, steps = self.columns.shape
    outputs = rng.standard_normal((steps + bands, number))  # in units of the noise
    if present:
      self._take_part(rng, outputs)
    return self._log_ratio(outputs)

  def _first(self) -> np.ndarray:
    """Returns the chance that an example is first free at each step 0, .., steps_apart - 1.

    A free example may take part. Sampling is assumed to have begun long before step 0."""
    rate = self.turn_prob / (1 + (self.steps_apart - 1) * self.turn_prob)
    chances = np.full(self.steps_apart, rate)
    chances[0] = 1 - (self.steps_apart - 1) * rate
    return chances

  def _take_part(self, rng: np.random.Generator, outputs: np.ndarray) -> None:
    bands, steps = self.columns.shape
    free = rng.choice(
      self.steps_apart, outputs.shape[1], p=self._first()
    )  # from which step on
    for t in range(steps):
      takes = (free <= t) & (rng.random(outputs.shape[1]) < self.turn_prob)
      outputs[t : t + bands, takes] += self.columns[:, t : t + 1] / self.noise
      free[takes] = t + self.steps_apart

  def _log_ratio(self, outputs: np.ndarray) -> np.ndarray:
    """Returns the log of the likelihood ratio, a sum over all sets of steps: [number].

    Each set is weighted by its chance. `waiting[t % steps_apart]` holds the sum over sets after
    which the example may take part again at step t. Columns of one set share no row, so factors of
    its steps multiply. With little noise a factor may exceed float64, so logarithms are added."""
    bands, steps = self.columns.shape
    # At turn_prob 1 an example takes part whenever it may, so log(1 - turn_prob) is -inf.
    with np.errstate(divide="ignore"):
      takes = np.log(self.turn_prob)
      leaves = np.log1p(-self.turn_prob)
      first = np.log(self._first())
    waiting = np.repeat(first[:, None], outputs.shape[1], axis=1)  # [steps_apart, number]
    free = np.full(outputs.shape[1], -np.inf)
    half = (self.columns**2).sum(axis=0) / (2 * self.noise**2)
    for t in range(steps):
      place = t % self.steps_apart
      free = np.logaddexp(free, waiting[place])
      products = self.columns[:, t] @ outputs[t : t + bands] / self.noise
      waiting[place] = takes + free + products - half[t]
      free = free + leaves
    return np.logaddexp(free, special.logsumexp(waiting, axis=0))


def _losses(gram: np.ndarray, noise: float, number: int, seed: int) -> list[np.ndarray]:
  """Returns sorted logs of dP/dQ under P, [number], and of dQ/dP under Q, [number]."""
  values, vectors = np.linalg.eigh(gram)
  # The root is no Cholesky factor, since the Gram matrix may be singular, and rounding may make its
  # eigenvalues negative.
  root = vectors * np.sqrt(np.maximum(values, 0.0))  # root root^T = gram
  rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0xB1B5,)))
  bins = len(gram)
  half = np.diag(gram) / 2

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
  """Returns the mean of max(0, 1 - exp(epsilon - loss)) over sorted losses."""
  # Losses up to epsilon add 0 to the mean.
  above = losses[np.searchsorted(losses, epsilon) :]
  return float(-np.expm1(epsilon - above).sum() / len(losses))


def _least_epsilon(losses: np.ndarray, limit: float) -> float:
  """Returns the smallest epsilon of the grid whose mean delta is at most `limit`, or inf.

  The mean delta falls with epsilon, so bisection finds this epsilon."""
  # A mean of NaN passes nowhere, so it gives inf, too.
  passes = lambda epsilon: bool(_mean_delta(losses, epsilon) <= limit)
  place = bisect.bisect_left(_GRID, True, key=passes)
  return float(_GRID[place]) if place < len(_GRID) else math.inf


def _largest_mean(number: int, delta: float, log_miss: float) -> float:
  """Returns the largest mean m <= delta of N values in [0, 1] with exp(-N kl(m, delta)) <= the miss
  probability. If the true mean were delta or more, a mean of at most m would be that rare."""

  def divergence(mean: float) -> float:
    other = (1 - mean) * math.log((1 - mean) / (1 - delta))
    return other + (mean * math.log(mean / delta) if mean > 0 else 0.0)

  low = 0.0
  high = delta
  # 100 halvings are more than float64 has binary digits. A mean of 0 always meets the condition.
  for _ in range(100):
    middle = (low + high) / 2
    if number * divergence(middle) >= log_miss:
      low = middle
    else:
      high = middle
  return low
