"""Gaussian differential privacy by its central limit: an APPROXIMATION, never a proof.

A run of many subsampled steps is nearly mu-GDP (Dong, Roth and Su 2019, arXiv:1905.02383,
section 5; Bu, Dong, Long and Su 2020, arXiv:1911.11607), with

  mu^2 = sum over steps of q^2 (e^(1 / z^2) - 1)        (Poisson, rate q, multiplier z)

The limit is that of many steps with q sqrt(steps) fixed. For a finite number of steps the epsilon
can be TOO SMALL, and is far too small at small delta and little noise; a unit test compares it
with the exact value. Use the limit to see how epsilon scales, and its order of magnitude. Nothing
in dpjax calibrates by it. Unsampled Gaussian noise is exactly mu-GDP, mu = 1 / z, and is labelled
proved.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting.event_kinds.elements import accountable, claims
from dpjax.accounting.event_kinds.kind import DpEvent, quiet
from dpjax.validate import UserError

# Smallest mu that is computed with: smaller ones lose their digits in differences of tails.
_LEAST_MU = 1e-6
# Largest relative error in delta of dp_accounting's epsilon for it, with a margin.
_ROOT_ERROR = 1e-7
# Largest 1 / z^2 whose exponential is a float.
_LARGEST = 700.0


class Approximation(NamedTuple):
  """An epsilon by Gaussian DP, and whether it is proved or an approximation by a central limit."""

  epsilon: float
  mu: float  # the run is (nearly) as private as N(0, 1) against N(mu, 1)
  # Key of `statement.EPSILON_KINDS`: "approximation" if the central limit is used.
  epsilon_kind: str


def approximate(
  event: DpEvent, *, delta: float, neighboring_relation: str = "add_or_remove_one"
) -> Approximation:
  """Returns an epsilon of `event` at `delta` by Gaussian DP; NOT a bound if sampling is used.

  Raises UserError for a part that is accounted neither as a Gaussian nor as a Poisson-sampled
  Gaussian, and for a relation under which the part's sampler has no analysis.

  >>> approximate(dpa.GaussianDpEvent(2.0), delta=1e-5).epsilon_kind
  'proved'
  >>> step = dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(1.1))
  >>> result = approximate(dpa.SelfComposedDpEvent(step, 4000), delta=1e-5)
  >>> round(result.epsilon, 2), round(result.mu, 3), result.epsilon_kind
  (2.99, 0.717, 'approximation')
  """
  validate.open_unit(delta=delta)
  steps, _ = accountable(event, neighboring_relation, "pld")
  mu = math.inf
  if dpa.NonPrivateDpEvent() not in steps:
    # fsum rounds only once. A plain sum over many parts would lose digits of a proved value.
    mu = math.sqrt(math.fsum(times * _mu_squared(part) for part, times in steps.items()))
  if math.isinf(mu):
    return Approximation(math.inf, math.inf, "none")
  # A single sampled part makes the epsilon of the run an approximation.
  is_exact = all(isinstance(part, dpa.GaussianDpEvent) for part in steps)
  exact_kind = "claimed" if claims(event) else "proved"
  epsilon_kind = exact_kind if is_exact else "approximation"
  return Approximation(epsilon(mu, delta=delta), mu, epsilon_kind)


def _mu_squared(part: DpEvent) -> float:
  if isinstance(part, dpa.GaussianDpEvent):
    return part.noise_multiplier**-2
  is_sample = isinstance(part, dpa.PoissonSampledDpEvent)
  if is_sample and isinstance(part.event, dpa.GaussianDpEvent):
    # This is the central limit of Bu et al. 2020.
    exponent = part.event.noise_multiplier**-2
    if exponent > _LARGEST:
      return math.inf
    return part.sampling_probability**2 * math.expm1(exponent)
  raise UserError(
    "the central limit is known here for Gaussian noise, unsampled or Poisson "
    "sampled; use accountant='pld' or 'rdp'",
    field="event",
    value=part,
  )


def epsilon(mu: float, *, delta: float) -> float:
  """Returns the epsilon of a mechanism that IS mu-GDP, by inverting
  delta = Phi(mu / 2 - eps / mu) - e^eps Phi(-mu / 2 - eps / mu).

  It is exact up to rounding, and rounded up; a mu below 1e-6 counts as 1e-6.

  >>> round(epsilon(0.5, delta=1e-5), 3)
  1.993
  """
  validate.non_negative(mu=mu)
  if mu == 0:
    return 0.0
  mu = max(mu, _LEAST_MU)
  with quiet():
    return float(dpa.get_epsilon_gaussian(1 / mu, delta * (1 - _ROOT_ERROR), tol=1e-16))
