"""Every integer flag of every launcher has both bounds: what sizes a loop is not endless."""

import ast
import pathlib

import pytest

_ROOM = pathlib.Path(__file__).resolve().parents[2] / "launch"
_OWN = {"account.py"}  # bounds what it reads itself: tests/runs/test_hostile_settings.py


def _calls():
  for path in sorted(_ROOM.glob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
      named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
      if named and node.func.attr == "DEFINE_integer" and path.name not in _OWN:
        yield pytest.param(node, id=f"{path.stem}-{ast.unparse(node.args[0])}")


@pytest.mark.parametrize("call", _calls())
def test_every_integer_flag_is_bounded(call):
  assert {"lower_bound", "upper_bound"} <= {keyword.arg for keyword in call.keywords}


def test_the_walk_finds_flags():
  assert len(list(_calls())) >= 5
