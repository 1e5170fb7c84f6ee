"""The points of a curve: the mean of a score over the seeds, at each x of each series."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from dpjax.accounting.text import by_name
from dpjax.experiments.run import report, writers
from dpjax.validate import UserError

Row = dict[str, Any]


def summarize(
  rows: Sequence[Row], *, x: str, y: str, series: str | None = None
) -> list[Row]:
  """Returns one row for each (series, x): number of seeds, failures and statistics of y.

  Failures are seeds that ended without a finite y. The mean, smallest and largest y are computed
  over the other seeds; without other seeds they are NaN.

  The epsilon of a row is the largest epsilon of its runs. On an axis of epsilon, x is None for runs
  that guarantee no epsilon. Runs whose x is NaN are left out.

  >>> runs = [{"e": 1.0, "a": 0.5}, {"e": 1.0, "a": 0.75}]
  >>> [(g["e"], g["seeds"], g["a_mean"]) for g in summarize(runs, x="e", y="a")]
  [(1.0, 2, 0.625)]
  """
  groups: dict[tuple, list[Row]] = {}
  if series and not all(series in row for row in rows):
    raise UserError("is no column of every run", field="series", value=series)
  for row in rows:
    label = row[series] if series else ""
    label = (
      by_name(str(series), label, digits=6) if isinstance(label, float) else str(label)
    )
    at = place(row, x)
    if at is None or not math.isnan(at):
      groups.setdefault((label, at), []).append(row)
  # Series keep their order of appearance.
  labels = [label for label, _ in groups]
  order = sorted(groups, key=lambda at: (labels.index(at[0]), at[1] or -math.inf))
  return [_summary(key, groups[key], x, y, series) for key in order]


def place(row: Row, x: str) -> float | None:
  """Returns the x value of a run. It is None if x is an epsilon and the run guarantees no epsilon.

  >>> place({"alpha": "inf"}, "alpha"), place({"epsilon_kind": "none"}, "epsilon")
  (inf, None)
  """
  # The config of a run without a guarantee may also hold an epsilon, which is not drawn.
  promised = row.get("epsilon_kind") != "none" or not x.endswith("epsilon")
  return numeric(row, x) if promised else None


def _summary(key: tuple, rows: list[Row], x: str, y: str, series: str | None) -> Row:
  values = [value for row in rows if math.isfinite(value := numeric(row, y))]
  known = (row["epsilon"] for row in rows if row.get("epsilon") is not None)
  failed = (row.get("failed_assumptions") or () for row in rows)
  return {
    **({series: key[0]} if series else {}),
    **{name: _common(row.get(name) for row in rows) for name in report.WHAT_EPSILON_MEANS},
    "epsilon": max(map(writers.number, known), default=None),
    "failed_assumptions": list(dict.fromkeys(itertools.chain(*failed))),
    x: key[1],
    "rounds_to_accuracy": _slowest(
      [row["rounds_to_accuracy"] for row in rows if row.get("rounds_to_accuracy")]
    ),
    "seeds": len(rows),
    "not_finite": len(rows) - len(values),
    # `statistics.mean` rounds only once, so that min <= mean <= max.
    f"{y}_mean": statistics.mean(values or [math.nan]),
    f"{y}_min": min(values, default=math.nan),
    f"{y}_max": max(values, default=math.nan),
  }


def _slowest(of_runs: Sequence[dict[str, int | None]]) -> dict[str, int | None]:
  """Returns the largest number of rounds to each target; None if one of the runs never reached it.

  >>> _slowest([{"0.97": 9, "0.99": None}, {"0.97": 12, "0.99": 30}])
  {'0.97': 12, '0.99': None}
  """
  slowest: dict[str, int | None] = {}
  for target in dict.fromkeys(itertools.chain(*of_runs)):
    rounds = [count for run in of_runs if (count := run.get(target)) is not None]
    slowest[target] = max(rounds) if len(rounds) == len(of_runs) else None
  return slowest


def numeric(row: Row, key: str) -> float:
  """Returns a number of a result as a float, also if it is the JSON form of a non-finite number
  (`writers.number`).

  Raises:
    UserError: the key is missing, or its value is no number.
  """
  value = row.get(key)
  if value in ("inf", "-inf") or (value is None and key in row):
    return writers.number(value)
  # In Python a bool is an int, but not a number to draw.
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    keys = sorted(k for k, v in row.items() if isinstance(v, (int, float)))
    raise UserError(
      f"must be a number; numbers are {', '.join(keys)}", field=key, value=value
    )
  return float(value)


def _common(values: Iterable[Any]) -> Any:
  """Returns the common value if all values are equal. Otherwise returns a text that lists the
  different values, in order of appearance."""
  different = list(dict.fromkeys(values))
  return different[0] if len(different) == 1 else " / ".join(map(str, different))
