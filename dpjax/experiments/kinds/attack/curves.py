"""Draws ROC curves of attacks on logarithmic axes, beside the curve that a guarantee allows."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dpjax import files, pictures
from dpjax.attacks import table
from dpjax.attacks.allowed import AllowedRoc
from dpjax.attacks.roc import Leakage, Roc
from dpjax.experiments.plots import recipes
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import report
from dpjax.pictures import PAGE, Look
from dpjax.validate import UserError

if TYPE_CHECKING:
  from matplotlib.axes import Axes

_LEFT = 0.1  # both axes begin here, or lower


def roc_report(
  out_dir: str | os.PathLike,
  leakages: Mapping[str, Leakage],
  *,
  line: AllowedRoc | None = None,
  allowed: Mapping[float, float] | None = None,
  title: str = "",
) -> None:
  """Writes `out_dir`/roc.png, roc.csv (attack, fpr, tpr) and attacks.md (`attacks.table`).

  Args:
    leakages: results of `attacks.measure`, by name of the attack.
    line: curve that the target's guarantee allows, drawn beside the attacks' curves; None: no line.
    allowed: the allowed true positive rates that the table shows, by false positive rate; the
      picture marks them where there is no line.
    title: title of the picture.

  Raises UserError if `leakages` is empty.
  """
  if not leakages:
    raise UserError("must hold at least one attack", field="leakages")
  out_dir = pathlib.Path(out_dir)
  look = Look(width=4.6)
  figure = pictures.new_figure(look, height=4.4)
  axes = figure.subplots()
  by_name = {name: leakage.curve for name, leakage in leakages.items()}
  draw_roc(axes, by_name, line, allowed)
  labels = {"xlabel": "false positive rate", "ylabel": "true positive rate"}
  pictures.dress(axes, look, title=title, **labels)
  pictures.key(figure, look, axes.lines)
  points = [
    {"attack": name, "fpr": fpr, "tpr": tpr}
    for name, leakage in leakages.items()
    for fpr, tpr in zip(*_best(leakage.curve))
  ]
  report.write_csv(out_dir / "roc.csv", points)
  words = {"fpr": "false positive rate", "tpr": "true positive rate"}
  recipe = Recipe(
    "lines", ("fpr",), ("tpr",), "attack", log=("fpr", "tpr"), words=words, title=title
  )
  recipes.write(out_dir / "roc.csv", recipe)
  files.replace_file(out_dir / "attacks.md", table(leakages, allowed=allowed).encode())
  pictures.save(figure, out_dir / "roc.png")


def draw_roc(
  axes: Axes,
  curves: Mapping[str, Roc],
  line: AllowedRoc | None = None,
  allowed: Mapping[float, float] | None = None,
) -> None:
  """Draws each curve as a staircase, guessing as a dotted diagonal, and what the guarantee allows:
  its `line`, or without a line crosses at the `allowed` rates.

  The logarithmic axes begin at 1 / n, or at 0.1 if 0.1 is smaller; n is the number of members or of
  non-members, whichever is larger. n records cannot resolve rates below 1 / n, so curves would seem
  to cross the line there.
  """
  least = min(1 / max(c.num_members, c.num_non_members) for c in curves.values())
  rates = np.geomspace(min(least, _LEFT), 1, 200)
  left = rates[0]
  for index, (name, curve) in enumerate(curves.items()):
    fpr, tpr = (np.maximum(part, left) for part in _best(curve))
    # Black is reserved for the line of the allowed rates.
    color = PAGE.color(index % (len(pictures.PALETTE) - 1))
    dash = PAGE.dash(index)
    axes.plot(
      fpr,
      tpr,
      label=name,
      drawstyle="steps-post",
      color=color,
      linestyle=dash,
      linewidth=1.2,
    )
  axes.plot(rates, rates, color="#888888", linewidth=0.9, linestyle=":", label="guessing")
  if line is not None:
    label = f"allowed: {line.words}"
    axes.plot(rates, line(rates), label=label, color="#000000", linestyle="--", linewidth=1)
  elif allowed:
    label = "allowed by the guarantee"
    axes.plot(list(allowed), list(allowed.values()), "x", label=label, color="#000000")
  axes.set(xscale="log", yscale="log", xlim=(left, 1), ylim=(left, 1.1))


def _best(curve: Roc) -> tuple[np.ndarray, np.ndarray]:
  """Returns (fpr, tpr): the largest true positive rate for each number of false positives."""
  last = np.append(np.diff(curve.false_positives) > 0, True)
  return curve.fpr[last], curve.tpr[last]
