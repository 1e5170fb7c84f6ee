"""Discrete Gaussian noise on an integer vector."""

from __future__ import annotations

import dataclasses

import dp_accounting as dpa
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.kind import ORDERS, DpEvent, EventKind, register
from dpjax.accounting.proved import RELATIONS, REPLACE
from dpjax.accounting.text import lower


@dataclasses.dataclass(frozen=True)
class DiscreteGaussianDpEvent(dpa.DpEvent):
  """The event of one sum of integer vectors, with discrete Gaussian noise on each coordinate.

  Args:
    noise_multiplier: sigma of the noise / the largest L2 norm of ONE record's integer vector, after
      rounding. Under replace_one the accountant doubles this norm.
  """

  noise_multiplier: float

  def __post_init__(self):
    validate.non_negative(noise_multiplier=self.noise_multiplier)


class DiscreteGaussianKind(EventKind[DiscreteGaussianDpEvent]):
  """The accounting of discrete Gaussian noise (Canonne, Kamath and Steinke 2020,
  arXiv:2004.00010).

  For a shift by an integer vector, Gaussian noise of the same sigma has no smaller Renyi divergence
  at any order (theorem 4). It is not proved that the trade-off curve of Gaussian noise is a bound,
  so there is no privacy loss distribution.
  """

  name = "discrete_gaussian"
  event = DiscreteGaussianDpEvent
  relations = RELATIONS
  accountants = ("rdp",)

  def under(self, part: DiscreteGaussianDpEvent, neighboring_relation: str) -> DpEvent:
    if neighboring_relation != REPLACE:
      return part
    return DiscreteGaussianDpEvent(part.noise_multiplier / 2)

  def rdp(self, part: DiscreteGaussianDpEvent) -> np.ndarray:
    return np.asarray(ORDERS) / (2 * part.noise_multiplier**2)

  def describe(self, part: DiscreteGaussianDpEvent, unit: str) -> str:
    multiple = lower(part.noise_multiplier, digits=6)
    return (
      f"discrete Gaussian noise on integers, of {multiple} times the largest norm of the part of "
      f"one {unit}, rounding included"
    )


register(DiscreteGaussianKind())
