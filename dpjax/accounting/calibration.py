"""The noise, number of steps or sampling probability that a target epsilon allows.

The target may also be a bound on an attacker (`attack_bounds`); then only the noise is found.
Every answer is on the private side: what the accountant proves at the answer is at most the target
(pitfall P25 in docs/sharp_edges.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Unpack

from dpjax import validate
from dpjax.accounting.attack_bounds import AttackBound
from dpjax.accounting.epsilon import (
  Counting,
  coarse_grid,
  epsilon_about,
  privacy_profile,
)
from dpjax.accounting.epsilon import epsilon as epsilon_of
from dpjax.accounting.event_kinds.elements import compose
from dpjax.accounting.event_kinds.kind import DpEvent
from dpjax.accounting.loss_grid import Profile
from dpjax.accounting.text import upper
from dpjax.validate import UserError

MIN_NOISE_MULTIPLIER = 1e-2
MAX_NOISE_MULTIPLIER = 1e6
MIN_SAMPLING_PROB = 1e-9
MAX_NUM_STEPS = 10_000_000
# If the cost of an answer on a coarse grid of losses is as far from the target, in logarithms, then
# this grid guides no more.
_FAR = 0.05

_Cost = Callable[[float], float]  # parameter -> epsilon or gain of an attacker


class Target(Counting):
  """Largest (epsilon, delta) of a run, with the relation and accountant that give its epsilon."""

  epsilon: float
  delta: float


def calibrate_noise_multiplier(
  make_event: Callable[[float], DpEvent], *, tol: float = 1e-4, **target: Unpack[Target]
) -> float:
  """Returns the smallest noise_multiplier z at which `make_event(z)` costs at most `epsilon`.

  Args:
    make_event: function from the number to the event of the whole run.
    tol: largest relative amount by which the cost may be below `epsilon`.
    target: `epsilon` and `delta`, and `neighboring_relation` and `accountant` as `epsilon` takes
      them.

  Guarantee: the run costs at most `epsilon`. It costs at least `(1 - tol) * epsilon`, unless the
  cost jumps over this range or the answer is MIN_NOISE_MULTIPLIER.
  Raises Unreachable if the run costs more even at MAX_NOISE_MULTIPLIER.

  >>> import dp_accounting as dpa
  >>> z = calibrate_noise_multiplier(dpa.GaussianDpEvent, epsilon=2.0, delta=1e-5)
  >>> round(z, 3)
  1.994
  """
  low = MIN_NOISE_MULTIPLIER
  high = MAX_NOISE_MULTIPLIER
  last = f"even noise_multiplier={high:g} costs"
  return _solve(make_event, low, high, last, tol, target)


def calibrate_noise_to_attack(
  make_event: Callable[[float], DpEvent],
  attack: AttackBound,
  *,
  delta: float,
  tol: float = 1e-4,
  **counting: Unpack[Counting],
) -> float:
  """Returns the smallest noise_multiplier z at which the run `make_event(z)` keeps an attack bound.

  The whole privacy profile is used (Kulynych et al. 2024, arXiv 2407.02191). This needs less noise
  than a bound that is converted to one pair (epsilon, delta).

  Args:
    make_event: noise multiplier -> event of the whole run.
    attack: bound on what an attacker gains, such as `TruePositiveRate(tpr=0.1, fpr=0.01)`.
    delta: slack of a `GaussianDp` bound; the other bounds hold without one.
    tol: largest gap between the limit and the attacker's gain at the answer, as a share of the
      limit, unless the gain jumps at the answer or the answer is MIN_NOISE_MULTIPLIER.
    counting: relation and accountant, as in `epsilon`.

  Guarantee: the bound holds at the answer.

  Raises:
    Unreachable: even MAX_NOISE_MULTIPLIER does not keep the bound.

  >>> from dpjax.accounting import TruePositiveRate, gaussian_event
  >>> bound = TruePositiveRate(tpr=0.1, fpr=0.01)
  >>> z = calibrate_noise_to_attack(gaussian_event, bound, delta=1e-5)
  >>> round(z, 3)  # 1 / (Phi^-1(.1) - Phi^-1(.01)) is .957
  0.957
  """

  make_profile = lambda noise: privacy_profile(make_event(noise), **counting)
  return noise_of_profile(make_profile, attack, delta=delta, tol=tol)


def noise_of_profile(
  make_profile: Callable[[float], Profile],
  attack: AttackBound,
  *,
  delta: float,
  tol: float = 1e-4,
) -> float:
  """Returns the noise as `calibrate_noise_to_attack` does, for runs given by privacy profiles.

  Args:
    make_profile: noise multiplier -> profile of the whole run.

  >>> from dpjax.accounting import Advantage, gaussian_event
  >>> make = lambda z: privacy_profile(gaussian_event(z))
  >>> round(noise_of_profile(make, Advantage(0.1), delta=1e-5), 2)
  3.98
  """
  validate.open_unit(delta=delta, tol=tol)

  cost = lambda noise: attack.cost(make_profile(noise), delta)
  # A cost may be a difference of rates (`TruePositiveRate`). A slightly smaller limit covers the
  # rounding of this difference.
  limit = attack.limit * (1 - 1e-12)
  low = MIN_NOISE_MULTIPLIER
  high = MAX_NOISE_MULTIPLIER
  answer = _least_guided(cost, start=1.0, low=low, high=high, target=limit, tol=tol)
  if answer is None:
    raise Unreachable(
      f"unreachable, even noise_multiplier={high:g} leaves an attacker "
      f"{upper(cost(high))}, where {upper(attack.limit)} is allowed",
      field="attacker",
      value=attack,
    )
  return answer


def calibrate_sampling_prob(
  make_event: Callable[[float], DpEvent], *, tol: float = 1e-4, **target: Unpack[Target]
) -> float:
  """Returns the largest sampling_prob q <= 1 at which `make_event(q)` costs at most `epsilon`.

  Args:
    make_event: function from the number to the event of the whole run.
    tol: largest relative amount by which the cost may be below `epsilon`.
    target: `epsilon` and `delta`, and `neighboring_relation` and `accountant` as `epsilon` takes
      them.

  Guarantee: the run costs at most `epsilon`. It costs at least `(1 - tol) * epsilon`, unless the
  cost jumps over this range or the answer is 1.
  Raises Unreachable if the run costs more even at MIN_SAMPLING_PROB.

  >>> from dpjax.accounting import gaussian_event, poisson_sampled_event  # doctest: +SLOW
  >>> make = lambda q: poisson_sampled_event(gaussian_event(1), sampling_prob=q)
  >>> round(calibrate_sampling_prob(make, epsilon=1.0, delta=1e-5), 4)
  0.048
  """
  # The cost falls as 1 / q rises, as it does for more noise, so the same search finds 1 / q.
  by_inverse = lambda inverse: make_event(1 / inverse)
  last = f"even sampling_prob={MIN_SAMPLING_PROB:g} costs"
  return 1 / _solve(by_inverse, 1.0, 1 / MIN_SAMPLING_PROB, last, tol, target)


def calibrate_num_steps(step_event: DpEvent, **target: Unpack[Target]) -> int:
  """Returns the largest number of steps of `step_event` that costs at most `epsilon`.

  Guarantee: the answer costs at most `epsilon`, and one step more costs more than `epsilon`.
  Raises UserError if one step costs more than `epsilon`, or if MAX_NUM_STEPS steps cost no more.

  >>> import dp_accounting as dpa
  >>> calibrate_num_steps(dpa.GaussianDpEvent(20.0), epsilon=2.0, delta=1e-5)
  100
  """
  run = functools.partial(compose, step_event)
  cost, about = _costs(run, 0.5, **target)
  search = functools.partial(_most_steps, target=target["epsilon"])
  start = search(functools.cache(about), 1)
  with coarse_grid():
    start = search(functools.cache(cost), start)
  answer = search(functools.cache(cost), start)
  if answer == 0:
    raise _unreachable("one step costs", cost(1), target)
  if answer >= MAX_NUM_STEPS:
    raise UserError(
      f"allows more than {MAX_NUM_STEPS} steps; give num_steps instead",
      field="epsilon",
      value=target["epsilon"],
    )
  return answer


def _costs(
  make_event: Callable[[Any], DpEvent],
  tol: float,
  *,
  epsilon: float,
  delta: float,
  accountant: str = "pld",
  **options: Any,
) -> tuple[_Cost, _Cost]:
  """Checks the target. Returns parameter -> epsilon, and a quick guess at it."""
  validate.positive(epsilon=epsilon)
  validate.open_unit(delta=delta, tol=tol)
  options["accountant"] = accountant

  def cost(parameter: Any) -> float:
    return epsilon_of(make_event(parameter), delta=delta, **options)

  def about(parameter: Any) -> float:
    return epsilon_about(make_event(parameter), delta=delta, **options)

  return cost, about


class Unreachable(UserError):
  """Raised if no answer in the search range keeps the requested epsilon or bound."""


def _unreachable(last: str, cost: float, target: Target) -> Unreachable:
  return Unreachable(
    f"unreachable, {last} epsilon={upper(cost)} at delta={target['delta']!r}",
    field="epsilon",
    value=target["epsilon"],
  )


def _solve(
  make_event: Callable, low: float, high: float, last: str, tol: float, target: Target
) -> float:
  """Returns, within `tol`, the smallest parameter in [low, high] that costs at most the target.

  If there is no such parameter, `Unreachable` is raised, with a message that begins with `last`."""
  cost, about = _costs(make_event, tol, **target)
  goal = {"low": low, "high": high, "target": target["epsilon"]}
  start = _least(functools.cache(about), start=1.0, tol=0.01, **goal) or 1.0
  answer = _least_guided(cost, start=start, tol=tol, **goal)
  if answer is None:
    raise _unreachable(last, cost(high), target)
  return answer


def _least_guided(
  fine: _Cost, *, start: float, low: float, high: float, target: float, tol: float
) -> float | None:
  """Returns `_least` of a cost, which is quicker to compute on a coarse grid of losses.

  Guarantee: the cost on the fine grid is at most the target at the answer.
  """
  search = functools.partial(_least, low=low, high=high)
  # A search asks repeatedly for the costs at the ends of its bracket.
  cost = functools.cache(fine)

  @functools.cache
  def coarse(parameter: float) -> float:
    with coarse_grid():
      return fine(parameter)

  near = functools.partial(search, start=start, target=target)
  guess = near(coarse, tol=tol / 4, width=tol / 4)
  if guess is None or not 0 < cost(guess) < math.inf:
    return near(cost, tol=tol)
  if target * (1 - tol) <= cost(guess) <= target:
    return guess
  if abs(math.log(cost(guess) / target)) > _FAR:
    return near(cost, start=guess, tol=tol, first_step=1.05)
  # The coarse grid raises the cost by a factor that changes slowly. The searches begin with small
  # steps, since the answer is near.
  near = functools.partial(search, start=guess, first_step=1.003)
  aim = target * (1 - tol / 2) * coarse(guess) / cost(guess)
  guess = near(coarse, target=aim, tol=tol / 4, width=tol / 4) or guess
  if target * (1 - tol) <= cost(guess) <= target:
    return guess
  return near(cost, start=guess, target=target, tol=tol)


def _least(
  cost: _Cost,
  *,
  start: float,
  low: float,
  high: float,
  target: float,
  tol: float,
  first_step: float = 1.1,
  width: float = 1e-10,
) -> float | None:
  """Returns the smallest x in [low, high] with cost(x) <= target, within `tol`.

  Returns None if cost(high) is above the target. The cost must fall as x rises. Then cost(x) is at
  least (1 - tol) * target, or x is `low`. A cost that jumps over the target never comes near it:
  then x is within a factor of about 1 + `width`."""
  private = unsafe = min(max(start, low), high)
  # The step is squared each time, so that even a bad start needs few trials.
  step = first_step
  while cost(private) > target:
    if private >= high:
      return None
    unsafe = private
    private = min(private * step, high)
    step = step**2
  step = first_step
  while cost(unsafe) <= target:
    if unsafe <= low:
      return unsafe
    private = unsafe
    unsafe = max(unsafe / step, low)
    step = step**2
  # Now cost(private) <= target < cost(unsafe), and the bracket is narrowed.
  for trial in range(200):
    near = cost(private) >= target * (1 - tol)
    if near or abs(math.log(unsafe / private)) < width:
      break
    middle = _interpolate(cost, private, unsafe, target * (1 - tol / 2), trial)
    # `private` always costs at most the target, so the answer is on the private side.
    private, unsafe = (middle, unsafe) if cost(middle) <= target else (private, middle)
  return private


def _interpolate(cost: _Cost, a: float, b: float, aim: float, trial: int) -> float:
  """Returns the point at which the line through a and b, on log-log axes, has the cost `aim`.

  Every third trial returns the geometric middle of a and b instead, and so does a trial in which a
  cost is 0 or infinite."""
  cost_a = cost(a)
  cost_b = cost(b)
  # Epsilon is nearly a power of the parameter. Where it is not, the middle guarantees
  # progress.
  share = 0.5
  if trial % 3 < 2 and 0 < cost_a < cost_b < math.inf:
    share = math.log(aim / cost_a) / math.log(cost_b / cost_a)
  # The share is clipped, so that the guess is never an end, where the cost is known already.
  return a * (b / a) ** min(max(share, 1e-3), 1 - 1e-3)


def _most_steps(cost: _Cost, start: int, *, target: float) -> int:
  """Returns the largest n <= MAX_NUM_STEPS with cost(n) <= target, or 0; costs must rise with n."""
  low = 0
  high = max(1, start)
  while high < MAX_NUM_STEPS and cost(high) <= target:
    low, high = high, min(high + max(1, high // (8 if low == 0 else 2)), MAX_NUM_STEPS)
  if cost(high) <= target:
    return high
  trial = 0
  while high - low > 1:
    guess = _interpolate(cost, max(low, 1), high, target, trial) if low else high // 2
    middle = min(max(int(guess), low + 1), high - 1)
    low, high = (middle, high) if cost(middle) <= target else (low, middle)
    trial += 1
  return low
