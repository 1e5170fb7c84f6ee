"""What runs of relevance write: a table of claims, proofs and attacks, and curves by epoch."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from dpjax import files
from dpjax.accounting import upper
from dpjax.accounting.text import lower
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import guarantee, report, writers
from dpjax.experiments.run.kind import Table
from dpjax.markdown import table

Row = dict[str, Any]
_SCORES = ("test_accuracy", "test_loss")
_OF_RUN = ("curve", "dataset", "epsilon_target", "seed")
_MEANING = (
  "epsilon_kind",
  "claimed_epsilon_thm7",
  "proved_epsilon",
  "delta",
  "neighboring_relation",
  "unit",
)
_NOTE = (
  "Claimed epsilons are the methods' own and come with the assumptions that fail for them; "
  "only the column `proved_epsilon` is a guarantee. An audited bound above an epsilon refutes "
  "it (95 % confidence); one below it proves nothing. Of several seeds it is the largest bound "
  "that still has this confidence: the second largest of 2 to 7, the third of 8. Accuracies are "
  "those of the last epoch.\n"
)
# Chance that the bound of one audited run is above the true epsilon.
_ERRS = 0.05


class ClaimsTable(Table):
  """claims.md and .csv: each method's claim, proof, attack result and accuracy; report.csv and its
  picture: every epoch of every run.

  A run's label is that of its line, up to " @ ": "RADP @ epsilon 2". A run without privacy has no
  epsilon, and is drawn beside the runs of every epsilon.
  """

  writes = "claims.md, claims.csv, report.png, report.csv"

  def facts(self, label: str, config: Any) -> Row:
    return {"label": label, "curve": label.split(" @ ")[0]}

  def tell(self, row: Row) -> str:
    return f"test_accuracy={row['test_accuracy']:.4f}, {guarantee.summary(row)}"

  def write(
    self, folder: pathlib.Path, rows: Sequence[Row], *, title: str, last: bool
  ) -> None:
    if rows:
      of_runs = [writers.read_metrics(folder / "points" / row["name"]) for row in rows]
      _write(folder, rows, of_runs, title)

  def alarm(self, rows: Sequence[Row]) -> str:
    refuted = [row for row in rows if row["status"] == "done" and is_alarming(row)]
    return "; ".join(
      f"audit: a proved epsilon is refuted: {row['name']}: {self.tell(row)}"
      for row in refuted[:1]
    )


def is_alarming(result: Row) -> bool:
  """Returns whether an attack refutes what is proved."""
  return verdict([result]) == "PROOF REFUTED"


def write_one(folder: pathlib.Path, curve: str) -> None:
  """Writes the files of one run in its folder, unless they are there."""
  if not (folder / "report.png").exists():
    row = writers.read_json(folder / writers.RESULT) | {"curve": curve}
    _write(folder, [row], [writers.read_metrics(folder)], "")


def _write(
  folder: pathlib.Path, results: Sequence[Row], metrics: Sequence[list[Row]], title: str
) -> None:
  rows = rows_of(results)
  report.write_csv(folder / "claims.csv", rows)
  files.replace_file(folder / "claims.md", f"{_NOTE}\n{markdown(rows)}".encode())
  rows = [row for curve in map(_by_epoch, results, metrics) for row in curve]
  report.write_csv(folder / "report.csv", rows)
  lines = ", ".join(dict.fromkeys(row["curve"] for row in rows))
  title = title or f"{results[0]['dataset']}: {lines}"
  redraw.write(folder / "report.csv", recipe(title))


def recipe(title: str) -> Recipe:
  """Returns how report.csv is drawn: panels by data set, epsilon and neighbouring relation."""
  return Recipe(
    "lines", ("epoch",), _SCORES, "curve", title=title,
    panels=("dataset", "epsilon_target", "neighboring_relation"),
    words={"test_loss": "cross-entropy (nats)", "epsilon_target": "epsilon"},
  )  # fmt: skip


def _by_epoch(result: Row, lines: list[Row]) -> list[Row]:
  of_run, meaning = (
    {name: result[name] for name in names} for names in (_OF_RUN, _MEANING)
  )
  scores = [{name: line[name] for name in _SCORES} for line in lines]
  epochs = [{"epoch": line["step"]} for line in lines]
  return [of_run | epoch | score | meaning for epoch, score in zip(epochs, scores)]


def rows_of(results: Sequence[Row]) -> list[Row]:
  """Returns one row for each (curve, data set, target epsilon), with the runs of all seeds."""
  groups: dict[tuple, list[Row]] = {}
  for result in results:
    key = (result["curve"], result["dataset"], result["epsilon_target"])
    groups.setdefault(key, []).append(result)
  return [_row(key, group) for key, group in groups.items()]


def _row(key: tuple, group: list[Row]) -> Row:
  accuracies = [result["test_accuracy"] for result in group]
  first = group[0]
  return {
    "method": key[0],
    "dataset": key[1],
    "claimed_epsilon": _largest(group, "claimed_epsilon"),
    "epsilon_by_theorem_7": _largest(group, "claimed_epsilon_thm7"),
    "proved_epsilon": _largest(group, "proved_epsilon"),
    "delta": _largest(group, "delta"),
    "neighboring_relation": first["neighboring_relation"],
    "audited_lower_bound": _joint_audit(group),
    "audited_by": first.get("audit", {}).get("strongest"),
    "verdict": verdict(group),
    # The mean hides how much seeds differ, so the range is shown, too.
    "test_accuracy": statistics.mean(accuracies),
    "accuracy_range": f"{min(accuracies):.3f}-{max(accuracies):.3f}",
    "seeds": len(group),
    "failed_assumptions": guarantee.names_of(first["failed_assumptions"]),
  }


def _largest(group: list[Row], name: str) -> float | None:
  values = [writers.number(r[name]) for r in group if r.get(name) is not None]
  return max(values, default=None)


def _least_refuting(num_runs: int) -> int:
  """Returns how many of so many independent runs must refute an epsilon, so that all together err
  as seldom as one of them.

  >>> [_least_refuting(runs) for runs in (1, 2, 5, 7, 8)]
  [1, 2, 2, 2, 3]
  """
  at_least = stats.binom.sf(np.arange(num_runs), num_runs, _ERRS)
  # The tolerance is for one run, which errs with exactly this chance.
  return 1 + int(np.argmax(at_least <= _ERRS * (1 + 1e-9)))


def _joint_audit(group: Sequence[Row]) -> float | None:
  """Returns the lower bound that all seeds together show. Their largest bound would err in any."""
  bounds = sorted(writers.number(row["epsilon_audited_lower"]) for row in _of_audits(group))
  return bounds[-_least_refuting(len(bounds))] if bounds else None


def _of_audits(group: Sequence[Row]) -> list[Row]:
  return [row for row in group if row.get("epsilon_audited_lower") is not None]


def verdict(group: Sequence[Row]) -> str:
  """Returns in words whether attacks refute the epsilon that the method states.

  >>> refuted = {"epsilon": 2.0, "epsilon_audited_lower": 5.0, "epsilon_kind": "claimed"}
  >>> verdict([refuted]), verdict([refuted, refuted | {"epsilon_audited_lower": 0.0}])
  ('claim refuted', 'not refuted (1 of 2 runs would, by itself)')
  >>> verdict([refuted | {"epsilon": 8.0, "audit": {"can_refute": False}}])
  'not refuted: perfect attacks COULD NOT either'
  """
  audited = _of_audits(group)
  if not audited:
    return "not audited"
  if group[0]["epsilon"] is None:
    return "no epsilon is stated"
  number = writers.number
  # `refuted` is also true if an attack refutes the local epsilon of features before the shuffler.
  over = sum(
    number(row["epsilon_audited_lower"]) > number(row["epsilon"])
    or row.get("audit", {}).get("refuted", False)
    for row in audited
  )
  if over < _least_refuting(len(audited)):
    if over:
      return f"not refuted ({over} of {len(audited)} runs would, by itself)"
    can = any(row.get("audit", {}).get("can_refute", True) for row in audited)
    return "not refuted" if can else "not refuted: perfect attacks COULD NOT either"
  return "claim refuted" if group[0]["epsilon_kind"] == "claimed" else "PROOF REFUTED"


def markdown(rows: Sequence[Row]) -> str:
  """Returns the rows as a Markdown table, whose columns are the keys of the first row.

  >>> print(markdown([{"method": "radp", "delta": None, "claimed_epsilon": 2.0}]))
  | method | delta | claimed_epsilon |
  | --- | --- | --- |
  | radp | - | 2 |
  <BLANKLINE>
  """
  lines = ([_cell(value, name) for name, value in row.items()] for row in rows)
  return table(rows[0], lines)


def _cell(value: Any, name: str) -> str:
  if value is None or value == "":
    return "-"
  if not isinstance(value, float):
    return str(value)
  if name == "test_accuracy":
    return f"{value:.3f}"
  # A lower bound is rounded down. Delta and all other epsilons are rounded up.
  return lower(value) if name == "audited_lower_bound" else upper(value)
