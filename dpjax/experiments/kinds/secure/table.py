"""A table and a picture of many secure computations: cost and hidden data of each."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpjax.experiments.run import promise, report, writers
from dpjax.markdown import table

Row = dict[str, Any]
_NOTE = (
  "All parties of a row run on one machine, so seconds are those of their work, without a "
  "network; bytes are those of the messages. Hiding is not differential privacy: what comes "
  "out still tells of the data.\n"
)
_COLUMNS = ("row", "task", "protocol", "sizes", "seconds", "bytes", "error", "of", "found")
_COLUMNS += ("hides", "epsilon")


def rows_of(results: Sequence[Row]) -> list[Row]:
  """Returns a row for each result of a `SecureConfig` run that has a label."""
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
      "epsilon": promise.told(result),
    }
    for result in results
  ]


def markdown(rows: Sequence[Row]) -> str:
  """The rows as a Markdown table."""
  lines = []
  for row in rows:
    told = {**row, "seconds": f"{row['seconds']:.3g}", "bytes": amount(row["bytes"])}
    told["error"] = f"{row['error']:.1e}" if row["error"] else "0"
    lines.append([str(told[name]).replace("|", "/") for name in _COLUMNS])
  return table(_COLUMNS, lines)


def amount(num_bytes: int) -> str:
  """Returns a number of bytes for readers.

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


def told(result: Row) -> str:
  """Summarises a run in one line."""
  return (
    f"{result['method']}, {result['sizes']}: {result['found']}; error {result['error']:.1e}, "
    f"{result['seconds']:.3g} s, {amount(result['bytes'])}"
  )


def write(folder: pathlib.Path, results: Sequence[Row], *, title: str = "") -> None:
  """Writes secure.md, secure.csv and secure.png; nothing where no run has finished."""
  if not results:
    return
  rows = rows_of(results)
  report.write_csv(folder / "secure.csv", rows)
  writers.replace_file(folder / "secure.md", f"{_NOTE}\n{markdown(rows)}".encode())
  figure = Figure(figsize=(9.6, 1.4 + 0.32 * len(rows)), layout="constrained")
  left, right = figure.subplots(1, 2, sharey=True)
  _bars(left, rows, "seconds", "seconds, both sides")
  _bars(right, rows, "bytes", "bytes of all messages")
  if title:
    figure.suptitle(title, fontsize=10)
  report.save_figure(figure, folder / "secure.png")


def _bars(axes: Axes, rows: Sequence[Row], name: str, label: str) -> None:
  """Draws bars on a logarithmic axis, with a colour for each task."""
  tasks = list(dict.fromkeys(row["task"] for row in rows))
  places = np.arange(len(rows))[::-1]
  least = {"seconds": 1e-3, "bytes": 1.0}[name]
  axes.barh(
    places,
    [max(row[name], least) for row in rows],
    color=[report.PALETTE[tasks.index(row["task"])] for row in rows],
    height=0.6,
  )
  axes.set_xscale("log")
  axes.set_yticks(places, [row["row"] for row in rows])
  report.style(axes, title=label, xlabel=name, ylabel="")
  axes.tick_params(axis="y", labelsize=7)
