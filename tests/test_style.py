"""Figures of style that may fall and never rise: a ratchet.

Measured the same way in Optax, jax_privacy, FedJAX, pfl-research and Diffrax (2026-11-24):

| figure, per 1,000 lines of code       | theirs   | aim  |
| ------------------------------------- | -------- | ---- |
| tuple assignments `a, b = x, y`       | .3-1.9   | 2    |
| comments on lines of their own        | 46-119   | 35   |
| private helpers, 6 lines, used once   | .8-4.8   | 3    |
| docstrings that are fragments, %      | 0-1.8    | 1    |
| dict bundles of arguments, in all     | rare     | 0    |

A figure that gets better may be written down here, one that gets worse may not. The figures are
places to look: a number that improves while the text gets harder to read has been gamed.
"""

import ast
import collections
import io
import pathlib
import re
import tokenize

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# What was measured last, rounded towards the worse.
_AT_MOST = {
  "tuple assignments": 0.1,
  "helpers used once": 3.0,
  "fragments, %": 0.1,
  "bundles": 0,
}
_AT_LEAST = {"own-line comments": 47}
_FRAGMENT = re.compile(
  r"^(What|Of|By which|By|Whose|Who|That of|Those|One|With which|In which|From which|To which|As)\b"
)


def _code_lines(source, nodes):
  """Lines that hold code: no blank line, comment or docstring."""
  documented = set()
  for node in nodes:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
      first = node.body[0] if node.body else None
      if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        documented |= {*range(first.lineno, first.end_lineno + 1)}
  lines = (line.strip() for line in source.splitlines())
  return sum(
    bool(line) and not line.startswith("#") and number not in documented
    for number, line in enumerate(lines, start=1)
  )


def _tuple_assignments(nodes):
  """Statements that bind unrelated values at once; a swap is none."""
  for node in nodes:
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
      continue
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
      continue
    left = {ast.unparse(part) for part in target.elts}
    right = {ast.unparse(part) for part in node.value.elts}
    starred = any(
      isinstance(part, ast.Starred) for part in [*target.elts, *node.value.elts]
    )
    if left != right and not starred:
      yield node.lineno


def _bundles(nodes):
  """Arguments that travel as `rest: Any = dict(a=..., b=...)`."""
  for node in nodes:
    value = getattr(node, "value", None)
    if not (isinstance(node, ast.AnnAssign) and isinstance(value, ast.Call)):
      continue
    if getattr(value.func, "id", "") == "dict" and value.keywords:
      yield node.lineno


def _own_line_comments(source):
  """Comments on lines of their own, but for those that open a file."""
  skip = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING)
  tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
  start = next((n for n, token in enumerate(tokens) if token.type not in skip), 0)
  for token in tokens[start:]:
    if token.type == tokenize.COMMENT and token.line.strip().startswith("#"):
      yield token.start[0]


def _docstrings(nodes):
  for node in nodes:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
      text = ast.get_docstring(node)
      if text:
        yield text.splitlines()[0]


def _used_once(source, tree):
  """Private functions of at most six lines that one place calls."""
  words = collections.Counter(re.findall(r"\b_[a-z]\w*\b", source))
  for node in tree.body:
    if not isinstance(node, ast.FunctionDef) or not node.name.startswith("_"):
      continue
    body = node.body[1:] if ast.get_docstring(node) else node.body
    lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
    if lines <= 6 and words[node.name] == 2 and not node.name.startswith("__"):
      yield node.lineno


@pytest.fixture(scope="module")
def figures():
  counts = dict.fromkeys((*_AT_MOST, *_AT_LEAST, "lines", "docstrings"), 0)
  for folder in ("dpjax", "launch"):
    for path in (_ROOT / folder).rglob("*.py"):
      source = path.read_text()
      tree = ast.parse(source)
      # Walked once: a walk over all of dpjax takes a second.
      nodes = [*ast.walk(tree)]
      first_lines = [*_docstrings(nodes)]
      counts["lines"] += _code_lines(source, nodes)
      counts["tuple assignments"] += len([*_tuple_assignments(nodes)])
      counts["bundles"] += len([*_bundles(nodes)])
      counts["own-line comments"] += len([*_own_line_comments(source)])
      counts["helpers used once"] += len([*_used_once(source, tree)])
      counts["docstrings"] += len(first_lines)
      counts["fragments, %"] += sum(bool(_FRAGMENT.match(line)) for line in first_lines)
  thousands = counts.pop("lines") / 1000
  docstrings = counts.pop("docstrings")
  for name in ("tuple assignments", "own-line comments", "helpers used once"):
    counts[name] /= thousands
  counts["fragments, %"] *= 100 / docstrings
  return counts


@pytest.mark.parametrize("name", _AT_MOST)
def test_no_figure_of_style_rises(figures, name):
  assert figures[name] <= _AT_MOST[name]


@pytest.mark.parametrize("name", _AT_LEAST)
def test_comments_do_not_become_fewer(figures, name):
  assert figures[name] >= _AT_LEAST[name]


def test_the_measures_can_fail():
  tree = ast.parse("a, b = x, y\nb, c = c, b\nrest: Any = dict(k=1)\n")
  nodes = [*ast.walk(tree)]
  assert [*_tuple_assignments(nodes)] == [1] and [*_bundles(nodes)] == [3]
  assert [*_own_line_comments("x = 1\n# why\ny = 2  # what\n")] == [2]
  source = "def _f():\n  return 1\n\n\nx = _f()\n"
  assert [*_used_once(source, ast.parse(source))] == [1]
