"""Packages whose names are imported when they are first asked for.

A package lists its names once, as imports under `if TYPE_CHECKING:`, which type checkers and
editors read. `attach` reads the same lines, so a run imports only what it uses.
"""

import ast
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from dpjax import _moved


def _listed(file: str) -> dict[str, tuple[str, str]]:
  """Returns public name -> (module, name there), of the imports under `if TYPE_CHECKING:`."""
  names = {}
  for node in ast.parse(pathlib.Path(file).read_text(encoding="utf-8")).body:
    if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
      continue
    for line in node.body:
      assert isinstance(line, ast.ImportFrom) and line.module, f"{file}: only from-imports"
      for alias in line.names:
        names[alias.asname or alias.name] = (line.module, alias.name)
  return names


def attach(
  package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
  """Returns `__getattr__`, `__dir__` and `__all__` of a package.

  A name that is also a module of the package is imported at once: Python would otherwise put
  the module in its place.

  Args:
    package: `__name__` of the package. file: its `__file__`.
  """
  names = _listed(file)
  space = sys.modules[package].__dict__

  def found(name: str) -> Any:
    module, name_there = names[name]
    if module == package:
      return importlib.import_module(f"{package}.{name_there}")
    source = importlib.import_module(module)
    value = getattr(source, name_there, None)
    return importlib.import_module(f"{module}.{name_there}") if value is None else value

  def get(name: str) -> Any:
    if name not in names:
      return _moved.attribute(package, name)
    space[name] = found(name)
    return space[name]

  def listed() -> list[str]:
    return sorted({*space, *names})

  folder = pathlib.Path(file).parent
  for name, (module, name_there) in names.items():
    is_that_module = module == package and name_there == name
    if (folder / f"{name}.py").exists() and not is_that_module:
      space[name] = found(name)
  return get, listed, sorted(names)
