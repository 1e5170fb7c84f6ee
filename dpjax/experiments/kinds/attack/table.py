"""Writes a table and a picture of many attacks: the success of each attack under each defence."""

from __future__ import annotations

import pathlib
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpjax import pictures
from dpjax.accounting import upper
from dpjax.accounting.text import lower
from dpjax.experiments.kinds.attack import curves as attack_report
from dpjax.experiments.run import report, writers
from dpjax.markdown import table
from dpjax.pictures import PAGE, Look

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Row = dict[str, Any]
_NOTE = (
  "Epsilon is what the attacked run promises; its line bounds every membership attack, and a "
  "user's what one client can do to the model. A "
  "defence that an attack breaks FAILS; one that is not shown to fail may fail under another "
  "attack. Intervals are exact, at 95 % each, for scores that are independent: those "
  "of the records of one model share its training.\n"
)
# Largest number of rows of one panel, unless they are all of one attack.
_MANY = 12
# Maps a method to what was counted, since tables of earlier versions do not say it.
_SHARES = {"inversion": "recovered exactly, of the records"}
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
    rows.append(
      {
        "method": name,
        "finds": finds,
        "success": rate,
        "low": low,
        "high": high,
        "tpr_at_0.001_fpr": rates["tpr_at_fpr"]["0.001"]["tpr"],
        "auc": rates["auc"],
        # Results of earlier versions have no entry "loss_tail".
        "loss_tail_0.01": result.get("loss_tail", {}).get("0.01", {}).get("share"),
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
  """Returns the rows as a Markdown table. Its column "published" is left out if it is empty."""
  columns = [*_COLUMNS] + ["published"] * any(row["beside"] for row in rows)
  lines = []
  for row in rows:
    cells = {**row, "epsilon": _epsilon(row), "published": row["beside"] or "-"}
    lines.append([_cell(cells[name]) for name in columns])
  return table(columns, lines)


def strengths(results: Sequence[Row]) -> str:
  """Returns Markdown lines on the strongest attack of each result; "" if no result names it.

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
  return (
    f"epsilon >= {lower(bound)} by the best attack (indicative: members were not dealt by coins); "
    f"claimed: {_epsilon(_common({'attack': '', 'defence': '', **result}))}; perfect scores of "
    f"{result['num_members']} members would show {lower(most)}. {verdicts}"
  )


def write(
  folder: pathlib.Path, results: Sequence[Row], *, title: str = "", picture: bool = True
) -> None:
  """Writes attacks.md, attacks.csv and, with `picture`, attacks.png; writes nothing if no run has
  finished.

  If results hold ROC curves, it writes them to curves.csv.
  """
  if not results:
    return
  rows = rows_of(results)
  report.write_csv(folder / "attacks.csv", rows)
  text = f"{_NOTE}\n{markdown(rows)}{strengths(results)}"
  writers.replace_file(folder / "attacks.md", text.encode())
  points = points_of(results)
  if points:
    report.write_csv(folder / "curves.csv", points)
  if picture:
    pictures.save(figure(rows, points, title=title), folder / "attacks.png")


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


def figure(
  rows: Sequence[Row], points: Sequence[Row], *, title: str = "", look: Look = PAGE
) -> Figure:
  """Returns the picture of a table: panels of ROC curves, and panels of counted rates.

  Args:
    rows: rows of attacks.csv.
    points: rows of curves.csv (`points_of`).
    title: title of the picture.
    look: sizes, fonts, style.
  """
  rocs: dict[tuple[str, str, str], list[Row]] = {}
  for point in points:
    place = (point["attack"], point["defence"], point["epsilon"])
    rocs.setdefault(place, []).append(point)
  rates = _panels_of_rates(rows, beside=bool(rocs))
  number = len(rocs) + len(rates)
  high = -(-number // look.across(2.2))
  # Panels are spread evenly over the rows of the grid, so that the last row is not nearly empty.
  wide = -(-number // high)
  lines = max(map(len, rates.values()), default=0)
  panel = max(2.3 * bool(rocs), lines * look.font_size * 1.6 / 72 + 0.55)
  drawn = pictures.new_figure(look, height=panel * high + 0.8)
  grid = list(drawn.subplots(high, wide, squeeze=False).flat)
  handles: dict[str, Any] = {}
  for axes, (place, alike) in zip(grid, rocs.items()):
    handles |= _draw_points(axes, alike, place, look)
  for axes, ((share, name), alike) in zip(grid[len(rocs) :], rates.items()):
    handles |= _draw_rates(axes, alike, share, name, look, panel_width=look.width / wide)
  # If all panels show the same rate, only the lowest panel of each column has a label.
  if not rocs and len({share for share, _ in rates}) == 1:
    for axes in grid[: max(0, number - wide)]:
      axes.set_xlabel("")
  for axes in grid[number:]:
    axes.set_axis_off()
  pictures.headline(drawn, look, title)
  pictures.key(drawn, look, list(handles.values()))
  return drawn


def _panels_of_rates(
  rows: Sequence[Row], *, beside: bool
) -> dict[tuple[str, str], list[Row]]:
  """Returns a dict (what was counted, attack) -> rows of one panel.

  The attack is "" if the panel holds all attacks.

  Args:
    rows: rows of attacks.csv.
    beside: whether ROCs are drawn beside the rates. If not, a membership attack counts as a rate,
      at 1 % false positives.
  """
  counted: dict[str, list[Row]] = {}
  for row in rows:
    unsaid = None if beside else _SHARES.get(row["method"], _AT_1_PERCENT)
    share = row.get("share") or unsaid
    if share:
      counted.setdefault(share, []).append(row)
  panels: dict[tuple[str, str], list[Row]] = {}
  for share, alike in counted.items():
    attacks = list(dict.fromkeys(row["attack"] for row in alike))
    # Many rows would be illegible in one panel, so each attack gets its own panel.
    if len(alike) <= _MANY or len(attacks) == 1:
      panels[share, ""] = alike
      continue
    for name in attacks:
      panels[share, name] = [row for row in alike if row["attack"] == name]
  return panels


def _draw_points(
  axes: Axes, points: Sequence[Row], place: tuple[str, str, str], look: Look
) -> dict[str, Any]:
  """Draws ROC curves from their points. Returns a dict label -> line for the legend."""
  attack, defence, epsilon = place
  curves: dict[str, tuple[list[float], list[float]]] = {}
  for point in points:
    fpr, tpr = curves.setdefault(point["method"], ([], []))
    fpr.append(point["fpr"])
    tpr.append(point["tpr"])
  allowed = curves.pop("allowed", None)
  rates = next(iter(curves.values()))[0] if curves else []
  # The allowed rates were computed at the false positive rates of the curves.
  line = allowed[1] if allowed else None
  attack_report.draw_curves(axes, curves, rates, "no attack may cross", line, look=look)
  heading = f"{attack}: {defence}\nepsilon: {epsilon}" if defence else attack
  labels = {"xlabel": "false positive rate", "ylabel": "true positive rate"}
  pictures.dress(axes, look, title=heading, **labels)
  return {str(line.get_label()): line for line in axes.lines}


def _draw_rates(
  axes: Axes,
  rows: Sequence[Row],
  share: str,
  attack: str,
  look: Look,
  *,
  panel_width: float,
) -> dict[str, Any]:
  """Draws rates with their intervals, one row each.

  Returns a dict label -> handle for the legend.

  Args:
    axes: axes of the panel.
    rows: rows of attacks.csv.
    share: what was counted, and of what.
    attack: name of the only attack of the rows; "" if there may be several.
    look: sizes, fonts, style.
    panel_width: width of the panel with its names, in inches.
  """
  places = np.arange(len(rows))[::-1]
  handles = {}
  for place, row in zip(places, rows):
    fails = row["verdict"].startswith("FAILS")
    how: dict[str, Any] = {
      "color": look.color(int(fails)),
      "marker": pictures.marker(int(fails)),
    }
    axes.plot([row["low"], row["high"]], [place, place], color=how["color"], linewidth=1.6)
    axes.plot(row["success"], place, markersize=3.5, **how)
    label = "the defence fails" if fails else "not shown to fail"
    handles[label] = pictures.sample(label, look, **how)
  attacks = {row["attack"] for row in rows}
  # If a panel has one attack, its title names the attack, and the names of rows do not.
  attack = attack or (attacks.pop() if len(attacks) == 1 else "")
  runs = [
    row["defence"] if attack else f"{row['attack']}: {row['defence']}" for row in rows
  ]
  names = [
    f"{run}, {pictures.proper_name(row['method'])}" if runs.count(run) > 1 else run
    for run, row in zip(runs, rows)
  ]
  axes.set_yticks(places, names)
  axes.set(xlim=(-0.03, 1.03), ylim=(-0.7, len(rows) - 0.3))
  axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
  what, _, of = share.partition(", ")
  # A label that is wider than its axes would be cut at the edge of the picture.
  longest = max(map(len, names)) * pictures.letter(look.font_size - 1)
  characters = max(14, int((panel_width - longest) / pictures.letter(look.font_size)))
  # No-break spaces keep the words in brackets on one line.
  bars = "(bars: 95 %)".replace(" ", "\N{NO-BREAK SPACE}")
  label = textwrap.fill(f"{what}, share {of} {bars}", characters)
  pictures.dress(axes, look, title=attack, xlabel=label)
  return handles
