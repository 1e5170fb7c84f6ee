"""The picture of a sweep: one number over another, a line per series, with a CSV file."""

from __future__ import annotations

import math
import os
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from dpjax import pictures
from dpjax.accounting import by_name
from dpjax.experiments.run import report, writers
from dpjax.experiments.sweeps import curve_picture
from dpjax.validate import UserError

Row = dict[str, Any]


def sweep_report(
  rows: Sequence[Row],
  out_dir: str | os.PathLike,
  *,
  x: str = "privacy.epsilon",
  y: str = "test_accuracy",
  series: str | None = None,
  references: Iterable[tuple[str, float, float]] = (),
  title: str = "",
) -> None:
  """Writes `out_dir`/curve.csv and curve.png: y over x, the mean over seeds.

  The bars span the smallest and the largest of the seeds (no claim about other seeds);
  a single seed is a point without a bar. Runs that guarantee no epsilon are drawn as a
  horizontal line, never at the epsilon that their config happens to hold. A run whose y is
  not finite (it diverged) is counted, in the column `not_finite`, and is in no mean.

  Args:
    rows: one per finished run, with the keys x, y, series and those of a result.
    out_dir: folder to write to.
    x: numeric key. One that ends in "epsilon", or whose values are positive and span a factor
      of 50, gets a logarithmic axis. Values beside an infinite one are drawn without a scale.
    y: numeric key of the result; None and "inf" are what JSON holds of one that diverged.
    series: key whose values become separate lines.
    references: (label, x, y) of published results, listed in the key. At an epsilon of 0 it is
      a model that saw no private data: a horizontal line.
    title: title of the picture.

  Raises:
    UserError: a run has no such key, or its value is no number.
  """
  out_dir = pathlib.Path(out_dir)
  groups = summarize(rows, x=x, y=y, series=series)
  header = [*([series] if series else []), x, "seeds", "not_finite"]
  header += [f"{y}_mean", f"{y}_min", f"{y}_max", "epsilon", *report.WHAT_EPSILON_MEANS]
  report.write_csv(out_dir / "curve.csv", groups, list(dict.fromkeys(header)))
  axes = {"x": x, "y": y, "series": series}
  figure = curve_picture.figure(groups, **axes, references=references, title=title)
  pictures.save(figure, out_dir / "curve.png")


def summarize(
  rows: Sequence[Row], *, x: str, y: str, series: str | None = None
) -> list[Row]:
  """Returns one row per (series, x): seeds, failures and statistics of y.

  Failures are seeds that ended without a finite y. The mean, smallest and largest y are those
  of the other seeds, NaN where there are none.

  The epsilon of a group is the largest of its runs. x is None without an epsilon; runs whose
  x is NaN have no place and are left out.

  >>> runs = [{"e": 1.0, "a": 0.5}, {"e": 1.0, "a": 0.75}]
  >>> [(g["e"], g["seeds"], g["a_mean"]) for g in summarize(runs, x="e", y="a")]
  [(1.0, 2, 0.625)]
  """
  groups: dict[tuple, list[Row]] = {}
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
  """Returns the place of a run on the axis; None on an axis of epsilon for a run without one.

  >>> place({"alpha": "inf"}, "alpha"), place({"epsilon_kind": "none"}, "epsilon")
  (inf, None)
  """
  # The config of a run without noise has an epsilon, too, which does not hold.
  promised = row.get("epsilon_kind") != "none" or not x.endswith("epsilon")
  return numeric(row, x) if promised else None


def _summary(key: tuple, rows: list[Row], x: str, y: str, series: str | None) -> Row:
  values = [value for row in rows if math.isfinite(value := numeric(row, y))]
  known = (row["epsilon"] for row in rows if row.get("epsilon") is not None)
  return {
    **({series: key[0]} if series else {}),
    **{name: _common(row.get(name) for row in rows) for name in report.WHAT_EPSILON_MEANS},
    "epsilon": max(map(writers.number, known), default=None),
    x: key[1],
    "seeds": len(rows),
    "not_finite": len(rows) - len(values),
    # This mean is rounded only once, so that min <= mean <= max.
    f"{y}_mean": statistics.mean(values or [math.nan]),
    f"{y}_min": min(values, default=math.nan),
    f"{y}_max": max(values, default=math.nan),
  }


def numeric(row: Row, key: str) -> float:
  """Returns a number of a result, also a non-finite one in its JSON form
  (`writers.number`).

  Raises:
    UserError: there is no such key, or it holds something else.
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
  """Returns the value that all share; otherwise a text of the different values, in order of
  appearance."""
  different = list(dict.fromkeys(values))
  return different[0] if len(different) == 1 else " / ".join(map(str, different))
