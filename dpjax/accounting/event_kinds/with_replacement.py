"""Noise on a batch of fixed size, drawn with replacement."""

from __future__ import annotations

import dataclasses

import dp_accounting as dpa
from dp_accounting.pld import privacy_loss_distribution as pld_lib

from dpjax.accounting.event_kinds.bounded_contribution import BoundedContributionDpEvent
from dpjax.accounting.event_kinds.fixed_size import SampleKind, fixed_size_event
from dpjax.accounting.event_kinds.kind import DpEvent, kind_of, noise_multiplier_of
from dpjax.accounting.proved import ADD, REPLACE


class WithReplacementKind(SampleKind[dpa.SampledWithReplacementDpEvent]):
  """Gaussian noise on b uniform draws, with replacement, out of n records or more.

  `dpjax.accounting.exchanged_copies` has the proofs. A joining record is accounted as b records of
  one user, each drawn with chance 1 / n, at twice the shift (`bounded_contribution`).
  """

  name = "sampled_with_replacement"
  event = dpa.SampledWithReplacementDpEvent
  relations = (REPLACE, ADD)
  accountants = ("pld",)

  def under_add_or_remove_one(
    self, part: dpa.SampledWithReplacementDpEvent
  ) -> BoundedContributionDpEvent:
    # Each copy of a joining record takes the place of another record, so each copy moves the sum by
    # up to 2 C.
    inner = kind_of(part.event).under_replace_one(part.event)
    return BoundedContributionDpEvent(
      1 / part.source_dataset_size, part.sample_size, noise_multiplier_of(inner)
    )

  def pld(
    self, part: dpa.SampledWithReplacementDpEvent, interval: float
  ) -> pld_lib.PrivacyLossDistribution:
    from dpjax.accounting.exchanged_copies import copies_pld  # few runs need it

    return copies_pld(
      num_examples=part.source_dataset_size,
      batch_size=part.sample_size,
      noise_multiplier=2 * noise_multiplier_of(part.event),
      interval=interval,
    )

  # The next two methods only guide the choice of a grid.
  def renyi_two(self, part: dpa.SampledWithReplacementDpEvent) -> float:
    joining = self.under_add_or_remove_one(part)
    # The part's noise is already relative to the sensitivity 2 C, so it must not be halved.
    joining = dataclasses.replace(joining, noise_multiplier=noise_multiplier_of(part.event))
    return kind_of(joining).renyi_two(joining)

  def largest_loss(self, part: dpa.SampledWithReplacementDpEvent) -> float:
    from dpjax.accounting.exchanged_copies import copies_largest_loss

    noise = 2 * noise_multiplier_of(part.event)
    return copies_largest_loss(part.source_dataset_size, part.sample_size, noise)

  def joining_prob(self, part: dpa.SampledWithReplacementDpEvent) -> float:
    from dpjax.accounting.exchanged_copies import joining_prob

    return joining_prob(part.source_dataset_size, part.sample_size)

  def describe(self, part: dpa.SampledWithReplacementDpEvent, unit: str) -> str:
    return (
      f"{kind_of(part.event).describe(part.event, unit)} on a batch with replacement (assumed: "
      f"{part.sample_size} draws out of {part.source_dataset_size} {unit}s or more, each uniform "
      "and on its own, every copy clipped by itself)"
    )


def with_replacement_event(
  event: DpEvent, *, num_examples: int, batch_size: int
) -> DpEvent:
  """Returns the event of `event` on `batch_size` records drawn uniformly WITH replacement.

  Arguments and errors are those of `fixed_size_event`; l2_clip_norm bounds each copy of a record.

  >>> from dpjax.accounting import gaussian_event
  >>> with_replacement_event(gaussian_event(1), num_examples=10, batch_size=2).sample_size
  2
  """
  # This call checks both numbers.
  fixed_size_event(event, num_examples=num_examples, batch_size=batch_size)
  return dpa.SampledWithReplacementDpEvent(int(num_examples), int(batch_size), event)
