"""Modules of a user, in a folder that a test enters as a new process would."""

import importlib
import os
import pathlib
import sys

import pytest

# A model and a data set, as files of a user hold them.
NET = '''
import flax.linen as nn


class Net(nn.Module):
  """A dense layer of its own width."""

  num_classes: int
  width: int = 4

  @nn.compact
  def __call__(self, x):
    x = nn.tanh(nn.Dense(self.width)(x.reshape(x.shape[0], -1)))
    return nn.Dense(self.num_classes)(x)
'''
CORNERS = '''
import numpy as np

from dpjax import data


def corners():
  """The corners of a triangle, again and again."""

  def split(name, n):
    y = np.arange(n) % 3
    facts = {"name": "corners", "split": name, "nominal_size": 60}
    return data.from_arrays(np.eye(3)[y], y, num_classes=3, **facts)

  return split("train", 60), split("test", 30)
'''


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
