"""Epsilon and delta of an event, by privacy loss distribution (PLD) or by Renyi DP.

An event's noise multiplier z is std / C, C = l2_clip_norm, for every relation. Exchanging one
record (replace_one) moves a clipped sum by up to 2 C, so there z counts as z / 2. The two
accountants of dp_accounting read `GaussianDpEvent` differently under REPLACE_ONE: RDP as
std / sensitivity, PLD as std / C, a factor of 2 in the noise. So dpjax converts the noise before it
asks either of them. A randomised response (so also `pure_dp_event`) has no noise multiplier: its
epsilon is the same under every relation.

`event_kinds` defines each kind of event: its proof, Renyi curve and privacy loss. This module
composes the parts of a run. Random allocation under replace_one is accounted as removing one
record and adding another (`replaced`).

Both accountants give upper bounds, which allow for rounding errors: `loss_grid` rounds up every
operation, and `_RDP_ROUNDING` of `event_kinds.elements` is added to every Renyi divergence.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TypedDict, Unpack

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib

from dpjax import validate
from dpjax.accounting.event_kinds.elements import (
  Parts,
  accountable,
  compose,
  merged_parts,
  rdp_of,
  unamplified,
)
from dpjax.accounting.event_kinds.kind import ORDERS, DpEvent, kind_of, quiet
from dpjax.accounting.loss_grid import (
  Composition,
  Profile,
  Step,
  is_coarse,
  pld_of,
)
from dpjax.accounting.replaced import delta_of_both, epsilon_of_both
from dpjax.validate import UserError


class Counting(TypedDict, total=False):
  """Optional arguments `neighboring_relation` and `accountant`, as `epsilon` takes them."""

  neighboring_relation: str
  accountant: str


# Part of delta that PLD leaves unused. `loss_grid` proves its epsilons without it. It is what the
# transforms of dp_accounting may lose, so that an epsilon of theirs is no larger than ours.
_UNUSED = (1e-13, 1e-16)  # (once, per composed step)
# Largest interval of the grid of privacy losses, except for huge losses and in `coarse_grid`.
# It is 4e-4, rounded up to 28 binary digits, so that its multiples are exact.
_INTERVAL = math.ceil(4e-4 * 2**39) / 2**39
# If losses need a wider interval than this, epsilon is reported as infinite. A finite epsilon would
# be too large to be useful.
_WIDEST = 100.0
# Largest numbers of grid points, roughly: for one step, and for the composition. They bound memory.
_MAX_POINTS = (2e5, 4e6)
# Factor by which `coarse_grid` widens the interval of the grid. It is a power of two, as is the
# ratio of any two intervals.
_COARSER = 8.0


def epsilon(
  event: DpEvent,
  *,
  delta: float,
  neighboring_relation: str = "add_or_remove_one",
  accountant: str = "pld",
) -> float:
  """Returns the smallest epsilon that the accountant proves for `event` at `delta`, or inf.

  Guarantee: an upper bound. PLD (Koskela et al. 2020; Doroshenko et al. 2022,
  arXiv:2207.04380) is nearly exact; RDP (Mironov et al. 2019, arXiv:1908.10530) is looser.
  Raises UserError if the accountant has no analysis of this sampler under this relation, or if
  `delta` is below 2e-13 + 2e-16 per step for PLD.

  >>> run = dpa.GaussianDpEvent(2.0)
  >>> round(epsilon(run, delta=1e-5), 3)
  1.993
  >>> round(epsilon(dpa.GaussianDpEvent(4.0), delta=1e-5,
  ...               neighboring_relation="replace_one"), 3)
  1.993
  >>> epsilon(dpa.NonPrivateDpEvent(), delta=1e-5)
  inf
  """
  validate.open_unit(delta=delta)
  steps, in_two = accountable(event, neighboring_relation, accountant)
  if dpa.NonPrivateDpEvent() in steps:
    return math.inf
  epsilon_by = _pld_epsilon if accountant == "pld" else _rdp_epsilon
  if in_two:
    # Renyi divergences have an epsilon at every delta.
    least = 2 * _unused(steps) if accountant == "pld" else 1e-300
    both = epsilon_of_both(functools.partial(epsilon_by, steps), delta, least=least)
    relation: Counting = {"neighboring_relation": "replace_one", "accountant": accountant}
    # Both bounds are proved, so the smaller one holds. The second claims no amplification by
    # sampling. With little noise it may be smaller, since the first is a sum of two epsilons.
    return min(both, epsilon(unamplified(steps), delta=delta, **relation))
  return epsilon_by(steps, delta)


def delta(event: DpEvent, *, epsilon: float, **counting: Unpack[Counting]) -> float:
  """Returns the smallest delta that the accountant proves for `event` at `epsilon`; at most 1.

  >>> round(delta(dpa.GaussianDpEvent(2.0), epsilon=1.9931), 8)
  1e-05
  """
  return float(delta_curve(event, [epsilon], **counting)[0])


def delta_curve(
  event: DpEvent, epsilons: Sequence[float], **counting: Unpack[Counting]
) -> np.ndarray:
  """Returns delta at each epsilon, [k], as `delta` does. All pairs (epsilon, delta) hold at once.

  >>> delta_curve(dpa.GaussianDpEvent(2.0), [0.0, 1.9931]).round(5)  # 2 Phi(1/4) - 1
  array([1.9741e-01, 1.0000e-05])
  """
  validate.non_negative(**validate.entries(epsilons=epsilons))
  return privacy_profile(event, **counting)(epsilons)


def privacy_profile(event: DpEvent, **counting: Unpack[Counting]) -> Profile:
  """Returns a function epsilons -> deltas, for epsilons >= 0; the analysis is done once.

  For many calls the returned function takes under 1/1000 of the time of `delta_curve`.

  Guarantee: all deltas of the returned function are upper bounds, which hold at once.

  Raises UserError if the accountant has no analysis of this sampler under this relation.

  >>> profile = privacy_profile(dpa.GaussianDpEvent(2.0))
  >>> profile([0.0, 1.9931]).round(5)  # 2 Phi(1/4) - 1
  array([1.9741e-01, 1.0000e-05])
  """
  steps, in_two = accountable(event, **counting)
  if dpa.NonPrivateDpEvent() in steps:
    return lambda epsilons: np.ones(len(epsilons))
  # For an event without parts, RDP's formula would take the log of zero.
  if not steps:
    return lambda epsilons: np.zeros(len(epsilons))
  pld = counting.get("accountant", "pld") == "pld"
  profile = _pld_profile(steps) if pld else _rdp_profile(steps)
  if not in_two:
    return profile
  plain = privacy_profile(unamplified(steps), **counting)

  def both(epsilons: Sequence[float] | np.ndarray) -> np.ndarray:
    deltas = [delta_of_both(profile, float(value)) for value in epsilons]
    return np.minimum(plain(epsilons), deltas)

  return both


def loss_distribution(
  event: DpEvent, **counting: Unpack[Counting]
) -> tuple[pld_lib.PrivacyLossDistribution, float] | None:
  """Returns an event's privacy loss distribution, and a bound on the rounding error of its delta.

  Returns None for RDP, for an event without parts, and for losses so large that epsilon is
  infinite. It also returns None if a replaced record is accounted as one removed and one added.
  Raises UserError if the accountant has no analysis of this sampler under this relation.

  >>> pld, rounding = loss_distribution(dpa.GaussianDpEvent(2.0))
  >>> round(pld.get_epsilon_for_delta(1e-5), 3), rounding < 1e-12
  (1.993, True)
  """
  steps, in_two = accountable(event, **counting)
  if in_two or counting.get("accountant", "pld") != "pld":
    return None
  # An event without parts, or with an infinite epsilon, has no grid of losses.
  if not steps or dpa.NonPrivateDpEvent() in steps or _interval(steps) > _WIDEST:
    return None
  sides = [side.masses() for side in _compositions(steps)]
  return pld_of([masses for masses, _ in sides]), max(rounding for _, rounding in sides)


def zcdp(event: DpEvent, *, neighboring_relation: str = "add_or_remove_one") -> float:
  """Returns rho of zero-concentrated DP: every Renyi divergence of order a is at most rho a.

  Papers on DP-FTRL report rho. It adds up over releases. Sampling the records of a step does not
  lower its rho. A pass of random allocation has the rho of the sums that one record joins.

  Guarantee: an upper bound (Bun and Steinke 2016, arXiv:1605.02065); exact for Gaussian noise.

  Raises:
    UserError: a part without a bound on rho, such as Skellam noise or the best of several runs; or
      a relation under which a part has no proof.

  >>> zcdp(compose(dpa.GaussianDpEvent(2.0), 4))
  0.5
  """
  raw = merged_parts(event)
  if dpa.NonPrivateDpEvent() in raw:
    return math.inf
  # The parts are checked first, so that an error is about a missing rho, not about a missing
  # accountant.
  for part in raw:
    kind_of(part).zcdp(part)
  steps, in_two = accountable(event, neighboring_relation)
  # A pass of random allocation costs no more than one sum, which a replaced record moves by 2 C.
  if in_two:
    steps, _ = accountable(unamplified(steps), neighboring_relation)
  return math.fsum(times * kind_of(part).zcdp(part) for part, times in steps.items())


def epsilon_of_zcdp(rho: float, *, delta: float) -> float:
  """Returns the smallest epsilon at `delta` that rho-zCDP proves, over dp_accounting's orders.

  Guarantee: an upper bound (Canonne, Kamath and Steinke 2020, arXiv:2004.00010, proposition 12).

  >>> round(epsilon_of_zcdp(0.125, delta=1e-5), 3)  # of a Gaussian that is 1.993 at this delta
  2.166
  """
  validate.open_unit(delta=delta)
  if rho == math.inf:
    return math.inf
  validate.non_negative(rho=rho)
  curve = [rho * order for order in ORDERS]
  return float(rdp_lib.compute_epsilon(ORDERS, curve, delta)[0]) if rho else 0.0


def epsilon_curve(
  step_event: DpEvent, steps: Sequence[int], *, delta: float, **counting: Unpack[Counting]
) -> np.ndarray:
  """Returns epsilon after each number of steps, [k].

  The entry for n steps is `epsilon(compose(step_event, n))`.

  >>> epsilon_curve(dpa.GaussianDpEvent(4.0), [0, 4], delta=1e-5).round(3)
  array([0.   , 1.993])
  """
  validate.integer_at_least(0, **validate.entries(steps=steps))
  # One step's distribution is cached for each interval of the grid. So mostly the composition alone
  # is repeated.
  each = [epsilon(compose(step_event, n), delta=delta, **counting) for n in steps]
  return np.array(each, float)


def epsilon_about(event: DpEvent, *, delta: float, **counting: Unpack[Counting]) -> float:
  """Returns a guess at `epsilon` by a central limit, which proves nothing: where searches start.

  >>> round(epsilon_about(dpa.GaussianDpEvent(2.0), delta=1e-5), 3)
  1.993
  """
  steps, in_two = accountable(event, **counting)
  if dpa.NonPrivateDpEvent() in steps:
    return math.inf
  # Such runs are nearly as private as two normals that are this far apart (`gdp`).
  apart = sum(times * kind_of(part).grid(part).renyi_two for part, times in steps.items())
  apart = math.sqrt(apart) * (2 if in_two else 1)
  if not 1e-6 < apart < 1e3:
    return apart**2 / 2 if apart >= 1e3 else 0.0
  with quiet():
    return float(dpa.get_epsilon_gaussian(1 / apart, delta))


@contextlib.contextmanager
def coarse_grid() -> Iterator[None]:
  """Widens the grid of losses inside a `with` block, for searches that need many epsilons quickly.

  Guarantee: epsilons remain upper bounds, as on any grid. They are up to one per cent looser.

  >>> with coarse_grid():
  ...   rough = epsilon(dpa.GaussianDpEvent(2.0), delta=1e-5)
  >>> round(rough / epsilon(dpa.GaussianDpEvent(2.0), delta=1e-5), 2)
  1.0
  """
  token = is_coarse.set(True)
  try:
    yield
  finally:
    is_coarse.reset(token)


# --- Renyi DP


def _rdp_epsilon(steps: Parts, delta: float) -> float:
  return float(rdp_lib.compute_epsilon(ORDERS, list(rdp_of(steps)), delta)[0])


def _rdp_profile(steps: Parts) -> Profile:
  """Returns a function epsilons -> deltas, a vectorised `rdp_lib.compute_delta`.

  Its source is proposition 12 of Canonne, Kamath and Steinke 2020, arXiv:2004.00010."""
  rdp = np.array(rdp_of(steps))
  orders = np.array(ORDERS)
  # At every epsilon, delta <= sqrt(1 - e^-KL). The Renyi divergence of every order is at least the
  # Kullback-Leibler divergence KL, so the smallest divergence gives a bound.
  largest = float(np.exp(0.5 * np.log1p(-np.exp(-rdp.min()))))
  # Near order 1 the formula is not stable. The bound is valid without these orders, too.
  usable = orders > 1.01
  slopes = orders[usable] - 1
  heights = slopes * (rdp[usable] + np.log1p(-1 / orders[usable])) - np.log(orders[usable])

  def deltas(epsilons: Sequence[float] | np.ndarray) -> np.ndarray:
    at = np.asarray(epsilons, float)[:, None]  # [k, 1] against the orders
    least = np.exp(np.minimum(heights - slopes * at, 0.0).min(axis=1))
    # A delta that underflows to 0 would say that noise with tails is (epsilon, 0)-private.
    return np.minimum(largest, np.maximum(least, sys.float_info.min))

  return deltas


# --- privacy loss distributions


def _ways(steps: Parts) -> list[Parts]:
  """Returns the steps; and the steps `unamplified`, where a part has another proof.

  All ways are proved, so the smallest epsilon or delta holds. With little noise it may be that of
  the second way."""
  for part in steps:
    if kind_of(part).unamplified(part) is not part:
      return [steps, merged_parts(unamplified(steps))]
  return [steps]


def _pld_profile(steps: Parts) -> Profile:
  """Returns a function epsilons -> deltas, the smallest of those of all ways."""
  ways = [_compositions(way) for way in _ways(steps) if _interval(way) <= _WIDEST]
  unused = _unused(steps)

  def deltas(epsilons: Sequence[float] | np.ndarray) -> np.ndarray:
    best = np.ones(len(epsilons))
    for sides in ways:
      # The worse direction counts.
      worst = np.max([side.deltas(epsilons) for side in sides], axis=0)
      best = np.minimum(best, worst + unused)
    return best

  return deltas


def _pld_epsilon(steps: Parts, delta: float) -> float:
  if delta < 2 * _unused(steps):
    raise UserError(
      f"too small for accountant='pld' over {sum(steps.values())} steps, where it must be at "
      f"least {2 * _unused(steps):.1g}; use accountant='rdp'",
      field="delta",
      value=delta,
    )
  if not steps:
    return 0.0
  best = math.inf
  for way in _ways(steps):
    if _interval(way) <= _WIDEST:
      left = delta - _unused(way)
      best = min(best, max(side.epsilon(left) for side in _compositions(way)))
  return best


def _unused(steps: Parts) -> float:
  once, per_step = _UNUSED
  return once + per_step * sum(steps.values())


def _compositions(steps: Parts) -> tuple[Composition, ...]:
  """Returns the sum of the losses of removing a record, and that of adding one if it differs."""
  # A dict has no hash, and the cache needs one. It tells types apart by its key, see `_steps_of`.
  return _composition((*zip(map(type, steps), steps, steps.values()),), _interval(steps))


# The cache has few entries, since an entry can hold millions of points. It serves
# `epsilon_of_both`, which asks for the same run at several deltas.
@functools.lru_cache(maxsize=2)
def _composition(
  steps: tuple[tuple[type, DpEvent, int], ...], interval: float
) -> tuple[Composition, ...]:
  removed: list[tuple[Step, int]] = []
  added: list[tuple[Step, int]] = []
  for _, part, times in steps:
    # A step of one side has the same losses in both directions.
    sides = _steps_of(part, interval)
    removed.append((sides[0], times))
    added.append((sides[-1], times))
  directions = [removed] if added == removed else [removed, added]
  return tuple(map(Composition, directions))


# A user's event may claim to equal an event of another class, so the cache tells types apart.
@functools.lru_cache(maxsize=16, typed=True)
def _steps_of(part: DpEvent, interval: float) -> tuple[Step, ...]:
  return tuple(map(Step, kind_of(part).pld(part, interval)))


def _interval(steps: Parts) -> float:
  """Returns the interval of the grid of losses: small for small losses, wide for huge ones.

  A grid of interval h adds about h^2 / 4 to the variance r of one step's loss. So an interval of
  sqrt(r) / 60 adds about 7e-5 of the variance.
  """
  total = 0.0
  widest = 0.0
  finest = math.inf
  for part, times in steps.items():
    grid = kind_of(part).grid(part)
    total += times * grid.renyi_two
    widest = max(widest, grid.largest_loss)
    finest = min(finest, math.sqrt(grid.renyi_two) / grid.points)
  composed_width = total + 12 * math.sqrt(2 * total)
  wanted = max(
    1e-6, min(_INTERVAL, finest), widest / _MAX_POINTS[0], composed_width / _MAX_POINTS[1]
  )
  # The interval is rounded up to _INTERVAL times a power of two, so that different runs share
  # cached distributions of a step.
  interval = _INTERVAL * 2.0 ** math.ceil(math.log2(wanted / _INTERVAL))
  return interval * _COARSER if is_coarse.get() else interval
