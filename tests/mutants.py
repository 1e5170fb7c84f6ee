"""Single wrong characters in dpjax, drawn by a seed, and whether the quick tests see them.

    python -m tests.mutants --seed=1 --count=40 [--package=transforms] [--out=mutants.jsonl]

A mutant swaps a sign, is off by one, compares with `<=` in place of `<`, or drops a term or factor.
Each runs in a clone of the last commit against the quick tests of its package, its examples, and
the tests that name its module and function; those that name most of it come first. Prints a line
for each: what was changed, and the first line of the failure, or `survived`. Some survivors compute
the same as the original: read them. The same seed draws the same mutants of the same sources.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PARTS = [*(_ROOT / "dpjax").glob("*/__init__.py"), *(_ROOT / "dpjax").glob("[a-z]*.py")]
PACKAGES = tuple(
  sorted(path.parent.name if path.stem == "__init__" else path.stem for path in _PARTS)
)


class Mutant(NamedTuple):
  """One change of one expression."""

  path: str
  function: str
  line: int
  column: int
  kind: str
  before: str
  after: str


_FLIPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_LOOSER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


def _is_text(node: ast.BinOp) -> bool:
  """Returns whether text, lists or sets are put together."""
  texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, ast.Set, ast.SetComp)
  return any(
    isinstance(part, texts)
    or (isinstance(part, ast.Constant) and isinstance(part.value, str))
    for part in (node.left, node.right)
  )


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
  """(kind, expression in the place of `node`)."""
  if isinstance(node, ast.BinOp) and not _is_text(node):
    if type(node.op) in _FLIPPED:
      yield "sign", ast.BinOp(node.left, _FLIPPED[type(node.op)](), node.right)
    if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
      yield "dropped", node.left
  elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    if not isinstance(node.operand, ast.Constant):
      yield "sign", node.operand
  elif isinstance(node, ast.Compare) and type(node.ops[0]) in _LOOSER:
    ops = [_LOOSER[type(node.ops[0])](), *node.ops[1:]]
    yield "off by one", ast.Compare(node.left, ops, node.comparators)
  elif isinstance(node, ast.Constant) and type(node.value) is int:
    yield "off by one", ast.Constant(node.value + 1)


def _expressions(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
  """(function, expression) of all code that computes: no message, annotation or decorator."""
  if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
    return
  if isinstance(node, ast.FunctionDef):
    children = node.body
    function = node.name
  elif isinstance(node, ast.AnnAssign):
    children = [node.value] if node.value else []
  elif isinstance(node, ast.Subscript):
    # `shape[0]`: another index fails at once, and axes are numbers of their own kind.
    children = [node.value]
  else:
    children = [*ast.iter_child_nodes(node)]
  for child in children:
    if function and isinstance(child, ast.expr):
      yield function, child
    yield from _expressions(child, function)


def mutants(package: str) -> list[Mutant]:
  """Returns all mutants of a package, or of a file of that name."""
  folder = _ROOT / "dpjax" / package
  paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
  found = []
  for path in paths:
    source = path.read_text()
    for function, node in _expressions(ast.parse(source)):
      for kind, new in _changed(node):
        before = ast.get_source_segment(source, node) or ""
        after = f"({ast.unparse(ast.fix_missing_locations(copy.deepcopy(new)))})"
        # Source is replaced on its line, so an expression of several lines is left.
        if "\n" not in before and before in source.splitlines()[node.lineno - 1]:
          where = path.relative_to(_ROOT).as_posix()
          column = len(
            source.splitlines()[node.lineno - 1].encode()[: node.col_offset].decode()
          )
          found.append(Mutant(where, function, node.lineno, column, kind, before, after))
  return sorted(set(found))


def draw(seed: int, count: int, packages: tuple[str, ...] = PACKAGES) -> list[Mutant]:
  """Returns `count` mutants, as many of each package, and kinds of equal chance."""
  random_ = random.Random(seed)
  drawn = []
  by_package = {package: mutants(package) for package in packages}
  for number in range(count):
    left = [package for package in packages if by_package[package]]
    found = by_package[left[number % len(left)]]
    kind = random_.choice(sorted({mutant.kind for mutant in found}))
    mutant = random_.choice([mutant for mutant in found if mutant.kind == kind])
    found.remove(mutant)
    drawn.append(mutant)
  return drawn


def planted(source: str, mutant: Mutant) -> str:
  """Returns a file's source with the mutant's expression changed.

  >>> one = Mutant("a.py", "f", 1, 9, "sign", "x + 1", "(x - 1)")
  >>> planted("y = 2 * (x + 1)", one)
  'y = 2 * ((x - 1))'
  """
  lines = source.splitlines(keepends=True)
  line = lines[mutant.line - 1]
  end = mutant.column + len(mutant.before)
  assert line[mutant.column : end] == mutant.before, mutant
  lines[mutant.line - 1] = line[: mutant.column] + mutant.after + line[end:]
  return "".join(lines)


def _files(clone: pathlib.Path, mutant: Mutant) -> list[str]:
  """Test files of the package, those first that name the module and the function."""
  package = pathlib.Path(mutant.path).parts[1].removesuffix(".py")
  module = pathlib.Path(mutant.path).stem
  parts = {package, *pathlib.Path(mutant.path).parts[1:-1]}

  def hits(path: pathlib.Path) -> int:
    text = path.read_text()
    named = path.stem in (f"test_{module}", f"test_{package}")
    both = mutant.function in text and module in text
    return 4 * named + 2 * both + bool(parts & {*path.parts})

  tests = {path: hits(path) for path in (clone / "tests").rglob("test_*.py")}
  found = sorted(
    (path for path in tests if tests[path]), key=lambda path: (-tests[path], path)
  )
  paths = [path.relative_to(clone).as_posix() for path in found]
  own = f"dpjax/{package}"
  return [mutant.path, *paths, own if (clone / own).is_dir() else f"{own}.py"]


def verdict(clone: pathlib.Path, mutant: Mutant, seconds: float) -> dict[str, str]:
  """Returns which test fails first on a mutant, and the first line of its error."""
  path = clone / mutant.path
  source = path.read_text()
  path.write_text(planted(source, mutant))
  command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--tb=short"]
  command += ["-p", "no:cacheprovider", "-p", "no:randomly"]
  try:
    done = subprocess.run(
      [*command, *_files(clone, mutant)],
      cwd=clone,
      env=os.environ | {"PYTHONPATH": str(clone)},
      capture_output=True,
      text=True,
      timeout=seconds,
    )
  except subprocess.TimeoutExpired:
    return {"killed by": "time", "message": f"more than {seconds:.0f} s"}
  finally:
    path.write_text(source)
  if done.returncode == 0:
    return {"killed by": "", "message": "survived"}
  tests = re.findall(r"(?m)^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout)
  errors = re.findall(r"(?m)^E +(.*)|^(Expected:|Got:)", done.stdout)
  lines = [error for error, _ in errors if error]
  got = re.findall(r"(?ms)^Expected:\n(.*?)^Got:\n(.*?)\n", done.stdout)
  lines += [f"expected {' '.join(a.split())}, got {b.strip()}" for a, b in got]
  return {"killed by": tests[0] if tests else "?", "message": " | ".join(lines)[:300]}


def main() -> int:
  """Draws mutants and prints what became of them; the exit code is 1 where one survived."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--seed", type=int, default=1)
  parser.add_argument("--count", type=int, default=40)
  parser.add_argument("--package", action="append", choices=PACKAGES)
  parser.add_argument("--seconds", type=float, default=900, help="of one mutant")
  parser.add_argument("--out", help="file for a JSON line of each mutant")
  flags = parser.parse_args()
  survivors = 0
  with tempfile.TemporaryDirectory() as folder:
    clone = pathlib.Path(folder) / "clone"
    subprocess.run(["git", "clone", "-q", "--shared", str(_ROOT), str(clone)], check=True)
    for mutant in draw(flags.seed, flags.count, tuple(flags.package or PACKAGES)):
      row = {**mutant._asdict(), **verdict(clone, mutant, flags.seconds)}
      survivors += not row["killed by"]
      where = f"{mutant.path}:{mutant.line} {mutant.before} -> {mutant.after}"
      print(f"{where}: {row['killed by']} {row['message']}", flush=True)
      if flags.out:
        with open(flags.out, "a") as file:
          file.write(json.dumps(row) + "\n")
  print(f"{survivors} of {flags.count} survived")
  return int(survivors > 0)


if __name__ == "__main__":
  sys.exit(main())
