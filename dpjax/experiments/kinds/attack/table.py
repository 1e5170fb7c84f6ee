"""A table and a picture of many attacks: the success of each under each defence."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpjax.accounting import lower, upper
from dpjax.experiments.kinds.attack import curves as attack_report
from dpjax.experiments.run import report, writers
from dpjax.markdown import table

Row = dict[str, Any]
_NOTE = (
  "Epsilon is what the attacked run promises; its line bounds every membership attack, and a "
  "user's what one client can do to the model. A "
  "defence that an attack breaks FAILS; one that is not shown to fail may fail under another "
  "attack. Intervals are exact, at 95 % each, for scores that are independent: those "
  "of the records of one model share its training.\n"
)
_WIDE = 3  # panels beside each other
_COLUMNS = ("attack", "defence", "method", "finds", "epsilon", "test_accuracy", "verdict")


def rows_of(results: Sequence[Row]) -> list[Row]:
  """Returns one row for every method under every defence, from results of `AttackConfig`
  runs that have both."""
  of_all = []
  for result in results:
    # A task that dpjax does not know brings its own rows.
    known = _ROWS.get(result["task"])
    rows = result["rows"] if known is None else known(result)
    of_all += [_common(result) | row for row in rows]
  return of_all


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


def _counted(one: Row, method: str, share: str, finds: str, **more: Any) -> Row:
  """Returns a row whose success is a counted rate."""
  low, high = one["interval"]
  row = {
    "method": method,
    "share": share,
    "finds": finds,
    "success": one["count"] / one["total"],
  }
  return row | {"low": low, "high": high, **more}


def _inferred(result: Row) -> list[Row]:
  return [
    {
      "method": name,
      "finds": _told_rates(one),
      "success": one["tpr_at_fpr"]["0.01"]["tpr"],
      "low": one["tpr_at_fpr"]["0.01"]["interval"][0],
      "high": one["tpr_at_fpr"]["0.01"]["interval"][1],
      "tpr_at_0.001_fpr": one["tpr_at_fpr"]["0.001"]["tpr"],
      "auc": one["auc"],
      # Results of earlier versions have no such entry.
      "loss_tail_0.01": result.get("loss_tail", {}).get("0.01", {}).get("share"),
      "verdict": one["verdict"],
    }
    for name, one in result["attacks"].items()
  ]


def _told_rates(one: Row) -> str:
  low, high = one["tpr_at_fpr"]["0.01"]["interval"]
  rate = one["tpr_at_fpr"]["0.01"]["tpr"]
  return f"TPR {rate:.3f} ({low:.3f}-{high:.3f}) at 1 % FPR, AUC {one['auc']:.3f}"


def _inverted(result: Row) -> list[Row]:
  exact = result["success"]["exact"]
  scores = result["leakage"]
  low, high = exact["interval"]
  told = f"{exact['count']} of {exact['total']} ({low:.2f}-{high:.2f}) exactly"
  told += f", median {writers.number(result['median_psnr']):.0f} dB"
  told += f", labels {result['labels_right']} of {result['num_records']}"
  names = {"dense": "GLS dense", "recovered": "GLS recovered", "distance": "GLS distance"}
  told += "".join(
    f", {names[name]} {one['score']:.3f} (null {one['null']:.2f})"
    for name, one in scores.items()
  )
  row = _counted(
    exact, "inversion", "recovered exactly, of the records", told,
    median_psnr=result["median_psnr"], verdict=result["verdict"],
  )  # fmt: skip
  found = {f"gls_{name}": one["score"] for name, one in scores.items()}
  return [row | found | {f"gls_{name}_null": one["null"] for name, one in scores.items()}]


def _poisoned(result: Row) -> list[Row]:
  """Returns a row whose success is the share of misled victims. For an attack without
  victims it is the share of misclassified test records."""
  right = result["accuracy"]
  misled = result["victims_misled"]
  told = f"accuracy {_rate(right)} ({_rate(result['clean_accuracy'])} unattacked)"
  if misled is None:
    share = "wrong, of the test records"
    wrong = [1 - end for end in reversed(right["interval"])]
    misled = right | {"count": right["total"] - right["count"], "interval": wrong}
  else:
    share = "misled, of the victims"
    clean = _rate(result["clean_victims_misled"])
    told = f"misled {_rate(misled)} ({clean} unattacked), {told}"
  told += f"; {result['num_attackers']} of {result['num_clients']} clients attack"
  row = _counted(misled, result["poisoning"], share, told, verdict=result["verdict"])
  clean = result["clean_accuracy"]["count"]  # of as many test records
  # share of accuracy that remains
  ratio = result["accuracy"]["count"] / clean if clean else None
  return [row | {"accuracy_ratio": ratio}]


def _copied(result: Row) -> list[Row]:
  """Returns one row for each number of queries; success is fidelity."""
  share = "named alike by copy and model, of inputs"
  guess = _rate(result["commonest"])

  def row(one: Row) -> Row:
    method, (low, high) = f"{one['num_queries']} queries", one["interval"]
    told = f"fidelity {_rate(one)} ({low:.3f}-{high:.3f}); {guess} the commonest answer"
    return _counted(one, method, share, told, verdict=one["verdict"])

  return [row(one) for one in result["copies"]]


def _pictured(result: Row) -> list[Row]:
  one = result["recognised"]
  share = "recognised by the judge, of inputs"
  low, high = one["interval"]
  told = f"{one['count']} of {one['total']} ({low:.2f}-{high:.2f}) called by their class"
  told += f"; the judge is right on {result['judge_accuracy']:.3f}"
  return [_counted(one, "class inversion", share, told, verdict=result["verdict"])]


def _rate(counted: Row) -> str:
  return f"{counted['count'] / counted['total']:.3f}"


_ROWS = {
  "membership": _inferred,
  "extraction": _copied,
  "class_inversion": _pictured,
  "inversion": _inverted,
  "poisoning": _poisoned,
}


def markdown(rows: Sequence[Row]) -> str:
  """The rows as a Markdown table."""
  columns = [*_COLUMNS] + ["published"] * any(row["beside"] for row in rows)
  lines = []
  for row in rows:
    cells = {**row, "epsilon": _epsilon(row), "published": row["beside"] or "-"}
    lines.append([_cell(cells[name]) for name in columns])
  return table(columns, lines)


def strengths(results: Sequence[Row]) -> str:
  """Returns one line for each result that says how strong its strongest attack was.

  >>> print(strengths([{"attack": "a", "defence": "b", "strongest": {"words": "weak"}}]))
  <BLANKLINE>
  - a, b: weak
  <BLANKLINE>
  >>> strengths([{"attack": "a", "defence": "b"}])
  ''
  """
  lines = []
  for result in results:
    if "strongest" not in result:
      continue
    line = f"- {result['attack']}, {result['defence']}: {result['strongest']['words']}"
    tail = result.get("loss_tail", {}).get("0.01")
    if tail is not None:
      line += f"; the loss tail estimates TPR {tail['share']:.3f}"
    lines.append(line)
  return "\n".join(["", *lines, ""]) if lines else ""


def _cell(value: Any) -> str:
  if value is None or value == "":
    return "-"
  return f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "/")


def _epsilon(row: Row) -> str:
  """Returns epsilon with its kind, or says that it does not hold against this attacker."""
  if row["note"]:
    return f"none here: {row['note']}"
  if row["epsilon"] is None:
    return "none"
  return f"{upper(row['epsilon'])} ({row['epsilon_kind']}, per {row['unit']})"


def told(result: Row) -> str:
  """Summarises a run in one line."""
  rows = rows_of([result])
  best = max(rows, key=lambda row: row["success"])
  return f"{best['method']}: {best['finds']}; {best['verdict']}; epsilon {_epsilon(best)}"


def told_of_run(result: Row) -> str:
  """Compares an attack on a finished run with the run's epsilon, in one line."""
  bound = result["epsilon_lower_indicative"]
  most = result["epsilon_lower_ceiling"]
  verdicts = "; ".join(
    f"{name}: {one['verdict']}" for name, one in result["attacks"].items()
  )
  verdicts += f" ({result['strongest']['words']})" if "strongest" in result else ""
  return (
    f"epsilon >= {lower(bound)} by the best attack (indicative: members were not dealt by coins); "
    f"claimed: {_epsilon(_common({'attack': '', 'defence': '', **result}))}; perfect scores of "
    f"{result['num_members']} members would show {lower(most)}. {verdicts}"
  )


def write(folder: pathlib.Path, results: Sequence[Row], *, title: str = "") -> None:
  """Writes attacks.md, attacks.csv and attacks.png; nothing where no run has finished."""
  if not results:
    return
  rows = rows_of(results)
  report.write_csv(folder / "attacks.csv", rows)
  text = f"{_NOTE}\n{markdown(rows)}{strengths(results)}"
  writers.replace_file(folder / "attacks.md", text.encode())
  curves = [result for result in results if "curves" in result]
  shares = list(dict.fromkeys(row["share"] for row in rows if "share" in row))
  panels = len(curves) + len(shares)
  wide = min(panels, _WIDE)
  high = -(-panels // _WIDE)
  figure = Figure(figsize=(3.9 * wide, 3.7 * high), layout="constrained")
  axes = list(figure.subplots(high, wide, squeeze=False).flat)
  for axis, result in zip(axes, curves):
    _draw_curves(axis, result)
  for axis, share in zip(axes[len(curves) :], shares):
    _draw_rates(axis, [row for row in rows if row.get("share") == share], share)
  for axis in axes[panels:]:
    axis.set_axis_off()
  if title:
    figure.suptitle(title, fontsize=10)
  report.save_figure(figure, folder / "attacks.png")


def _draw_curves(axes: Axes, result: Row) -> None:
  curves: dict[str, list[float]] = {**result["curves"]}
  fpr = curves.pop("fpr")
  allowed = curves.pop("allowed", None)
  best = {name: (fpr, tpr) for name, tpr in curves.items()}
  attack_report.draw_curves(axes, best, fpr, "no attack may cross", allowed)
  epsilon = _epsilon(_common(result))
  title = f"{result['attack']}: {result['defence']}\nepsilon: {epsilon}"
  report.style(axes, title=title, xlabel="false positive rate", ylabel="true positive rate")
  axes.legend(loc="lower right", fontsize=7, frameon=False)


def _draw_rates(axes: Axes, rows: Sequence[Row], share: str) -> None:
  places = np.arange(len(rows))[::-1]
  for place, row in zip(places, rows):
    color = report.PALETTE[row["verdict"].startswith("FAILS")]
    axes.plot([row["low"], row["high"]], [place, place], color=color, linewidth=2)
    axes.plot(row["success"], place, "o", color=color, markersize=4)
  runs = [f"{row['attack']}: {row['defence']}" for row in rows]
  names = [
    f"{run}, {row['method']}" if runs.count(run) > 1 else run
    for run, row in zip(runs, rows)
  ]
  axes.set_yticks(places, names)
  axes.set(xlim=(-0.03, 1.03), ylim=(-0.7, len(rows) - 0.3))
  what, _, of = share.partition(", ")
  report.style(axes, title=f"{what} (95 %)", xlabel=f"share {of}", ylabel="")
  axes.tick_params(axis="y", labelsize=7)
