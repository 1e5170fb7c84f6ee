"""Events of mechanisms, stated for the relation under which they will be accounted.

A sensitivity holds under one neighbouring relation. `dpjax.accounting` reads a noise multiplier as
noise scale / (bound on the contribution of one record), and halves it under replace_one. So if a
sensitivity was stated under replace_one, the multiplier is doubled here. Then any other relation is
refused, since epsilon would come out too small: by `event`, and by the accountant, since the event
holds its relation (`StatedDpEvent`). The accountant then uses:

| stated under     | accounted under  | Gaussian, Laplace     | pure epsilon |
| ---------------- | ---------------- | --------------------- | ------------ |
| any              | the same         | scale / sensitivity   | epsilon      |
| add or remove    | replace_one      | half of that ratio    | 2 epsilon    |
| replace_special  | replace_one      | half of that ratio    | 2 epsilon    |
| anything else    |                  | refused               | refused      |
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dpjax import accounting, validate
from dpjax.accounting import proved
from dpjax.accounting.event_kinds import kind
from dpjax.accounting.event_kinds.elements import StatedDpEvent
from dpjax.accounting.event_kinds.randomized_response import pure_dp_event
from dpjax.validate import UserError

RELATIONS = proved.RELATIONS
DpEvent = kind.DpEvent
_MOST = 1e300


def gaussian_event(noise_multiplier: float, stated: str, asked: str) -> DpEvent:
  """Returns the event of Gaussian noise of std noise_multiplier * (L2 sensitivity under `stated`).

  Raises UserError if the relation `asked` of the accountant is refused by the module's table.

  >>> gaussian_event(3.0, "replace_one", "replace_one")  # the accountant halves it
  StatedDpEvent(neighboring_relation='replace_one', event=GaussianDpEvent(noise_multiplier=6.0))
  """
  return _of_noise(accounting.gaussian_event, noise_multiplier, stated, asked)


def laplace_event(noise_multiplier: float, stated: str, asked: str) -> DpEvent:
  """Returns the event of Laplace noise of scale noise_multiplier * (L1 sensitivity under `stated`).

  Raises UserError if the relation `asked` of the accountant is refused by the module's table.

  >>> laplace_event(3.0, "add_or_remove_one", "add_or_remove_one")
  LaplaceDpEvent(noise_multiplier=3.0)
  """
  return _of_noise(accounting.laplace_event, noise_multiplier, stated, asked)


def pure_event(epsilon: float, stated: str, asked: str) -> DpEvent:
  """Returns the event of a mechanism that is only known to be (epsilon, 0)-DP under `stated`.

  Raises UserError if the relation `asked` of the accountant is refused by the module's table.

  >>> pure_event(math.log(3), "add_or_remove_one", "add_or_remove_one").event
  RandomizedResponseDpEvent(noise_parameter=0.5, num_buckets=2)
  """
  _check(stated, asked)
  return only_under(asked, pure_dp_event(epsilon if asked == stated else 2 * epsilon))


def only_under(relation: str, event: DpEvent) -> DpEvent:
  """Returns the event as one that is accounted under `relation` alone."""
  return StatedDpEvent(str(relation), event)


def _of_noise(
  event_of: Callable[[float], DpEvent], noise_multiplier: float, stated: str, asked: str
) -> DpEvent:
  _check(stated, asked)
  event = event_of(noise_multiplier * (2 if stated == proved.REPLACE else 1))
  # What holds for a record that comes or goes, the accountant converts to any other relation.
  return event if stated == proved.ADD else only_under(asked, event)


def _check(stated: str, asked: str) -> None:
  validate.one_of(RELATIONS, neighboring_relation=asked)
  if asked not in (stated, "replace_one"):
    raise UserError(
      f"this mechanism is private under {str(stated)!r}; ask for event({str(stated)!r}) "
      "and account under the same",
      field="neighboring_relation",
      value=str(asked),
    )


def positive(**named: float) -> None:
  """Raises UserError unless each value is in [1e-300, 1e300], so that its inverse is, too.

  >>> positive(epsilon=1e-310)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: epsilon=1e-310: must be in [1e-300, 1e+300], as its inverse
  """
  validate.positive(**named)
  for name, value in named.items():
    if not 1 / _MOST <= float(value) <= _MOST:
      raise UserError(
        f"must be in [{1 / _MOST:g}, {_MOST:g}], as its inverse", field=name, value=value
      )


def interval(lower: float, upper: float) -> None:
  """Raises UserError unless lower < upper, and both and their difference are finite.

  >>> interval(1.0, 1.0)
  Traceback (most recent call last):
  ...
  dpjax.validate.UserError: upper=1.0: must be a number above lower=1.0
  """
  validate.finite(lower=lower, upper=upper)
  if not 0 < float(upper) - float(lower) < math.inf:
    raise UserError(f"must be a number above lower={lower!r}", field="upper", value=upper)
