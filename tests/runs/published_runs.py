"""Published configs and their runs: of a sweep one point of each line, not its whole grid.

Two files walk over them, and pytest needs the names when it collects. Whole grids of 900 points,
each with its check and digest, took a third of all collection.
"""

import dataclasses
import functools
import importlib
import pathlib

from dpjax.experiments.sweeps import grid

_ROOT = pathlib.Path(__file__).resolve().parents[2] / "configs"


@functools.cache
def configs():
  """Name -> config of every file of configs/ that returns one."""
  found = {}
  for path in sorted(_ROOT.rglob("*.py")):
    name = ".".join(path.relative_to(_ROOT.parent).with_suffix("").parts)
    module = importlib.import_module(name)
    if hasattr(module, "get_config"):
      found[name.removeprefix("configs.")] = module.get_config()
  return found


def line(point):
  """Which line of a curve a point lies on: variants of one line share a name."""
  return str(point.overrides.get("variant", "")).split(" @ ")[0]


def lines(sweep):
  """The lines of a sweep, as `ends` names them."""
  return list(dict.fromkeys(name.split(" @ ")[0] for name in sweep.variants)) or [""]


def ends(sweep, index):
  """Line -> its first run (`index` 0) or its last (-1), as `grid.points` of all would give it.

  `test_ends_of_lines_are_those_of_the_whole_sweep` compares the two.
  """
  of_lines = {}
  for name in sweep.variants:
    label = name.split(" @ ")[0]
    if index == -1 or label not in of_lines:
      of_lines[label] = name
  one_of_each = dataclasses.replace(
    sweep,
    variants={name: sweep.variants[name] for name in of_lines.values()},
    grid={field: [values[index]] for field, values in sweep.grid.items()},
    seeds=[sweep.seeds[index]],
  )
  return {line(point): point.config for point in grid.points(one_of_each)}
