"""Checks of the parts of a private training before it is trusted, as one table.

The guarantee of a run needs facts about code: no example moves the sum by more than the
sensitivity, the noise is as large as accounted, and batches are drawn as accounted. Each fact is
measured on the run's own model, gradient, transform, sampler and keys, and compared with a bound.
A pass is evidence, not a proof. A failure is a bug that voids the epsilon.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dpjax.checks import (
  batches,
  before_steps,
  charges,
  influence,
  noise_distributions,
  whole_step,
)
from dpjax.checks.subject import Row, Subject
from dpjax.validate import first_line

Check = Callable[[Any], Row]


def asked(subject: Subject) -> list[Check]:
  """Returns the checks of the parts of a training, in order."""
  fitted = (before_steps,) if subject.plan.statistics is not None else ()
  modules = (influence, whole_step, noise_distributions, *fitted, batches, charges)
  return [check for module in modules for check in module.CHECKS]


def checks(subject: Subject) -> Iterator[Row]:
  """Yields the row of each check, in order."""
  yield from rows(asked(subject), subject)


def in_words(check: Check) -> str:
  """Returns the name of a check before its row is there."""
  return check.__name__.replace("_", " ")


def rows(asked: Iterable[Check], subject: Any) -> Iterator[Row]:
  """Yields the row of each check that is asked. A check that raises an error fails."""
  for check in asked:
    try:
      yield check(subject)
    except Exception as error:
      # The run's own code raised this, on inputs that training may meet.
      reason = f"ended in {first_line(error, with_type=True)}"
      yield Row(in_words(check), False, math.inf, 0.0, reason)


@dataclasses.dataclass(frozen=True, repr=False)
class CheckTable:
  """The results of all checks. Printing the table shows one line for each check."""

  rows: list[Row]

  @property
  def ok(self) -> bool:
    """Whether no check fails, which is evidence, not a proof."""
    return not self.failed

  @property
  def failed(self) -> list[Row]:
    """Returns the checks that fail, without those that do not apply."""
    return failures(self.rows)

  def to_json(self) -> dict[str, Any]:
    """Returns the rows as a dict for JSON, as in check.json."""
    return to_json(self.rows)

  def __repr__(self) -> str:
    return table(self.rows)

  def __iter__(self) -> Iterator[Row]:
    return iter(self.rows)

  def __len__(self) -> int:
    return len(self.rows)


def failures(rows: list[Row]) -> list[Row]:
  """Returns the checks that fail, without those that do not apply."""
  return [row for row in rows if row.passed is False]


def table(rows: list[Row]) -> str:
  """Returns the rows as text, one line for each check.

  >>> print(table([Row("noise", True, 0.5, 1.0, "z-score")]))
  pass  noise  0.5 <= 1  z-score
  """
  lines = []
  width = max(len(row.name) for row in rows)
  for row in rows:
    word, sign = ("pass", "<=") if row.passed else ("FAIL", "> ")
    numbers = f"{row.measured:.4g} {sign} {row.bound:.4g}  "
    word, numbers = ("n/a ", "") if row.passed is None else (word, numbers)
    lines.append(f"{word}  {row.name:<{width}}  {numbers}{row.detail}")
  return "\n".join(lines)


def to_json(rows: list[Row]) -> dict[str, Any]:
  """Returns the rows as a dict for check.json. Numbers that are not finite become text."""
  finite = lambda value: value if math.isfinite(value) else str(value)
  return {
    "passed": not failures(rows),
    "checks": [
      row._asdict() | {"measured": finite(row.measured), "bound": finite(row.bound)}
      for row in rows
    ],
  }
