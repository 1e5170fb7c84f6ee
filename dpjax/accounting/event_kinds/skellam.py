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
    # `discrete` is imported here, since every run imports this module, but only secure sums need
    # `discrete`.
    from dpjax.accounting.discrete import skellam_rdp

    return skellam_rdp(
      part.variance,
      orders=ORDERS,
      l2_sensitivity=part.l2_sensitivity,
      l1_sensitivity=part.l1_sensitivity,
    )

  def describe(self, part: SkellamDpEvent, unit: str) -> str:
    multiple = lower(math.sqrt(part.variance) / part.l2_sensitivity, digits=6)
    return (
      f"Skellam noise on integers, of {multiple} times the largest norm of the integers of one "
      f"{unit}, rounding included"
    )


register(SkellamKind())
