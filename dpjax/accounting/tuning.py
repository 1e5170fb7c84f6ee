"""The cost of choosing the best of several private runs, and how many runs to make.

Trying a fixed number k of settings and keeping the best is accounted as k runs. A RANDOM
number of trials, kept secret, can cost little more than two runs (Papernot and Steinke 2022,
arXiv:2110.03620). The proof needs these conditions, which no accountant can check:

- the number of trials is drawn by `draw_trials`, from a distribution fixed beforehand;
- every trial draws its setting at random, independently of the data, and its own noise;
- only the best trial is released: not the others, nor their scores, nor their number;
- the score uses only public data and the released output, or its cost is part of the event.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib
from scipy import optimize

from dpjax import validate
from dpjax.validate import UserError, Verbatim

MOST_SHAPE = 1e6  # of the distribution of the number of trials


def select_rdp(
  orders: Sequence[float], rdp: np.ndarray, *, mean_trials: float, shape: float = 1.0
) -> np.ndarray:
  """Returns a bound on the Renyi divergence of the best of K runs at each order, [len(orders)].

  Args:
    orders: Renyi orders, all > 1.
    rdp: upper bound on one run's divergence at each order, [len(orders)].
    mean_trials, shape: parameters of the distribution of K; see `draw_trials`.

  Source: theorems 2 (truncated negative binomial) and 6 (Poisson) of arXiv:2110.03620.

  >>> once = np.array([0.5, 1.0])  # at orders 2 and 4
  >>> select_rdp([2, 4], once, mean_trials=1.0, shape=1.0).round(3)
  array([1. , 1.5])
  """
  order = np.asarray(orders, float)
  if np.any(order <= 1) or order.shape != np.shape(rdp):
    raise UserError(
      "must be > 1, one for each value of rdp", field="orders", value=list(orders)
    )
  check_trials(mean_trials, shape)
  if shape == math.inf:
    # In the limit of an infinite shape, the number of trials has a Poisson distribution.
    of_one = np.asarray(rdp, float)
    failure = [
      rdp_lib.compute_delta(list(order), list(of_one), math.log1p(1 / (alpha - 1)))[0]
      for alpha in order
    ]
    several = mean_trials * np.array(failure) + math.log(mean_trials) / (order - 1)
    return of_one + several
  gamma = stopping_prob(mean_trials, shape)
  constant = (1 + shape) * np.min((1 - 1 / order) * rdp - math.log(gamma) / order)
  at_each = rdp + math.log(mean_of(mean_trials, shape)) / (order - 1) + constant
  # Divergences grow with the order, so a bound at a larger order holds at smaller orders, too.
  later = [np.min(at_each[order >= alpha]) for alpha in order]
  return np.array(later)


def stopping_prob(mean_trials: float, shape: float) -> float:
  """Returns gamma of the truncated negative binomial distribution with this mean, or slightly less.

  Raises UserError for an infinite shape.

  >>> stopping_prob(10.0, 1.0)
  0.1
  """
  check_trials(mean_trials, shape)
  if shape == math.inf:
    raise UserError(
      "the Poisson distribution has no stopping probability",
      field="shape",
      value=Verbatim("inf"),
    )
  if mean_trials == 1:
    return 1.0
  if shape == 1:
    return 1 / mean_trials
  # The root is searched in log(gamma), since gamma may be far below any fixed tolerance.
  excess = lambda log_gamma: math.log(_mean(math.exp(log_gamma), shape) / mean_trials)
  low = math.log(min(1.0, 1 / mean_trials))
  while excess(low) < 0:
    low *= 2
  high = -1e-12
  # The mean is barely above 1. A larger one costs more.
  if excess(high) > 0:
    return math.exp(high) * (1 - 1e-9)
  root = float(optimize.brentq(excess, low, high, xtol=1e-13))  # type: ignore[arg-type]
  # A smaller gamma means more trials, and costs more. So gamma is lowered by more than the error of
  # the root.
  return math.exp(root) * (1 - 1e-9)


def mean_of(mean_trials: float, shape: float) -> float:
  """Returns the mean of the drawn number of trials: `mean_trials`, or slightly more.

  `stopping_prob` is rounded down. At a large shape, that adds up to a thousandth to the mean.

  >>> mean_of(10.0, 1.0)
  10.0
  """
  if shape == math.inf:
    return mean_trials
  return max(mean_trials, _mean(stopping_prob(mean_trials, shape), shape))


def _mean(gamma: float, shape: float) -> float:
  """Returns the mean shape (1 - g) / (g (1 - g^shape)) of trials, or its limit at shape 0.

  The formula is from definition 1 of arXiv:2110.03620, with g for `gamma`."""
  if gamma == 1:
    return 1.0
  log_gamma = math.log(gamma)
  if shape == 0:
    # The formula below is 0 / 0 at shape 0, so its limit is returned.
    return math.expm1(-log_gamma) / -log_gamma
  return shape * math.expm1(-log_gamma) / -math.expm1(shape * log_gamma)


def draw_trials(rng: np.random.Generator, *, mean_trials: float, shape: float = 1.0) -> int:
  """Draws how many runs to make. Keep the number secret.

  Args:
    rng: random generator; seed it from the operating system, as nobody may know the number.
    mean_trials: mean of the number K of runs, at least 1.
    shape: parameter of the distribution of K. 1 is geometric, 0 logarithmic, and inf Poisson; with
      Poisson K may be 0, and then nothing is released. Any other value is a truncated negative
      binomial, with P(K = k) proportional to (1 - gamma)^k Gamma(k + shape) / k!.

  >>> draw_trials(np.random.default_rng(0), mean_trials=1.0)
  1
  """
  check_trials(mean_trials, shape)
  if shape == math.inf:
    return int(rng.poisson(mean_trials))
  gamma = stopping_prob(mean_trials, shape)
  if gamma == 1:
    return 1
  if shape == 0:
    return int(rng.logseries(1 - gamma))
  if shape == 1:
    return int(rng.geometric(gamma))
  # A negative binomial number is a sum of logarithmic ones, as many as a Poisson process has
  # arrivals up to the time `rate`. The truncation leaves out that there is none. So the first
  # arrival is drawn given that it comes. Drawing until there is one would take 1 / rate draws.
  rate = -shape * math.log(gamma)
  first = -math.log1p(rng.random() * math.expm1(-rate))
  several = 1 + rng.poisson(max(0.0, rate - first))
  return int(rng.logseries(1 - gamma, several).sum())


def check_trials(mean_trials: float, shape: float) -> None:
  """Raises UserError unless `draw_trials` has a distribution with these parameters."""
  validate.positive(mean_trials=mean_trials)
  if mean_trials < 1:
    raise UserError("must be >= 1", field="mean_trials", value=mean_trials)
  # Above that the distribution is nearly Poisson's, and rounding decides its mean.
  if not (
    isinstance(shape, int | float) and (0 <= shape <= MOST_SHAPE or shape == math.inf)
  ):
    raise UserError(f"must be in [0, {MOST_SHAPE:g}], or inf", field="shape", value=shape)
