"""Modules of dpjax are loaded once, also where a doctest of one is the first that runs; doctests
have lanes, as tests do."""

import contextlib
import doctest
import importlib
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parent
# `>>> train()  # doctest: +SLOW` marks all examples of a docstring, as `pytest.mark.slow` a test.
_FLAGS = {name: doctest.register_optionflag(name.upper()) for name in ("slow", "long")}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items):
  """Marks slow and long examples."""
  for item in items:
    if isinstance(item, pytest.DoctestItem):
      for name, flag in _FLAGS.items():
        if any(flag in example.options for example in item.dtest.examples):
          item.add_marker(name)


def pytest_collect_file(file_path):
  """Imports the package of a file, which pytest is about to import.

  pytest looks for the file's module before it imports the package. A package that imports that
  module, as `dpjax.gradients` does with `clip`, would leave it loaded twice, as two modules with
  two tables of rules.
  """
  if file_path.suffix == ".py" and file_path.is_relative_to(_ROOT / "dpjax"):
    package = ".".join(file_path.parent.relative_to(_ROOT).parts)
    # What cannot be imported is reported by pytest, with the file.
    with contextlib.suppress(ImportError):
      importlib.import_module(package)
