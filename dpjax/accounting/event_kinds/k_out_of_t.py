"""Event of k-out-of-t random allocation: each record joins k uniformly drawn steps of t."""

from __future__ import annotations

import dataclasses

import dp_accounting as dpa

from dpjax import validate
from dpjax.accounting.event_kinds.kind import DpEvent, EventKind, kind_of, register
from dpjax.accounting.event_kinds.random_allocation import (
  RandomAllocationDpEvent,
  RandomAllocationKind,
  random_allocation_event,
)
from dpjax.validate import UserError


@dataclasses.dataclass(frozen=True)
class KOutOfTDpEvent(dpa.DpEvent):
  """A pass of `num_steps` Gaussian sums, where each record joins `num_selected` of the sums.

  A record's set of sums is uniform, independent of other records, secret, and drawn anew in each
  pass.
  """

  num_steps: int
  num_selected: int
  noise_multiplier: float

  def __post_init__(self):
    # The event of one selected step checks the other two numbers.
    RandomAllocationDpEvent(self.num_steps, self.noise_multiplier)
    validate.integer_at_least(1, num_selected=self.num_selected)
    if self.num_selected > self.num_steps:
      raise UserError(
        f"must be <= num_steps={self.num_steps}",
        field="num_selected",
        value=self.num_selected,
      )


class KOutOfTKind(EventKind[KOutOfTDpEvent]):
  """The accounting of k out of t steps, as k passes of one out of about t / k steps each.

  `dpjax.accounting.random_allocation` has the proof. The k passes lose nothing at k = 1 and k = t.
  """

  name = "k_out_of_t"
  event = KOutOfTDpEvent
  relations = RandomAllocationKind.relations
  replaced_in_two = True

  def under(self, part: KOutOfTDpEvent, neighboring_relation: str) -> DpEvent:
    size, longer = divmod(part.num_steps, part.num_selected)
    runs = [(size, part.num_selected - longer), (size + 1, longer)]
    passes = [(RandomAllocationDpEvent(t, part.noise_multiplier), k) for t, k in runs if k]
    return dpa.ComposedDpEvent([dpa.SelfComposedDpEvent(*each) for each in passes])

  def zcdp(self, part: KOutOfTDpEvent) -> float:
    # The record's steps are drawn independently of the record. So a pass is a mixture, over these
    # steps, of compositions of k sums.
    noise = dpa.GaussianDpEvent(part.noise_multiplier)
    return part.num_selected * kind_of(noise).zcdp(noise)

  def gaussian_noise(self, part: KOutOfTDpEvent) -> float:
    return part.noise_multiplier

  def describe(self, part: KOutOfTDpEvent, unit: str) -> str:
    noise = dpa.GaussianDpEvent(part.noise_multiplier)
    return (
      f"a pass of {part.num_steps} steps with {kind_of(noise).describe(noise, unit)} "
      f"(assumed: every {unit} is in {part.num_selected} steps of the pass, drawn uniformly on "
      "its own, anew in each pass, and kept secret)"
    )


def k_out_of_t_event(event: DpEvent, *, num_steps: int, num_selected: int) -> DpEvent:
  """Returns the event of `num_steps` Gaussian sums, of which each record joins `num_selected`.

  Args:
    event: a Gaussian sum; its noise multiplier is std / l2_clip_norm.
    num_steps: number t of steps of a pass.
    num_selected: number k of steps of a record, from 1 to t. With 1 the result is that of
      `random_allocation_event`.

  Raises:
    UserError: numbers out of their range, or an event that is no Gaussian sum.

  >>> from dpjax.accounting import gaussian_event
  >>> k_out_of_t_event(gaussian_event(1), num_steps=200, num_selected=3)
  KOutOfTDpEvent(num_steps=200, num_selected=3, noise_multiplier=1.0)
  >>> k_out_of_t_event(gaussian_event(1), num_steps=200, num_selected=1)
  RandomAllocationDpEvent(num_steps=200, noise_multiplier=1.0)
  """
  if num_selected == 1 or not isinstance(event, dpa.GaussianDpEvent):
    return random_allocation_event(event, num_steps=num_steps)
  return KOutOfTDpEvent(num_steps, num_selected, event.noise_multiplier)


register(KOutOfTKind())
