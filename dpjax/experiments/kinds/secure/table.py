"""Writes a table and a picture of secure computations: the cost of each, and what it hides."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax import pictures
from dpjax.experiments.run import guarantee, report, writers
from dpjax.markdown import table
from dpjax.pictures import PAGE, Look

if TYPE_CHECKING:
  from matplotlib.figure import Figure

Row = dict[str, Any]
_NOTE = (
  "All parties of a row run on one machine, so seconds are those of their work, without a "
  "network; bytes are those of the messages. Hiding is not differential privacy: what comes "
  "out still tells of the data.\n"
)
_COLUMNS = ("row", "task", "protocol", "sizes", "seconds", "bytes", "error", "of", "found")
_COLUMNS += ("hides", "epsilon")


def rows_of(results: Sequence[Row]) -> list[Row]:
  """Returns one row for each result. Results come from `SecureConfig` runs, and have a label."""
  return [
    {
      "row": result["label"],
      "task": result["task"],
      "protocol": result["method"],
      "dataset": result["dataset"],
      "sizes": result["sizes"],
      "seconds": round(result["seconds"], 3),
      "bytes": result["bytes"],
      "error": result["error"],
      "of": result["error_is"],
      "found": result["found"],
      "hides": result["hides"],
      "epsilon": guarantee.summary(result),
    }
    for result in results
  ]


def markdown(rows: Sequence[Row]) -> str:
  """Returns the rows as a Markdown table, with rounded numbers."""
  lines = []
  for row in rows:
    shown = {**row, "seconds": f"{row['seconds']:.3g}", "bytes": amount(row["bytes"])}
    shown["error"] = f"{row['error']:.1e}" if row["error"] else "0"
    lines.append([str(shown[name]).replace("|", "/") for name in _COLUMNS])
  return table(_COLUMNS, lines)


def amount(num_bytes: int) -> str:
  """Returns a number of bytes as text, with three digits and a unit.

  >>> amount(999), amount(12_345_678)
  ('999 B', '12.3 MB')
  """
  value = float(num_bytes)
  unit = "B"
  for larger in ("kB", "MB", "GB", "TB"):
    if value < 1000:
      break
    value = value / 1000
    unit = larger
  return f"{value:.3g} {unit}"


def summary(result: Row) -> str:
  """Returns one line on a run: protocol, sizes, result, error, seconds and bytes."""
  return (
    f"{result['method']}, {result['sizes']}: {result['found']}; error {result['error']:.1e}, "
    f"{result['seconds']:.3g} s, {amount(result['bytes'])}"
  )


def write(
  folder: pathlib.Path, results: Sequence[Row], *, title: str = "", picture: bool = True
) -> None:
  """Writes secure.md, secure.csv and, with `picture`, secure.png; writes nothing if no run has
  finished."""
  if not results:
    return
  rows = rows_of(results)
  report.write_csv(folder / "secure.csv", rows)
  writers.replace_file(folder / "secure.md", f"{_NOTE}\n{markdown(rows)}".encode())
  if picture:
    pictures.save(figure(rows, title=title), folder / "secure.png")


def figure(rows: Sequence[Row], *, title: str = "", look: Look = PAGE) -> Figure:
  """Returns the picture of the table: seconds and bytes of each row, on logarithmic axes.

  Each number stands beside its point. There are no bars, since a logarithmic axis has no zero.

  Args:
    rows: rows of secure.csv.
    title: title of the picture.
    look: sizes, fonts, style.
  """
  from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

  # If a picture is narrower than 5 inches, its two panels do not fit beside each other.
  wide = 2 if look.width >= 5 else 1
  line = look.font_size * 1.75 / 72
  drawn = pictures.new_figure(look, height=(len(rows) * line + 0.5) * (3 - wide) + 0.7)
  panels = drawn.subplots(3 - wide, wide, squeeze=False, sharey=True).flat
  tasks = list(dict.fromkeys(row["task"] for row in rows))
  places = np.arange(len(rows))[::-1]
  # A logarithmic axis has no zero, so values below `least` are drawn at `least`.
  for axes, (name, label, least, shown) in zip(panels, (
    ("seconds", "seconds of all parties", 1e-3, lambda value: f"{value:.3g} s"),
    ("bytes", "bytes of all messages", 1.0, lambda value: amount(int(value))),
  )):  # fmt: skip
    values = [max(row[name], least) for row in rows]
    for place, row, value in zip(places, rows, values):
      index = tasks.index(row["task"])
      how = {"color": look.color(index), "marker": pictures.marker(index)}
      axes.plot(value, place, markersize=4, linestyle="none", **how)
      axes.annotate(
        shown(row[name]), (value, place), xytext=(5, 0), textcoords="offset points",
        va="center", fontsize=look.font_size - 1.5, color="#333333",
      )  # fmt: skip
    axes.set_xscale("log")
    # Ticks are formatted like the numbers. A short range of values gets more ticks.
    subs = (1.0,) if max(values) > 20 * min(values) else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=5))
    # The next panel changes `shown`, so this formatter binds it as a default.
    axes.xaxis.set_major_formatter(
      FuncFormatter(lambda value, place, shown=shown: shown(value))
    )
    axes.xaxis.set_minor_locator(NullLocator())
    # The axis ends far beyond the largest value, so that the number beside its point fits.
    axes.set_xlim(min(values) / 1.6, max(values) * (max(values) / min(values)) ** 0.3 * 3)
    axes.set_yticks(places, [row["row"] for row in rows])
    axes.set_ylim(-0.7, len(rows) - 0.3)
    pictures.dress(axes, look, xlabel=label)
  pictures.headline(drawn, look, title)
  if len(tasks) > 1:
    pictures.key(drawn, look, [
      pictures.sample(
        task, look, linestyle="none", marker=pictures.marker(index), color=look.color(index)
      )
      for index, task in enumerate(tasks)
    ])  # fmt: skip
  return drawn
