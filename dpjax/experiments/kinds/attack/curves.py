"""Writes ROC curves of attacks on logarithmic axes, beside the curve that a guarantee allows."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

import numpy as np

from dpjax import files
from dpjax.attacks import table
from dpjax.attacks.allowed import AllowedRoc
from dpjax.attacks.roc import Leakage, Roc
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import report
from dpjax.validate import UserError

_LEFT = 0.1  # lines begin here, or lower


def roc_report(
  out_dir: str | os.PathLike,
  leakages: Mapping[str, Leakage],
  *,
  line: AllowedRoc | None = None,
  allowed: Mapping[float, float] | None = None,
  title: str = "",
) -> None:
  """Writes `out_dir`/roc.csv (attack, fpr, tpr), its picture, and attacks.md (`attacks.table`).

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
  curves = [leakage.curve for leakage in leakages.values()]
  points = [
    {"attack": name, "fpr": fpr, "tpr": tpr}
    for name, leakage in leakages.items()
    for fpr, tpr in zip(*_best(leakage.curve))
  ]
  report.write_csv(out_dir / "roc.csv", points)
  # So many records cannot resolve smaller rates: an attack would seem to cross the line there.
  least = min(1 / max(curve.num_members, curve.num_non_members) for curve in curves)
  rates = np.geomspace(min(least, _LEFT), 1, 50)
  beside = {"guessing": list(zip(rates[[0, -1]].tolist(), rates[[0, -1]].tolist()))}
  if line is not None:
    beside[f"allowed: {line.words}"] = list(zip(rates.tolist(), line(rates).tolist()))
  at = {} if line is not None or allowed is None else allowed
  recipe = Recipe(
    "lines", ("fpr",), ("tpr",), "attack", log=("fpr", "tpr"), curves=beside, title=title,
    references=tuple(("allowed by the guarantee", fpr, tpr) for fpr, tpr in at.items()),
  )  # fmt: skip
  redraw.write(out_dir / "roc.csv", recipe)
  files.replace_file(out_dir / "attacks.md", table(leakages, allowed=allowed).encode())


def _best(curve: Roc) -> tuple[np.ndarray, np.ndarray]:
  """Returns (fpr, tpr): the largest true positive rate for each number of false positives."""
  last = np.append(np.diff(curve.false_positives) > 0, True)
  return curve.fpr[last], curve.tpr[last]
