"""Noise on a Poisson sample, which every record joins independently."""

from __future__ import annotations

import math
from collections.abc import Iterable

import dp_accounting as dpa
from dp_accounting.pld import privacy_loss_distribution as pld_lib

from dpjax import validate
from dpjax.accounting.event_kinds.gaussian import sampled_gaussian_pld
from dpjax.accounting.event_kinds.kind import (
  LEAST_PROB,
  DpEvent,
  EventKind,
  amplified,
  kind_of,
  noise_multiplier_of,
  sampled,
)
from dpjax.accounting.event_kinds.laplace import sampled_laplace_pld
from dpjax.accounting.proved import ADD, ZERO
from dpjax.accounting.text import upper


class PoissonSampledKind(EventKind[dpa.PoissonSampledDpEvent]):
  """Gaussian or Laplace noise on a sample that each record joins independently.

  There is no proof under replace_one: the sample may then hold a different record for each
  neighbour, and dp_accounting has no dominating pair for this case.
  """

  name = "poisson_sampled"
  event = dpa.PoissonSampledDpEvent
  fields = ("sampling_probability", "event")
  relations = (ADD, ZERO)

  def elements(self, event: dpa.PoissonSampledDpEvent) -> Iterable[tuple[DpEvent, int]]:
    prob = event.sampling_probability
    if prob == 0:
      return []
    validate.probability(sampling_probability=prob)
    return sampled(
      event,
      (dpa.GaussianDpEvent, dpa.LaplaceDpEvent),
      lambda inner: dpa.PoissonSampledDpEvent(prob, inner),
    )

  def accountants_of(self, part: dpa.PoissonSampledDpEvent) -> tuple[str, ...]:
    return ("pld",) if isinstance(part.event, dpa.LaplaceDpEvent) else self.accountants

  def pld(
    self, part: dpa.PoissonSampledDpEvent, interval: float
  ) -> pld_lib.PrivacyLossDistribution:
    noise = part.event
    of_noise = (
      sampled_laplace_pld if isinstance(noise, dpa.LaplaceDpEvent) else sampled_gaussian_pld
    )
    return of_noise(
      noise_multiplier_of(noise),
      interval,
      sampling_prob=_accounted_prob(part),
    )

  def renyi_two(self, part: dpa.PoissonSampledDpEvent) -> float:
    whole = kind_of(part.event).renyi_two(part.event)
    # This is exact at order 2: sampling with probability q multiplies the chi-square divergence by
    # q^2.
    return amplified(whole, _accounted_prob(part) ** 2)

  def largest_loss(self, part: dpa.PoissonSampledDpEvent) -> float:
    whole = kind_of(part.event).largest_loss(part.event)
    return amplified(whole, _accounted_prob(part))

  def mu_squared(self, part: dpa.PoissonSampledDpEvent) -> tuple[float, bool]:
    if not isinstance(part.event, dpa.GaussianDpEvent):
      return super().mu_squared(part)
    # This is the central limit of Bu et al. 2020; see `gdp`.
    square = part.sampling_probability**2 * math.expm1(part.event.noise_multiplier**-2)
    return square, False

  def zcdp(self, part: dpa.PoissonSampledDpEvent) -> float:
    return kind_of(part.event).zcdp(part.event)

  def gaussian_noise(self, part: dpa.PoissonSampledDpEvent) -> float | None:
    return kind_of(part.event).gaussian_noise(part.event)

  def describe(self, part: dpa.PoissonSampledDpEvent, unit: str) -> str:
    prob = upper(part.sampling_probability, digits=6)
    return (
      f"{kind_of(part.event).describe(part.event, unit)} on a Poisson sample (assumed: every "
      f"{unit} joins each batch on its own, with probability {prob})"
    )


def _accounted_prob(part: dpa.PoissonSampledDpEvent) -> float:
  # A larger probability q' costs no less than q: drawing with q is drawing with q', and then
  # leaving the record out with chance 1 - q / q'.
  return max(part.sampling_probability, LEAST_PROB)


def poisson_sampled_event(event: DpEvent, *, sampling_prob: float) -> DpEvent:
  """Returns the event of `event` on a batch that each record joins independently.

  The probability of joining is `sampling_prob`.

  >>> from dpjax.accounting import gaussian_event
  >>> poisson_sampled_event(gaussian_event(1), sampling_prob=0.5).sampling_probability
  0.5
  """
  validate.probability(sampling_prob=sampling_prob)
  return dpa.PoissonSampledDpEvent(float(sampling_prob), event)
