"""Accounting of correlated noise: the sensitivity of C x under bounded participation.

The matrix mechanism C x + w (w white noise of standard deviation z clip norms) is one Gaussian
mechanism. As C is lower triangular, this holds even if later rows of x depend on earlier
outputs (Denisov et al. 2022, arXiv:2202.08312, theorem 2.1). Its sensitivity is the largest
|C u|, where u are the clipped gradients of ONE example at the steps in which it takes part:

  |C u|^2 = sum_ij (C^T C)_ij <u_i, u_j>  <=  sum_ij |C^T C|_ij   over its steps i, j,

with equality, for equal u_i, if no entry of C^T C at these steps is negative
(Choquette-Choo et al. 2022, arXiv:2211.06530). After t steps only the first t rows have been
released. Their sensitivities s_t rise with t, so the run is accounted step by step: step t counts
as a Gaussian of noise multiplier z / sqrt(s_t^2 - s_{t-1}^2). The events of t steps then compose to
exactly the Gaussian of noise multiplier z / s_t.

| steps of one example                        | s_t                                          |
| ------------------------------------------- | -------------------------------------------- |
| cyclic: r, r + b, r + 2 b, ..               | exact: the worst of b patterns               |
| at least b apart, C Toeplitz and falling    | exact: 0, b, 2 b, .. is worst (Kalinin 2024) |
| at least b apart, C of at most b bands      | upper bound: worst column of each b steps    |
| at least b apart, any other C               | refused                                      |
| cyclic and sampled, C of at most b bands    | amplified: one sampled Gaussian per turn     |

Under replace_one, u_i is the difference of two clipped gradients, so s_t doubles.
`accounting.epsilon` doubles the sensitivity of every Gaussian event.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Protocol

import dp_accounting as dpa
import numpy as np

from dpjax import validate
from dpjax.accounting.event_kinds.elements import compose
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.event_kinds.noisy_sum import gaussian_event, poisson_sampled_event
from dpjax.validate import UserError, Verbatim

# Largest number of steps for which all columns of C are computed at once.
_DENSE = 4096
# Largest number of entries of one array: 2 GiB of float64. A few arrays of this size are held at
# once.
_MOST_ENTRIES = 2**28
# Largest number of entries of C, if every entry must be checked.
_MOST_LOOKED_AT = 2**28
# Number of columns of C that are checked at once.
_COLUMNS = 256
# Largest rounding error of an entry of C. An entry of at least minus this counts as not
# negative, and a Toeplitz column that rises by at most this counts as falling.
_ZERO = 1e-12


class Strategy(Protocol):
  """Hashable lower-triangular matrix C with entries >= 0; see `dpjax.noise.correlated`."""

  @property
  def bands(self) -> int | None: ...  # C[i, j] = 0 where i - j >= bands
  @property
  def toeplitz(self) -> bool: ...  # C[i, j] depends on i - j alone
  def multiply(self, x: np.ndarray) -> np.ndarray: ...  # C x for x [n, ...]


@functools.lru_cache(maxsize=8)
def turn_images(
  strategy: Strategy, num_steps: int, turns: int, factors: tuple[float, ...] = ()
) -> np.ndarray:
  """Returns the image C' (e_r + e_{r + turns} + ..) for each r = 0 .. turns - 1.

  Here e_t is the unit vector of step t. C' is C with row t divided by factors[t], the factor of the
  noise at step t; () means 1 for every step. The result is [num_steps, min(turns, num_steps)]:
  further columns would be zero. Raises UserError if it is too large, or C has a negative entry.

  >>> from dpjax.noise.correlated import Tree
  >>> turn_images(Tree(restart_every=4), 4, 2)[3]
  array([2., 2.])
  """
  if num_steps * min(turns, num_steps) > _MOST_ENTRIES:
    most = max(_MOST_ENTRIES // turns, math.isqrt(_MOST_ENTRIES))
    raise UserError(
      f"must be at most {most} for steps that are {turns} apart: what an "
      "example may change is counted in an array of num_steps times so many",
      field="num_steps",
      value=num_steps,
    )
  steps = np.arange(num_steps)[:, None]
  patterns = (steps % turns == np.arange(min(turns, num_steps))).astype(np.float64)
  check_entries(strategy, num_steps)
  image = strategy.multiply(patterns)
  image = image / np.array(factors)[:, None] if factors else image
  # The cache returns this array itself, so a write would change later answers.
  image.flags.writeable = False
  return image


@functools.lru_cache(maxsize=8)
def check_entries(strategy: Strategy, num_steps: int) -> None:
  """Raises UserError if C has a negative entry, no unit diagonal or entries outside of its `bands`,
  or is too large to be looked at.

  Equal gradients are the worst case only if C has no negative entry. Sums of columns would not show
  such an entry, since a larger entry of the same row may hide it. Entries outside of the bands
  would join steps that are accounted apart. dpjax's own strategies are built without such entries.
  """
  if type(strategy).__module__.startswith("dpjax.noise.correlated"):
    return
  if num_steps**2 > _MOST_LOOKED_AT:
    raise UserError(
      f"must be at most {math.isqrt(_MOST_LOOKED_AT)} for a strategy of your own, whose entries "
      "are all looked at",
      field="num_steps",
      value=num_steps,
    )
  for start in range(0, num_steps, _COLUMNS):
    columns = np.eye(num_steps, min(_COLUMNS, num_steps - start), -start)
    entries = strategy.multiply(columns)
    below = np.arange(num_steps)[:, None] - np.arange(start, start + columns.shape[1])
    free = (below > 0) & (below < (strategy.bands or num_steps))
    if entries.min() < -_ZERO:
      raise UserError("C must have no negative entry", field="correlation", value=strategy)
    if np.abs(np.where(free, 0.0, entries - (below == 0))).max() > _ZERO:
      raise UserError(
        "C must be 1 on its diagonal, and 0 above it and from `bands` below it on",
        field="correlation",
        value=strategy,
      )


@functools.lru_cache(maxsize=8)
def participation_costs(
  strategy: Strategy,
  *,
  num_steps: int,
  steps_apart: int,
  cyclic: bool,
  factors: tuple[float, ...] = (),
) -> np.ndarray:
  """Returns squared sensitivities s_t^2 of the first t rows of C for t = 1 .. num_steps; rising.

  Args:
    strategy: matrix C of the correlated noise, without negative entries.
    num_steps: number of steps of the run.
    steps_apart: smallest distance of two steps of one example. Their number has no other limit.
    cyclic: whether all distances of an example's steps are multiples of steps_apart.
    factors: factor of the white noise at each step; () for 1 at every step.

  Guarantee: exact or an upper bound, as the table in the docstring of the module says. Raises
  UserError if no bound is known.

  >>> from dpjax.noise.correlated import Independent
  >>> participation_costs(Independent(), num_steps=5, steps_apart=2, cyclic=True)
  array([1., 1., 2., 2., 3.])
  """
  validate.integer_at_least(1, num_steps=num_steps, steps_apart=steps_apart)
  _check_factors(factors, num_steps)
  if cyclic:
    squares = turn_images(strategy, num_steps, steps_apart, factors) ** 2
    costs = np.cumsum(squares, axis=0).max(axis=1)
  else:
    costs = _separated_costs(strategy, num_steps, steps_apart, factors)
  # More rows never cost less than fewer rows. Where rounding breaks this order, it is restored.
  costs = np.maximum.accumulate(costs)
  # The cache returns this array itself, so a write would change later answers.
  costs.flags.writeable = False
  return costs


def _check_factors(factors: Sequence[float], num_steps: int) -> None:
  if factors and len(factors) != num_steps:
    raise UserError(
      f"has {len(factors)} factors, must have one for each of num_steps={num_steps}",
      field="noise_schedule",
    )
  validate.positive(**validate.entries(noise_schedule=factors))


def _separated_costs(
  strategy: Strategy, num_steps: int, steps_apart: int, factors: tuple[float, ...]
) -> np.ndarray:
  if strategy.toeplitz and not factors:
    column = strategy.multiply(np.eye(num_steps, 1))[:, 0]
    if column.min() >= -_ZERO and (np.diff(column) <= _ZERO).all():
      comb = (np.arange(num_steps) % steps_apart == 0).astype(np.float64)
      return np.cumsum(strategy.multiply(comb[:, None])[:, 0] ** 2)
  if strategy.bands is None or strategy.bands > steps_apart or num_steps > _DENSE:
    raise UserError(
      "no sensitivity is known here for examples whose steps are only known to "
      f"be steps_apart={steps_apart} apart; use a cyclic sampler, or at most {steps_apart} "
      "bands",
      field="correlation",
      value=Verbatim(type(strategy).__name__),
    )
  rows = np.array(factors)[:, None] if factors else 1.0
  # With at most steps_apart bands the columns of one example are orthogonal, so their squared norms
  # add up.
  norms = np.cumsum((strategy.multiply(np.eye(num_steps)) / rows) ** 2, axis=0)
  windows = np.arange(0, num_steps, steps_apart)
  # An example takes part at most once in each window of steps_apart steps. So the largest squared
  # norms of the windows add up to a bound.
  return np.maximum.reduceat(norms, windows, axis=1).sum(axis=1)


@functools.lru_cache(maxsize=8)
def amplified_costs(
  strategy: Strategy,
  *,
  num_steps: int,
  num_groups: int,
  factors: tuple[float, ...] = (),
) -> np.ndarray:
  """Returns the largest squared column norm of C in each turn of `num_groups` steps, [turns].

  If C has at most `num_groups` bands, an example's turns change disjoint rows. Then each turn is a
  separate Gaussian mechanism, sampled with the example's probability (Choquette-Choo et al. 2023,
  arXiv:2306.08153). Raises UserError for more bands.

  >>> from dpjax.noise.correlated import BandedToeplitz
  >>> amplified_costs(BandedToeplitz((1.0, 0.5)), num_steps=3, num_groups=2)
  array([1.25, 1.  ])
  """
  validate.integer_at_least(1, num_steps=num_steps, num_groups=num_groups)
  _check_factors(factors, num_steps)
  if strategy.bands is None or strategy.bands > num_groups:
    bands = "no" if strategy.bands is None else f"{strategy.bands}"
    raise UserError(
      f"has {bands} bands; cyclic Poisson sampling amplifies only noise of at "
      f"most num_groups={num_groups} bands",
      field="correlation",
      value=Verbatim(type(strategy).__name__),
    )
  squares = turn_images(strategy, num_steps, num_groups, factors) ** 2
  groups = squares.shape[1]  # num_groups, or num_steps if that is smaller
  turns = -(-num_steps // groups)
  # Zero rows are added after the last step, so that every group has whole turns.
  padded = np.zeros(((turns + 1) * groups, groups))
  padded[:num_steps] = squares
  norms = [
    padded[group : group + turns * groups, group].reshape(turns, groups).sum(axis=1)
    for group in range(groups)
  ]
  costs = np.max(norms, axis=0)
  costs.flags.writeable = False
  return costs


def correlated_events(
  strategy: Strategy,
  *,
  noise_multiplier: float,
  num_steps: int,
  steps_apart: int,
  cyclic: bool,
  turn_prob: float = 1.0,
  factors: tuple[float, ...] = (),
) -> tuple[DpEvent, ...]:
  """Returns an event for each step. For every t, the first t events cover the cost of t steps.

  Args:
    noise_multiplier: multiplier of the white noise: its standard deviation / l2_clip_norm.
    steps_apart, cyclic, factors: as for `participation_costs`.
    turn_prob: chance that an example takes part in its turn. If it is below 1, each turn of
      steps_apart steps is accounted as one Poisson-sampled Gaussian, at the first step of the turn.

  >>> from dpjax.noise.correlated import Independent
  >>> correlated_events(
  ...   Independent(), noise_multiplier=2.0, num_steps=3, steps_apart=2, cyclic=True)
  (GaussianDpEvent(noise_multiplier=2.0), NoOpDpEvent(), GaussianDpEvent(noise_multiplier=2.0))
  """
  options = dict(num_steps=num_steps, factors=tuple(factors))
  if turn_prob < 1:
    costs = amplified_costs(strategy, num_groups=steps_apart, **options)
    turns = [_event(cost, noise_multiplier) for cost in costs]
    sampled = [poisson_sampled_event(turn, sampling_prob=turn_prob) for turn in turns]
    # The whole turn is accounted at its first step, so a run may stop after any step of the turn.
    quiet = [dpa.NoOpDpEvent()] * (min(steps_apart, num_steps) - 1)
    return tuple(itertools.chain.from_iterable([event, *quiet] for event in sampled))[
      :num_steps
    ]
  costs = participation_costs(strategy, steps_apart=steps_apart, cyclic=cyclic, **options)
  # Squared sensitivities add up, so the event of step t holds the increase from step t - 1.
  return tuple(_event(cost, noise_multiplier) for cost in np.diff(costs, prepend=0.0))


def _event(cost: float, noise_multiplier: float) -> DpEvent:
  """Returns the event of a Gaussian sum of squared sensitivity `cost`, in squared clip norms."""
  if cost <= 0:
    return dpa.NoOpDpEvent()
  return gaussian_event(noise_multiplier / float(np.sqrt(cost)))


def join(events: Sequence[DpEvent]) -> DpEvent:
  """Returns the event of all steps together; equal events in a row become one with a count.

  >>> join([gaussian_event(1), gaussian_event(1), dpa.NoOpDpEvent()]).events[0].count
  2
  """
  runs = [compose(event, len(list(group))) for event, group in itertools.groupby(events)]
  if len(runs) > 1:
    return dpa.ComposedDpEvent(runs)
  return runs[0] if runs else dpa.NoOpDpEvent()
