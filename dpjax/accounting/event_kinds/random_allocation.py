"""Event of a pass of random allocation: each record joins one uniformly drawn step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import dp_accounting as dpa
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.kind import (
  ORDERS,
  DpEvent,
  EventKind,
  Grid,
  amplify,
  kind_of,
  register,
)
from dpjax.accounting.loss_grid import LossMasses
from dpjax.accounting.proved import ADD, REPLACE, ZERO
from dpjax.validate import UserError

# Largest number of steps of a pass: integers up to this are exact in float64.
_MOST_STEPS = 10**15
# Number of cells of likelihood ratios while a search needs many epsilons quickly.
_COARSE_CELLS = 2**15


@dataclasses.dataclass(frozen=True)
class RandomAllocationDpEvent(dpa.DpEvent):
  """A pass of `num_steps` Gaussian sums, in which each record joins one sum.

  A record's step is drawn uniformly, independently of the other records, anew in each pass, and
  kept secret. A pass that stops early costs no more.
  """

  num_steps: int
  noise_multiplier: float

  def __post_init__(self):
    validate.integer_in(1, _MOST_STEPS, num_steps=self.num_steps)
    validate.non_negative(noise_multiplier=self.noise_multiplier)


class RandomAllocationKind(EventKind[RandomAllocationDpEvent]):
  """The accounting of a pass; `accounting.random_allocation` and `allocation_rdp` have the proofs.

  Replacing a record is accounted as removing one and adding one (`dpjax.accounting.replaced`).
  """

  name = "random_allocation"
  event = RandomAllocationDpEvent
  relations = (ADD, ZERO, REPLACE)
  replaced_in_two = True

  def unamplified(self, part: RandomAllocationDpEvent) -> DpEvent:
    # With little noise the accountant may prove a smaller epsilon for it than for the pass.
    return one_sum(part)

  # The next two methods import their module when called, since few runs account for a pass.
  def rdp(self, part: RandomAllocationDpEvent) -> np.ndarray:
    from dpjax.accounting.allocation_rdp import allocation_rdp

    return allocation_rdp(part.num_steps, part.noise_multiplier, orders=ORDERS)

  def pld(self, part: RandomAllocationDpEvent, interval: float) -> Sequence[LossMasses]:
    from dpjax.accounting.loss_grid import is_coarse
    from dpjax.accounting.random_allocation import allocation_pld

    cells = _COARSE_CELLS if is_coarse.get() else 0
    return allocation_pld(
      part.num_steps, part.noise_multiplier, interval=interval, cells=cells
    )

  def grid(self, part: RandomAllocationDpEvent) -> Grid:
    noise = one_sum(part)
    whole = kind_of(noise).grid(noise)
    # A pass of T steps has a Renyi divergence of order 2 of log(1 + (e^(1 / z^2) - 1) / T). So its
    # loss is about that of one step on a sample of probability 1 / sqrt(T).
    prob = part.num_steps**-0.5
    return Grid(amplify(whole.renyi_two, prob**2), amplify(whole.largest_loss, prob))

  def zcdp(self, part: RandomAllocationDpEvent) -> float:
    # The record's step is drawn independently of the record. So a pass is a mixture of runs where
    # the record is in one sum.
    noise = one_sum(part)
    return kind_of(noise).zcdp(noise)

  def gaussian_noise(self, part: RandomAllocationDpEvent) -> float:
    return part.noise_multiplier

  def describe(self, part: RandomAllocationDpEvent, unit: str) -> str:
    noise = one_sum(part)
    return (
      f"a pass of {part.num_steps} steps with {kind_of(noise).describe(noise, unit)} "
      f"(assumed: every {unit} is in one step of the pass, drawn uniformly on its own, anew in "
      "each pass, and kept secret)"
    )


def one_sum(part: RandomAllocationDpEvent) -> dpa.GaussianDpEvent:
  """Returns an event that costs no less than a pass: the one sum that a record is in.

  A pass is a mixture, over the record's step, of runs where the record is in one Gaussian sum.
  """
  return dpa.GaussianDpEvent(part.noise_multiplier)


def random_allocation_event(event: DpEvent, *, num_steps: int) -> DpEvent:
  """Returns the event of a pass of `num_steps` Gaussian sums; a record is in one of them.

  The record's step must be drawn uniformly, independently of other records, anew in every pass, and
  kept secret. A pass is accounted by PLD (`dpjax.accounting.random_allocation`) and by RDP
  (`dpjax.accounting.allocation_rdp`). A pass that stops early costs no more. If k passes take the
  SAME batches, account for one pass, with the noise multiplier divided by sqrt(k).

  >>> from dpjax.accounting import gaussian_event
  >>> random_allocation_event(gaussian_event(1), num_steps=200)
  RandomAllocationDpEvent(num_steps=200, noise_multiplier=1.0)
  """
  if not isinstance(event, dpa.GaussianDpEvent):
    raise UserError("random allocation takes a GaussianDpEvent", field="event", value=event)
  return RandomAllocationDpEvent(num_steps, event.noise_multiplier)


register(RandomAllocationKind())
