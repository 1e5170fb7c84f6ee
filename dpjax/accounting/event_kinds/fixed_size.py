"""Noise on a uniformly drawn subset of fixed size."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar

import dp_accounting as dpa
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.elements import sampled_elements
from dpjax.accounting.event_kinds.kind import (
  ORDERS,
  DpEvent,
  EventKind,
  Grid,
  amplify,
  kind_of,
  register,
)
from dpjax.accounting.loss_grid import LossMasses, connect
from dpjax.accounting.proved import ADD, REPLACE
from dpjax.validate import UserError

# Largest number of records, which must fit into a signed integer of 64 bits.
_MOST_RECORDS = 2**63 - 1


# Type of an event on a sample of a fixed size.
Sample = TypeVar(
  "Sample", dpa.SampledWithoutReplacementDpEvent, dpa.SampledWithReplacementDpEvent
)


class SampleKind(EventKind[Sample]):
  """Base class for Gaussian noise on a sample of a fixed number of records. Subclasses define how
  the sample is drawn, and the proofs."""

  event: ClassVar[
    type[dpa.SampledWithoutReplacementDpEvent] | type[dpa.SampledWithReplacementDpEvent]
  ]

  def elements(self, event: Sample) -> Iterable[tuple[DpEvent, int]]:
    if event.sample_size == 0:
      return []
    check_sizes(event.source_dataset_size, event.sample_size)
    return sampled_elements(event, dpa.GaussianDpEvent)

  def under(self, part: Sample, neighboring_relation: str) -> DpEvent:
    # The noise becomes relative to 2 C, the sensitivity to a replaced record. A joining record also
    # takes the place of another one.
    noise = dpa.GaussianDpEvent(noise_of(part) / 2)
    if neighboring_relation == ADD:
      return self.joining(part, noise)
    return self.event(part.source_dataset_size, part.sample_size, noise)

  def joining(self, part: Sample, noise: dpa.GaussianDpEvent) -> DpEvent:
    """Returns the event of a joining record; `noise` is relative to 2 l2_clip_norm."""
    raise NotImplementedError

  def gaussian_noise(self, part: Sample) -> float | None:
    return kind_of(part.event).gaussian_noise(part.event)


class FixedSizeKind(SampleKind[dpa.SampledWithoutReplacementDpEvent]):
  """Gaussian noise on b of n or more records, which are drawn uniformly without replacement.

  For exchanging a record, `dpjax.accounting.exchanged_sample` has the proof.

  For adding or removing a record x, let n be the size of the larger data set, and q = b / n. Draw b
  of the other records, and among these one record j. With x in the data, the batch is the b records
  with probability 1 - q, and else has x in the place of j. So, around the sum of the b records, the
  outputs are (1 - q) N(0) + q N(x - j) with x, and N(0) without x. Both x and j have norm C at
  most. As divergences are jointly convex, both directions are at most those of
  (1 - q) N(0) + q N(2 C) and N(0): the pair of Poisson sampling at twice the sensitivity. This
  bound is exact if all other gradients have norm C and the opposite direction of x. A joining
  record pushes another one out, so it would be wrong to account a Poisson sample of the same noise
  (pitfall P14).
  """

  name = "sampled_without_replacement"
  event = dpa.SampledWithoutReplacementDpEvent
  relations = (REPLACE, ADD)

  def joining(
    self, part: dpa.SampledWithoutReplacementDpEvent, noise: dpa.GaussianDpEvent
  ) -> DpEvent:
    return dpa.PoissonSampledDpEvent(self.sampling_prob(part), noise)

  def rdp(self, part: dpa.SampledWithoutReplacementDpEvent) -> np.ndarray:
    from dpjax.accounting.exchanged_sample import exchanged_rdp  # few runs need it

    return exchanged_rdp(
      sampling_prob=self.sampling_prob(part),
      noise_multiplier=2 * noise_of(part),
      orders=np.array(ORDERS),
    )

  def pld(
    self, part: dpa.SampledWithoutReplacementDpEvent, interval: float
  ) -> Sequence[LossMasses]:
    from dpjax.accounting.exchanged_sample import profile

    deltas = functools.partial(
      profile,
      sampling_prob=self.sampling_prob(part),
      noise_multiplier=2 * noise_of(part),
    )
    return connect(deltas, interval=interval, largest=self.grid(part).largest_loss)

  def grid(self, part: dpa.SampledWithoutReplacementDpEvent) -> Grid:
    whole = kind_of(part.event).grid(part.event)
    prob = self.sampling_prob(part)
    return Grid(amplify(whole.renyi_two, prob**2), amplify(whole.largest_loss, prob))

  def zcdp(self, part: dpa.SampledWithoutReplacementDpEvent) -> float:
    return kind_of(part.event).zcdp(part.event)

  def sampling_prob(self, part: dpa.SampledWithoutReplacementDpEvent) -> float:
    return part.sample_size / part.source_dataset_size

  def describe(self, part: dpa.SampledWithoutReplacementDpEvent, unit: str) -> str:
    return (
      f"{kind_of(part.event).describe(part.event, unit)} on a fixed-size sample (assumed: "
      f"{part.sample_size} distinct {unit}s of {part.source_dataset_size} or more, drawn afresh "
      "and uniformly, and kept secret)"
    )


def noise_of(part: DpEvent) -> float:
  """Returns the noise multiplier of the Gaussian sum that a sampled event holds."""
  return part.event.noise_multiplier  # type: ignore[attr-defined]


def check_sizes(num_examples: int, batch_size: int) -> None:
  """Raises UserError for a batch size above the number of records, or numbers below 1."""
  validate.integer_in(1, _MOST_RECORDS, num_examples=num_examples)
  validate.integer_at_least(1, batch_size=batch_size)
  if batch_size > num_examples:
    raise UserError(
      f"must be at most num_examples={num_examples}", field="batch_size", value=batch_size
    )


def fixed_size_event(event: DpEvent, *, num_examples: int, batch_size: int) -> DpEvent:
  """Returns the event of `event` on a uniformly drawn subset of `batch_size` records.

  Args:
    event: a Gaussian sum; its noise multiplier is std / l2_clip_norm under both relations.
    num_examples: number of records, or a lower bound on it. Under add_or_remove_one it must be a
      public lower bound on the size of the larger neighbour.
    batch_size: number of records in each batch.

  Raises:
    UserError: batch_size above num_examples, or numbers below 1.

  >>> from dpjax.accounting import gaussian_event
  >>> fixed_size_event(gaussian_event(1), num_examples=10, batch_size=2).sample_size
  2
  """
  check_sizes(num_examples, batch_size)
  return dpa.SampledWithoutReplacementDpEvent(int(num_examples), int(batch_size), event)


register(FixedSizeKind())
