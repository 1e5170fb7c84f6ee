"""What the code of a package defines, listed anywhere or not."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def public(package: ModuleType) -> dict[str, Any]:
  """Returns every public class and function of a package, exported or not.

  >>> from dpjax import mechanisms
  >>> sorted(n for n in public(mechanisms) if n.endswith("Vector"))
  ['SparseVector']
  """
  exported: dict[str, Any] = {}
  for module in modules(package):
    exported |= defined_in(module)
  return exported


def modules(package: ModuleType) -> Iterator[ModuleType]:
  """Yields the package and all modules in it."""
  infos = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
  for name in (package.__name__, *(info.name for info in infos)):
    yield importlib.import_module(name)


def defined_in(module: ModuleType) -> dict[str, Any]:
  is_of_module = lambda value: getattr(value, "__module__", "") == module.__name__
  return {
    n: o for n, o in vars(module).items() if is_of_module(o) and not n.startswith("_")
  }
