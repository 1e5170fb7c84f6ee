"""A sweep as a Markdown table: one row for each line of the picture, one column for each x."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from dpjax import files, markdown
from dpjax.accounting.text import by_name, is_promised
from dpjax.experiments.run import report
from dpjax.experiments.sweeps import curve

TABLE = "table.md"
Row = dict[str, Any]


def write(
  rows: Sequence[Row],
  out_dir: str | os.PathLike,
  *,
  x: str,
  y: str,
  series: str | None = None,
) -> None:
  """Writes `out_dir`/table.md: the mean of y, and its range over the seeds, by series and x.

  For federated runs, a second table shows the largest number of rounds, over the seeds, to each
  target accuracy.

  Args:
    rows: one row for each finished run, as for `curve.summarize`.
  """
  text = table(rows, x=x, y=y, series=series)
  rounds = rounds_table(rows, x=x, series=series)
  content = f"{text}\n{rounds}" if rounds else text
  files.replace_file(pathlib.Path(out_dir) / TABLE, content.encode())


def table(rows: Sequence[Row], *, x: str, y: str, series: str | None = None) -> str:
  """Returns the Markdown table of y by series and x. If x is an epsilon, lines below say what it
  means.

  >>> runs = [{"alpha": 0.5, "acc": 0.9, "name": "avg"}, {"alpha": 0.5, "acc": 0.8, "name": "avg"}]
  >>> print(table(runs, x="alpha", y="acc", series="name"))
  | name \\ alpha | 0.5 |
  | --- | --- |
  | avg | .8500 (.8000-.9000) |
  <BLANKLINE>
  """
  groups = curve.summarize(rows, x=x, y=y, series=series)
  # Runs without an epsilon come last, in a separate column.
  columns = sorted({group[x] for group in groups}, key=lambda at: (at is None, at or 0))
  labels = list(dict.fromkeys(_label(group, series, y) for group in groups))
  cells = {(_label(group, series, y), group[x]): _cell(group, y) for group in groups}
  head = [
    f"{series or y} \\ {x}",
    *(_value_text(x, c) for c in columns),
  ]
  body = [[label, *(cells.get((label, at), "") for at in columns)] for label in labels]
  means = {report.meaning(group) for group in groups if group[x] is not None} - {""}
  lines = [f"\nEach epsilon is {text}.\n" for text in sorted(means) if is_promised(x)]
  return "".join([markdown.table(head, body), *lines])


def rounds_table(rows: Sequence[Row], *, x: str, series: str | None = None) -> str:
  """Returns the Markdown table of rounds to each target accuracy.

  A row is a series, or a series at one x if the series has several x values. A cell is "-" if one
  of its runs never reached the target. The table is "" if no run reports rounds.

  >>> runs = [{"alpha": at, "rounds_to_accuracy": {"0.97": 9, "0.99": None}} for at in (1, 2)]
  >>> print(rounds_table(runs, x="alpha"))
  | rounds to | 0.97 | 0.99 |
  | --- | --- | --- |
  | all @ 1 | 9 | - |
  | all @ 2 | 9 | - |
  <BLANKLINE>
  >>> print(rounds_table(runs[:1], x="alpha").splitlines()[-1])
  | all | 9 | - |
  """
  with_rounds = [row for row in rows if row.get("rounds_to_accuracy")]
  if not with_rounds:
    return ""
  targets = list(dict.fromkeys(t for row in with_rounds for t in row["rounds_to_accuracy"]))
  name = lambda row: str(row[series]) if series else "all"
  places: dict[str, set] = {}
  for row in with_rounds:
    places.setdefault(name(row), set()).add(curve.place(row, x))

  def label(row: Row) -> str:
    line = name(row)
    return (
      f"{line} @ {_value_text(x, curve.place(row, x))}" if len(places[line]) > 1 else line
    )

  lines = []
  for each in dict.fromkeys(map(label, with_rounds)):
    mine = [row["rounds_to_accuracy"] for row in with_rounds if label(row) == each]
    line = [each]
    for target in targets:
      # A cell shows the slowest run, or a dash if one of the runs never reached the target.
      rounds = [rounds_of_run.get(target) for rounds_of_run in mine]
      line.append("-" if None in rounds else str(max(rounds)))
    lines.append(line)
  return markdown.table(["rounds to", *targets], lines)


def _value_text(x: str, at: float | None) -> str:
  return "none" if at is None else by_name(x, at, digits=6)


def _label(group: Row, series: str | None, y: str) -> str:
  return str(group[series]) if series else y


def _cell(group: Row, y: str) -> str:
  """Returns mean and range of seeds with a finite result, and the number of other seeds."""
  lost = group["not_finite"]
  seeds = group["seeds"]
  if lost == seeds:
    return "not finite"
  mean, low, high = (_number(group[f"{y}_{part}"], y) for part in ("mean", "min", "max"))
  lost_text = f"; {lost} of {seeds} not finite" if lost else ""
  return mean if seeds == 1 else f"{mean} ({low}-{high}{lost_text})"


def _number(value: float, y: str) -> str:
  """Formats a number. A score below 1 gets four decimals, and no leading zero. Other numbers are
  formatted by `by_name`."""
  if not is_promised(y) and 0 < abs(value) < 1:
    return f"{value:.4f}".replace("0.", ".", 1)
  return by_name(y, value, digits=6)
