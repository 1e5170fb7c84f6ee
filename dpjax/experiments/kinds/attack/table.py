"""Writes a table and a picture of many attacks: the success of each attack under each defence."""

from __future__ import annotations

import collections
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from dpjax.accounting import upper
from dpjax.accounting.text import lower
from dpjax.experiments.config.fields import name_of
from dpjax.experiments.kinds.attack.config import AttackConfig
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import kind, report, writers
from dpjax.markdown import table

Row = dict[str, Any]
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
_AT_1_PERCENT = "true positives at 1 % false ones, of members"
_COLUMNS = ("attack", "defence", "method", "finds", "epsilon", "test_accuracy", "verdict")


def rows_of(results: Sequence[Row]) -> list[Row]:
  """Returns one row for every method under every defence.

  Args:
    results: results of `AttackConfig` runs, with their attack and defence.
  """
  of_all = []
  for result in results:
    # A task that a user defined puts the rows of the table into its result.
    known = _ROWS.get(result["task"])
    rows = result["rows"] if known is None else known(result)
    of_all += [_common(result) | row for row in rows]
  return of_all


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
    "note": note,
    "noise_multiplier": result.get("noise_multiplier"),
    "test_accuracy": result["test_accuracy"],
    "beside": result.get("beside", ""),
  }


def _counted(counts: Row, method: str, share: str, finds: str, **more: Any) -> Row:
  """Returns a row whose success is the rate count / total, with its interval.

  Args:
    counts: count, total and interval.
    method: name of the method.
    share: what was counted, and of what.
    finds: text of the cell "finds".
    more: further cells.
  """
  low, high = counts["interval"]
  row = {
    "method": method,
    "share": share,
    "finds": finds,
    "success": counts["count"] / counts["total"],
  }
  return row | {"low": low, "high": high, **more}


def _inferred(result: Row) -> list[Row]:
  rows = []
  for name, rates in result["attacks"].items():
    rate = rates["tpr_at_fpr"]["0.01"]["tpr"]
    low, high = rates["tpr_at_fpr"]["0.01"]["interval"]
    finds = f"TPR {rate:.3f} ({low:.3f}-{high:.3f}) at 1 % FPR, AUC {rates['auc']:.3f}"
    bound = rates["tpr_at_fpr"]["0.01"]["allowed_tpr"]
    finds += "" if bound is None else f"; at most {upper(bound)} allowed"
    rows.append(
      {
        "method": name,
        "share": _AT_1_PERCENT,
        "finds": finds,
        "success": rate,
        "low": low,
        "high": high,
        "allowed_tpr": bound,
        "tpr_at_0.001_fpr": rates["tpr_at_fpr"]["0.001"]["tpr"],
        "auc": rates["auc"],
        "loss_tail_0.01": result["loss_tail"]["0.01"]["share"],
        "verdict": rates["verdict"],
      }
    )
  return rows


def _inverted(result: Row) -> list[Row]:
  exact = result["success"]["exact"]
  scores = result["leakage"]
  low, high = exact["interval"]
  text = f"{exact['count']} of {exact['total']} ({low:.2f}-{high:.2f}) exactly"
  text += f", median {writers.number(result['median_psnr']):.0f} dB"
  text += f", labels {result['labels_right']} of {result['num_records']}"
  names = {"dense": "GLS dense", "recovered": "GLS recovered", "distance": "GLS distance"}
  text += "".join(
    f", {names[name]} {leakage['score']:.3f} (null {leakage['null']:.2f})"
    for name, leakage in scores.items()
  )
  row = _counted(
    exact, "inversion", "recovered exactly, of the records", text,
    median_psnr=result["median_psnr"], verdict=result["verdict"],
  )  # fmt: skip
  columns = {f"gls_{name}": leakage["score"] for name, leakage in scores.items()}
  return [
    row
    | columns
    | {f"gls_{name}_null": leakage["null"] for name, leakage in scores.items()}
  ]


def _poisoned(result: Row) -> list[Row]:
  """Returns a row whose success is the share of misled victims. For an attack without
  victims it is the share of misclassified test records."""
  right = result["accuracy"]
  misled = result["victims_misled"]
  text = f"accuracy {_rate(right)} ({_rate(result['clean_accuracy'])} unattacked)"
  if misled is None:
    share = "wrong, of the test records"
    wrong = [1 - end for end in reversed(right["interval"])]
    misled = right | {"count": right["total"] - right["count"], "interval": wrong}
  else:
    share = "misled, of the victims"
    clean = _rate(result["clean_victims_misled"])
    text = f"misled {_rate(misled)} ({clean} unattacked), {text}"
  text += f"; {result['num_attackers']} of {result['num_clients']} clients attack"
  row = _counted(misled, result["poisoning"], share, text, verdict=result["verdict"])
  clean = result["clean_accuracy"]["count"]
  # Share of the accuracy that remains under attack. Both counts are of the same test records.
  ratio = result["accuracy"]["count"] / clean if clean else None
  return [row | {"accuracy_ratio": ratio}]


def _copied(result: Row) -> list[Row]:
  """Returns one row for each number of queries; success is fidelity."""
  share = "named alike by copy and model, of inputs"
  guess = _rate(result["commonest"])

  def row(copy: Row) -> Row:
    method = f"{copy['num_queries']} queries"
    low, high = copy["interval"]
    text = f"fidelity {_rate(copy)} ({low:.3f}-{high:.3f}); {guess} the commonest answer"
    return _counted(copy, method, share, text, verdict=copy["verdict"])

  return [row(copy) for copy in result["copies"]]


def _pictured(result: Row) -> list[Row]:
  counts = result["recognised"]
  share = "recognised by the judge, of inputs"
  low, high = counts["interval"]
  text = (
    f"{counts['count']} of {counts['total']} ({low:.2f}-{high:.2f}) called by their class"
  )
  text += f"; the judge is right on {result['judge_accuracy']:.3f}"
  return [_counted(counts, "class inversion", share, text, verdict=result["verdict"])]


def _written(result: Row) -> list[Row]:
  """Returns a row for each ranking and number of lines; success is the share of records found."""
  share = "records among the first lines, of those planted"

  def row(found: Row) -> Row:
    groups = ", ".join(
      f"{count} with {copies} cop{'y' if copies == '1' else 'ies'}"
      for copies, count in found["by_copies"].items()
    )
    text = f"{found['count']} of {found['total']} records ({groups}), precision"
    text += f" {found['precision']:.3f}; {found['controls']} that were never there"
    method = f"{found['ranking']}, first {found['first']}"
    columns = {name: found[name] for name in ("precision", "controls", "allowed")}
    columns |= {f"found_of_{copies}": count for copies, count in found["by_copies"].items()}
    most = found["allowed_by_copies"] or dict.fromkeys(found["by_copies"])
    columns |= {f"allowed_of_{copies}": mean for copies, mean in most.items()}
    columns["test_perplexity"] = result["test_perplexity"]
    return _counted(found, method, share, text, **columns, verdict=found["verdict"])

  return [row(found) for found in result["extracted"]]


def _rate(counted: Row) -> str:
  return f"{counted['count'] / counted['total']:.3f}"


_ROWS = {
  "membership": _inferred,
  "extraction": _copied,
  "class_inversion": _pictured,
  "inversion": _inverted,
  "poisoning": _poisoned,
  "text_extraction": _written,
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
  """Returns epsilon with its kind; or "none", with a reason if it does not hold here."""
  if row["note"]:
    return f"none here: {row['note']}"
  if row["epsilon"] is None:
    return "none"
  return f"{upper(row['epsilon'])} ({row['epsilon_kind']}, per {row['unit']})"


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
  return (
    f"epsilon >= {lower(bound)} by the best attack (indicative: members were not dealt by coins); "
    f"claimed: {_epsilon(_common({'attack': '', 'defence': '', **result}))}; perfect scores of "
    f"{result['num_members']} members would show {lower(most)}. {verdicts}"
  )


class AttackTable(kind.Table):
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
    return f"above the line that a guarantee allows: {above}" if above else ""


def is_above(row: Row) -> bool:
  """Returns whether an attack of a finished run exceeds the guarantee of the attacked run."""
  attacks = row.get("attacks", {}).values()
  return any(judged["against_line"] == "above" for judged in attacks)


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
  writers.replace_file(folder / "attacks.md", text.encode())
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
