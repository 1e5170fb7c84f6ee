"""Noise on a uniformly drawn subset of fixed size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting.event_kinds.kind import DpEvent, EventKind, kind_of, sampled
from dpjax.accounting.proved import REPLACE, Proved
from dpjax.validate import UserError


class FixedSizeKind(EventKind):
  """Gaussian noise on a subset drawn without replacement.

  Proved for the exchange of a record, by RDP (Wang, Balle and Kasiviswanathan 2019,
  arXiv:1808.00087). Accounting it as Poisson sampling would be wrong (pitfall P14).
  """

  name = "sampled_without_replacement"
  event = dpa.SampledWithoutReplacementDpEvent
  fields = ("source_dataset_size", "sample_size", "event")
  scheme = "fixed_size"
  proof = Proved((REPLACE,), ("rdp",))
  rdp_relation = "REPLACE_ONE"

  def elements(self, event: Any) -> Iterable[tuple[DpEvent, int]]:
    size = event.sample_size
    total = event.source_dataset_size
    if size == 0:
      return []
    # The constructor checks both numbers.
    fixed_size_event(event.event, num_examples=total, batch_size=size)
    return sampled(
      event,
      (dpa.GaussianDpEvent,),
      lambda inner: dpa.SampledWithoutReplacementDpEvent(total, size, inner),
    )

  def under_replace_one(self, part: Any) -> DpEvent:
    # The noise is relative to the sensitivity, which is 2 C where a record is replaced.
    inner = kind_of(part.event).under_replace_one(part.event)
    return dpa.SampledWithoutReplacementDpEvent(
      part.source_dataset_size, part.sample_size, inner
    )

  def gaussian_noise(self, part: Any) -> float | None:
    return kind_of(part.event).gaussian_noise(part.event)

  def joining_prob(self, part: Any) -> float:
    return part.sample_size / part.source_dataset_size

  def describe(self, part: Any, unit: str) -> str:
    return (
      f"{kind_of(part.event).describe(part.event, unit)} on a fixed-size sample (assumed: "
      f"{part.sample_size} distinct {unit}s of {part.source_dataset_size}, drawn afresh and "
      "uniformly)"
    )


def fixed_size_event(event: DpEvent, *, num_examples: int, batch_size: int) -> DpEvent:
  """Returns `event` on `batch_size` distinct records drawn uniformly out of `num_examples`.

  Such an event can be accounted only under replace_one and by RDP (pitfall P14).

  >>> from dpjax.accounting import gaussian_event
  >>> fixed_size_event(gaussian_event(1), num_examples=10, batch_size=2).sample_size
  2
  """
  validate.integer_at_least(1, num_examples=num_examples, batch_size=batch_size)
  if batch_size > num_examples:
    raise UserError(
      f"must be at most num_examples={num_examples}", field="batch_size", value=batch_size
    )
  return dpa.SampledWithoutReplacementDpEvent(int(num_examples), int(batch_size), event)
