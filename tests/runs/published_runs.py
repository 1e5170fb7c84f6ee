"""Published configs and their runs: of a sweep one run of each line, not all of them.

Two files walk over them, and pytest needs the names when it collects. Whole sweeps of 900 runs,
each with its check and digest, took a third of all collection.
"""

import functools
import importlib
import pathlib

_ROOT = pathlib.Path(__file__).resolve().parents[2] / "configs"


def _module(name):
  return importlib.import_module(f"configs.{name}")


@functools.cache
def configs():
  """Name -> config of every file of configs/ that returns one."""
  found = {}
  for path in sorted(_ROOT.rglob("*.py")):
    name = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
    if hasattr(_module(name), "get_config"):
      found[name] = _module(name).get_config()
  return found


def first_of_lines(name):
  """The first run of each line of a file with `get_configs`: names of one line begin alike."""
  module = _module(name)
  runs = {}
  for label, run in module.get_configs(module.get_config()):
    runs.setdefault(label.split(" @ ")[0], run)
  return list(runs.values())
