"""Noise on a Poisson sample of records, where a user may own several records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting.event_kinds.kind import DpEvent, EventKind, Grid, kind_of, register
from dpjax.accounting.loss_grid import LossMasses
from dpjax.accounting.proved import ZERO
from dpjax.accounting.text import upper
from dpjax.validate import UserError

# Largest number of a user's records, if more than one is drawn on average. The accounting holds a
# chance for each number of drawn records. With a mean of at most 1, m drawn records have a chance
# of at most 1 / m!. So fewer than 171 chances are held, however many records the user owns.
_MOST_RECORDS = 256
_MOST_AT_MEAN_ONE = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class BoundedContributionDpEvent(dpa.DpEvent):
  """A Gaussian sum over a Poisson sample, where a user owns at most `max_contribution` records.

  The noise multiplier is std / (clip norm of ONE record). `max_contribution` may be at most 256 if
  max_contribution * sampling_prob > 1.
  """

  sampling_prob: float
  max_contribution: int
  noise_multiplier: float

  def __post_init__(self):
    prob = self.sampling_prob
    validate.probability(sampling_prob=prob)
    validate.integer_in(1, _MOST_AT_MEAN_ONE, max_contribution=self.max_contribution)
    if self.max_contribution * prob > 1 + 1e-12:
      validate.integer_in(1, _MOST_RECORDS, max_contribution=self.max_contribution)
    validate.non_negative(noise_multiplier=self.noise_multiplier)


class BoundedContributionKind(EventKind[BoundedContributionDpEvent]):
  """Accounting of a user with up to k records, each drawn independently with probability q.

  In the neighbour all of the user's records are empty. If i of the user's records are drawn, the
  sum moves by a vector of norm at most i C. So the worst pair is a mixture of N(i C), with i from
  Binomial(k, q), against N(0). This pair dominates every mixture with vectors of these norms, in
  both directions (Choquette-Choo et al. 2023, arXiv:2310.15526, section 4; for examples of users:
  Charles et al. 2024, arXiv:2407.07737). It is exact if all k gradients have the same direction.
  """

  name = "bounded_contribution"
  event = BoundedContributionDpEvent
  relations = (ZERO,)
  accountants = ("pld",)

  def pld(self, part: BoundedContributionDpEvent, interval: float) -> Sequence[LossMasses]:
    from dpjax.accounting.mixture_pld import (
      binomial_counts,
      mixture_pld,
    )  # few runs need it

    counts, chances = binomial_counts(part.max_contribution, part.sampling_prob)
    return mixture_pld(
      chances=chances, shifts=counts / part.noise_multiplier, interval=interval
    )

  def grid(self, part: BoundedContributionDpEvent) -> Grid:
    from dpjax.accounting import mixture_pld

    counts, chances = mixture_pld.binomial_counts(part.max_contribution, part.sampling_prob)
    shifts = counts / part.noise_multiplier
    return Grid(
      mixture_pld.typical_renyi_two(chances=chances, shifts=shifts),
      mixture_pld.largest_loss(chances=chances, shifts=shifts),
    )

  def gaussian_noise(self, part: BoundedContributionDpEvent) -> float:
    return part.noise_multiplier

  def sampling_prob(self, part: BoundedContributionDpEvent) -> float:
    return part.sampling_prob

  def describe(self, part: BoundedContributionDpEvent, unit: str) -> str:
    noise = dpa.GaussianDpEvent(part.noise_multiplier)
    return (
      f"{kind_of(noise).describe(noise, unit)} of one record on a Poisson sample (assumed: every "
      f"record joins each batch on its own, with probability "
      f"{upper(part.sampling_prob, digits=6)}, and a {unit} owns at most "
      f"{part.max_contribution} of them)"
    )


def bounded_contribution_event(
  event: DpEvent, *, sampling_prob: float, max_contribution: int
) -> DpEvent:
  """Returns the event of a Gaussian sum over a Poisson sample, where a user owns several records.

  Args:
    event: a Gaussian sum; its noise multiplier is std / clip norm of one record.
    sampling_prob: probability with which one record is drawn.
    max_contribution: largest number of records of one user. It may be at most 256 if
      max_contribution * sampling_prob > 1.

  The event is accounted under replace_special, by PLD. So in the neighbour all of a user's records
  are empty, but stay in place.

  Raises:
    UserError: numbers out of their range, or an event that is no Gaussian sum.

  >>> from dpjax.accounting import gaussian_event
  >>> bounded_contribution_event(gaussian_event(4), sampling_prob=0.01, max_contribution=3)
  BoundedContributionDpEvent(sampling_prob=0.01, max_contribution=3, ...=4.0)
  """
  # The event checks its numbers, this one under the event's own name.
  validate.probability(sampling_prob=sampling_prob)
  if not isinstance(event, dpa.GaussianDpEvent):
    raise UserError(
      "a sample of bounded contributions takes a GaussianDpEvent",
      field="event",
      value=event,
    )
  return BoundedContributionDpEvent(
    float(sampling_prob), max_contribution, event.noise_multiplier
  )


register(BoundedContributionKind())
