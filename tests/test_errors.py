"""Errors carry data: their text is written once and read by nobody."""

import ast
import functools
import pathlib
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpjax.validate import NO_VALUE, UserError, Verbatim

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_KINDS = {"UserError", "RoundRefused", "BudgetExceeded", "Overspent", "OverlappingShards"}
_KINDS |= {"Unreachable", "Unwritable", "Busy", "PeerFailed", "NothingSent"}
_FOLDERS = ("dpjax", "launch", "benchmarks")
# Files that read the text of an error of another library, which carries no data, and why.
_OF_OTHERS = {
  "dpjax/zoo/networks/registry.py": "the first line of what a model's constructor raised",
  "dpjax/experiments/run/writers.py": "a full disk is told by libraries in words",
  "dpjax/data/npz.py": "zipfile says in words why a file is no archive",
  "dpjax/secure/mpc/spu_program.py": "SPU's C++ errors end in a stack trace",
  "dpjax/secure/homomorphic/ckks.py": "SEAL says in words what does not fit",
  "dpjax/parallel/targets.py": "XLA says in words how much memory a program wants",
  "dpjax/gradients/loss_checks.py": "nnx raises an error without a class of its own",
  "launch/app.py": "JAX says in words that a backend or memory is missing",
}
_READS = {"partition", "rpartition", "split", "startswith", "endswith", "removeprefix"}
_READS |= {"find", "index", "match", "search", "findall", "fullmatch", "replace"}


def _is_text_of_an_error(node, names=()):
  """Whether an expression is `str(error)`, `error.args[0]`, or a variable that holds it."""
  if isinstance(node, ast.Name) and node.id in names:
    return True
  if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "str" and node.args:
    return getattr(node.args[0], "id", "") in ("error", "exc", "e", "failure")
  inner = node.value if isinstance(node, ast.Subscript) else None
  return isinstance(inner, ast.Attribute) and inner.attr == "args"


def _reads(tree):
  """Line numbers where the text of an error decides something."""
  kept = [
    node.targets[0].id
    for node in ast.walk(tree)
    if isinstance(node, ast.Assign)
    and isinstance(node.targets[0], ast.Name)
    and _is_text_of_an_error(node.value)
  ]
  is_text = functools.partial(_is_text_of_an_error, names=kept)
  for node in ast.walk(tree):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
      read = [node.func.value, *node.args]
      whitespace = node.func.attr == "split" and not node.args
      if not whitespace and node.func.attr in _READS and any(map(is_text, read)):
        yield node.lineno
    if isinstance(node, ast.Compare) and any(map(is_text, (node.left, *node.comparators))):
      yield node.lineno


def _files():
  for folder in _FOLDERS:
    for path in sorted((_ROOT / folder).rglob("*.py")):
      yield path.relative_to(_ROOT).as_posix(), ast.parse(path.read_text())


@pytest.mark.slow
def test_no_text_of_an_error_is_read():
  found = {name: lines for name, tree in _files() if (lines := [*_reads(tree)])}
  assert {name: lines for name, lines in found.items() if name not in _OF_OTHERS} == {}


def test_the_check_can_fail():
  for line in (
    "str(error).partition('=')",
    "'x' in str(error)",
    "re.match('a', str(error))",
    "text = str(error); text.startswith('a')",
  ):
    assert [*_reads(ast.parse(line))] == [1], line


def _begins_with_a_field(message):
  """Whether a message begins with names and a colon, or with a name and its value."""
  parts = message.values if isinstance(message, ast.JoinedStr) else [message]
  text = "".join(
    str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts
  )
  return bool(re.match(r"[^\s:=]+(, [^\s:=]+)*(=|:( |$))", text))


@pytest.mark.parametrize(
  ("message", "begins"),
  [
    ("'n=3: must be > 0'", True),
    ("f'{name}: must be > 0'", True),
    ("f'{name}={value}: must be > 0'", True),
    ("'x, y: hold NaN'", True),
    ("f'--{name}: must be given'", True),
    ("f'line {number}: is blank'", False),
    ("f'has no {name} (it holds x=1)'", False),
  ],
)
def test_a_field_inside_a_message_is_seen(message, begins):
  assert _begins_with_a_field(ast.parse(message, mode="eval").body) is begins


@pytest.mark.slow
def test_errors_give_their_field_as_data_and_not_inside_the_message():
  """`UserError("n=3: must ...")` would be a mistake of no field."""
  wrong = []
  for name, tree in _files():
    for node in ast.walk(tree):
      if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in _KINDS:
        continue
      given = {keyword.arg for keyword in node.keywords} & {"field", None}
      if node.args and not given and _begins_with_a_field(node.args[0]):
        wrong.append(f"{name}:{node.lineno}")
  assert wrong == []


_NAMES = st.from_regex(r"[a-z_]{1,12}(\.[a-z_]{1,12}){0,3}", fullmatch=True)
_VALUES = st.one_of(
  st.none(), st.integers(), st.floats(), st.text(max_size=500), st.lists(st.integers())
)


@given(_NAMES, _VALUES, st.text(max_size=40))
def test_an_error_is_one_line_and_keeps_its_data(field, value, must):
  error = UserError(must, field=field, value=value)
  assert len(str(error).splitlines()) <= 1
  assert error.field == field and error.is_about(field, value)
  moved = error.within("privacy")
  assert moved.field == f"privacy.{field}" and moved.value is value
  again = pickle.loads(pickle.dumps(error))
  assert type(again) is UserError and str(again) == str(error) and again.field == field


def test_a_message_without_a_field_is_shown_as_it_is():
  error = UserError("no sound run")
  assert (str(error), error.field, error.value) == ("no sound run", "", NO_VALUE)
  assert str(error.within("train")) == "train: no sound run"
  assert str(pickle.loads(pickle.dumps(error))) == "no sound run"


def test_text_is_quoted_unless_verbatim_and_a_hint_ends_the_line():
  assert str(UserError("must be int", field="n", value="3")) == "n='3': must be int"
  assert str(UserError("no", field="n", value=Verbatim("3"))) == "n=3: no"
  assert str(UserError("no", field="n", hint="try 4")) == "n: no; try 4"
