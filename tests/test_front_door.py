"""`import dpjax`: what it gives, and what it does not import before it is needed."""

import ast
import json
import pathlib
import subprocess
import sys

import pytest

import dpjax
from dpjax import _lazy

_FILE = pathlib.Path(dpjax.__file__)
_HEAVY = (
  "sklearn",
  "matplotlib",
  "tensorflow_datasets",
  "tensorflow",
  "orbax",
  "tensorboardX",
)


_ROOMS = [name for name, (module, _) in _lazy._LISTED["dpjax"].items() if module == "dpjax"]


def _imported(code):
  """The modules that a fresh interpreter holds after some code."""
  code += "\nimport json, sys; print(json.dumps(list(sys.modules)))"
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=_FILE.parents[1], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def _tops(modules):
  return {module.split(".")[0] for module in modules}


def test_the_import_alone_loads_no_room_and_no_array_library():
  modules = _imported("import dpjax")
  assert not _tops(modules) & {*_HEAVY, "jax", "flax", "scipy", "numpy", "dp_accounting"}
  own = {module for module in modules if module.startswith("dpjax")}
  assert own == {"dpjax", "dpjax._lazy"}


@pytest.mark.long
def test_no_room_but_relevance_loads_it_or_what_draws_reads_and_saves():
  packages = [name for name in _ROOMS if name != "relevance"]
  modules = _imported("import dpjax\n" + "\n".join(f"dpjax.{name}" for name in packages))
  assert not _tops(modules) & {*_HEAVY}
  later = ("dpjax.relevance", "dpjax.secure.homomorphic", "dpjax.secure.mpc")
  assert not [module for module in modules if module.startswith(later)]
  assert "dpjax.relevance" in _imported("import dpjax\ndpjax.relevance")


_ALL = """
import importlib, pathlib
for path in sorted(pathlib.Path("dpjax").rglob("*.py")):
  importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
from jax._src import xla_bridge  # nothing public tells it
assert not xla_bridge.backends_are_initialized()
"""


@pytest.mark.slow
def test_no_import_starts_a_backend():
  """Several processes and commands that fork (tests/commands.py) must come before it."""
  assert "dpjax.auditing.games.federated" in _imported(_ALL)


def test_type_checkers_see_what_is_there():
  """The imports that are only for them are the names that `__getattr__` knows."""
  (block,) = [
    node for node in ast.parse(_FILE.read_text()).body if isinstance(node, ast.If)
  ]
  shown = {}
  for node in block.body:
    (alias,) = node.names
    assert alias.asname == alias.name
    shown[alias.name] = node.module
  assert shown == {name: module for name, (module, _) in _lazy._LISTED["dpjax"].items()}


@pytest.mark.parametrize("name", dpjax.__all__)
def test_every_name_is_there_and_listed(name):
  assert getattr(dpjax, name) is not None and name in dir(dpjax)


def test_another_name_is_an_attribute_error():
  with pytest.raises(AttributeError, match="module 'dpjax' has no attribute 'plans'"):
    _ = dpjax.plans
