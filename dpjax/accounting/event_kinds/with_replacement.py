"""Noise on a batch of fixed size, drawn with replacement."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import dp_accounting as dpa

from dpjax.accounting.event_kinds.bounded_contribution import BoundedContributionDpEvent
from dpjax.accounting.event_kinds.fixed_size import SampleKind, check_sizes, noise_of
from dpjax.accounting.event_kinds.kind import DpEvent, Grid, kind_of, register
from dpjax.accounting.loss_grid import LossMasses, connect
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

  def joining(
    self, part: dpa.SampledWithReplacementDpEvent, noise: dpa.GaussianDpEvent
  ) -> BoundedContributionDpEvent:
    return BoundedContributionDpEvent(
      1 / part.source_dataset_size, part.sample_size, noise.noise_multiplier
    )

  def pld(
    self, part: dpa.SampledWithReplacementDpEvent, interval: float
  ) -> Sequence[LossMasses]:
    from dpjax.accounting.exchanged_copies import copies_profile  # few runs need it

    deltas = functools.partial(
      copies_profile,
      num_examples=part.source_dataset_size,
      batch_size=part.sample_size,
      noise_multiplier=2 * noise_of(part),
    )
    return connect(deltas, interval=interval, largest=self.grid(part).largest_loss)

  def grid(self, part: dpa.SampledWithReplacementDpEvent) -> Grid:
    from dpjax.accounting.exchanged_copies import copies_largest_loss

    # The part's noise is already relative to the sensitivity 2 C, so it is not halved.
    joining = self.joining(part, dpa.GaussianDpEvent(noise_of(part)))
    noise = 2 * noise_of(part)
    return Grid(
      kind_of(joining).grid(joining).renyi_two,
      copies_largest_loss(part.source_dataset_size, part.sample_size, noise),
    )

  def sampling_prob(self, part: dpa.SampledWithReplacementDpEvent) -> float:
    from dpjax.accounting.exchanged_copies import sampling_prob

    return sampling_prob(part.source_dataset_size, part.sample_size)

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
  check_sizes(num_examples, batch_size)
  return dpa.SampledWithReplacementDpEvent(int(num_examples), int(batch_size), event)


register(WithReplacementKind())
