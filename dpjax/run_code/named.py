"""Names in a module's source: its imports, also within functions, and names that are bound once."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Any

_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_NAME = re.compile(r"\.*[^\W\d]\w*(?:\.[^\W\d]\w*)*")
# Matches "helpers.", which is a part of f"helpers.{name}", and "helpers.%s" and "helpers.{}".
_PREFIX = re.compile(r"(\.*(?:[^\W\d]\w*(?:\.[^\W\d]\w*)*)?)\.(?:%s|\{\w*\})?")
_IMPORTS = re.compile(r"import|run_module|run_path|find_spec|load_module|resolve_name")
_LISTS = ("iter_modules", "walk_packages")  # of pkgutil: all modules of a package
_LONGEST_PATH = 500
_CLOCKS = {
  "time", "datetime", "date", "perf_counter", "monotonic", "process_time", "getpid", "getppid",
  "gethostname", "getuser", "platform", "cpu_count", "node", "uname", "id", "getsize",
  "getmtime", "stat",
}  # fmt: skip
_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
_ACTS = {"setattr", "delattr", "exec", "eval", "__import__"}
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


@dataclasses.dataclass
class Names:
  """Names in one source. Names of modules are absolute; the modules need not exist."""

  imports: set[str] = dataclasses.field(default_factory=set)
  # Modules that are imported outside functions and branches.
  top: set[str] = dataclasses.field(default_factory=set)
  # Packages of which any child may be imported.
  packages: set[str] = dataclasses.field(default_factory=set)
  # Modules from which `*` is imported.
  stars: set[str] = dataclasses.field(default_factory=set)
  files: set[str] = dataclasses.field(default_factory=set)  # names that end with .py
  # Dotted strings and chains of attributes that may name a module.
  maybe: set[str] = dataclasses.field(default_factory=set)
  # Names bound once, to a number, a string, bytes, None or a tuple of such values.
  literals: dict[str, Any] = dataclasses.field(default_factory=dict)
  exported: list[str] = dataclasses.field(default_factory=list)  # strings of __all__
  # Names bound once, to a literal dict, list or set.
  tables: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Names bound once, to a comprehension, or to a dict, list, set or tuple with computed entries.
  displays: set[str] = dataclasses.field(default_factory=set)
  # Names whose values may differ between processes: functions set them, or they hold a time, a host
  # or the like.
  changing: set[str] = dataclasses.field(default_factory=set)
  # Words that may name environment variables, if the source reads the environment.
  variables: set[str] = dataclasses.field(default_factory=set)
  # Whether the source may modify its imports, as by `helper.SCALE = 3` or `jax.config.update(...)`.
  acts: bool = False


@functools.lru_cache(maxsize=4096)
def names_in(content: bytes, package: str) -> Names:
  """Returns the names in a source, or empty `Names` if the source is not valid Python.

  Args:
    package: name of the package that relative imports begin at.

  >>> sorted(names_in(b"def f():\\n  from a.b import c", "").imports)
  ['a.b', 'a.b.c']
  """
  try:
    tree = ast.parse(content)
  except (SyntaxError, ValueError):
    return Names()
  reader = _Reader(package)
  reader.visit(tree)
  names = reader.names
  # All aliases are known only after the whole source was read.
  for chain in reader.chains:
    first, *parts = chain
    name = reader.aliases.get(first)
    for part in parts if name is not None else ():
      name = f"{name}.{part}"
      names.maybe.add(name)
  for node in tree.body:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
      names.top |= {*_of_statement(node, package)}
  values = _literals(tree, reader.bound)
  names.literals = {name: value for name, value in values.items() if is_plain(value)}
  names.tables = {
    name: value
    for name, value in values.items()
    if value and not isinstance(value, tuple) and not is_plain(value)
  }
  names.displays = _displays(tree, reader.bound) - {*values}
  names.changing |= _of_this_process(tree)
  names.acts = any(_acts(node, reader.aliases) for node in ast.walk(tree))
  names.exported = _exported(tree)
  names.variables = _variables(tree)
  return names


def is_plain(value: Any) -> bool:
  """Returns whether a value is a number, a string, bytes, None or a tuple of such values.

  >>> is_plain((1, "a")), is_plain([1])
  (True, False)
  """
  if isinstance(value, tuple):
    return all(map(is_plain, value))
  return type(value) in _SCALARS


def _absolute(name: str, package: str) -> str | None:
  if not name.startswith("."):
    return name
  try:
    return importlib.util.resolve_name(name, package) if package else None
  except ImportError:
    return None


def _of_statement(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
  if isinstance(node, ast.Import):
    yield from (alias.name for alias in node.names)
    return
  home = _absolute("." * node.level + (node.module or ""), package)
  if home is not None:
    yield home
    yield from (f"{home}.{alias.name}" for alias in node.names if alias.name != "*")


class _Reader(ast.NodeVisitor):
  """Reads one source. It does not distinguish scopes, so it may find names that are no imports."""

  def __init__(self, package: str):
    self.package = package
    self.names = Names()
    self.aliases: dict[str, str] = {}  # name in the source -> what it was imported as
    self.chains: list[list[str]] = []  # ["pkg", "part", "f"] of pkg.part.f
    self.bound: dict[str, int] = {}  # name -> how often it is bound

  def _bind(self, name: str, times: int = 1) -> None:
    self.bound[name] = self.bound.get(name, 0) + times

  def visit_Import(self, node: ast.Import) -> None:
    self.names.imports |= {*_of_statement(node, self.package)}
    for alias in node.names:
      first = alias.name.partition(".")[0]
      self._bind(alias.asname or first)
      self.aliases[alias.asname or first] = alias.name if alias.asname else first

  def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
    names = [*_of_statement(node, self.package)]
    self.names.imports |= {*names}
    for alias in node.names:
      self._bind(alias.asname or alias.name)
      if names and alias.name == "*":
        self.names.stars.add(names[0])
      elif names:
        self.aliases[alias.asname or alias.name] = f"{names[0]}.{alias.name}"

  def visit_Call(self, node: ast.Call) -> None:
    name = str(getattr(node.func, "attr", getattr(node.func, "id", "")))
    if _IMPORTS.search(name):
      self._importing_call(node)
    elif name in _LISTS:
      self.names.packages.add(self.package)
    self.generic_visit(node)

  def _importing_call(self, node: ast.Call) -> None:
    """Records the possible imports of a call such as
    `importlib.import_module(f"helpers.{name}")`."""
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    texts = [text for argument in arguments for text in _strings(argument)]
    for text in texts:
      prefix = _PREFIX.fullmatch(text)
      if prefix is not None:
        home = prefix.group(1)
        # A lone "." is from f"{__name__}.{name}" or "." + name, which may import any module of the
        # package.
        inside = _absolute(home, self.package) if home.strip(".") else self.package
        self.names.packages.add(inside or self.package)
      elif _NAME.fullmatch(text):
        self.names.imports.add(_absolute(text, self.package) or text)
    if not texts:
      self.names.packages.add(self.package)

  def visit_Constant(self, node: ast.Constant) -> None:
    text = node.value
    if not isinstance(text, str):
      return
    if _DOTTED.fullmatch(text):
      self.names.maybe.add(text)
    if text.endswith(".py") and len(text) < _LONGEST_PATH and "\n" not in text:
      self.names.files.add(text)

  def visit_Attribute(self, node: ast.Attribute) -> None:
    parts = [node.attr]
    at = node.value
    while isinstance(at, ast.Attribute):
      parts.append(at.attr)
      at = at.value
    if isinstance(at, ast.Name):
      self.chains.append([at.id, *reversed(parts)])
    self.visit(at)

  def visit_Name(self, node: ast.Name) -> None:
    if not isinstance(node.ctx, ast.Load):
      self._bind(node.id)

  def visit_Global(self, node: ast.Global) -> None:
    self.names.changing |= {*node.names}
    # A function sets the name, too, so the name counts as bound twice: its value need not be the
    # literal in the source.
    for name in node.names:
      self._bind(name, 2)

  def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
    self._bind(node.name)
    self.generic_visit(node)

  def visit_ClassDef(self, node: ast.ClassDef) -> None:
    self._bind(node.name)
    self.generic_visit(node)


def _strings(node: ast.AST) -> list[str]:
  constants = [each for each in ast.walk(node) if isinstance(each, ast.Constant)]
  return [each.value for each in constants if isinstance(each.value, str)]


def _literals(tree: ast.Module, bound: dict[str, int]) -> dict[str, Any]:
  literals = {}
  for node in tree.body:
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
      continue
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    target = targets[0]
    # A name that is bound more than once need not hold the value of this statement.
    if not isinstance(target, ast.Name) or bound[target.id] != 1:
      continue
    try:
      value = ast.literal_eval(node.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
      continue
    literals[target.id] = value
  return literals


def _displays(tree: ast.Module, bound: dict[str, int]) -> set[str]:
  names = set()
  for node in tree.body:
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
      continue
    value = node.value
    name = node.targets[0].id
    is_filled = bool(getattr(value, "elts", None) or getattr(value, "keys", None))
    is_computed = isinstance(value, (ast.ListComp, ast.SetComp, ast.DictComp))
    if bound[name] == 1 and (is_filled or is_computed):
      names.add(name)
  return names


def _of_this_process(tree: ast.Module) -> set[str]:
  local_names = set()
  for node in tree.body:
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      parts = [*ast.walk(node.value)]
      names = {each.id for each in parts if isinstance(each, ast.Name)}
      names |= {each.attr for each in parts if isinstance(each, ast.Attribute)}
      if names & _CLOCKS:
        bound = [each for target in targets for each in ast.walk(target)]
        local_names |= {each.id for each in bound if isinstance(each, ast.Name)}
  return local_names


def _variables(tree: ast.Module) -> set[str]:
  nodes = [*ast.walk(tree)]
  names = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}
  names |= {node.name for node in nodes if isinstance(node, ast.alias)}
  if not names & _ENVIRONMENT:
    return set()
  # A constant may name a variable anywhere: `NAME = "SCALE"`, then `os.environ[NAME]`.
  return {text for text in _strings(tree) if text.isidentifier() and len(text) > 1}


def _acts(node: ast.AST, aliases: Mapping[str, str]) -> bool:
  """Returns whether a statement may modify an import."""
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
    return node.func.id in _ACTS
  targets: list[ast.expr] = []
  if isinstance(node, (ast.Assign, ast.Delete)):
    targets = node.targets
  elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
    targets = [node.target]
  elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
    # A call with an unused result is made for its side effects, so it may modify an import.
    targets = [node.value]
  return any(_is_part_of_import(target, aliases) for target in targets)


def _is_part_of_import(target: ast.expr, aliases: Mapping[str, str]) -> bool:
  """Returns whether an expression is an attribute, an entry or a call of an imported name."""
  at: ast.expr = target
  while isinstance(at, (ast.Attribute, ast.Subscript, ast.Call)):
    at = at.func if isinstance(at, ast.Call) else at.value
  return at is not target and isinstance(at, ast.Name) and at.id in aliases


def _exported(tree: ast.Module) -> list[str]:
  for node in tree.body:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets):
      return _strings(node)
  return []
