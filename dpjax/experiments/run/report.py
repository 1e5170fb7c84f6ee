"""The picture of a run, and shared parts of all pictures: a CSV file beside each.

Drawn with matplotlib's object interface, so that no global state is touched and no
display is needed. Colours are those of Okabe and Ito (2008), distinguished by everyone.
"""

from __future__ import annotations

import csv
import functools
import io
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from matplotlib.axes import Axes
from matplotlib.axis import Tick
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from dpjax.accounting import upper
from dpjax.experiments.run import promise, writers
from dpjax.validate import UserError

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PICTURE = "report.png"
TABLE = "report.csv"
FILES = (PICTURE, TABLE)
WHAT_EPSILON_MEANS = ("epsilon_kind", "delta", "neighboring_relation", "unit")
Row = dict[str, Any]


def train_report(workdir: str | os.PathLike, *, steps: str = "optimizer steps") -> None:
  """Writes `workdir`/report.png and report.csv from metrics.jsonl and result.json.

  Two panels over the steps (`steps` is their name): test accuracy, or the first score that there
  is, and the epsilon spent so far with what it means; a run without an epsilon has the first
  panel only. A run that has not finished (no result.json) is drawn as far as it came.

  Raises:
    UserError: there are no metrics.
  """
  workdir = pathlib.Path(workdir)
  by_step: dict[int, Row] = {}
  # Several lines of one step form one row.
  for line in writers.read_metrics(workdir):
    by_step.setdefault(line["step"], {}).update(line)
  rows = [by_step[step] for step in sorted(by_step)]
  if not rows:
    raise UserError(f"{workdir / writers.METRICS}: holds no metrics to report")
  path = workdir / writers.RESULT
  result = writers.read_json(path) if path.exists() else {}
  write_csv(workdir / TABLE, rows)
  # A task without accuracy is drawn by its first score.
  columns = [name for row in rows for name in row if name.startswith("test_")]
  score = "test_accuracy" if "test_accuracy" in columns else next(iter(columns), None)
  panels = [] if score is None else [functools.partial(_draw_score, score)]
  panels += [_draw_epsilon] * bool(_series(rows, "epsilon")[0])
  if not panels:
    return
  figure = Figure(figsize=(4.4 * len(panels), 3.4), layout="constrained")
  axes = figure.subplots(1, len(panels), squeeze=False)[0]
  for axis, draw in zip(axes, panels):
    draw(axis, rows, result, steps)
  save_figure(figure, workdir / PICTURE)


def redraw(workdir: pathlib.Path, steps: str) -> None:
  """Draws `train_report` again where a part of it is missing or empty. A run may have been
  killed between its result and its report."""
  whole = all(
    (workdir / name).is_file() and (workdir / name).stat().st_size for name in FILES
  )
  if not whole and writers.read_metrics(workdir):
    train_report(workdir, steps=steps)


def style(axes: Axes, *, title: str, xlabel: str, ylabel: str) -> None:
  """Style of every picture: labels, a light grid, no decoration."""
  axes.set_title(title, fontsize=9, loc="left")
  axes.set_xlabel(xlabel, fontsize=9)
  axes.set_ylabel(ylabel, fontsize=9)
  axes.tick_params(labelsize=8, length=3)
  axes.grid(True, color="#E5E5E5", linewidth=0.6)
  axes.set_axisbelow(True)
  axes.spines[["top", "right"]].set_visible(False)


def meaning(result: Row) -> str:
  """Explains an epsilon in one line; empty where the result does not say.

  >>> meaning({"epsilon_kind": "proved", "delta": 1e-5, "unit": "example",
  ...          "neighboring_relation": "add_or_remove_one"})
  'proved, delta = 1e-05, add_or_remove_one, per example'
  >>> meaning({"epsilon_kind": "none"})
  'not private'
  """
  kind = result.get("epsilon_kind")
  if kind in (None, "none"):
    return "" if kind is None else "not private"
  delta, relation, unit = (result[key] for key in WHAT_EPSILON_MEANS[1:])
  # Text where several runs have several deltas.
  told = upper(delta) if isinstance(delta, float) else delta
  return f"{kind}, delta = {told}, {relation}, per {unit}"


def _draw_score(score: str, axes: Axes, rows: list[Row], result: Row, xlabel: str) -> None:
  (steps, values), title = _series(rows, score), score.replace("_", " ")
  axes.plot(steps, values, color=PALETTE[0], marker="o", markersize=3, linewidth=1.4)
  label = title
  if result:
    method = f", {result['method']}" if result["epsilon_kind"] != "none" else ""
    private = "" if method else f", {result['method']}: not private"
    last = writers.number(result[score])
    title = f"{result['dataset']}{method}{private}: {last:.3f} at the end"
  style(axes, title=title, xlabel=xlabel, ylabel=label)


def _draw_epsilon(axes: Axes, rows: list[Row], result: Row, xlabel: str) -> None:
  steps, values = _series(rows, "epsilon")
  axes.plot(steps, values, color=PALETTE[1], linewidth=1.4)
  lines = [f"epsilon {upper(values[-1])}", meaning(result)]
  lines.append(promise.attackers_told(result).removeprefix(", "))
  title = "\n".join(line for line in lines if line)
  style(axes, title=title, xlabel=xlabel, ylabel="epsilon spent so far")
  axes.set_ylim(bottom=0)


def _series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
  found = [(r["step"], r[name]) for r in rows if name in r and math.isfinite(r[name])]
  return [step for step, _ in found], [value for _, value in found]


def write_csv(path: pathlib.Path, rows: list[Row], header: Sequence[str] = ()) -> None:
  """Writes rows as a CSV file, atomically; columns in the order of the header."""
  header = list(header) or list(dict.fromkeys(name for row in rows for name in row))
  text = io.StringIO()
  table = csv.DictWriter(
    text, header, restval="", extrasaction="ignore", lineterminator="\n"
  )
  table.writeheader()
  table.writerows(rows)
  writers.replace_file(path, text.getvalue().encode())


def write_entries(path: pathlib.Path, entries: Sequence[Any]) -> None:
  """A benchmark's entries (NamedTuples) as CSV, each with the platform and JAX's version."""
  where = {"platform": jax.default_backend(), "jax": jax.__version__}
  path.parent.mkdir(parents=True, exist_ok=True)
  write_csv(path, [{**entry._asdict(), **where} for entry in entries])


def save_figure(figure: Figure, path: pathlib.Path) -> None:
  """Writes a picture as PNG, atomically and without a display; names in it are shown
  literally."""
  FigureCanvasAgg(figure)
  # A title or a label may hold a path or a user's text, where "$" begins no formula. Tick
  # labels of logarithmic axes do hold matplotlib's own formulas.
  ticks = {id(text) for tick in figure.findobj(Tick) for text in tick.findobj(Text)}
  for text in figure.findobj(Text):
    if isinstance(text, Text) and id(text) not in ticks:
      text.set_parse_math(False)
  # Rendered in memory first, so that a kill leaves the old picture or the new one.
  content = io.BytesIO()
  figure.savefig(content, format="png", dpi=150)
  writers.replace_file(path, content.getvalue())
