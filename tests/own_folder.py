"""Modules of a user, in a folder that a test enters as a new process would."""

import importlib
import os
import pathlib
import sys

import pytest


@pytest.fixture
def fresh(monkeypatch):
  """A way into a folder as a process that begins there would go; leaves no module behind."""
  before, path, here = {*sys.modules}, [*sys.path], os.getcwd()
  monkeypatch.setattr(sys, "dont_write_bytecode", True)

  def enter(folder):
    for name in {*sys.modules} - before:
      if name.startswith("own_"):
        del sys.modules[name]
    sys.path[:] = [str(folder), *path]
    os.chdir(folder)
    importlib.invalidate_caches()

  yield enter
  enter(pathlib.Path(here))
  sys.path[:] = path
