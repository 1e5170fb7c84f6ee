"""Checks of the parts of a private training before it is trusted, as one table.

The guarantee of a run needs facts about code: no example moves the sum by more than the
sensitivity, the noise is as large as accounted, and batches are drawn as accounted. Each fact is
measured on the run's own model, gradient, transform, sampler and keys, and compared with a bound.
A pass is evidence, not a proof. A failure is a bug that voids the epsilon.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
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


def checks(subject: Subject) -> dict[str, Check]:
  """Returns the checks of the parts of a training by their names, in order."""
  fitted = (before_steps,) if subject.plan.statistics is not None else ()
  modules = (influence, whole_step, noise_distributions, *fitted, batches, charges)
  return {name: check for module in modules for name, check in module.CHECKS.items()}


def rows(
  checks: Mapping[str, Check], subject: Any, begins: Callable[[str], object] = str
) -> Iterator[Row]:
  """Yields the row of each check. A check that raises an error fails.

  Args:
    begins: function that is called with the name of each check as it begins.
  """
  for name, check in checks.items():
    begins(name)
    try:
      yield check(subject)._replace(name=name)
    except Exception as error:
      # The run's own code raised this, on inputs that training may meet.
      reason = f"ended in {first_line(error, with_type=True)}"
      yield Row(name, False, math.inf, 0.0, reason)


@dataclasses.dataclass(frozen=True, repr=False)
class CheckTable:
  """The results of all checks. Printing the table shows one line for each check.

  >>> CheckTable([Row("noise", True, 0.5, 1.0, "z-score")])
  pass  noise  0.5 <= 1  z-score
  """

  rows: list[Row]

  @property
  def ok(self) -> bool:
    """Whether no check fails, which is evidence, not a proof."""
    return not self.failed

  @property
  def failed(self) -> list[Row]:
    """Returns the checks that fail, without those that do not apply."""
    return [row for row in self.rows if row.passed is False]

  def to_json(self) -> dict[str, Any]:
    """Returns the rows as a dict for check.json. Numbers that are not finite become text."""
    finite = lambda value: value if math.isfinite(value) else str(value)
    return {
      "passed": self.ok,
      "checks": [
        row._asdict() | {"measured": finite(row.measured), "bound": finite(row.bound)}
        for row in self.rows
      ],
    }

  def __repr__(self) -> str:
    lines = []
    width = max(len(row.name) for row in self.rows)
    for row in self.rows:
      word, sign = ("pass", "<=") if row.passed else ("FAIL", "> ")
      numbers = f"{row.measured:.4g} {sign} {row.bound:.4g}  "
      word, numbers = ("n/a ", "") if row.passed is None else (word, numbers)
      lines.append(f"{word}  {row.name:<{width}}  {numbers}{row.detail}")
    return "\n".join(lines)

  def __iter__(self) -> Iterator[Row]:
    return iter(self.rows)

  def __len__(self) -> int:
    return len(self.rows)
