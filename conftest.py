"""Modules of dpjax are loaded once, also where a doctest of one is the first that runs."""

import contextlib
import importlib
import pathlib

_ROOT = pathlib.Path(__file__).parent


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
