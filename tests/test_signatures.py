"""What public signatures say: few parameters are of type Any, in no pillar more than a few."""

import ast
import collections
import pathlib

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "dpjax"
_MOST = 0.07  # of all parameters; to go down, never up
_READABLE = ("accounting", "auditing", "data", "federated", "models", "noise", "relevance")
_MOST_READABLE = 0.05


def _functions(body):
  """Public functions, and public methods of public classes, calls and constructors included."""
  for node in body:
    name = getattr(node, "name", "_")
    if isinstance(node, ast.ClassDef) and not name.startswith("_"):
      yield from _functions(node.body)
    if isinstance(node, ast.FunctionDef) and (
      not name.startswith("_") or name in ("__init__", "__call__")
    ):
      yield node


def _says_nothing(annotation):
  return annotation is None or (isinstance(annotation, ast.Name) and annotation.id == "Any")


def counts(source):
  """(parameters of public functions, those of no type or of type Any)."""
  given = []
  for function in _functions(ast.parse(source).body):
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    given += [one.annotation for one in named if one.arg not in ("self", "cls")]
  return len(given), sum(map(_says_nothing, given))


def _by_room():
  found = collections.defaultdict(lambda: [0, 0])
  for path in _PACKAGE.rglob("*.py"):
    package = path.relative_to(_PACKAGE).with_suffix("").parts[0]
    for index, number in enumerate(counts(path.read_text())):
      found[package][index] += number
  return found


def test_the_count_sees_what_it_should():
  source = (
    "def f(a: Any, b: int, *, c): pass\n"
    "def _g(a: Any): pass\n"
    "class C:\n  def __call__(self, x: Any): pass\n  def _h(self, x): pass\n"
  )
  assert counts(source) == (4, 3)


def test_few_public_parameters_are_of_any_type():
  counts_by_package = _by_room()
  total, untyped = (
    sum(counts[index] for counts in counts_by_package.values()) for index in (0, 1)
  )
  assert untyped / total <= _MOST, f"{untyped} of {total}"


def test_the_rooms_that_people_read_first_say_more():
  shares = {package: _by_room()[package] for package in _READABLE}
  many = {package: c for package, c in shares.items() if c[1] / c[0] > _MOST_READABLE}
  assert many == {}
