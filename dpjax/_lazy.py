"""Lazy packages: names are imported on first access.

A package lists its names once, as imports under `if TYPE_CHECKING:`, which type checkers and
editors read. `attach` reads the same lines, so a program imports only what it uses. In that list
`from package import *` stands for all names in `package.__all__`.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

# Names of all lazy packages: package -> public name -> (module, name in that module).
_LISTED: dict[str, dict[str, tuple[str, str]]] = {}


def _read(file: str) -> dict[str, tuple[str, str]]:
  """Maps each public name of a file to (module, name in that module).

  The source is the file's imports under `if TYPE_CHECKING:`."""
  names = {}
  for node in ast.parse(pathlib.Path(file).read_text(encoding="utf-8")).body:
    if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
      continue
    for line in node.body:
      assert isinstance(line, ast.ImportFrom) and line.module, f"{file}: only from-imports"
      for alias in line.names:
        if alias.name == "*":
          # The module behind `*` lists its names itself, so a name is added in one place only.
          source = importlib.import_module(line.module)
          names |= {public: (line.module, public) for public in source.__all__}
          continue
        names[alias.asname or alias.name] = (line.module, alias.name)
  return names


class _Package(types.ModuleType):
  """A package in which a listed name takes precedence over a module of the same name.

  For example, `accounting.epsilon` is the function, not its module `accounting/epsilon.py`.
  """

  def __setattr__(self, name: str, value: object) -> None:
    module, name_there = _LISTED[self.__name__].get(name, ("", ""))
    # After an import, Python itself sets the module as an attribute of its package.
    is_own_module = getattr(value, "__name__", "") == f"{self.__name__}.{name}"
    if module and is_own_module and isinstance(value, types.ModuleType):
      if module == self.__name__:
        # The listed object is the module itself, so it is set below.
        pass
      elif module == value.__name__:
        value = getattr(value, name_there)
      else:
        return
    super().__setattr__(name, value)

  def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
    # A package is pickled by its name. Cloudpickle does so for plain modules, but has no rule for a
    # subclass. Ray and Flower pickle functions, which may refer to a package of dpjax.
    return importlib.import_module, (self.__name__,)


def public_names(package: str) -> Mapping[str, tuple[str, str]]:
  """Returns public name -> (module, name in that module) of a package made by `attach`."""
  return types.MappingProxyType(_LISTED[package])


def attach(
  package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
  """Returns `__getattr__`, `__dir__` and `__all__` for a package.

  Modules that the package does not list are attributes too, but not in `__all__`.

  Args:
    package: `__name__` of the package.
    file: `__file__` of the package.
  """
  _LISTED[package] = _read(file)
  module = sys.modules[package]
  module.__class__ = _Package

  def get(name: str) -> Any:
    if name in _LISTED[package]:
      source, name_there = _LISTED[package][name]
      # The listed object is an attribute of a module, or a module itself.
      if source != package and hasattr(importlib.import_module(source), name_there):
        value = getattr(importlib.import_module(source), name_there)
      else:
        value = importlib.import_module(f"{source}.{name_there}")
      setattr(module, name, value)
      return value
    folder = pathlib.Path(file).parent
    if (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists():
      return importlib.import_module(f"{package}.{name}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")

  def names() -> list[str]:
    return sorted({*vars(module), *_LISTED[package]})

  return get, names, sorted(_LISTED[package])
