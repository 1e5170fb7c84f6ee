"""Writes a table and a picture of many attacks: the success of each attack under each defence."""

from __future__ import annotations

import collections
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from dpjax import files
from dpjax.accounting import upper
from dpjax.accounting.text import lower
from dpjax.experiments.config.choices import name_of
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.kinds.attack.settings import Row
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import report
from dpjax.experiments.run.guarantee import OWN_EPSILON
from dpjax.experiments.run.kind import Table
from dpjax.markdown import table

_NOTE = (
  "Epsilon is what the attacked run promises; its line bounds every membership attack, and a "
  "user's what one client can do to the model. A "
  "defence that an attack breaks FAILS; one that is not shown to fail may fail under another "
  "attack. Intervals hold at 95 % each, for scores that are independent: those of the "
  "records of one model share its training. Several targets have the same records, so their "
  "intervals are as wide as for one. Of several runs a row has mean, sd and extremes.\n"
)
# Largest number of rows of one panel, unless they are all of one attack.
_MANY = 12
_COLUMNS = ("attack", "defence", "method", "finds", "epsilon", "test_accuracy", "verdict")


def rows_of(results: Sequence[Row]) -> list[Row]:
  """Returns one row for every method under every defence.

  Args:
    results: results of `AttackConfig` runs, with their attack and defence.
  """
  return [_common(result) | row for result in results for row in result["rows"]]


def means(rows: Sequence[Row]) -> list[Row]:
  """Returns a row for each method under each defence: the mean of its runs, which differ in their
  seed. A row of one run stays as it is.

  The column "runs" says how many there are, "sd" their standard deviation, low and high are their
  extremes.

  >>> runs = [{"attack": "a", "defence": "b", "method": "c", "success": x} for x in (0.0, 0.5)]
  >>> row, = means([run | {"verdict": "FAILS: read"} for run in runs])
  >>> row["success"], round(row["sd"], 3), row["low"], row["high"], row["verdict"]
  (0.25, 0.354, 0.0, 0.5, 'FAILS: read: 2 of 2 runs')
  """
  groups: dict[tuple[str, ...], list[Row]] = {}
  for row in rows:
    groups.setdefault((row["attack"], row["defence"], row["method"]), []).append(row)
  return [group[0] if len(group) == 1 else _mean(group) for group in groups.values()]


def _mean(runs: list[Row]) -> Row:
  values = [run["success"] for run in runs]
  averaged = {
    name: statistics.fmean(run[name] for run in runs)
    for name, value in runs[0].items()
    if isinstance(value, int | float) and all(run[name] is not None for run in runs)
  }
  mean, sd = averaged["success"], statistics.stdev(values)
  verdicts = collections.Counter(run["verdict"] for run in runs)
  row = runs[0] | averaged
  return row | {
    "runs": len(runs),
    "sd": sd,
    "low": min(values),
    "high": max(values),
    "finds": f"{mean:.3f} (sd {sd:.3f}, {min(values):.3f}-{max(values):.3f})",
    "verdict": "; ".join(
      f"{words}: {count} of {len(runs)} runs" for words, count in verdicts.most_common()
    ),
  }


def _common(result: Row) -> Row:
  epsilon = result["epsilon"]
  note = result.get("epsilon_note", "")
  return {
    "attack": result["attack"],
    "defence": result["defence"],
    "epsilon": None if epsilon is None or note else epsilon,
    "epsilon_kind": result["epsilon_kind"],
    "delta": result["delta"],
    "neighboring_relation": result["neighboring_relation"],
    "unit": result["unit"],
    "failed_assumptions": result.get("failed_assumptions") or [],
    "note": note,
    "noise_multiplier": result.get("noise_multiplier"),
    "test_accuracy": result["test_accuracy"],
    "beside": result.get("beside", ""),
  }


def markdown(rows: Sequence[Row]) -> str:
  """Returns the rows as a Markdown table. Its column "published" is left out if it is empty."""
  columns = [*_COLUMNS] + ["published"] * any(row["beside"] for row in rows)
  lines = []
  for row in rows:
    cells = {**row, "epsilon": _epsilon(row), "published": row["beside"] or "-"}
    lines.append([_cell(cells[name]) for name in columns])
  return table(columns, lines)


def remarks(results: Sequence[Row]) -> str:
  """Returns Markdown lines on attacks: the strongest method of a single run, and what a guarantee
  of lines allows for groups of them; "" if no result says so.

  >>> result = {"attack": "a", "defence": "b", "strongest": {"words": "weak"}}
  >>> print(remarks([result]))
  <BLANKLINE>
  - a, b: weak
  <BLANKLINE>
  >>> remarks([result, result])  # the table has their mean
  ''
  """
  runs = collections.Counter((result["attack"], result["defence"]) for result in results)
  lines = []
  for result in results:
    place = result["attack"], result["defence"]
    of_result = []
    if "strongest" in result and runs[place] == 1:
      of_result.append(result["strongest"]["words"])
      tail = result.get("loss_tail", {}).get("0.01")
      if tail is not None:
        of_result.append(f"the loss tail estimates TPR {tail['share']:.3f}")
    if "of_groups" in result:
      of_result.append(result["of_groups"])
    if of_result:
      lines.append(f"- {', '.join(place)}: {'; '.join(of_result)}")
  return "\n".join(["", *dict.fromkeys(lines), ""]) if lines else ""


def _cell(value: Any) -> str:
  if value is None or value == "":
    return "-"
  return f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "/")


def _epsilon(row: Row) -> str:
  """Returns epsilon and what it means; or "none", with a reason if it does not hold here."""
  if row["note"]:
    return f"none here: {row['note']}"
  if row["epsilon"] is None:
    return "none"
  return f"{upper(row['epsilon'])} ({report.meaning(row)})"


def summary(result: Row) -> str:
  """Returns one line on a run: the method with the most success, its verdict, and epsilon."""
  rows = rows_of([result])
  best = max(rows, key=lambda row: row["success"])
  return f"{best['method']}: {best['finds']}; {best['verdict']}; epsilon {_epsilon(best)}"


def summary_of_run(result: Row) -> str:
  """Returns one line that compares an attack on a finished run with the run's epsilon."""
  bound = result["epsilon_lower_indicative"]
  most = result["epsilon_lower_ceiling"]
  verdicts = "; ".join(
    f"{name}: {judged['verdict']}" for name, judged in result["attacks"].items()
  )
  verdicts += f" ({result['strongest']['words']})" if "strongest" in result else ""
  rates = next(iter(result["attacks"].values()))["tpr_at_fpr"]["0.01"]
  if rates["allowed_tpr"] is not None:
    verdicts += f"; the claim allows TPR {upper(rates['allowed_tpr'])} at 1 % FPR"
  alarm = "ALARM: " if is_above(result) else ""
  claimed = _epsilon(_common({"attack": "", "defence": "", **result}))
  return (
    f"{alarm}epsilon >= {lower(bound)} by the best attack (indicative: members were not dealt by "
    f"coins); claimed: {claimed}; perfect scores of "
    f"{result['num_members']} members would show {lower(most)}. {verdicts}"
  )


class AttackTable(Table):
  """The table of several attacks: attacks.md, attacks.csv and attacks.png.

  In a run's label, the text before the last comma names the attack, and the text after it the
  defence.
  """

  unreleased = (
    "Each epsilon is what the attacked run promises by itself. An attack trains many models and "
    "looks at true records: nothing in this folder may be released where the data are private."
  )
  writes = "attacks.md, attacks.csv, attacks.png"

  def alone(self, config: AttackConfig) -> str:
    return f"{name_of(config, 'attack')}, as configured"

  def facts(self, label: str, config: AttackConfig) -> Row:
    attack, _, defence = label.rpartition(", ")
    named = {"attack": attack or name_of(config, "attack"), "defence": defence}
    return named | {"beside": config.beside}

  def tell(self, row: Row) -> str:
    return summary(row)

  def write(
    self, folder: pathlib.Path, rows: Sequence[Row], *, title: str, last: bool
  ) -> None:
    # A picture of many panels takes seconds, so it is drawn once, after the last run.
    write(folder, rows, title=title, picture=last)

  def read(self, folder: pathlib.Path) -> str:
    return (folder / "attacks.md").read_text()

  def alarm(self, rows: Sequence[Row]) -> str:
    above = ", ".join(row["name"] for row in rows if is_above(row))
    return f"above what a guarantee allows: {above}" if above else ""


def is_above(row: Row) -> bool:
  """Returns whether an attack exceeds the guarantee of the attacked run: it is above the line, or a
  finished run's bound is above its epsilon."""
  attacks = row.get("attacks", {}).values()
  if any(judged["against_line"] == "above" for judged in attacks):
    return True
  # That of a larger deployment is promised to others.
  guaranteed = row.get("epsilon_kind") in ("proved", "claimed") and OWN_EPSILON not in row
  return guaranteed and row.get("epsilon_lower_indicative", 0.0) > row["epsilon"]


def write(
  folder: pathlib.Path, results: Sequence[Row], *, title: str = "", picture: bool = True
) -> None:
  """Writes attacks.md, attacks.csv and, with `picture`, attacks.png; writes nothing if no run has
  finished. Of runs that differ in their seed these have means, and runs.csv has each.

  If results hold ROC curves, it writes them to curves.csv, and draws them with `picture`.
  """
  if not results:
    return
  each = rows_of(results)
  rows = means(each)
  report.write_csv(folder / "attacks.csv", rows)
  several = len(rows) < len(each)
  if several:
    report.write_csv(folder / "runs.csv", each)
  text = f"{_NOTE}\n{markdown(rows)}{remarks(results)}"
  files.replace_file(folder / "attacks.md", text.encode())
  points = points_of(results)
  if points:
    report.write_csv(folder / "curves.csv", points)
    if picture:
      redraw.write(folder / "curves.csv", recipe_of_curves(title))
  if picture:
    lines = "the runs' extremes" if several else "95 %"
    redraw.write(folder / "attacks.csv", recipe(rows, title, lines=lines))


def points_of(results: Sequence[Row]) -> list[Row]:
  """Returns the ROC curves of results, one row for each point of each method.

  The method "allowed" is the line that no attack may cross.
  """
  return [
    {
      "attack": result["attack"],
      "defence": result["defence"],
      "epsilon": _epsilon(_common(result)),
      "method": method,
      "fpr": fpr,
      "tpr": tpr,
    }
    for result in results
    if "curves" in result
    for method, rates in result["curves"].items()
    if method != "fpr" and rates is not None
    for fpr, tpr in zip(result["curves"]["fpr"], rates)
  ]


def recipe(rows: Sequence[Row], title: str, *, lines: str = "95 %") -> Recipe:
  """Returns how attacks.csv is drawn: the rate of each attack, with its exact interval.

  Many rows would be illegible in one panel, so each attack then gets its own.

  Args:
    rows: rows of attacks.csv.
    title: title of the picture.
    lines: what the interval of a rate is.
  """
  many = len(rows) > _MANY and len({row["attack"] for row in rows}) > 1
  names = ("defence",) if many else ("attack", "defence")
  twice = len({tuple(row[name] for name in ("attack", "defence")) for row in rows}) < len(
    rows
  )
  return Recipe(
    "bars", ("success",), (*names, *(("method",) if twice else ())), "verdict",
    panels=("share", "attack") if many else ("share",), ends=("low", "high"),
    outcomes=(("FAILS", "the defence fails"), ("", "not shown to fail")),
    words={"success": f"success (lines: {lines})"}, title=title,
  )  # fmt: skip


def recipe_of_curves(title: str) -> Recipe:
  """Returns how curves.csv is drawn: ROC curves, and the line that no attack may cross."""
  return Recipe(
    "lines", ("fpr",), ("tpr",), "method", panels=("attack", "defence", "epsilon"),
    log=("fpr", "tpr"), words={"allowed": "allowed: no attack may cross"}, title=title,
  )  # fmt: skip
