"""A second accountant: epsilon of a plan, derived anew from its public fields by dp_accounting.

It shares no code with `Plan.epsilon` but the share of delta that is left for overflow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from scipy import special, stats

from dpjax import noise, transforms

# Renyi orders above 40 are left out if 2 x order / noise multiplier exceeds this number.
_FARTHEST = 60.0
# Relative tolerance between two computations of one epsilon, which round losses differently.
_EPSILON_SLACK = 0.01


def agrees(plan: Any) -> bool:
  """Returns whether the plan's epsilon is the derived one, within the rounding of both."""
  derived = derived_epsilon(plan)
  assert derived is not None, plan.sampler
  return abs(plan.epsilon() / derived - 1) <= _EPSILON_SLACK


def derived_epsilon(plan: Any) -> float | None:
  """Returns epsilon, derived from public fields of the plan by the accountants of dp_accounting;
  None if this file has no second derivation for the plan."""
  scheme = "poisson" if plan.sampler.name == "users" else plan.sampler.name
  if scheme == "fixed_size" and plan.neighboring_relation == "replace_one":
    return _epsilon_of_exchange(plan)
  by_rdp = plan.accountant == "rdp" and scheme != "truncated_poisson"
  # The default interval is too wide for a small epsilon.
  interval = min(1e-4, 1e-3 * plan.epsilon())
  accountant = (
    RdpAccountant
    if by_rdp
    else functools.partial(PLDAccountant, value_discretization_interval=interval)
  )
  relation = dpa.NeighboringRelation[plan.neighboring_relation.name]
  if plan.sampler.participation is not None:
    counted, event, times = accountant(), *_event_of_matrix(plan)
  elif scheme == "shuffled":  # a Gaussian for each epoch, begun ones too
    times = -(-plan.num_steps // (plan.sampler.num_examples // plan.sampler.batch_size))
    counted = accountant()
    event = dpa.GaussianDpEvent(_multiplier(plan) / _exchanged(plan))
  elif scheme in _SAMPLED:
    event = _SAMPLED[scheme](plan.sampler, _multiplier(plan))
    times = plan.num_steps
    counted = accountant(neighboring_relation=relation)
  else:
    return None
  counted.compose(event, times)
  # The PLD accountant under replace_one reads multipliers relative to the clip norm.
  by_norm = scheme in _SAMPLED and not by_rdp
  for level in _levels_before(plan):
    event = dpa.GaussianDpEvent(level * (_exchanged(plan) if by_norm else 1))
    counted.compose(event, len(plan.statistics.vectors))
  return float(counted.get_epsilon(plan.accounted_delta(plan.delta)))


_SAMPLED: dict[str, Callable[[Any, float], dpa.DpEvent]] = {
  "poisson": lambda s, z: dpa.PoissonSampledDpEvent(
    s.sampling_prob, dpa.GaussianDpEvent(z)
  ),
  "truncated_poisson": lambda s, z: dpa.TruncatedSubsampledGaussianDpEvent(
    s.num_examples, s.sampling_prob, s.capacity, z
  ),
  # Under add_or_remove_one a joining record pushes another one out. So the pair is that of a
  # Poisson sample whose sum moves by 2 C.
  "fixed_size": lambda s, z: dpa.PoissonSampledDpEvent(
    s.batch_size / s.num_examples, dpa.GaussianDpEvent(z / 2)
  ),
}


def _epsilon_of_exchange(plan: Any) -> float | None:
  """Returns epsilon of a plan that draws without replacement, under replace_one.

  Returns None for a plan with statistics, whose cost is not composed with such batches here.
  """
  if plan.statistics is not None:
    return None
  shift = 2 / _multiplier(plan)
  outcomes = _exchanged_outcomes(plan.sampler.batch_size / plan.sampler.num_examples, shift)
  delta = plan.accounted_delta(plan.delta)
  steps = plan.num_steps
  if plan.accountant == "rdp":
    return _epsilon_by_rdp(*outcomes, shift=shift, delta=delta, num_steps=steps)
  # Losses are rounded up by .4 of the interval on average, and roundings of all steps add up.
  interval = min(1e-4, _EPSILON_SLACK * plan.epsilon() / plan.num_steps)
  return _epsilon_by_pld(*outcomes, interval=interval, delta=delta, num_steps=steps)


def _exchanged_outcomes(prob: float, shift: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns log-probabilities of many outcomes under both neighbours, where a record is exchanged.

  `dpjax.accounting.exchanged_sample` has the proof of this pair. With r(x) = (1 - q) + q N(shift) /
  N(0), each x with r(x) > 1 makes two outcomes: one with densities N(0) and r N(0) under the two
  neighbours, and its mirror image. Each other outcome is as likely under one as under the other.

  Args:
    prob: q, the chance that one record is in the batch.
    shift: 2 / noise multiplier.

  Returns:
    Two arrays [outcomes]. Their probabilities sum to 1 each, up to the rounding of cells.
  """
  # Renyi moments of order a have their peak near a * shift; see `_epsilon_by_rdp`.
  points = np.linspace(shift / 2, max(_FARTHEST + 12, 41 * shift), 80_001)
  middle = (points[1:] + points[:-1]) / 2
  width = math.log(points[1] - points[0])
  low = stats.norm.logpdf(middle) + width
  # log1p(-1) is -inf: every record is in every batch.
  with np.errstate(divide="ignore"):
    stays_out = np.log1p(-prob)
  high = np.logaddexp(
    stays_out + low, math.log(prob) + stats.norm.logpdf(middle, shift) + width
  )
  alike = math.log(max(1.0 - np.exp(low).sum() - np.exp(high).sum(), 1e-300))
  return np.r_[high, low, alike], np.r_[low, high, alike]


def _epsilon_by_rdp(
  upper: np.ndarray, lower: np.ndarray, *, shift: float, delta: float, num_steps: int
) -> float:
  """Returns epsilon of a pair of discrete distributions, from its Renyi divergences."""
  orders = np.array(
    [order for order in RdpAccountant().orders if order <= 40 or order * shift <= _FARTHEST]
  )
  moments = [special.logsumexp(order * upper + (1 - order) * lower) for order in orders]
  divergences = np.array(moments) / (orders - 1) * num_steps
  return float(dpa.rdp.compute_epsilon(orders.tolist(), divergences.tolist(), delta)[0])


def _epsilon_by_pld(
  upper: np.ndarray, lower: np.ndarray, *, interval: float, delta: float, num_steps: int
) -> float:
  """Returns epsilon of a pair of discrete distributions, from its privacy loss."""
  # Outcomes with a probability below e^-60 under both neighbours have no weight beside delta.
  likely = np.maximum(upper, lower) > -60
  numbers = range(int(likely.sum()))
  one_step = privacy_loss_distribution.from_two_probability_mass_functions(
    dict(zip(numbers, lower[likely])), dict(zip(numbers, upper[likely])),
    value_discretization_interval=interval,
  )  # fmt: skip
  return float(one_step.self_compose(num_steps).get_epsilon_for_delta(delta))


def _levels_before(plan: Any) -> list[float]:
  """Returns noise multipliers, relative to the sensitivity, of what is released for one vector of
  the statistics: its noisy sum, and its private median if it has one. Returns [] without
  statistics."""
  statistics = plan.statistics
  if statistics is None:
    return []
  levels = [statistics.noise_multiplier / _exchanged(plan)]
  if not statistics.clip_norms:
    levels.append(
      -0.5 / float(stats.norm.ppf(1 / (1 + math.exp(statistics.median_epsilon))))
    )
  return levels


def _multiplier(plan: Any) -> float:
  z = plan.noise_multiplier
  rule = plan.l2_clip_norm.rule
  # Slack clipping needs no correction: gradient and slack together are within the clip norm.
  if not isinstance(rule, transforms.AdaptiveClipping):
    return z
  # Adaptive clipping also releases a count of sensitivity 1/2.
  return (z**-2 + (2 * rule.count_std(plan.normalize_by)) ** -2) ** -0.5


def _exchanged(plan: Any) -> int:
  """Returns the sensitivity in clip norms: 2 under replace_one, else 1."""
  return 2 if plan.neighboring_relation == "replace_one" else 1


def _event_of_matrix(plan: Any) -> tuple[dpa.DpEvent, int]:
  """Returns (event, number of times that the event is composed) for bounded participation, from the
  dense strategy matrix C."""
  shape = plan.noise_shape
  matrix = noise.correlated.matrix(shape.strategy, plan.num_steps)
  matrix /= np.array(shape.schedule or np.ones(plan.num_steps))[:, None]
  apart, cyclic, prob = plan.sampler.participation
  turns = 1 if prob == 1 else -(-plan.num_steps // apart)
  if prob < 1:  # an event is one turn, in which an example uses one column
    sensitivity = np.sqrt((matrix**2).sum(axis=0).max())
  else:
    # No entry is negative, so equal gradients in every turn are worst. For steps that are not
    # cyclic this is Kalinin's theorem, for falling Toeplitz matrices.
    starts = range(min(apart, plan.num_steps)) if cyclic else [0]
    sensitivity = max(np.linalg.norm(matrix[:, r::apart].sum(axis=1)) for r in starts)
  event = dpa.GaussianDpEvent(plan.noise_multiplier / sensitivity / _exchanged(plan))
  return (event if prob == 1 else dpa.PoissonSampledDpEvent(prob, event)), turns
