"""How much noise, how many steps, how large batches: from a target epsilon, backwards.

Every answer lies on the private side: the accountant, asked again about the answer, gives
an epsilon that is at most the target (pitfall P25).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from dpjax import validate
from dpjax.accounting.epsilon import epsilon as epsilon_of
from dpjax.accounting.events import DpEvent, composed
from dpjax.accounting.text import upper
from dpjax.validate import UserError

MIN_NOISE_MULTIPLIER, MAX_NOISE_MULTIPLIER = 1e-2, 1e6
MIN_SAMPLING_PROB = 1e-9
MAX_NUM_STEPS = 10_000_000

_Cost = Callable[[float], float]  # parameter -> epsilon


def calibrate_noise_multiplier(
  make_event: Callable[[float], DpEvent],
  *,
  epsilon: float,
  delta: float,
  neighboring_relation: str = "add_or_remove_one",
  accountant: str = "pld",
  tol: float = 1e-4,
) -> float:
  """The smallest noise_multiplier whose whole run `make_event(z)` costs at most `epsilon`.

  Guarantee: `epsilon(make_event(answer)) <= epsilon`, and at least `(1 - tol) * epsilon`
  unless epsilon jumps there or the answer is MIN_NOISE_MULTIPLIER.
  UserError: even MAX_NOISE_MULTIPLIER costs more.

  >>> import dp_accounting as dpa
  >>> z = calibrate_noise_multiplier(dpa.GaussianDpEvent, epsilon=2.0, delta=1e-5)
  >>> round(z, 3)
  1.994
  """
  search = functools.partial(
    _least, low=MIN_NOISE_MULTIPLIER, high=MAX_NOISE_MULTIPLIER, target=epsilon
  )
  cost = _cost(make_event, epsilon, delta, neighboring_relation, tol)
  answer = _with_rdp_start(search, cost, accountant, tol)
  if answer is None:
    raise UserError(
      f"epsilon={epsilon!r}: unreachable, even noise_multiplier={MAX_NOISE_MULTIPLIER:g} "
      f"costs epsilon={upper(cost(accountant)(MAX_NOISE_MULTIPLIER))} at delta={delta!r}"
    )
  return answer


def calibrate_sampling_prob(
  make_event: Callable[[float], DpEvent],
  *,
  epsilon: float,
  delta: float,
  neighboring_relation: str = "add_or_remove_one",
  accountant: str = "pld",
  tol: float = 1e-4,
) -> float:
  """The largest sampling_prob, at most 1, whose run `make_event(q)` costs <= `epsilon`.

  Guarantee: on the private side, as for `calibrate_noise_multiplier`.
  UserError: even MIN_SAMPLING_PROB costs more.

  >>> from dpjax.accounting.events import gaussian_event, poisson_sampled_event
  >>> make = lambda q: poisson_sampled_event(gaussian_event(1), sampling_prob=q)
  >>> round(calibrate_sampling_prob(make, epsilon=1.0, delta=1e-5), 4)
  0.048
  """
  search = functools.partial(_least, low=1.0, high=1 / MIN_SAMPLING_PROB, target=epsilon)
  by_inverse = lambda inverse: make_event(1 / inverse)  # so that more is more private
  cost = _cost(by_inverse, epsilon, delta, neighboring_relation, tol)
  answer = _with_rdp_start(search, cost, accountant, tol)
  if answer is None:
    raise UserError(
      f"epsilon={epsilon!r}: unreachable, even sampling_prob={MIN_SAMPLING_PROB:g} costs "
      f"epsilon={upper(cost(accountant)(1 / MIN_SAMPLING_PROB))} at delta={delta!r}"
    )
  return 1 / answer


def calibrate_num_steps(
  step_event: DpEvent,
  *,
  epsilon: float,
  delta: float,
  neighboring_relation: str = "add_or_remove_one",
  accountant: str = "pld",
) -> int:
  """The largest number of steps of `step_event` that costs at most `epsilon`.

  Guarantee: the answer costs at most `epsilon`, one step more costs more.
  UserError: the first step costs more, or MAX_NUM_STEPS cost no more.

  >>> import dp_accounting as dpa
  >>> calibrate_num_steps(dpa.GaussianDpEvent(20.0), epsilon=2.0, delta=1e-5)
  100
  """
  run = functools.partial(composed, step_event)
  cost = _cost(run, epsilon, delta, neighboring_relation)
  search = functools.partial(_most_steps, target=epsilon)
  start = 1 if accountant == "rdp" else _rdp_start(lambda: search(cost("rdp"), 1))
  answer = search(cost(accountant), start or 1)
  if answer == 0:
    raise UserError(
      f"epsilon={epsilon!r}: unreachable, one step costs "
      f"epsilon={upper(cost(accountant)(1))} at delta={delta!r}"
    )
  if answer >= MAX_NUM_STEPS:
    raise UserError(
      f"epsilon={epsilon!r}: allows more than {MAX_NUM_STEPS} steps; give num_steps instead"
    )
  return answer


def _cost(
  make_event: Callable, epsilon: float, delta: float, relation: str, tol: float = 0.5
) -> Callable[[str], _Cost]:
  """Checks the target; returns accountant -> (parameter -> epsilon), remembering values."""
  validate.positive(epsilon=epsilon)
  validate.open_unit(delta=delta, tol=tol)

  @functools.cache
  def cost_by(accountant: str) -> _Cost:
    return functools.cache(
      lambda parameter: epsilon_of(
        make_event(parameter),
        delta=delta,
        neighboring_relation=relation,
        accountant=accountant,
      )
    )

  return cost_by


def _with_rdp_start(search, cost, accountant: str, tol: float) -> float | None:
  """Searches by the accountant, beginning where the fast and looser RDP says."""
  if accountant == "rdp":
    return search(cost("rdp"), start=1.0, tol=tol)
  start = _rdp_start(lambda: search(cost("rdp"), start=1.0, tol=0.01))
  return search(cost(accountant), start=start or 1.0, tol=tol)


def _rdp_start(search: Callable):
  try:
    return search()
  except UserError:  # RDP has no analysis of this event: the accountant asked for decides
    return None


def _least(
  cost: _Cost, *, start: float, low: float, high: float, target: float, tol: float
) -> float | None:
  """The least x in [low, high] with cost(x) <= target, for a falling cost; or None."""
  private = unsafe = min(max(start, low), high)
  step = 1.1
  while cost(private) > target:
    if private >= high:
      return None
    unsafe, private, step = private, min(private * step, high), step**2
  step = 1.1
  while cost(unsafe) <= target:
    if unsafe <= low:
      return unsafe
    private, unsafe, step = unsafe, max(unsafe / step, low), step**2
  return _between(cost, private, unsafe, target, tol)


def _between(
  cost: _Cost, private: float, unsafe: float, target: float, tol: float
) -> float:
  """Narrows cost(private) <= target < cost(unsafe) until it is within tol of the target."""
  for trial in range(200):
    near = cost(private) >= target * (1 - tol)
    if near or abs(math.log(unsafe / private)) < 1e-10:
      break
    middle = _interpolate(cost, private, unsafe, target * (1 - tol / 2), trial)
    private, unsafe = (middle, unsafe) if cost(middle) <= target else (private, middle)
  return private


def _interpolate(cost: _Cost, a: float, b: float, aim: float, trial: int) -> float:
  """Where the log-log line through a and b meets `aim`; every third time, the middle."""
  cost_a, cost_b = cost(a), cost(b)
  share = 0.5
  if trial % 3 < 2 and 0 < cost_a < cost_b < math.inf:
    share = math.log(aim / cost_a) / math.log(cost_b / cost_a)
  return a * (b / a) ** min(max(share, 1e-3), 1 - 1e-3)


def _most_steps(cost: _Cost, start: int, *, target: float) -> int:
  """The largest n <= MAX_NUM_STEPS with cost(n) <= target, for a rising cost; maybe 0."""
  low, high = 0, max(1, start)
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
