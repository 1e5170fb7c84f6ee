"""Likelihood-ratio audits: run a mechanism many times on two neighbouring inputs.

This is the strongest audit if a run is cheap. By Neyman and Pearson, the best test of two inputs
thresholds the ratio of the outputs' likelihoods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpjax import validate
from dpjax.auditing import lower_bounds
from dpjax.auditing.scores import Scores
from dpjax.types import HostArray
from dpjax.validate import UserError

# Number of decimals to which a log-likelihood ratio is rounded.
_DIGITS = 9

# Function (which of the two inputs, 0 or 1; generator; n) -> n independent outputs [n, ...].
Draw = Callable[[int, np.random.Generator, int], Any]
Score = Callable[[Any], np.ndarray]  # outputs [n, ...] -> [n]; large speaks for input 1


def trial_scores(draw: Draw, score: Score, *, num_trials: int, seed: int) -> Scores:
  """Returns the scores of `num_trials` independent runs on each of the two inputs.

  >>> draw = lambda which, rng, n: which + rng.laplace(size=n)
  >>> scores = trial_scores(draw, lambda z: z, num_trials=4, seed=0)
  >>> scores.inside.shape, scores.outside.shape
  ((4,), (4,))
  """
  validate.integer_at_least(2, num_trials=num_trials)
  validate.integer_at_least(0, seed=seed)
  generators = [np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2)]
  outside, inside = (
    np.asarray(score(draw(which, rng, num_trials)), np.float64)
    for which, rng in enumerate(generators)
  )
  if not inside.shape == outside.shape == (num_trials,):
    raise UserError(
      f"must return [{num_trials}] numbers, got {inside.shape}", field="score"
    )
  return Scores(inside, outside)


def likelihood_ratio(
  draw: Draw,
  score: Score,
  *,
  num_trials: int,
  delta: float,
  seed: int,
  confidence: float = 0.95,
) -> float:
  """Returns a lower bound on the epsilon of a mechanism at `delta`, from runs on two neighbours.

  Args:
    draw: `(which, rng, n) -> outputs [n, ...]`, n independent runs on input 0 or 1.
    score: `outputs -> [n]`, fixed in advance. Any score gives a valid bound. The best score is
      the log-likelihood ratio, such as `gaussian_log_ratio` or `laplace_log_ratio`.
    num_trials: number of runs on each input. If all of them are told apart, the bound is about
      log(num_trials / 5.9), so a larger epsilon cannot be refuted.
    confidence: confidence of the bound, with a Bonferroni correction for all thresholds.

  Guarantee: the bound exceeds the true epsilon with probability at most 1 - confidence.

  >>> draw = lambda which, rng, n: which + rng.laplace(scale=0.5, size=n)  # epsilon 2
  >>> score = laplace_log_ratio(0.0, 1.0, 0.5)
  >>> bound = likelihood_ratio(draw, score, num_trials=20_000, delta=0.0, seed=0)
  >>> 1.8 < bound <= 2.0
  True
  """
  scores = trial_scores(draw, score, num_trials=num_trials, seed=seed)
  return lower_bounds.clopper_pearson(scores, delta=delta, confidence=confidence)


def _sum(terms: np.ndarray) -> np.ndarray:
  """Returns the sums over coordinates, without their last digits.

  The last digits would show the rounding of floating-point noise (Mironov 2012), not the mechanism.
  See `dpjax.noise.source`.
  """
  return np.round(terms.reshape(len(terms), -1).sum(axis=1), _DIGITS)


def gaussian_log_ratio(mean_0: HostArray, mean_1: HostArray, std: HostArray) -> Score:
  """Returns z -> log N(z; mean_1, std^2) - log N(z; mean_0, std^2), summed over coordinates.

  >>> gaussian_log_ratio(0.0, 1.0, 1.0)(np.array([0.5, 1.5]))
  array([0., 1.])
  """
  mean_0, mean_1, std = (np.asarray(v, np.float64) for v in (mean_0, mean_1, std))

  def score(outputs: Any) -> np.ndarray:
    z = np.asarray(outputs, np.float64)
    return _sum((mean_1 - mean_0) * (z - (mean_0 + mean_1) / 2) / std**2)

  return score


def laplace_log_ratio(mean_0: HostArray, mean_1: HostArray, scale: HostArray) -> Score:
  """Returns z -> sum over i of log Laplace(z_i; mean_1, scale) - log Laplace(z_i; mean_0, scale).

  >>> laplace_log_ratio(0.0, 1.0, 0.5)(np.array([-3.0, 0.5, 4.0]))
  array([-2.,  0.,  2.])
  """
  mean_0, mean_1, scale = (np.asarray(v, np.float64) for v in (mean_0, mean_1, scale))

  def score(outputs: Any) -> np.ndarray:
    z = np.asarray(outputs, np.float64)
    return _sum((np.abs(z - mean_0) - np.abs(z - mean_1)) / scale)

  return score


def discrete_log_ratio(probs_0: HostArray, probs_1: HostArray) -> Score:
  """Returns the score z -> log probs_1[z] - log probs_0[z] of indices z; infinite if one input
  cannot produce z.

  >>> discrete_log_ratio([0.5, 0.5], [0.5, 0.5])(np.array([0, 1]))
  array([0., 0.])
  """
  with np.errstate(divide="ignore"):
    logs = [np.log(np.asarray(probs, np.float64)) for probs in (probs_0, probs_1)]

  def score(outputs: Any) -> np.ndarray:
    z = np.asarray(outputs)
    return logs[1][z] - logs[0][z]

  return score
