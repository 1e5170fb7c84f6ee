"""Noise on a batch of fixed size, drawn with replacement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld_lib

from dpjax import validate
from dpjax.accounting.event_kinds.bounded_contribution import BoundedContributionDpEvent
from dpjax.accounting.event_kinds.kind import DpEvent, EventKind, kind_of, sampled
from dpjax.accounting.proved import ADD, REPLACE, Proved
from dpjax.validate import UserError

# Above it a share of the records is no float.
_MOST_RECORDS = 2**63 - 1


class WithReplacementKind(EventKind):
  """Gaussian noise on b draws out of n records or more, each draw uniform, copies counted.

  A record has M copies in a batch, M binomial of b draws of chance 1 / n, and each copy is
  clipped by itself. `dpjax.accounting.exchanged_copies` has the proof, under both relations:

  - exchanging a record: a mean of the profiles of `exchanged_sample`, over M;
  - adding or removing one: given b draws of the OTHER records, with which the record's copies are
    exchanged, the outputs are E N(2 C M) with the record and N(0) without. That is the pair of
    b records of one user, each with chance 1 / n, at twice the shift (`bounded_contribution`). It
    is exact where all others pull against the record. The chance falls with n, so a lower bound
    on the number of records of the larger neighbour serves.
  """

  name = "sampled_with_replacement"
  event = dpa.SampledWithReplacementDpEvent
  fields = ("source_dataset_size", "sample_size", "event")
  scheme = "with_replacement"
  proof = Proved((REPLACE, ADD), ("pld",))

  def elements(self, event: Any) -> Iterable[tuple[DpEvent, int]]:
    size = event.sample_size
    total = event.source_dataset_size
    if size == 0:
      return []
    # The constructor checks both numbers.
    with_replacement_event(event.event, num_examples=total, batch_size=size)
    return sampled(
      event,
      (dpa.GaussianDpEvent,),
      lambda inner: dpa.SampledWithReplacementDpEvent(total, size, inner),
    )

  def under_replace_one(self, part: Any) -> DpEvent:
    # The noise is relative to the sensitivity of one copy, which is 2 C where it is replaced.
    inner = kind_of(part.event).under_replace_one(part.event)
    return dpa.SampledWithReplacementDpEvent(
      part.source_dataset_size, part.sample_size, inner
    )

  def under_add_or_remove_one(self, part: Any) -> DpEvent:
    # Each copy of a joining record takes the place of another one: it moves the sum by 2 C.
    inner: Any = kind_of(part.event).under_replace_one(part.event)
    return BoundedContributionDpEvent(
      1 / part.source_dataset_size, part.sample_size, inner.noise_multiplier
    )

  def pld(self, part: Any, interval: float) -> pld_lib.PrivacyLossDistribution:
    from dpjax.accounting.exchanged_copies import copies_pld  # few runs need it

    return copies_pld(
      num_examples=part.source_dataset_size,
      batch_size=part.sample_size,
      noise_multiplier=2 * part.event.noise_multiplier,
      interval=interval,
    )

  # The next two only guide the choice of a grid.
  def renyi_two(self, part: Any) -> float:
    from dpjax.accounting.exchanged_copies import copies

    numbers, chances, _ = copies(part.source_dataset_size, part.sample_size)
    # Copies beyond ten times the noise would overflow, and say nothing about the grid.
    shifts = np.minimum(numbers / part.event.noise_multiplier, 10.0)
    return max(float(np.log1p(chances**2 @ np.expm1(shifts**2))), 1e-30)

  def largest_loss(self, part: Any) -> float:
    from dpjax.accounting.exchanged_copies import copies_largest_loss

    noise = 2 * part.event.noise_multiplier
    return copies_largest_loss(part.source_dataset_size, part.sample_size, noise)

  def gaussian_noise(self, part: Any) -> float | None:
    return kind_of(part.event).gaussian_noise(part.event)

  def joining_prob(self, part: Any) -> float:
    from dpjax.accounting.exchanged_copies import joining_prob

    return joining_prob(part.source_dataset_size, part.sample_size)

  def describe(self, part: Any, unit: str) -> str:
    return (
      f"{kind_of(part.event).describe(part.event, unit)} on a batch with replacement (assumed: "
      f"{part.sample_size} draws out of {part.source_dataset_size} {unit}s or more, each uniform "
      "and on its own, every copy clipped by itself)"
    )


def with_replacement_event(
  event: DpEvent, *, num_examples: int, batch_size: int
) -> DpEvent:
  """Returns `event` on `batch_size` records drawn uniformly WITH replacement.

  Args:
    event: a Gaussian sum; its noise multiplier is std / l2_clip_norm of one copy.
    num_examples: number of records or fewer. Under add_or_remove_one that is a public lower bound
      on the size of the larger neighbour.
    batch_size: draws of each batch, at most num_examples.

  Accounted by PLD; Renyi divergences are dominated by batches of one record alone.

  Raises:
    UserError: batch_size above num_examples, or numbers below 1.

  >>> from dpjax.accounting import gaussian_event
  >>> with_replacement_event(gaussian_event(1), num_examples=10, batch_size=2).sample_size
  2
  """
  validate.integer_in(1, _MOST_RECORDS, num_examples=num_examples)
  validate.integer_at_least(1, batch_size=batch_size)
  if batch_size > num_examples:
    raise UserError(
      f"must be at most num_examples={num_examples}", field="batch_size", value=batch_size
    )
  return dpa.SampledWithReplacementDpEvent(int(num_examples), int(batch_size), event)
