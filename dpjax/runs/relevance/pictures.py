"""Pictures of relevance experiments: curves by epoch in the paper's layout, and heat maps."""

from __future__ import annotations

import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dpjax import relevance
from dpjax.accounting import upper
from dpjax.relevance.lrp import Lrp, heat_map
from dpjax.runs import report as reports
from dpjax.runs import writers
from dpjax.runs.relevance.config import Point, RelevanceConfig
from dpjax.validate import UserError

Row = dict[str, Any]
_METRICS = (("test_accuracy", "test accuracy"), ("test_loss", "test cross-entropy (nats)"))
_STYLES = {"proved": "-", "claimed": "--", "none": ":"}
_MARKERS = ("", "o", "s")  # beyond seven curves the colours begin again
_PICTURES = 8  # test images with their heat maps


def report(
  workdir: pathlib.Path,
  config: RelevanceConfig,
  folders: Sequence[tuple[Point, pathlib.Path]],
  results: Sequence[Row],
) -> None:
  """Writes `workdir`/report.csv (every epoch of every run) and report.png: accuracy above,
  cross-entropy below, one column for each data set and epsilon, one line for each curve
  (the mean over seeds; the band spans them)."""
  rows = _rows(folders, results)
  reports.write_csv(workdir / "report.csv", rows)
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
      reports.style(axis, title=title, xlabel="epoch", ylabel=label)
  _legend(figure, list(axes[0]))
  title = config.title or f"{config.data.name}: {', '.join(curves)}"
  figure.suptitle(
    f"{title}\nsolid: proved, dashed: claimed (no guarantee), dotted: not private",
    fontsize=9,
    x=0.01,
    ha="left",  # the legend stands on the right
  )
  reports.save_figure(figure, workdir / "report.png")


def _rows(folders: Sequence[tuple[Point, pathlib.Path]], results: Sequence[Row]) -> list:
  rows = []
  for (point, folder), result in zip(folders, results):
    meaning = {
      name: result[name]
      for name in (
        "epsilon_kind",
        "claimed_epsilon_thm7",
        "proved_epsilon",
        "delta",
        "neighboring_relation",
        "unit",
      )
    }
    for line in writers.read_metrics(folder):
      scores = {name: line[name] for name, _ in _METRICS}
      rows.append(
        {
          "curve": point.curve,
          "dataset": result["dataset"],
          "epsilon_target": point.epsilon,
          "seed": point.config.seed,
          "epoch": line["step"],
          **scores,
          **meaning,
        }
      )
  return rows


def _panel(axis: Axes, rows: list[Row], curves: list[str], metric: str) -> None:
  for index, curve in enumerate(curves):
    mine = [row for row in rows if row["curve"] == curve]
    if not mine:
      continue
    epochs = sorted({row["epoch"] for row in mine})
    values = [[row[metric] for row in mine if row["epoch"] == epoch] for epoch in epochs]
    color = reports.PALETTE[index % len(reports.PALETTE)]
    label = f"{curve} ({_kind(mine[0])})"
    marker = _MARKERS[index // len(reports.PALETTE) % len(_MARKERS)]
    look: dict[str, Any] = dict(
      color=color, lw=1.4, ls=_STYLES[mine[0]["epsilon_kind"]], marker=marker, ms=3
    )
    axis.plot(epochs, list(map(statistics.mean, values)), label=label, **look)
    low, high = [min(v) for v in values], [max(v) for v in values]
    axis.fill_between(epochs, low, high, color=color, alpha=0.15, linewidth=0)
  axis.xaxis.set_major_locator(MaxNLocator(integer=True))
  if metric == "test_loss":
    _tame(axis, [row[metric] for row in rows])


def _kind(row: Row) -> str:
  """What an epsilon of the panel's title means for this line."""
  if row["epsilon_kind"] == "none":
    return "not private"
  kind = f"{row['epsilon_kind']}, {row['neighboring_relation']}"
  return kind if row["unit"] == "example" else f"{kind}, per {row['unit']}"


def _tame(axis: Axes, losses: list[float]) -> None:
  """A loss that runs away must not hide the others."""
  finite = [loss for loss in losses if math.isfinite(loss) and loss > 0]
  if finite and max(finite) > 20 * statistics.median(finite):
    axis.set_yscale("log")


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
  lines = {}
  for axis in axes:
    handles, labels = axis.get_legend_handles_labels()
    lines |= dict(zip(labels, handles))
  figure.legend(
    list(lines.values()), list(lines), loc="outside right upper", fontsize=8, frameon=False
  )


def pictures(workdir: pathlib.Path, outcome: relevance.Outcome, how: Lrp) -> None:
  """Writes `workdir`/heat_maps.png (test images and what the released net sees in them)
  and, where there are some, maps.png (relevance and beta). Images only."""
  if np.ndim(outcome.test.x) != 4:
    return
  _heat_maps(workdir / "heat_maps.png", outcome, how)
  if outcome.maps:
    _maps(workdir / "maps.png", outcome.maps)


def _heat_maps(path: pathlib.Path, outcome: relevance.Outcome, how: Lrp) -> None:
  x, y = np.asarray(outcome.test.x[:_PICTURES]), np.asarray(outcome.test.y[:_PICTURES])
  try:
    inputs = jnp.asarray(x), jnp.asarray(y)
    scores = relevance.lrp.relevance(outcome.apply, outcome.params, *inputs, how).scores
  except UserError as error:
    writers.warn(f"no heat maps: {error}")
    return
  figure = Figure(figsize=(1.1 * len(y), 2.4), layout="constrained")
  axes = figure.subplots(2, len(y), squeeze=False)
  for column, (image, found, label) in enumerate(zip(x, np.asarray(scores), y)):
    axes[0, column].imshow(_shown(image), cmap="gray_r")
    axes[0, column].set_title(f"class {label}", fontsize=7)
    axes[1, column].imshow(heat_map(found))
  for axis in axes.ravel():
    axis.set_axis_off()
  figure.suptitle("test images; relevance for the true class: red for, blue against",
                  fontsize=8)  # fmt: skip
  reports.save_figure(figure, path)


def _shown(image: np.ndarray) -> np.ndarray:
  scaled = (image - image.min()) / max(float(np.ptp(image)), 1e-12)
  return scaled[..., 0] if scaled.shape[-1] != 3 else scaled


def _maps(path: pathlib.Path, maps: dict[str, np.ndarray]) -> None:
  sides = {name: math.isqrt(values.size) for name, values in maps.items()}
  square = {name: side for name, side in sides.items() if 1 < side**2 == maps[name].size}
  if not square:
    return
  figure = Figure(figsize=(3.0 * len(square), 2.8), layout="constrained")
  axes = figure.subplots(1, len(square), squeeze=False)[0]
  for axis, (name, side) in zip(axes, square.items()):
    drawn = axis.imshow(maps[name].reshape(side, side), cmap="magma")
    axis.set_title(name.replace("_", " "), fontsize=8)
    axis.set_axis_off()
    figure.colorbar(drawn, ax=axis, shrink=0.8).ax.tick_params(labelsize=7)
  reports.save_figure(figure, path)
