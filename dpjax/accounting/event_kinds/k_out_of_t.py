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

# Steps of a pass: integers up to here are floats, too.
_MOST_STEPS = 10**15


@dataclasses.dataclass(frozen=True)
class KOutOfTDpEvent(dpa.DpEvent):
  """A pass of `num_steps` Gaussian sums, in which each record joins `num_selected` of them.

  Which steps is drawn uniformly among all sets of that size, independently of the other records,
  and kept secret. Fewer steps of a pass cost no more than all. The next pass draws anew.
  """

  num_steps: int
  num_selected: int
  noise_multiplier: float


class KOutOfTKind(EventKind):
  """The accounting of k out of t steps, by k passes of one out of t / k.

  Let X_1, .., X_t be the likelihood ratios of the steps, with and without the record in them,
  given what was released before. The likelihood ratio of the run is

    L = sum over sets S of k steps of prod_(i in S) X_i / (t choose k).

  1. L is affine in each X_i with a slope >= 0. So exchanging X_t, .., X_1, one after the other,
     for independent lognormals makes no convex divergence smaller: step 1 of the proof in
     `dpjax.accounting.random_allocation`, word by word.
  2. Cut the steps into k blocks and take one uniform step of each. Where the steps were ordered
     uniformly at random before, the set of these k steps is uniform, whatever the sizes of the
     blocks are, for no step differs from another. So L = E_B prod_j mean_(i in B_j) X_i over
     random blocks B.
  3. By Jensen's inequality E f(L) <= E_B E f(prod_j mean_(i in B_j) X_i) for each convex f: both
     directions of the hockey-stick divergence. Given B the product is that of k independent
     passes of random allocation, of one step out of |B_j| each.

  Feldman and Shenfeld (2025, arXiv:2502.08202) prove the reduction to k passes of floor(t / k)
  steps. Blocks of unequal size use all steps: t mod k of them have one step more.

  So k out of t is accounted as k passes of t / k steps are, and never below them. It is exact at
  k = 1 and at k = t. Between, the true cost is smaller, and nobody has proved by how much.
  """

  name = "k_out_of_t"
  event = KOutOfTDpEvent
  fields = ("num_steps", "num_selected", "noise_multiplier")
  scheme = "k_out_of_t"
  proof = RandomAllocationKind.proof
  replaced_in_two = True

  def elements(self, event: Any) -> Iterable[tuple[DpEvent, int]]:
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

  def accounted_as(self, part: Any) -> DpEvent:
    noise = gaussian_event(part.noise_multiplier)
    size, longer = divmod(part.num_steps, part.num_selected)
    shorter = part.num_selected - longer
    runs = [composed(random_allocation_event(noise, num_steps=size), shorter)]
    if longer:
      runs.append(composed(random_allocation_event(noise, num_steps=size + 1), longer))
    return dpa.ComposedDpEvent(runs)

  # Asked of the best of several runs, which knows no reduction.
  def rdp(self, part: Any) -> np.ndarray:
    return rdp_of(parts(self.accounted_as(part)))

  def zcdp(self, part: Any) -> float:
    # The record's steps are drawn without looking at it, so the pass is a mixture of k sums.
    noise = dpa.GaussianDpEvent(part.noise_multiplier)
    return part.num_selected * kind_of(noise).zcdp(noise)

  def gaussian_noise(self, part: Any) -> float:
    return part.noise_multiplier

  def describe(self, part: Any, unit: str) -> str:
    noise = dpa.GaussianDpEvent(part.noise_multiplier)
    return (
      f"a pass of {part.num_steps} steps with {kind_of(noise).describe(noise, unit)} "
      f"(assumed: every {unit} is in {part.num_selected} steps of the pass, drawn uniformly on "
      "its own, anew in each pass, and kept secret)"
    )


def k_out_of_t_event(event: DpEvent, *, num_steps: int, num_selected: int) -> DpEvent:
  """Returns one pass of `num_steps` Gaussian sums; a record is in `num_selected` uniform ones.

  Args:
    event: a Gaussian sum; its noise multiplier is std / l2_clip_norm.
    num_steps: t, steps of a pass.
    num_selected: k, steps that each record takes part in, from 1 to t.

  With k = 1 it is `random_allocation_event`, whose event is returned.

  Raises:
    UserError: numbers out of their range, or an event that is no Gaussian sum.

  >>> from dpjax.accounting import gaussian_event
  >>> k_out_of_t_event(gaussian_event(1), num_steps=200, num_selected=3)
  KOutOfTDpEvent(num_steps=200, num_selected=3, noise_multiplier=1.0)
  >>> k_out_of_t_event(gaussian_event(1), num_steps=200, num_selected=1)
  RandomAllocationDpEvent(num_steps=200, noise_multiplier=1.0)
  """
  validate.integer_in(1, _MOST_STEPS, num_steps=num_steps)
  validate.integer_at_least(1, num_selected=num_selected)
  if num_selected > num_steps:
    raise UserError(
      f"must be <= num_steps={num_steps}", field="num_selected", value=num_selected
    )
  if not isinstance(event, dpa.GaussianDpEvent):
    raise UserError("random allocation takes a GaussianDpEvent", field="event", value=event)
  if num_selected == 1:
    return random_allocation_event(event, num_steps=num_steps)
  return KOutOfTDpEvent(int(num_steps), int(num_selected), event.noise_multiplier)
