"""Flags of every launcher: integers have both bounds, and an error names the flag as typed."""

import ast
import pathlib

import pytest
from absl import flags

from dpjax.validate import UserError
from launch import app

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


@pytest.mark.parametrize(
  ("field", "typed", "shown"),
  [
    ("privacy.epsilon", ["config.privacy.epsilon"], "--config.privacy.epsilon"),
    ("privacy.epsilon", ["config.privacy"], "--config.privacy.epsilon"),
    ("epsilons[0]", ["workdir", "config.epsilons"], "--config.epsilons[0]"),
    ("workdir", ["workdir"], "--workdir"),
    ("privacy.epsilon", ["workdir", "epsilon"], "privacy.epsilon"),
    ("epsilon_budget", ["config.epsilon"], "epsilon_budget"),
    ("", ["workdir"], ""),
  ],
)
def test_an_error_names_the_flag_that_was_typed(field, typed, shown):
  error = app.as_typed(UserError("must be > 0", field=field, value=-1), typed)
  assert error.field == shown and error.must == "must be > 0"


def test_a_flag_that_is_missing_is_named_without_a_value():
  values = flags.FlagValues()
  flags.DEFINE_string("column", None, "", flag_values=values)
  values.mark_as_parsed()
  error = UserError("must be given", field="column", value=None)
  assert str(app.by_flag(error, values)) == "--column: must be given"


def test_a_flag_with_its_default_is_named_and_a_field_of_its_name_is_not():
  values = flags.FlagValues()
  flags.DEFINE_multi_string("run", [], "", flag_values=values)
  values.mark_as_parsed()
  for value, shown in (([], "--run"), (["b"], "run")):
    error = UserError("must be given once", field="run", value=value)
    assert app.by_flag(error, values).field == shown
