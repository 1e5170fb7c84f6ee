"""Fields of a grid that its runs do not read; see `experiments.config.unread`.

In a sweep, a point must read every field that it sets. A field of the base must be read by at least
one point that does not replace it. In an experiment, whose curves may have different methods, every
setting must be read by at least one curve. A setting that a curve sets must be read by that curve.
"""

from __future__ import annotations

from typing import Any

from dpjax.experiments.config import fields
from dpjax.experiments.config import unread as unread_lib
from dpjax.experiments.config.ignored import WouldBeIgnored
from dpjax.experiments.config.unread import Unused, needs
from dpjax.experiments.kinds.relevance import unused as relevance_unused
from dpjax.experiments.kinds.relevance.config import RelevanceConfig
from dpjax.experiments.run import switches

# Fields for the picture and the table of a sweep, which a selection does not write.
_DRAWN = ("x", "series", "title", "references")
# Fields of an experiment that a curve does not have.
_OF_EXPERIMENT = ("curves", "title")


def refuse(config: Any, points: list[Any]) -> None:
  """Raises UserError for a field of the SweepConfig that nothing reads. The check of a point
  refuses fields that this point does not read."""
  unread_lib.refuse(config, of_sweep(config))
  unread_lib.refuse(config.base, _replaced(config, points), "base.")


def of_sweep(config: Any) -> Unused:
  """Returns the fields of a SweepConfig outside `base` that its other settings leave unread."""
  selection = config.selection
  others = ("mean_trials", "shape", "better")
  return (
    needs(selection.enabled, "selection.enabled", *(f"selection.{name}" for name in others))
    | needs(not selection.enabled, "a sweep that draws a curve", *_DRAWN)
    | needs(not selection.enabled, "a sweep; a selection draws its seeds", "seeds")
  )


def _replaced(config: Any, points: list[Any]) -> Unused:
  """Returns the fields that the base sets, and that no run keeps.

  A run may choose another value by name, such as another sampler. The new value then keeps the
  fields that were set in the old value, if both values have them (`fields.replace`).
  """
  grid = {"seed", *config.grid}
  chosen = [grid | set(fixed) for fixed in config.variants.values()] or [grid]
  kept = lambda path, names: unread_lib.reason(path, dict.fromkeys(names, "")) is None
  changed = fields.set_fields(config.base)

  def continued(path: str) -> bool:
    if any(path in names for names in chosen):
      return False
    return any(fields.get(point.config, path) == changed[path][0] for point in points)

  return {
    path: "a run that does not set its own"
    for path in changed
    if not any(kept(path, names) for names in chosen) and not continued(path)
  }


def refuse_curves(config: RelevanceConfig) -> None:
  """Raises UserError for a setting of an experiment that no curve reads, or that a curve sets but
  does not read."""
  unread_lib.refuse(config, of_curves(config))


def of_curves(config: RelevanceConfig) -> Unused:
  """Returns the fields of an experiment that no curve reads.

  Raises:
    UserError: a curve sets a field that it does not read, or a field of the whole experiment.
  """
  reasons: dict[str, list[str | None]] = {path: [] for path in switches.all_paths(config)}
  for label, changes in (config.curves or {config.method: {}}).items():
    where = f"curves[{label!r}]."
    for path in _OF_EXPERIMENT:
      if path in changes:
        raise WouldBeIgnored(
          "would be ignored, it is of the whole experiment", field=f"{where}{path}"
        )
    curve = fields.replace_all(config, changes, name=f"config.curves[{label!r}]")
    unread = relevance_unused.of(curve)
    taken_there = dict.fromkeys(changes, "")
    set_here = (
      path
      for path in fields.set_fields(curve)
      if unread_lib.reason(path, taken_there) == ""
    )
    unread_here = {
      path: why for path in set_here if (why := unread_lib.reason(path, unread))
    }
    unread_lib.refuse(curve, unread_here, where)
    taken = unread | dict.fromkeys(changes, "a curve that does not set its own")
    for path, reasons_of_path in reasons.items():
      reasons_of_path.append(unread_lib.reason(path, taken))
  return {
    path: str(reasons_of_path[0])
    for path, reasons_of_path in reasons.items()
    if path not in _OF_EXPERIMENT and all(reasons_of_path)
  }
