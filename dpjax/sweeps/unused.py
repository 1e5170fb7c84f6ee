"""Which fields of a sweep its runs read; see `unused`.

A point must read every field that it is given, and a field of the base must be read by a
point that does not replace it.
"""

from __future__ import annotations

from typing import Any

from dpjax.runs import fields, unused
from dpjax.runs.unused import Unused, needs

_DRAWN = ("x", "series", "title", "references")  # of the curve, and the table beside it


def refuse(config: Any, points: list[Any]) -> None:
  """Raises UserError for a field of the SweepConfig, or of a point, that nothing reads."""
  law = config.selection
  others = ("mean_trials", "shape", "better")
  of_sweep = needs(
    law.enabled, "selection.enabled", *(f"selection.{name}" for name in others)
  )
  of_sweep |= needs(not law.enabled, "a sweep that draws a curve", *_DRAWN)
  of_sweep |= needs(not law.enabled, "a sweep; a selection draws its seeds", "seeds")
  unused.refuse(config, of_sweep)
  unused.refuse(config.base, _replaced(config), "base.")
  for point in points:
    unused.refuse(point.config, unused.of(point.config), f"{point.name}: ")


def _replaced(config: Any) -> Unused:
  """Fields of the base that no run keeps."""
  grid = {"seed", *config.grid}
  chosen = [grid | set(fixed) for fixed in config.variants.values()] or [grid]
  paths = (leaf.path for leaf in fields.leaves(config.base))
  kept = lambda path, names: unused.reason(path, dict.fromkeys(names, "")) is None
  return {
    path: "a run that does not set its own"
    for path in paths
    if not any(kept(path, names) for names in chosen)
  }
