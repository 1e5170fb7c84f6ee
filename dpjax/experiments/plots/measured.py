"""Pictures of benchmarks, from the rows of their CSV files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpjax import pictures
from dpjax.accounting import upper
from dpjax.pictures import PAGE, Look

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Row = dict[str, Any]
# All other methods are compared with the time and memory of this method.
_ORDINARY = "ordinary"
# Ratio of errors at which the picture draws a line: 5 % more than central noise.
_WORSE = 1.05


def gradients(rows: Sequence[Row], *, title: str = "", look: Look = PAGE) -> Figure:
  """Draws the time of each way to clip gradients, divided by that of an ordinary gradient.

  Args:
    rows: rows of gradients.csv.
    title: title of the picture; "" for the usual one.
    look: sizes, fonts, style.
  """
  names = list(dict.fromkeys(row["workload"] for row in rows))
  methods = [m for m in dict.fromkeys(row["method"] for row in rows) if m != _ORDINARY]
  line = look.font_size * 2.1 / 72
  drawn = pictures.new_figure(look, height=len(names) * line + 1.3)
  axes = drawn.subplots()
  axes.axvline(1, color="#000000", linewidth=0.9, linestyle="--")
  for index, method in enumerate(methods):
    mine = [row for row in rows if row["method"] == method and row["ratio"]]
    # Methods of one workload are drawn slightly apart, so that none hides another.
    shift = (index - (len(methods) - 1) / 2) * 0.6 / max(len(methods), 1)
    axes.plot(
      [row["ratio"] for row in mine],
      [names.index(row["workload"]) + shift for row in mine],
      linestyle="none", marker=pictures.marker(index), markersize=3.6,
      color=look.color(index), label=pictures.proper_name(method),
    )  # fmt: skip
  axes.set_xscale("log")
  axes.set_yticks(range(len(names)), [pictures.proper_name(name) for name in names])
  axes.set_ylim(len(names) - 0.4, -0.6)
  platform = rows[0].get("platform", "") if rows else ""
  pictures.dress(axes, look, xlabel="time over that of an ordinary gradient (dashed)")
  pictures.headline(drawn, look, title or f"Clipped gradients on {_machine(platform)}")
  # The label of the x axis explains the line at 1, so the legend leaves it out.
  handles, _ = axes.get_legend_handles_labels()
  pictures.key(drawn, look, handles)
  return drawn


def compiled(rows: Sequence[Row], *, title: str = "", look: Look = PAGE) -> Figure:
  """Draws memory and roofline time of compiled clipped gradients, divided by those of an ordinary
  gradient.

  Args:
    rows: rows of compiled.csv.
    title: title of the picture; "" for the usual one.
    look: sizes, fonts, style.
  """
  # All ratios are relative to the ordinary gradient, so its own ratio would always be 1.
  rows = [row for row in rows if row["method"] != _ORDINARY and row["memory_ratio"]]
  names = list(dict.fromkeys(row["workload"] for row in rows))
  machines = list(dict.fromkeys(row["target"] for row in rows))
  methods = list(dict.fromkeys(row["method"] for row in rows))
  parts = {"roofline": "roofline_ratio", "memory held": "memory_ratio"}
  series = [(method, part) for method in methods for part in parts]
  line = look.font_size * 2.4 / 72
  drawn = pictures.new_figure(look, height=len(names) * line + 1.5)
  panels = drawn.subplots(1, max(1, len(machines)), sharey=True, squeeze=False)[0]
  for axes, machine in zip(panels, machines):
    axes.axvline(1, color="#000000", linewidth=0.9, linestyle="--")
    for index, (method, part) in enumerate(series):
      column = parts[part]
      mine = [
        row
        for row in rows
        if (row["target"], row["method"]) == (machine, method) and row[column]
      ]
      # Series of one workload are drawn slightly apart, so that none hides another.
      shift = (index - (len(series) - 1) / 2) * 0.6 / max(len(series), 1)
      axes.plot(
        [row[column] for row in mine],
        [names.index(row["workload"]) + shift for row in mine],
        linestyle="none", marker=pictures.marker(index), markersize=3.6,
        color=look.color(index), label=f"{method}: {part}",
      )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), [pictures.proper_name(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    pictures.dress(
      axes, look, title=_machine(machine), xlabel="over an ordinary gradient (dashed)"
    )
  pictures.headline(drawn, look, title or "Clipped gradients, compiled and not run")
  handles, _ = panels[0].get_legend_handles_labels()
  pictures.key(drawn, look, handles)
  return drawn


def federated(rows: Sequence[Row], *, title: str = "", look: Look = PAGE) -> Figure:
  """Draws the seconds of a round: over the number of clients for methods that were measured with
  several numbers, and by method for the others.

  Args:
    rows: rows of federated.csv; rows with a value of `data_mb` are left out.
    title: title of the picture; "" for the usual one.
    look: sizes, fonts, style.
  """
  kept = [row for row in rows if row.get("data_mb") is None and row["median_s"]]
  kinds: dict[tuple[str, str, int], list[Row]] = {}
  for row in kept:
    kind = (row["workload"], row["method"], int(row["steps_per_client"]))
    kinds.setdefault(kind, []).append(row)
  lines = {kind: mine for kind, mine in kinds.items() if len(mine) > 1}
  alone = [mine[0] for mine in kinds.values() if len(mine) == 1]
  panels = bool(lines) + bool(alone)
  wide = min(look.across(2.6), max(panels, 1))
  high = -(-panels // wide) or 1
  drawn = pictures.new_figure(look, height=2.2 * high + 0.6)
  grid = iter(drawn.subplots(high, wide, squeeze=False).flat)
  workloads = list(dict.fromkeys(row["workload"] for row in kept))
  if alone:
    axes = next(grid)
    _cohort(axes, alone, workloads, look)
  if lines:
    axes = next(grid)
    for kind, mine in lines.items():
      index = workloads.index(kind[0])
      axes.plot(
        [row["num_clients"] for row in mine], [row["median_s"] for row in mine],
        color=look.color(index), marker=pictures.marker(index), markersize=3.6, linewidth=1.2,
      )  # fmt: skip
    axes.set(xscale="log", yscale="log")
    ways = dict.fromkeys(
      f"{pictures.proper_name(method)}, {_steps(steps)}" for _, method, steps in lines
    )
    pictures.dress(
      axes,
      look,
      title="; ".join(ways),
      xlabel="clients in a cohort",
      ylabel="seconds a round",
    )
  platform = kept[0].get("platform", "") if kept else ""
  pictures.headline(drawn, look, title or f"One round on {_machine(platform)}")
  pictures.key(drawn, look, [
    pictures.sample(
      pictures.proper_name(name), look, color=look.color(index), marker=pictures.marker(index)
    )
    for index, name in enumerate(workloads)
  ])  # fmt: skip
  return drawn


def _machine(target: str) -> str:
  """Returns words for a platform, or for a target such as "gpu:h100:1" (platform:chip:devices)."""
  platform, *more = target.split(":")
  words = pictures.proper_name(platform)
  if len(more) < 2:
    return words
  chip, devices = more
  # Names of GPUs are written in capitals, those of TPU generations are not.
  return f"{chip if platform == 'tpu' else chip.upper()} {words}, devices: {devices}"


def _steps(steps: int) -> str:
  return "1 local step" if steps == 1 else f"{steps} local steps"


def _cohort(axes: Axes, rows: list[Row], workloads: list[str], look: Look) -> None:
  """Draws a row of points for each method, with one point for each workload."""
  from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

  methods = list(dict.fromkeys(row["method"] for row in rows))
  for row in rows:
    index = workloads.index(row["workload"])
    axes.plot(
      row["median_s"], methods.index(row["method"]), marker=pictures.marker(index),
      markersize=4, color=look.color(index), linestyle="none",
    )  # fmt: skip
  low = min(row["median_s"] for row in rows)
  high = max(row["median_s"] for row in rows)
  axes.set_xscale("log")
  axes.set_xlim(low / 1.5, high * 1.5)
  axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
  axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
  axes.xaxis.set_minor_locator(NullLocator())
  axes.set_yticks(range(len(methods)), [pictures.proper_name(name) for name in methods])
  axes.set_ylim(len(methods) - 0.4, -0.6)
  sizes = sorted({(int(row["num_clients"]), int(row["steps_per_client"])) for row in rows})
  heading = "; ".join(f"{clients} clients, {_steps(steps)}" for clients, steps in sizes)
  pictures.dress(axes, look, title=heading, xlabel="seconds a round")


def noise_error(rows: Sequence[Row], *, title: str = "", look: Look = PAGE) -> Figure:
  """Draws the error of noise inside a secure sum, relative to central noise, over the sum's bits.

  Args:
    rows: rows of distributed_noise.csv.
    title: title of the picture; "" for the usual one.
    look: sizes, fonts, style.
  """
  drawn = pictures.new_figure(look, height=3.3)
  axes = drawn.subplots()
  for index, epsilon in enumerate(dict.fromkeys(row["epsilon"] for row in rows)):
    mine = [row for row in rows if row["epsilon"] == epsilon and row["ratio"] is not None]
    axes.plot(
      [row["bits"] for row in mine], [row["ratio"] for row in mine], linewidth=1.2,
      marker=pictures.marker(index), markersize=3.6, color=look.color(index),
      linestyle=look.dash(index), label=f"epsilon {upper(epsilon)}",
    )  # fmt: skip
  axes.axhline(
    _WORSE,
    color="#000000",
    linewidth=0.9,
    linestyle="--",
    label="5 % more than central noise",
  )
  pictures.dress(
    axes, look, xlabel="bits of the modulus", ylabel="RMSE over that of central noise"
  )
  words = "Skellam shares inside a sum, against central Gaussian noise"
  pictures.headline(drawn, look, title or words)
  pictures.key(drawn, look, axes.lines)
  return drawn
