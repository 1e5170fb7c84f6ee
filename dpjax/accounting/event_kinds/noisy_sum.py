"""Gaussian or Laplace noise on a sum of clipped records: all of them, or a Poisson sample."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting import noise_profiles
from dpjax.accounting.event_kinds.elements import sampled_elements
from dpjax.accounting.event_kinds.kind import (
  LEAST_PROB,
  DpEvent,
  EventKind,
  Grid,
  amplify,
  kind_of,
  register,
  zcdp_of_pure,
)
from dpjax.accounting.loss_grid import LossMasses, connect
from dpjax.accounting.proved import ADD, RELATIONS, REPLACE, ZERO
from dpjax.accounting.text import lower, upper

Noise = TypeVar("Noise", dpa.GaussianDpEvent, dpa.LaplaceDpEvent)


class AdditiveNoiseKind(EventKind[Noise]):
  """Base class for a sum over all records, with noise relative to the bound on one record.

  Attributes:
    distribution: name of the noise's distribution in a privacy statement.
  """

  relations = RELATIONS
  event: ClassVar[type[dpa.GaussianDpEvent] | type[dpa.LaplaceDpEvent]]
  distribution: ClassVar[str]

  def under(self, part: Noise, neighboring_relation: str) -> DpEvent:
    if neighboring_relation != REPLACE:
      return part
    return self.event(part.noise_multiplier / 2)

  def divergences(self, part: Noise) -> noise_profiles.Noise:
    """Returns the divergences of the sums with and without a record."""
    raise NotImplementedError

  def pld(self, part: Noise, interval: float) -> Sequence[LossMasses]:
    return sample_pld(
      self.divergences(part),
      sampling_prob=1.0,
      largest=self.grid(part).largest_loss,
      interval=interval,
    )

  def describe(self, part: Noise, unit: str) -> str:
    multiple = lower(part.noise_multiplier, digits=6)
    return f"{self.distribution} noise of {multiple} times the clip norm"


class GaussianKind(AdditiveNoiseKind[dpa.GaussianDpEvent]):
  """A sum over every record, with Gaussian noise."""

  name = "gaussian"
  event = dpa.GaussianDpEvent
  distribution = "Gaussian"

  def divergences(self, part: dpa.GaussianDpEvent) -> noise_profiles.Noise:
    return noise_profiles.gaussian(1 / part.noise_multiplier)

  def grid(self, part: dpa.GaussianDpEvent) -> Grid:
    shift = 1 / part.noise_multiplier
    # The loss is normal, of mean shift^2 / 2 and standard deviation `shift`.
    return Grid(1 / part.noise_multiplier**2, shift**2 / 2 + 10 * shift)

  def zcdp(self, part: dpa.GaussianDpEvent) -> float:
    # This value is exact (Bun and Steinke 2016, arXiv:1605.02065, proposition 1.6).
    return 0.5 / part.noise_multiplier**2

  def gaussian_noise(self, part: dpa.GaussianDpEvent) -> float:
    return part.noise_multiplier


class LaplaceKind(AdditiveNoiseKind[dpa.LaplaceDpEvent]):
  """A sum of records that are clipped in L1 norm, with Laplace noise.

  The noise multiplier is scale / L1 bound.
  """

  name = "laplace"
  event = dpa.LaplaceDpEvent
  distribution = "Laplace"

  def divergences(self, part: dpa.LaplaceDpEvent) -> noise_profiles.Noise:
    return noise_profiles.laplace(1 / part.noise_multiplier)

  def grid(self, part: dpa.LaplaceDpEvent) -> Grid:
    # Laplace noise gives pure differential privacy, so the loss is bounded. With little noise this
    # bound 1 / z is smaller than 1 / z^2, the divergence of Gaussian noise.
    bound = 1 / part.noise_multiplier
    return Grid(min(1 / part.noise_multiplier**2, bound), bound)

  def zcdp(self, part: dpa.LaplaceDpEvent) -> float:
    return zcdp_of_pure(1 / part.noise_multiplier)


class PoissonSampledKind(EventKind[dpa.PoissonSampledDpEvent]):
  """Gaussian or Laplace noise on a sample that each record joins independently.

  There is no proof under replace_one: the sample may then hold a different record for each
  neighbour, and dp_accounting has no dominating pair for this case.
  """

  name = "poisson_sampled"
  event = dpa.PoissonSampledDpEvent
  relations = (ADD, ZERO)

  def elements(self, event: dpa.PoissonSampledDpEvent) -> Iterable[tuple[DpEvent, int]]:
    if event.sampling_probability == 0:
      return []
    validate.probability(sampling_probability=event.sampling_probability)
    # A larger probability q' costs no less than q: drawing with q is drawing with q', and then
    # leaving the record out with chance 1 - q / q'.
    if event.sampling_probability < LEAST_PROB:
      event = dpa.PoissonSampledDpEvent(LEAST_PROB, event.event)
    return sampled_elements(event, dpa.GaussianDpEvent, dpa.LaplaceDpEvent)

  def proofs(
    self, part: dpa.PoissonSampledDpEvent
  ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    laplace = isinstance(part.event, dpa.LaplaceDpEvent)
    return self.relations, ("pld",) if laplace else self.accountants

  def pld(self, part: dpa.PoissonSampledDpEvent, interval: float) -> Sequence[LossMasses]:
    kind = kind_of(part.event)
    assert isinstance(kind, AdditiveNoiseKind)
    return sample_pld(
      kind.divergences(part.event),
      sampling_prob=part.sampling_probability,
      largest=kind.grid(part.event).largest_loss,
      interval=interval,
    )

  def grid(self, part: dpa.PoissonSampledDpEvent) -> Grid:
    whole = kind_of(part.event).grid(part.event)
    sampling_prob = part.sampling_probability
    # The divergence is exact at order 2: sampling with probability q multiplies the chi-square
    # divergence by q^2.
    return Grid(
      amplify(whole.renyi_two, sampling_prob**2),
      amplify(whole.largest_loss, sampling_prob),
    )

  def zcdp(self, part: dpa.PoissonSampledDpEvent) -> float:
    return kind_of(part.event).zcdp(part.event)

  def gaussian_noise(self, part: dpa.PoissonSampledDpEvent) -> float | None:
    return kind_of(part.event).gaussian_noise(part.event)

  def describe(self, part: dpa.PoissonSampledDpEvent, unit: str) -> str:
    sampling_prob = upper(part.sampling_probability, digits=6)
    return (
      f"{kind_of(part.event).describe(part.event, unit)} on a Poisson sample (assumed: every "
      f"{unit} joins each batch on its own, with probability {sampling_prob})"
    )


def sample_pld(
  noise: noise_profiles.Noise, *, sampling_prob: float, largest: float, interval: float
) -> Sequence[LossMasses]:
  """Returns the privacy loss of noise on a Poisson sample, on a grid of `interval`.

  Args:
    noise: divergences of the noise on all records.
    sampling_prob: probability with which a record joins.
    largest: loss of the noise on all records that is exceeded with a negligible chance.
    interval: distance between neighbouring losses of the grid.
  """
  if sampling_prob == 1:
    return connect(lambda epsilons: noise(epsilons)[0], interval=interval, largest=largest)
  return connect(
    functools.partial(
      noise_profiles.removal_deltas, sampling_prob=sampling_prob, noise=noise
    ),
    functools.partial(
      noise_profiles.addition_deltas, sampling_prob=sampling_prob, noise=noise
    ),
    interval=interval,
    largest=amplify(largest, sampling_prob),
    largest_added=largest_added(largest, sampling_prob),
  )


def largest_added(largest: float, prob: float) -> float:
  """Returns -log(1 - prob (1 - e^-largest)): no loss of an added record is above this."""
  # `largest` holds for any probability, also for one near 1.
  return largest if prob == 1 else min(largest, -math.log1p(prob * math.expm1(-largest)))


def gaussian_event(noise_multiplier: float) -> DpEvent:
  """Returns the event of one Gaussian sum with noise of std `noise_multiplier * l2_clip_norm`.

  A noise multiplier of 0 is allowed, and has an infinite epsilon.

  >>> gaussian_event(2)
  GaussianDpEvent(noise_multiplier=2.0)
  """
  validate.non_negative(noise_multiplier=noise_multiplier)
  return dpa.GaussianDpEvent(float(noise_multiplier))


def laplace_event(noise_multiplier: float) -> DpEvent:
  """Returns the event of one Laplace sum. The scale is noise_multiplier * the L1 bound of a record.

  >>> laplace_event(2)
  LaplaceDpEvent(noise_multiplier=2.0)
  """
  validate.non_negative(noise_multiplier=noise_multiplier)
  return dpa.LaplaceDpEvent(float(noise_multiplier))


def poisson_sampled_event(event: DpEvent, *, sampling_prob: float) -> DpEvent:
  """Returns the event of `event` on a batch that each record joins independently.

  The probability of joining is `sampling_prob`.

  >>> from dpjax.accounting import gaussian_event
  >>> poisson_sampled_event(gaussian_event(1), sampling_prob=0.5).sampling_probability
  0.5
  """
  validate.probability(sampling_prob=sampling_prob)
  return dpa.PoissonSampledDpEvent(float(sampling_prob), event)


register(GaussianKind(), LaplaceKind(), PoissonSampledKind())
