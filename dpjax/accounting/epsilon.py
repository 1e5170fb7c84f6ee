"""Epsilon and delta of an event, by privacy loss distribution (PLD) or by Renyi DP.

The convention, once: an event's noise multiplier z is std / l2_clip_norm. Exchanging one
record (replace_one) moves a clipped sum by up to 2 C, so z counts as z / 2 there. The two
accountants of dp_accounting read `GaussianDpEvent` differently under REPLACE_ONE (RDP:
std / sensitivity, PLD: std / C), a factor of 2 in the noise; here the conversion is
done before either of them is asked. A randomised response (so also `pure_dp_event`) has no
noise multiplier: its epsilon stands as it is under every relation.

Which sampler is proved under which relation by which accountant stands in `proved`. Random
allocation under replace_one is charged as removing and adding a record (`replaced`).
A truncated Poisson sample is charged as the mixture of two pairs, which `_pld_truncated`
derives. Hyper-parameter selection is charged by `tuning.select_rdp`.

Both give upper bounds, and what rounding could take away is added back: see
`_PLD_ROUNDING` and `_RDP_ROUNDING`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld_lib
from dp_accounting.rdp import rdp_privacy_accountant as rdp_lib

from dpjax import validate
from dpjax.accounting import tuning
from dpjax.accounting.allocation_rdp import allocation_rdp
from dpjax.accounting.discrete import SkellamDpEvent, skellam_rdp
from dpjax.accounting.events import DpEvent, composed, merged_parts, unamplified
from dpjax.accounting.proved import ACCOUNTANTS, RELATIONS, law_of, proved_for
from dpjax.accounting.random_allocation import allocation_pld
from dpjax.accounting.replaced import delta_of_both, epsilon_of_both
from dpjax.passes import RandomAllocationDpEvent
from dpjax.validate import UserError, Verbatim

_Parts = Mapping[DpEvent, int]
_ORDERS = rdp_lib.DEFAULT_RDP_ORDERS


class Counting(TypedDict, total=False):
  """How a cost is counted: the last arguments of `epsilon`, with its defaults."""

  neighboring_relation: str
  accountant: str


# A PLD is composed by FFT, whose rounding can make delta too SMALL: against the closed form
# by at most 4e-17 per step (measured at 10, 4e3, 3e5, 1e6 and 1e7 steps). Added back, 2.5
# fold.
_PLD_ROUNDING = (1e-13, 1e-16)  # (once, per composed step)
# The Renyi divergence of one sampled step is computed to about 3e-16 and may come out zero
# or negative, which dp_accounting would read as "costs nothing".
_RDP_ROUNDING = 1e-14
_INTERVAL = 4e-4  # widest grid of privacy losses, unless they are huge
_WIDEST = 100.0  # a grid that would have to be wider shows no finite epsilon worth having
_MAX_POINTS = (2e5, 4e6)  # of one step's grid, of the composed grid


def epsilon(
  event: DpEvent,
  *,
  delta: float,
  neighboring_relation: str = "add_or_remove_one",
  accountant: str = "pld",
) -> float:
  """The smallest epsilon that the accountant proves for `event` at `delta`; maybe inf.

  Guarantee: an upper bound. PLD (Koskela et al. 2020; Doroshenko et al. 2022,
  arXiv:2207.04380) is nearly exact; RDP (Mironov et al. 2019, arXiv:1908.10530) is looser.
  UserError: the accountant has no analysis of this sampler under this relation.

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
  steps = _accountable(event, neighboring_relation, accountant)
  if dpa.NonPrivateDpEvent() in steps:
    return math.inf
  one = _pld_epsilon if accountant == "pld" else _rdp_epsilon
  if _in_two(steps, neighboring_relation):
    least = 2 * _pld_rounding(steps)
    both = epsilon_of_both(functools.partial(one, steps), delta, least=least)
    relation: Counting = {"neighboring_relation": "replace_one", "accountant": accountant}
    return min(both, epsilon(unamplified(steps), delta=delta, **relation))
  return one(steps, delta)


def delta(event: DpEvent, *, epsilon: float, **counting: Unpack[Counting]) -> float:
  """The smallest delta that the accountant proves for `event` at `epsilon`; at most 1.

  >>> round(delta(dpa.GaussianDpEvent(2.0), epsilon=1.9931), 8)
  1e-05
  """
  return float(delta_curve(event, [epsilon], **counting)[0])


def delta_curve(
  event: DpEvent, epsilons: Sequence[float], **counting: Unpack[Counting]
) -> np.ndarray:
  """Delta at each epsilon: all of them hold at once. The analysis is done once.

  Equal, entry by entry, to `delta`.

  >>> delta_curve(dpa.GaussianDpEvent(2.0), [0.0, 1.9931]).round(5)  # 2 Phi(1/4) - 1
  array([1.9741e-01, 1.0000e-05])
  """
  for value in epsilons:
    validate.non_negative(epsilon=value)
  steps = _accountable(event, **counting)
  if dpa.NonPrivateDpEvent() in steps:
    return np.ones(len(epsilons))
  pld = counting.get("accountant", "pld") == "pld"
  curve = functools.partial(_pld_deltas if pld else _rdp_deltas, steps)
  if _in_two(steps, counting.get("neighboring_relation", "")):
    plain = delta_curve(unamplified(steps), epsilons, **counting)
    return np.minimum(plain, [delta_of_both(curve, float(one)) for one in epsilons])
  deltas = curve([float(one) for one in epsilons])
  return np.minimum(1.0, np.array(deltas, float))


def epsilon_curve(
  step_event: DpEvent, steps: Sequence[int], *, delta: float, **counting: Unpack[Counting]
) -> np.ndarray:
  """Epsilon after each number of steps; the analysis of one step is done once.

  Equal, entry by entry, to `epsilon(composed(step_event, n))`.

  >>> epsilon_curve(dpa.GaussianDpEvent(4.0), [0, 4], delta=1e-5).round(3)
  array([0.   , 1.993])
  """
  each = [epsilon(composed(step_event, n), delta=delta, **counting) for n in steps]
  return np.array(each, float)


# --- which mechanism, under which relation, by which accountant


def check_accountant(accountant: str) -> None:
  """Raises UserError unless it is one that proves what it prints.

  >>> check_accountant("pld")
  """
  if accountant == "gdp":
    raise UserError(
      "an approximation that can be too small and proves nothing; use 'pld' or "
      "'rdp', or ask for it by name: dpjax.accounting.gdp.approximate",
      field="accountant",
      value="gdp",
    )
  validate.one_of(ACCOUNTANTS, accountant=accountant)


def _accountable(
  event: DpEvent, neighboring_relation: str = "add_or_remove_one", accountant: str = "pld"
) -> _Parts:
  """The event's parts with noise relative to the sensitivity; refuses mismatches."""
  check_accountant(accountant)
  validate.one_of(RELATIONS, neighboring_relation=neighboring_relation)
  steps = merged_parts(event)
  for part in steps:
    _check_supported(part, str(neighboring_relation), accountant)
  if neighboring_relation != "replace_one" or _in_two(steps, neighboring_relation):
    return steps
  return {_relative_to_two_clip_norms(part): times for part, times in steps.items()}


def _check_supported(part: Any, neighboring_relation: str, accountant: str) -> None:
  law = law_of(part)
  proved = proved_for(law)
  if neighboring_relation not in proved.relations:
    raise UserError(
      f"it is accounted under {' or '.join(proved.relations)}",
      field="sampler",
      value=Verbatim(f"{law} with neighboring_relation={neighboring_relation!r}"),
    )
  if accountant not in proved.accountants:
    raise UserError(
      f"has no such analysis; use accountant={' or '.join(map(repr, proved.accountants))}",
      field="sampler",
      value=Verbatim(f"{law} with accountant={accountant!r}"),
    )
  if isinstance(part, dpa.dp_event.RepeatAndSelectDpEvent):
    runs = merged_parts(part.event)
    if _in_two(runs, neighboring_relation):
      raise UserError(
        "is not proved for the best of several runs",
        field="sampler",
        value=Verbatim("random_allocation with neighboring_relation='replace_one'"),
      )
    for inner in runs:
      _check_supported(inner, neighboring_relation, accountant)


def _in_two(steps: _Parts, neighboring_relation: str) -> bool:
  """Whether replacing is charged as removing and adding; UserError where both ways meet."""
  passes = [part for part in steps if isinstance(part, RandomAllocationDpEvent)]
  if neighboring_relation != "replace_one" or not passes:
    return False
  for part in steps:
    if not isinstance(part, RandomAllocationDpEvent | dpa.GaussianDpEvent):
      raise UserError(
        f"is proved beside Gaussian noise only, not beside {type(part).__name__}",
        field="sampler",
        value=Verbatim("random_allocation with neighboring_relation='replace_one'"),
      )
  return True


def _relative_to_two_clip_norms(part: Any) -> DpEvent:
  if isinstance(part, dpa.GaussianDpEvent | dpa.LaplaceDpEvent):
    return type(part)(part.noise_multiplier / 2)
  if isinstance(part, SkellamDpEvent):
    return SkellamDpEvent(part.variance, 2 * part.l2_sensitivity, 2 * part.l1_sensitivity)
  if isinstance(part, dpa.SampledWithoutReplacementDpEvent):
    inner = _relative_to_two_clip_norms(part.event)
    return type(part)(part.source_dataset_size, part.sample_size, inner)
  if isinstance(part, dpa.dp_event.RepeatAndSelectDpEvent):
    run = tuple(
      dpa.SelfComposedDpEvent(_relative_to_two_clip_norms(inner), times)
      for inner, times in merged_parts(part.event).items()
    )
    whole = dpa.ComposedDpEvent(run)  # type: ignore[arg-type]  # hashable
    return dpa.dp_event.RepeatAndSelectDpEvent(whole, part.mean, part.shape)
  return part


# --- Renyi DP


def _rdp_epsilon(steps: _Parts, delta: float) -> float:
  return float(rdp_lib.compute_epsilon(_ORDERS, list(_rdp(steps)), delta)[0])


def _rdp_deltas(steps: _Parts, epsilons: list[float]) -> list[float]:
  rdp = list(_rdp(steps))
  return [rdp_lib.compute_delta(_ORDERS, rdp, epsilon)[0] for epsilon in epsilons]


def _rdp(steps: _Parts) -> np.ndarray:
  total = np.zeros(len(_ORDERS))
  for part, times in steps.items():
    total += times * _rdp_one(part)
  return total


@functools.lru_cache(maxsize=256)
def _rdp_one(part: DpEvent) -> np.ndarray:
  if isinstance(part, dpa.dp_event.RepeatAndSelectDpEvent):
    one_run = _rdp(merged_parts(part.event))
    law = {"mean_trials": part.mean, "shape": part.shape}
    return tuning.select_rdp(_ORDERS, one_run, **law)
  if isinstance(part, SkellamDpEvent):
    given = {"l2_sensitivity": part.l2_sensitivity, "l1_sensitivity": part.l1_sensitivity}
    return skellam_rdp(part.variance, orders=_ORDERS, **given)
  if isinstance(part, RandomAllocationDpEvent):
    return allocation_rdp(part.num_steps, part.noise_multiplier, orders=_ORDERS)
  replaces = isinstance(
    part, dpa.SampledWithoutReplacementDpEvent | dpa.RandomizedResponseDpEvent
  )
  relation = dpa.NeighboringRelation["REPLACE_ONE" if replaces else "ADD_OR_REMOVE_ONE"]
  with _quiet():
    one = rdp_lib.RdpAccountant(neighboring_relation=relation).compose(part).rdp
  return np.maximum(one, _RDP_ROUNDING)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Hides "order excluded" warnings: leaving out an order only loosens the bound."""
  keep = lambda record: "Excluding this order" not in record.getMessage()
  logger = logging.getLogger("absl")
  logger.addFilter(keep)
  try:
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
      yield
  finally:
    logger.removeFilter(keep)


# --- privacy loss distributions


def _pld_epsilon(steps: _Parts, delta: float) -> float:
  rounding = _pld_rounding(steps)
  if delta < 2 * rounding:
    raise UserError(
      f"too small for accountant='pld' over {sum(steps.values())} steps, whose "
      f"rounding is {rounding:.1g}; use accountant='rdp'",
      field="delta",
      value=delta,
    )
  if not steps:
    return 0.0
  plain = merged_parts(unamplified(steps))
  if plain != steps:
    return min(_pld_quantile(steps, delta), _pld_quantile(plain, delta))
  return _pld_quantile(steps, delta)


def _pld_quantile(steps: _Parts, delta: float) -> float:
  if _interval(steps) > _WIDEST:
    return math.inf
  return float(_pld(steps).get_epsilon_for_delta(delta - _pld_rounding(steps)))


def _pld_deltas(steps: _Parts, epsilons: list[float]) -> list[float]:
  if not steps:
    return [0.0] * len(epsilons)
  plain = merged_parts(unamplified(steps))
  if plain == steps:
    return _pld_values(steps, epsilons)
  pairs = zip(_pld_values(steps, epsilons), _pld_values(plain, epsilons))
  return [min(pair) for pair in pairs]


def _pld_values(steps: _Parts, epsilons: list[float]) -> list[float]:
  if _interval(steps) > _WIDEST:
    return [1.0] * len(epsilons)
  pld = _pld(steps)
  rounding = _pld_rounding(steps)
  return [float(pld.get_delta_for_epsilon(value)) + rounding for value in epsilons]


def _pld_rounding(steps: _Parts) -> float:
  once, per_step = _PLD_ROUNDING
  return once + per_step * sum(steps.values())


def _pld(steps: _Parts) -> pld_lib.PrivacyLossDistribution:
  return _pld_of(tuple(steps.items()))


@functools.lru_cache(maxsize=2)  # replacing asks the same run at several deltas
def _pld_of(steps: tuple[tuple[DpEvent, int], ...]) -> pld_lib.PrivacyLossDistribution:
  interval = _interval(dict(steps))
  ones = [(_pld_one(part, interval), times) for part, times in steps]
  each = [one if times == 1 else one.self_compose(times) for one, times in ones]
  return functools.reduce(lambda left, right: left.compose(right), each)


@functools.lru_cache(maxsize=16)
def _pld_one(part: DpEvent, interval: float) -> pld_lib.PrivacyLossDistribution:
  """Pessimistic at any interval (connect-the-dots), so the grid is free to choose."""
  if isinstance(part, dpa.RandomizedResponseDpEvent):
    return pld_lib.from_randomized_response(
      part.noise_parameter, part.num_buckets, value_discretization_interval=interval
    )
  if isinstance(part, dpa.TruncatedSubsampledGaussianDpEvent):
    return _pld_truncated(part, interval)
  if isinstance(part, RandomAllocationDpEvent):
    return allocation_pld(part.num_steps, part.noise_multiplier, interval=interval)
  prob, noise = _sampling_and_noise(part)
  options: dict[str, Any] = {
    "sampling_prob": prob,
    "value_discretization_interval": interval,
  }
  if isinstance(noise, dpa.LaplaceDpEvent):
    return pld_lib.from_laplace_mechanism(noise.noise_multiplier, **options)
  return pld_lib.from_gaussian_mechanism(noise.noise_multiplier, **options)


def _pld_truncated(
  part: dpa.TruncatedSubsampledGaussianDpEvent, interval: float
) -> pld_lib.PrivacyLossDistribution:
  """A Poisson draw of n records at rate q, cut to B at random, one record x or zeroed.

  Let K ~ Bin(n - 1, q) be how many OTHERS are drawn. K < B: nothing is cut, with or without
  x, and the pair is that of Poisson sampling. K >= B: let T be a uniform B-subset of the
  others drawn, y uniform in T. x is kept with p = q E[B / (K + 1) | K >= B], then in the
  place of y. Given (T, y) both neighbours are (1 - p) N(0) + p N(u), with ||u|| <= 2 C, and
  (1 - p) N(0) + p N(v), with ||v|| <= C and ||u - v|| <= C. By advanced joint convexity
  (Balle, Barthe, Gaboardi 2018, theorem 2) their hockey-stick divergence is, in both
  directions and at every order >= 1, at most p times that of two Gaussians 2 C apart, hence
  at most that of (1 - p) N(0) + p N(2 C) and (1 - p) N(0) + p N(-2 C). Whether K >= B is
  revealed: the two pairs are mixed. dp_accounting builds the same (arXiv:2508.15089).
  """
  return pld_lib.from_truncated_subsampled_gaussian_mechanism(
    part.dataset_size,
    part.sampling_probability,
    part.truncated_batch_size,
    part.noise_multiplier,
    value_discretization_interval=interval,
    neighboring_relation=dpa.NeighboringRelation.REPLACE_SPECIAL,
  )


def _sampling_and_noise(part: Any) -> tuple[float, Any]:
  if isinstance(part, dpa.PoissonSampledDpEvent):
    return part.sampling_probability, part.event
  if isinstance(part, dpa.TruncatedSubsampledGaussianDpEvent):  # a guide for the grid only
    return part.sampling_probability, dpa.GaussianDpEvent(part.noise_multiplier)
  if isinstance(part, RandomAllocationDpEvent):  # as a whole pass: see `_renyi_two`
    return part.num_steps**-0.5, dpa.GaussianDpEvent(part.noise_multiplier)
  return 1.0, part


def _interval(steps: _Parts) -> float:
  """The grid of losses: finer where one step loses little, coarser where losses are huge.

  A grid of h adds about h^2 / 4 to the variance r of one step's loss, so h = sqrt(r) / 60
  costs about 1e-4 of it. Powers of two, so that one step's PLD is found again.
  """
  renyi = {part: _renyi_two(part) for part in steps}
  total = sum(times * renyi[part] for part, times in steps.items())
  widest = max(_largest_loss(part) for part in steps)
  composed_width = total + 12 * math.sqrt(2 * total)
  # a response has two or three losses, which fall between the points of the grid
  fine = lambda part: 4000 if isinstance(part, dpa.RandomizedResponseDpEvent) else 60
  finest = min(math.sqrt(value) / fine(part) for part, value in renyi.items())
  wanted = max(
    1e-6, min(_INTERVAL, finest), widest / _MAX_POINTS[0], composed_width / _MAX_POINTS[1]
  )
  return _INTERVAL * 2.0 ** math.ceil(math.log2(wanted / _INTERVAL))


def _renyi_two(part: DpEvent) -> float:
  """About the Renyi divergence of order 2 of one step: log(1 + q^2 (e^(1/z^2) - 1))."""
  if isinstance(part, dpa.RandomizedResponseDpEvent):
    loss = _largest_loss(part)
    return min(loss, math.expm1(min(loss, 1.0)) ** 2)
  prob, noise = _sampling_and_noise(part)
  full = 1 / noise.noise_multiplier**2
  if isinstance(noise, dpa.LaplaceDpEvent):
    full = min(full, 1 / noise.noise_multiplier)
  return _amplified(full, prob**2)


def _largest_loss(part: DpEvent) -> float:
  """About the largest loss of one step that is kept: 10 standard deviations of noise."""
  if isinstance(part, dpa.RandomizedResponseDpEvent):
    share = part.noise_parameter / part.num_buckets
    return math.log1p((1 - part.noise_parameter) / share)
  prob, noise = _sampling_and_noise(part)
  shift = 1 / noise.noise_multiplier
  full = shift if isinstance(noise, dpa.LaplaceDpEvent) else shift**2 / 2 + 10 * shift
  return _amplified(full, prob)


def _amplified(loss: float, prob: float) -> float:
  """log(1 + prob (e^loss - 1)), without overflow."""
  if loss < 1:
    return math.log1p(prob * math.expm1(loss))
  return loss + math.log(prob + (1 - prob) * math.exp(-loss))
