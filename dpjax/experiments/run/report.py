"""The picture and the CSV file of a run, and the meaning of an epsilon in one line."""

from __future__ import annotations

import csv
import io
import math
import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpjax import accounting, files, pictures
from dpjax.accounting import proved, upper
from dpjax.accounting.event_kinds.kind import event_from_json
from dpjax.experiments.plots import lines, recipes
from dpjax.experiments.plots.recipes import WHAT_EPSILON_MEANS as WHAT_EPSILON_MEANS
from dpjax.experiments.plots.recipes import Recipe, is_number
from dpjax.experiments.run import guarantee, writers
from dpjax.pictures import PAGE, Look
from dpjax.validate import UserError

if TYPE_CHECKING:
  from matplotlib.figure import Figure

PICTURE, TABLE = writers.REPORT
_POINTS = 12
Row = dict[str, Any]


def train_report(workdir: str | os.PathLike, *, steps: str = "optimizer steps") -> None:
  """Writes `workdir`/report.png and report.csv from metrics.jsonl and result.json.

  The picture has two panels over the steps. The first panel shows test accuracy, or else the first
  score. The second panel shows the epsilon spent so far, and its meaning; it is left out for a run
  without an epsilon. A run that has not finished (no result.json) is drawn up to its last row.

  Args:
    workdir: folder of the run.
    steps: name of the steps, for the axis.

  Raises:
    UserError: there are no metrics.
  """
  workdir = pathlib.Path(workdir)
  by_step: dict[int, Row] = {}
  # Lines with the same step form one row.
  for line in writers.read_metrics(workdir):
    by_step.setdefault(line["step"], {}).update(line)
  rows = [by_step[step] for step in sorted(by_step)]
  if not rows:
    raise UserError("holds no metrics to report", field=str(workdir / writers.METRICS))
  path = workdir / writers.RESULT
  result = writers.read_json(path) if path.exists() else {}
  write_csv(workdir / TABLE, rows)
  its_recipe = recipe(rows, result, steps=steps)
  if its_recipe is not None:
    recipes.write(workdir / TABLE, its_recipe)
    pictures.save(lines.lines(rows, its_recipe), workdir / PICTURE)


def recipe(
  rows: list[Row], result: Row, *, steps: str = "optimizer steps"
) -> Recipe | None:
  """Returns how report.csv is drawn; None if its rows hold neither scores nor epsilon.

  With one kind of step in the result's ledger, the accountant computes epsilon between evaluations,
  in less than a second. Otherwise the curve is a staircase that is never too low: between two
  evaluations, epsilon is at most its value at the second.

  Args:
    rows: one row for each evaluation.
    result: content of result.json; {} for a run that has not finished.
    steps: name of the steps, for the axis.
  """
  # A task without accuracy is drawn by its first score.
  columns = [name for row in rows for name in row if name.startswith("test_")]
  score = "test_accuracy" if "test_accuracy" in columns else next(iter(columns), None)
  words = {"step": steps, "epsilon": "epsilon spent so far"}
  titles = {}
  curves = {}
  y = [] if score is None else [score]
  if score is not None:
    words[score] = score.replace("_", " ")
    titles[score] = _title(score, result)
  at, values = [], []
  for row in rows:
    if is_number(row.get("epsilon")):
      at.append(row["step"])
      values.append(row["epsilon"])
  if at:
    y.append("epsilon")
    titles["epsilon"] = _meaning_of(values[-1], result)
    between = _between(at, values, result)
    curves = {"epsilon": list(between.items())} if between else {}
  if not y:
    return None
  return Recipe(
    "lines", ("step",), tuple(y), stairs=("epsilon",) if at else (), curves=curves, words=words,
    titles=titles,
  )  # fmt: skip


def figure(
  rows: list[Row],
  result: Row,
  *,
  steps: str = "optimizer steps",
  look: Look = PAGE,
) -> Figure | None:
  """Returns the picture of a run: its score, and the epsilon spent so far; None if it has neither.
  The arguments are those of `recipe`."""
  its_recipe = recipe(rows, result, steps=steps)
  if its_recipe is None:
    return None
  return lines.lines(rows, its_recipe, look)


def meaning(result: Row) -> str:
  """Explains the epsilon of a result in one line; "" if the result has no `epsilon_kind`.

  >>> proved = {"epsilon_kind": "proved", "delta": 1e-5, "unit": "example",
  ...           "neighboring_relation": "add_or_remove_one"}
  >>> meaning(proved)
  'proved, delta = 1e-05, add or remove one example'
  >>> meaning(proved | {"epsilon_kind": "claimed", "failed_assumptions": ["C4: no noise"]})
  'claimed, delta = 1e-05, add or remove one example; fails or is assumed: C4'
  >>> meaning({"epsilon_kind": "none"})
  'not private'
  """
  kind = result.get("epsilon_kind")
  if kind in (None, "none"):
    return "" if kind is None else "not private"
  delta = result["delta"]
  relation = pictures.relation_in_words(result["neighboring_relation"], result["unit"])
  # `delta` is text if several runs have different deltas.
  shown = upper(delta) if isinstance(delta, float) else delta
  failed = guarantee.names_of(result.get("failed_assumptions") or ())
  rests_on = f"; fails or is assumed: {failed}" if failed else ""
  return f"{kind}, delta = {shown}, {relation}{rests_on}"


def _title(score: str, result: Row) -> str:
  """Returns what stands above the panel of a score."""
  if not result:
    return score.replace("_", " ")
  dataset, method = map(pictures.proper_name, (result["dataset"], result["method"]))
  private = "" if result["epsilon_kind"] != "none" else ": not private"
  last = writers.number(result[score])
  return f"{dataset}, {method}{private}: {last:.3f} at the end"


def _meaning_of(epsilon: float, result: Row) -> str:
  """Returns what stands above the panel of epsilon."""
  # A title begins at the axis; names and ticks left of the axis take about half an inch.
  characters = int((3.45 - 0.6) / pictures.letter(PAGE.font_size))
  lines = [f"epsilon {upper(epsilon)}", meaning(result)]
  lines.append(guarantee.attackers_bound(result).removeprefix(", "))
  return "\n".join(textwrap.fill(line, characters) for line in lines if line)


def _between(steps: list[int], values: list[float], result: Row) -> dict[int, float]:
  """Returns {step: epsilon}, also between evaluations, by the run's accountant.

  Returns {} for fewer than two evaluations, or if the result does not determine epsilon: the ledger
  is missing or has steps of several kinds, or the accountant's epsilon at the last evaluation
  differs from the epsilon of its row.
  """
  charges = (result.get("ledger") or {}).get("charges", ())
  accountant: Any = result.get("accountant")
  if len(charges) != 1 or accountant not in proved.ACCOUNTANTS or len(steps) < 2:
    return {}
  event = event_from_json(charges[0]["event"])
  relation = result["neighboring_relation"]
  last = max(steps)
  # Early steps cost most, so most points are early.
  early = (round(last ** (part / _POINTS)) for part in range(_POINTS + 1))
  wanted = sorted({*early, *steps, *(round(last * part / 4) for part in range(1, 5))})
  try:
    curve = accounting.epsilon_curve(
      event,
      wanted,
      delta=guarantee.delta_of_ledger(result),
      neighboring_relation=relation,
      accountant=accountant,
    )
  except UserError:
    return {}
  between = dict(zip(wanted, map(float, curve)))
  return between if math.isclose(between[last], values[-1], rel_tol=1e-4) else {}


def write_csv(path: pathlib.Path, rows: list[Row], header: Sequence[str] = ()) -> None:
  """Writes rows as a CSV file, atomically. The columns are those of the header, or, if it is empty,
  all names in the rows. A list in a cell is its entries between semicolons."""
  header = list(header) or list(dict.fromkeys(name for row in rows for name in row))
  text = io.StringIO()
  table = csv.DictWriter(
    text, header, restval="", extrasaction="ignore", lineterminator="\n"
  )
  table.writeheader()
  for row in rows:
    as_text = {
      name: "; ".join(map(str, v)) for name, v in row.items() if isinstance(v, list)
    }
    table.writerow(row | as_text)
  files.replace_file(path, text.getvalue().encode())
