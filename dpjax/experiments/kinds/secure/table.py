"""Writes a table and a picture of secure computations: the cost of each, and what it hides."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from dpjax import files
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.kinds.secure.config import SecureConfig
from dpjax.experiments.plots import points, redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import guarantee, report
from dpjax.experiments.run.kind import Table
from dpjax.markdown import table
from dpjax.validate import UserError

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
    shown = {
      **row,
      "seconds": f"{row['seconds']:.3g}",
      "bytes": points.amount(row["bytes"]),
    }
    shown["error"] = f"{row['error']:.1e}" if row["error"] else "0"
    lines.append([str(shown[name]).replace("|", "/") for name in _COLUMNS])
  return table(_COLUMNS, lines)


class SecureTable(Table):
  """The table of several computations: secure.md, secure.csv (one line for each) and secure.png."""

  unreleased = (
    "All parties of a row ran in one process on known data: these runs measure, and release "
    "nothing."
  )
  writes = "secure.md, secure.csv, secure.png"

  def alone(self, config: SecureConfig) -> str:
    return f"{name_of(config, 'task')}, as configured"

  def missing(self, config: SecureConfig) -> str:
    try:
      config.task.check_library()
    except UserError as error:
      return str(error)
    return ""

  def tell(self, row: Row) -> str:
    return (
      f"{row['method']}, {row['sizes']}: {row['found']}; error {row['error']:.1e}, "
      f"{row['seconds']:.3g} s, {points.amount(row['bytes'])}"
    )

  def write(
    self, folder: pathlib.Path, rows: Sequence[Row], *, title: str, last: bool
  ) -> None:
    if not rows:
      return
    of_table = rows_of(rows)
    report.write_csv(folder / "secure.csv", of_table)
    text = f"{_NOTE}\n{markdown(of_table)}"
    files.replace_file(folder / "secure.md", text.encode())
    # A picture of many panels takes seconds, so it is drawn once, after the last run.
    if last:
      redraw.write(folder / "secure.csv", recipe(title))

  def read(self, folder: pathlib.Path) -> str:
    return (folder / "secure.md").read_text()


def recipe(title: str) -> Recipe:
  """Returns how secure.csv is drawn: seconds and bytes of each row, on logarithmic axes.

  Each number stands beside its point. There are no bars, since a logarithmic axis has no zero.
  """
  return Recipe(
    "points", ("seconds", "bytes"), ("row",), "task", log=("seconds", "bytes"), title=title,
    units={"seconds": "s", "bytes": "B"},
    words={"seconds": "seconds of all parties", "bytes": "bytes of all messages"},
  )  # fmt: skip
