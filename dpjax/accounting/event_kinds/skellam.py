"""Skellam noise, which clients add in shares to a sum of integer vectors."""

from __future__ import annotations

import dataclasses
import math

import dp_accounting as dpa
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.kind import ORDERS, DpEvent, EventKind, register
from dpjax.accounting.proved import REPLACE, ZERO
from dpjax.accounting.text import lower


@dataclasses.dataclass(frozen=True)
class SkellamDpEvent(dpa.DpEvent):
  """The event of one sum of integer vectors with Skellam noise.

  Args:
    variance: variance of all noise on one coordinate, in squared grid steps.
    l2_sensitivity, l1_sensitivity: largest norms of ONE record's integer vector, after
      rounding. Under replace_one the accountant doubles both norms.
  """

  variance: float
  l2_sensitivity: float
  l1_sensitivity: float

  def __post_init__(self):
    validate.positive(
      variance=self.variance,
      l2_sensitivity=self.l2_sensitivity,
      l1_sensitivity=self.l1_sensitivity,
    )


class SkellamKind(EventKind[SkellamDpEvent]):
  """The accounting of Skellam noise (Agarwal, Kairouz and Liu 2021, arXiv:2110.04995).

  At an integer order a, with variance s2 and sensitivities D2 and D1, the Renyi divergence is at
  most a D2^2 / (2 s2) + min(((2 a - 1) D2^2 + 6 D1) / (4 s2^2), 3 D1 / (2 s2)) (corollary 3.6).

  There is no proof under add_or_remove_one, since a removed client also removes its share of the
  noise.
  """

  name = "skellam"
  event = SkellamDpEvent
  relations = (ZERO, REPLACE)
  accountants = ("rdp",)

  def under(self, part: SkellamDpEvent, neighboring_relation: str) -> DpEvent:
    if neighboring_relation != REPLACE:
      return part
    # The integer vectors of a record and of its replacement differ by up to twice each norm.
    return SkellamDpEvent(part.variance, 2 * part.l2_sensitivity, 2 * part.l1_sensitivity)

  def rdp(self, part: SkellamDpEvent) -> np.ndarray:
    variance, l1 = part.variance, part.l1_sensitivity
    square = part.l2_sensitivity**2
    # The divergence rises with the order, so its value at the next integer is an upper bound.
    order = np.ceil(np.array(ORDERS, float))
    few = ((2 * order - 1) * square + 6 * l1) / (4 * variance**2)
    return order * square / (2 * variance) + np.minimum(few, 3 * l1 / (2 * variance))

  def describe(self, part: SkellamDpEvent, unit: str) -> str:
    multiple = lower(math.sqrt(part.variance) / part.l2_sensitivity, digits=6)
    return (
      f"Skellam noise on integers, of {multiple} times the largest norm of the integers of one "
      f"{unit}, rounding included"
    )


register(SkellamKind())
