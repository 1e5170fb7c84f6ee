"""The curves of a relevance experiment by epoch, in the paper's layout."""

from __future__ import annotations

import math
import pathlib
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dpjax.accounting import upper
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.run import report

Row = dict[str, Any]
_METRICS = (("test_accuracy", "test accuracy"), ("test_loss", "test cross-entropy (nats)"))
_OF_RUN = ("curve", "dataset", "epsilon_target", "seed")
_MEANING = (
  "epsilon_kind",
  "claimed_epsilon_thm7",
  "proved_epsilon",
  "delta",
  "neighboring_relation",
  "unit",
)
_STYLES = {"proved": "-", "claimed": "--", "none": ":"}
# Longest line of a heading above one panel.
_LETTERS = 42
# After seven curves the colours repeat, and markers distinguish them.
_MARKERS = ("", "o", "s")


def draw(
  workdir: pathlib.Path,
  config: RelevanceConfig,
  results: Sequence[Row],
  metrics: Sequence[list[Row]],
) -> None:
  """Writes `workdir`/report.csv (every epoch of every run) and report.png. The picture
  shows accuracy above, cross-entropy below, and one column for each data set and epsilon.
  Each curve is one line, the mean over seeds, with a band that spans them.

  Args:
    results: results of the runs. metrics: their rows of metrics.jsonl.
  """
  rows = [row for own in map(_by_epoch, results, metrics) for row in own]
  report.write_csv(workdir / "report.csv", rows)
  panels = list(dict.fromkeys((row["dataset"], row["epsilon_target"]) for row in rows))
  figure = Figure(figsize=(3.9 * len(panels) + 2.4, 6.2), layout="constrained")
  axes = figure.subplots(2, len(panels), squeeze=False)
  curves = list(dict.fromkeys(row["curve"] for row in rows))
  for column, (dataset, epsilon) in enumerate(panels):
    mine = [
      row for row in rows if (row["dataset"], row["epsilon_target"]) == (dataset, epsilon)
    ]
    title = f"({chr(97 + column)}) {dataset}, epsilon = {upper(epsilon)}"
    for axis, (metric, label) in zip(axes[:, column], _METRICS):
      _panel(axis, mine, curves, metric)
      report.style(axis, title=title, xlabel="epoch", ylabel=label)
  _legend(figure, list(axes[0]))
  title = config.title or f"{config.data.name}: {', '.join(curves)}"
  lines = (title, "solid: proved, dashed: claimed (no guarantee), dotted: not private")
  # Beside a single panel a longer line would reach the legend.
  wrapped = [textwrap.fill(line, _LETTERS * len(panels)) for line in lines]
  figure.suptitle(
    "\n".join(wrapped),
    fontsize=9,
    x=0.01,
    ha="left",  # the legend stands on the right
  )
  report.save_figure(figure, workdir / "report.png")


def _by_epoch(result: Row, lines: list[Row]) -> list[Row]:
  of_run, meaning = (
    {name: result[name] for name in names} for names in (_OF_RUN, _MEANING)
  )
  scores = [{name: line[name] for name, _ in _METRICS} for line in lines]
  epochs = [{"epoch": line["step"]} for line in lines]
  return [of_run | epoch | score | meaning for epoch, score in zip(epochs, scores)]


def _panel(axis: Axes, rows: list[Row], curves: list[str], metric: str) -> None:
  for index, curve in enumerate(curves):
    mine = [row for row in rows if row["curve"] == curve]
    if not mine:
      continue
    epochs = sorted({row["epoch"] for row in mine})
    values = [[row[metric] for row in mine if row["epoch"] == epoch] for epoch in epochs]
    color = report.PALETTE[index % len(report.PALETTE)]
    label = f"{curve} ({_kind(mine[0])})"
    marker = _MARKERS[index // len(report.PALETTE) % len(_MARKERS)]
    axis.plot(
      epochs,
      list(map(statistics.mean, values)),
      label=label,
      color=color,
      linewidth=1.4,
      linestyle=_STYLES[mine[0]["epsilon_kind"]],
      marker=marker,
      markersize=3,
    )
    low = [min(v) for v in values]
    high = [max(v) for v in values]
    axis.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0)
  axis.xaxis.set_major_locator(MaxNLocator(integer=True))
  if metric == "test_loss":
    # One diverging loss must not hide the others.
    losses = [row[metric] for row in rows]
    finite = [loss for loss in losses if math.isfinite(loss) and loss > 0]
    if finite and max(finite) > 20 * statistics.median(finite):
      axis.set_yscale("log")


def _kind(row: Row) -> str:
  """Returns the kind, relation and unit of this line's epsilon, in words."""
  if row["epsilon_kind"] == "none":
    return "not private"
  kind = f"{row['epsilon_kind']}, {row['neighboring_relation']}"
  return kind if row["unit"] == "example" else f"{kind}, per {row['unit']}"


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
  lines = {}
  for axis in axes:
    handles, labels = axis.get_legend_handles_labels()
    lines |= dict(zip(labels, handles))
  figure.legend(
    list(lines.values()), list(lines), loc="outside right upper", fontsize=8, frameon=False
  )
