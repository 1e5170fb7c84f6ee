"""Randomised response, which also stands for every mechanism of a known pure epsilon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import dp_accounting as dpa
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.kind import (
  DpEvent,
  EventKind,
  Grid,
  curve_of,
  register,
  zcdp_of_pure,
)
from dpjax.accounting.loss_grid import LossMasses, connect
from dpjax.accounting.noise_profiles import UNIT
from dpjax.accounting.proved import RELATIONS
from dpjax.accounting.text import upper

# Epsilon below which the formula of `pure_dp_event` would round too much.
_SMALL = 1e-6
# Chance of one false answer below which a response counts as one without noise. dp_accounting's
# curve of a response with a chance that underflows is negative, which would cost nothing.
_LEAST_CHANCE = 1e-100
_MOST_BUCKETS = 2**63 - 1


class RandomizedResponseKind(EventKind[dpa.RandomizedResponseDpEvent]):
  """Randomised response: the true one of `num_buckets` answers, or a random one.

  With probability `noise_parameter` the answer is drawn uniformly; otherwise it is the true answer.
  The event has no noise multiplier, so its epsilon is not converted under any relation.
  """

  name = "randomized_response"
  event = dpa.RandomizedResponseDpEvent
  relations = RELATIONS

  def elements(self, event: dpa.RandomizedResponseDpEvent) -> Iterable[tuple[DpEvent, int]]:
    validate.integer_in(1, _MOST_BUCKETS, num_buckets=event.num_buckets)
    # With one bucket, or with noise alone, the answer does not depend on the input.
    if event.num_buckets == 1 or event.noise_parameter == 1:
      return []
    if event.noise_parameter == 0:
      return [(dpa.NonPrivateDpEvent(), 1)]
    validate.probability(noise_parameter=event.noise_parameter)
    if float(event.noise_parameter) < _LEAST_CHANCE:
      return [(dpa.NonPrivateDpEvent(), 1)]
    return [(event, 1)]

  def pld(
    self, part: dpa.RandomizedResponseDpEvent, interval: float
  ) -> Sequence[LossMasses]:
    loss = self._pure_loss(part)
    rounding = (16 + 8 * loss) * UNIT

    def deltas(epsilons: np.ndarray) -> np.ndarray:
      # One answer has the loss, and a chance of at most 1; its opposite has minus the loss.
      chance = 1 - part.noise_parameter * (1 - 1 / part.num_buckets)
      delta = rounding - chance * np.expm1(np.minimum(epsilons - loss, 0.0))
      return np.where(epsilons <= loss * (1 + rounding), delta, 0.0)

    return connect(deltas, interval=interval, largest=loss)

  def rdp(self, part: dpa.RandomizedResponseDpEvent) -> np.ndarray:
    # Randomised response is defined by two values of one record, so dp_accounting analyses it for
    # replacement.
    return curve_of(part, dpa.NeighboringRelation.REPLACE_ONE)

  def grid(self, part: dpa.RandomizedResponseDpEvent) -> Grid:
    loss = self._pure_loss(part)
    # The divergence of a pure epsilon is at most epsilon, and about epsilon^2 if epsilon is small.
    # A response has only two or three losses, which a coarser grid would round too much.
    return Grid(min(loss, math.expm1(min(loss, 1.0)) ** 2), loss, points=4000)

  def zcdp(self, part: dpa.RandomizedResponseDpEvent) -> float:
    return zcdp_of_pure(self._pure_loss(part))

  def _pure_loss(self, part: dpa.RandomizedResponseDpEvent) -> float:
    share = part.noise_parameter / part.num_buckets
    return math.log1p((1 - part.noise_parameter) / share)

  def describe(self, part: dpa.RandomizedResponseDpEvent, unit: str) -> str:
    loss = math.log1p((1 - part.noise_parameter) * part.num_buckets / part.noise_parameter)
    return f"a mechanism that is ({upper(loss, digits=6)}, 0)-private by itself"


def pure_dp_event(epsilon: float) -> DpEvent:
  """Returns the event of ANY mechanism that is only known to be (epsilon, 0)-DP.

  Guarantee: binary randomised response at `epsilon` dominates every (epsilon, 0)-DP mechanism
  (Kairouz, Oh and Viswanath 2015, arXiv:1311.0776, theorem 3.1). So compositions of the event bound
  compositions of these mechanisms. Laplace noise of scale 1 / epsilon does NOT dominate them: its
  delta is smaller at every value below epsilon. Epsilon must hold under the relation of the
  accounting.

  >>> import math
  >>> pure_dp_event(math.log(3))
  RandomizedResponseDpEvent(noise_parameter=0.5, num_buckets=2)
  """
  validate.non_negative(epsilon=epsilon)
  noise = 2 * math.exp(-epsilon) / (1 + math.exp(-epsilon))
  # If the formula rounded to 1, the event would cost nothing. The next float64 below
  # 1 - epsilon / 2 is less than the true value. So it stands for less noise, which costs more.
  if 0 < epsilon < _SMALL:
    noise = math.nextafter(1 - epsilon / 2, 0.0)
  return dpa.RandomizedResponseDpEvent(noise, 2)


register(RandomizedResponseKind())
