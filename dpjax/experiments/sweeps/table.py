"""A sweep as a Markdown table: one row for each line of the picture, one column for each x."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from dpjax import files, markdown
from dpjax.accounting.text import by_name, is_promised
from dpjax.experiments.run import report

TABLE = "table.md"
Row = dict[str, Any]


def write(
  groups: Sequence[Row],
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
    groups: points of the curve, of `curve.summarize`.
  """
  tables = [
    table(groups, x=x, y=y, series=series),
    rounds_table(groups, x=x, series=series),
  ]
  text = "\n".join(filter(None, tables))
  files.replace_file(pathlib.Path(out_dir) / TABLE, text.encode())


def table(groups: Sequence[Row], *, x: str, y: str, series: str | None = None) -> str:
  """Returns the Markdown table of y by series and x. If x is an epsilon, lines below say what it
  means.

  >>> from dpjax.experiments.sweeps import curve
  >>> runs = [{"alpha": 0.5, "acc": 0.9, "name": "avg"}, {"alpha": 0.5, "acc": 0.8, "name": "avg"}]
  >>> axes = {"x": "alpha", "y": "acc", "series": "name"}
  >>> print(table(curve.summarize(runs, **axes), **axes))
  | name \\ alpha | 0.5 |
  | --- | --- |
  | avg | .8500 (.8000-.9000) |
  <BLANKLINE>
  """
  # Runs without an epsilon come last, in a separate column.
  columns = sorted({group[x] for group in groups}, key=lambda at: (at is None, at or 0))
  name_of = lambda group: group[series] if series else y
  labels = list(dict.fromkeys(map(name_of, groups)))
  cells = {(name_of(group), group[x]): _cell(group, y) for group in groups}
  head = [f"{series or y} \\ {x}", *(_value_text(x, at) for at in columns)]
  body = [[label, *(cells.get((label, at), "") for at in columns)] for label in labels]
  means = {report.meaning(group) for group in groups if group[x] is not None} - {""}
  lines = [f"\nEach epsilon is {text}.\n" for text in sorted(means) if is_promised(x)]
  return "".join([markdown.table(head, body), *lines])


def rounds_table(groups: Sequence[Row], *, x: str, series: str | None = None) -> str:
  """Returns the Markdown table of rounds to each target accuracy.

  A row is a series, or a series at one x if the series has several x values. A cell is "-" if one
  of its runs never reached the target. The table is "" if no run reports rounds.

  >>> from dpjax.experiments.sweeps import curve
  >>> runs = [{"alpha": at, "a": 1, "rounds_to_accuracy": {"0.9": 9, "1": None}} for at in (1, 2)]
  >>> print(rounds_table(curve.summarize(runs, x="alpha", y="a"), x="alpha"))
  | rounds to | 0.9 | 1 |
  | --- | --- | --- |
  | all @ 1 | 9 | - |
  | all @ 2 | 9 | - |
  <BLANKLINE>
  """
  groups = [group for group in groups if group["rounds_to_accuracy"]]
  if not groups:
    return ""
  targets = list(dict.fromkeys(t for group in groups for t in group["rounds_to_accuracy"]))
  names = [group[series] if series else "all" for group in groups]
  lines = []
  for name, group in zip(names, groups):
    label = f"{name} @ {_value_text(x, group[x])}" if names.count(name) > 1 else name
    rounds = [group["rounds_to_accuracy"].get(target) for target in targets]
    lines.append([label, *("-" if count is None else str(count) for count in rounds)])
  return markdown.table(["rounds to", *targets], lines)


def _value_text(x: str, at: float | None) -> str:
  return "none" if at is None else by_name(x, at, digits=6)


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
