"""The picture of a sweep: one number over another, a line per series, with a CSV file."""

from __future__ import annotations

import math
import os
import pathlib
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dpjax.accounting import by_name, upper
from dpjax.experiments.run import report, writers
from dpjax.validate import UserError

_OURS = "this sweep"
# Number of characters that fit below the axes beside a legend.
_LABEL = 48
_MARKERS = ("*", "D", "P", "X", "v", "^")
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
  a single seed is a point without a bar. Runs that promise no epsilon are drawn as a
  horizontal line, never at the epsilon that their config happens to hold. A run whose y is
  not finite (it diverged) is counted, in the column `not_finite`, and is in no mean.

  Args:
    rows: one per finished run, with the keys x, y, series and those of a result.
    out_dir: folder to write to.
    x: numeric key; a key that ends in "epsilon" gets a logarithmic axis. Where one value is
      infinite, all are drawn side by side, without a scale.
    y: numeric key of the result; None and "inf" are what JSON holds of one that diverged.
    series: key whose values become separate lines.
    references: (label, x, y) of published results, listed in the legend.
    title: title of the picture.

  Raises:
    UserError: a run has no such key, or its value is no number.
  """
  out_dir = pathlib.Path(out_dir)
  references = list(references)
  groups = summarize(rows, x=x, y=y, series=series)
  header = [*([series] if series else []), x, "seeds", "not_finite"]
  header += [f"{y}_mean", f"{y}_min", f"{y}_max", "epsilon", *report.WHAT_EPSILON_MEANS]
  report.write_csv(out_dir / "curve.csv", groups, list(dict.fromkeys(header)))
  places = _places([group[x] for group in groups] + [at for _, at, _ in references])
  figure = Figure(figsize=(7.2, 3.8), layout="constrained")
  axes = figure.subplots()
  drawn = [{**group, x: places.get(group[x], group[x])} for group in groups]
  _draw_groups(axes, drawn, x, y, series)
  _draw_references(axes, references, places, x)
  _label(axes, groups, x, y, title)
  if places:
    axes.set_xticks(
      list(places.values()), [by_name(x, at) if at is not None else "" for at in places]
    )
  else:
    _scale(axes, x, [group[x] for group in groups], [at for _, at, _ in references])
  # Beside the axes, which lines may fill; the user's lines come before published
  # references.
  handles, labels = axes.get_legend_handles_labels()
  pairs = sorted(zip(handles, labels), key=lambda pair: isinstance(pair[0], Line2D))
  if labels not in ([], [_OURS]):
    axes.legend(
      *zip(*pairs), loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False
    )
  report.save_figure(figure, out_dir / "curve.png")


def _places(values: Sequence[float | None]) -> dict[float | None, float]:
  """Returns the drawn position of each value of x if one is infinite: in order, equally
  spaced. Otherwise empty, since each value has its own place on the axis.

  >>> _places([0.1, math.inf, 0.5]), _places([0.1, 0.5])
  ({0.1: 0.0, 0.5: 1.0, inf: 2.0}, {})
  """
  found = sorted({value for value in values if value is not None})
  if not found or not math.isinf(found[-1]):
    return {}
  return {value: float(place) for place, value in enumerate(found)}


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
  """Returns the place of a run on the axis; None without an epsilon.

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
    # rounded only once, so that min <= mean <= max
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
  """Returns the value that all share, or all values. An epsilon without its report.meaning
  is left out."""
  different = list(dict.fromkeys(values))
  return different[0] if len(different) == 1 else " / ".join(map(str, different))


def _draw_groups(axes: Axes, groups: list[Row], x: str, y: str, series: str | None) -> None:
  labels = list(dict.fromkeys(group.get(series, "") if series else "" for group in groups))
  for index, label in enumerate(labels):
    color = report.PALETTE[index % len(report.PALETTE)]
    mine = [group for group in groups if not series or group[series] == label]
    placed = [g for g in mine if g[x] is not None and math.isfinite(g[f"{y}_mean"])]
    _draw_line(axes, placed, x, y, color, label or _OURS)
    for group in mine:
      # A run without a guarantee has no place on the axis of epsilon, only a height.
      if group[x] is None and math.isfinite(group[f"{y}_mean"]):
        name = f"{label}, not private" if label else "not private"
        axes.axhline(group[f"{y}_mean"], color=color, ls="--", lw=1, label=name)


def _draw_line(
  axes: Axes, groups: list[Row], x: str, y: str, color: str, label: str
) -> None:
  if not groups:
    return
  xs = [group[x] for group in groups]
  mean = [group[f"{y}_mean"] for group in groups]
  low = [group[f"{y}_mean"] - group[f"{y}_min"] for group in groups]
  high = [group[f"{y}_max"] - group[f"{y}_mean"] for group in groups]
  bars = [low, high] if any(group["seeds"] > 1 for group in groups) else None
  axes.errorbar(
    xs, mean, yerr=bars, color=color, marker="o", markersize=4, linewidth=1.4, capsize=3,
    label=label,
  )  # fmt: skip


def _draw_references(
  axes: Axes,
  references: list[tuple[str, float, float]],
  places: dict[Any, float],
  x_name: str,
) -> None:
  """Each reference has its own marker; the legend names it, so labels never collide."""
  for index, (label, x, y) in enumerate(references):
    axes.plot(
      [places.get(x, x)], [y], linestyle="none", marker=_MARKERS[index % len(_MARKERS)],
      markersize=8, color="#555555", label=f"{label} ({by_name(x_name, x)}: {y:g})",
    )  # fmt: skip


def _label(axes: Axes, groups: list[Row], x: str, y: str, title: str) -> None:
  seeds = sorted({group["seeds"] for group in groups})
  counts = " to ".join(map(str, dict.fromkeys(seeds[:1] + seeds[-1:]))) or "0"
  note = "one seed each" if seeds == [1] else f"mean of {counts} seeds; bars: min to max"
  lost = sum(group["not_finite"] for group in groups)
  note += f"; not drawn: {lost} that ended without a finite number" if lost else ""
  private = [group for group in groups if group["epsilon_kind"] not in (None, "none")]
  xlabel = x
  if private:
    kept = {
      name: _common(group[name] for group in private) for name in report.WHAT_EPSILON_MEANS
    }
    told = f"(epsilon: {report.meaning(kept)})"
    xlabel = f"{x}\n{textwrap.fill(told, _LABEL, break_on_hyphens=False)}"
  report.style(
    axes, title=f"{title}\n{note}".strip(), xlabel=xlabel, ylabel=y.replace("_", " ")
  )


def _scale(axes: Axes, x: str, ours: list[float | None], theirs: list[float]) -> None:
  if not x.endswith("epsilon"):
    return
  # Ticks at the epsilons that were run, rather than at powers of ten.
  ticks = sorted({at for at in ours if at is not None and at > 0})
  if not ticks and not theirs:
    return
  axes.set_xscale("log")
  axes.xaxis.set_major_locator(FixedLocator(ticks or sorted(set(theirs))))
  axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: upper(value)))
  axes.xaxis.set_minor_locator(NullLocator())
