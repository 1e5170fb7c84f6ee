"""The table of each method's claim, proof, attack result and accuracy."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from dpjax.accounting import upper
from dpjax.accounting.text import lower
from dpjax.experiments.run import guarantee, report, writers
from dpjax.markdown import table

Row = dict[str, Any]
_NOTE = (
  "Claimed epsilons are the methods' own and come with the assumptions that fail for them; "
  "only the column `proved_epsilon` is a guarantee. An audited bound above an epsilon refutes "
  "it (95 % confidence); one below it proves nothing. Accuracies are those of the last epoch.\n"
)


def write(workdir: pathlib.Path, results: Sequence[Row]) -> None:
  """Writes the table of all runs to claims.csv and claims.md in `workdir`."""
  rows = rows_of(results)
  report.write_csv(workdir / "claims.csv", rows)
  writers.replace_file(workdir / "claims.md", f"{_NOTE}\n{markdown(rows)}".encode())


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
    "audited_lower_bound": _largest(group, "epsilon_audited_lower"),
    "audited_by": first.get("audit", {}).get("strongest"),
    "verdict": verdict(group),
    # The mean hides how much seeds differ, so the range is shown, too.
    "test_accuracy": statistics.mean(accuracies),
    "accuracy_range": f"{min(accuracies):.3f}-{max(accuracies):.3f}",
    "seeds": len(group),
    "failed_assumptions": guarantee.named(first["failed_assumptions"]),
  }


def _largest(group: list[Row], name: str) -> float | None:
  values = [writers.number(r[name]) for r in group if r.get(name) is not None]
  return max(values, default=None)


def verdict(group: Sequence[Row]) -> str:
  """Returns in words whether attacks refute the epsilon that the method states.

  >>> verdict([{"epsilon": 2.0, "epsilon_audited_lower": 5.0, "epsilon_kind": "claimed"}])
  'claim refuted'
  """
  audited = [r for r in group if r.get("epsilon_audited_lower") is not None]
  if not audited:
    return "not audited"
  if group[0]["epsilon"] is None:
    return "no epsilon is stated"
  number = writers.number
  over = any(number(r["epsilon_audited_lower"]) > number(r["epsilon"]) for r in audited)
  # `refuted` is also true if an attack refutes the local epsilon of features before the shuffler.
  over |= any(r.get("audit", {}).get("refuted", False) for r in audited)
  if not over:
    return "not refuted"
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
