"""The programs of the guide, docs/site.py and docs/tables.py, which stand in no package."""

import functools
import importlib.util

from tests.commands import ROOT


@functools.cache
def site():
  """docs/site.py."""
  spec = importlib.util.spec_from_file_location("dpjax_site", ROOT / "docs" / "site.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def tables():
  """docs/tables.py."""
  return site().tables
