"""Event of k-out-of-t random allocation: each record joins k uniformly drawn steps of t."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import dp_accounting as dpa
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.composition import composed
from dpjax.accounting.event_kinds.gaussian import gaussian_event
from dpjax.accounting.event_kinds.kind import (
  DpEvent,
  EventKind,
  kind_of,
  parts,
  rdp_of,
  with_noise,
)
from dpjax.accounting.event_kinds.random_allocation import (
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


class KOutOfTKind(EventKind[KOutOfTDpEvent]):
  """The accounting of k out of t steps, as k passes of one out of about t / k steps each.

  `dpjax.accounting.random_allocation` has the proof. The k passes lose nothing at k = 1 and k = t.
  """

  name = "k_out_of_t"
  event = KOutOfTDpEvent
  fields = ("num_steps", "num_selected", "noise_multiplier")
  relations = RandomAllocationKind.relations
  replaced_in_two = True

  def elements(self, event: KOutOfTDpEvent) -> Iterable[tuple[DpEvent, int]]:
    # These constructors check all three numbers.
    k_out_of_t_event(
      gaussian_event(event.noise_multiplier),
      num_steps=event.num_steps,
      num_selected=event.num_selected,
    )
    return with_noise(
      event.noise_multiplier,
      lambda z: KOutOfTDpEvent(event.num_steps, event.num_selected, z),
    )

  def accounted_as(self, part: KOutOfTDpEvent) -> DpEvent:
    noise = gaussian_event(part.noise_multiplier)
    size, longer = divmod(part.num_steps, part.num_selected)
    shorter = part.num_selected - longer
    runs = [composed(random_allocation_event(noise, num_steps=size), shorter)]
    if longer:
      runs.append(composed(random_allocation_event(noise, num_steps=size + 1), longer))
    return dpa.ComposedDpEvent(runs)

  # This method serves the best of several runs, whose accounting does not use `accounted_as`.
  def rdp(self, part: KOutOfTDpEvent) -> np.ndarray:
    return rdp_of(parts(self.accounted_as(part)))

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
  # The constructor checks the event and the number of steps.
  once: Any = random_allocation_event(event, num_steps=num_steps)
  validate.integer_at_least(1, num_selected=num_selected)
  if num_selected > num_steps:
    raise UserError(
      f"must be <= num_steps={num_steps}", field="num_selected", value=num_selected
    )
  if num_selected == 1:
    return once
  return KOutOfTDpEvent(int(num_steps), int(num_selected), once.noise_multiplier)
