"""Public names: what packages list in `__all__`. They are few, and each has its place in the
reference.

An object counts once, however many packages list it, and so does a package or module that one
lists. Everything else is imported from the module that defines it.
"""

import importlib
import pathlib

import pytest

from dpjax import _lazy
from tests.pages import site

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_MOST = 350
# Told by the main names of the reference's first page, and by its table of packages.
_ON_THE_FIRST_PAGE = {
  "dpjax.accounting.proved.NeighboringRelation",
  "dpjax.checks.check.check",
  "dpjax.zoo",
}


def _packages():
  for file in sorted((_ROOT / "dpjax").rglob("__init__.py")):
    yield ".".join(file.parent.relative_to(_ROOT).parts), file


def _homes():
  """Full names of all objects that packages list, by where they are defined."""
  packages = [package for package, _ in _packages()]
  for package in packages:
    importlib.import_module(package)
  found = set()
  for package in packages:
    for module, name in _lazy._LISTED.get(package, {}).values():
      while name in _lazy._LISTED.get(module, {}):  # listed by that package, too
        if _lazy._LISTED[module][name] == (module, name):
          break  # a module of the package
        module, name = _lazy._LISTED[module][name]
      found.add(f"{module}.{name}")
  return found


def test_public_names_are_few():
  count = len(_homes())
  if count > _MOST:
    pytest.fail(
      f"{count} public names, at most {_MOST}: for each new line of an `__init__` take another "
      "out, or leave it out and import the thing from its module",
      pytrace=False,
    )


def test_each_has_its_place_in_the_reference():
  pages = {f"dpjax.{package}" for package in site().packages()}
  placed = {
    home for package in site().packages() for _, home in site().public_names(package)
  }
  of_one_file = {home for home in _homes() if home.rpartition(".")[0] in pages}
  assert _homes() - placed - pages - of_one_file == _ON_THE_FIRST_PAGE


def test_only_lazy_packages_list_names():
  for package, file in _packages():
    assert not list(site()._exports(file)) or package in _lazy._LISTED, package
