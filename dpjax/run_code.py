"""The code that a run is made of, so that edited code never shares its noise with the code before.

Two runs with one noise and two codes give their exact clipped sums away: the difference of what
they release holds no noise. So `of` names the code, `runs.streams` binds every key to that name,
and a run that was begun goes on with the same code alone.

| code                                            | is told by                                 |
| ----------------------------------------------- | ------------------------------------------ |
| files of the user that the run reaches          | name of the module, SHA-256 of its source  |
| dpjax                                           | its version, SHA-256 of all its sources    |
| JAX, Flax, Optax, NumPy, SciPy, dp_accounting   | their versions                             |
| other packages that the user's files import     | their versions                             |
| a package that was installed from a folder      | the hashes of its RECORD, too              |
| Python and its standard library                 | the version, as 3.11                       |
| what was changed in memory [1]                  | its byte code, or its value                |

[1] Of a user's module: a function whose code is not in the source, such as one that `exec` made
of another file, and a number or string that the source sets once to something else.

Why SciPy and dp_accounting: they decide the noise multiplier of an epsilon. One noise at two
scales gives the sums away, too. Names hold no folder, so two machines with one code agree.

Which files a run reaches is a function of the run, not of the process. `sys.modules` also holds
what a test, a notebook or a plugin imported by chance. So the search starts at the modules that
the config names, and follows (1) every import statement in their sources, also within functions,
and every module or file that a constant names where one is imported; (2) what their functions,
classes and values are made of: closures, defaults, decorated functions, partial arguments. What is not
yet imported is found as an import would find it, and its source is read without running it.

A source is read once, when its module is first seen. A long process that edits a file later runs
what it has imported, under the name of what it has imported. A file that was edited between its
import and that first look is refused, where its compiled file tells.

What the search cannot see is refused when it runs: `watched` looks at which files' functions are called
while a run is built and does its first step. Not covered are data files that code reads,
libraries that are loaded by ctypes, environment variables, and files in site-packages that were
edited in place.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import marshal
import os
import pathlib
import re
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from dpjax.validate import UserError

# Distributions that decide what a run computes, whether or not a user imports them.
DISTRIBUTIONS = (
  "dpjax",
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "numpy",
  "scipy",
  "dp_accounting",
)
_PACKAGE = pathlib.Path(__file__).resolve().parent
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")
_NAME = re.compile(r"\.*[^\W\d]\w*(?:\.[^\W\d]\w*)*")
# "helpers." of f"helpers.{name}", "helpers.%s", "helpers.{}"
_PREFIX = re.compile(r"(\.*(?:[^\W\d]\w*(?:\.[^\W\d]\w*)*)?)\.(?:%s|\{\w*\})?")
_IMPORTS = re.compile(r"import|run_module|run_path|find_spec|load_module|resolve_name")
_SCALARS = (bool, int, float, complex, str, bytes, type(None))


class Code(NamedTuple):
  """The code of a run. `modules` and `versions` are public and hold no folder."""

  modules: dict[str, str]  # of the user's: name -> SHA-256
  versions: dict[str, str]  # of packages: name -> version, or version and SHA-256
  files: frozenset[str] = frozenset()  # where the modules lie on this machine

  def digest(self) -> bytes:
    """32 bytes that name it.

    >>> Code({}, {}).digest() == Code({}, {"jax": "0.10"}).digest()
    False
    """
    told = json.dumps([sorted(self.modules.items()), sorted(self.versions.items())])
    return hashlib.sha256(f"dpjax code {told}".encode()).digest()

  def to_json(self) -> dict[str, dict[str, str]]:
    """What result.json and a run's memory hold of it."""
    return {"modules": self.modules, "versions": self.versions}


def of(roots: Iterable[Any] = ()) -> Code:
  """The code of a run that begins at `roots`.

  Args:
    roots: names of modules that can be imported, and functions, classes or values whose code
      takes part. Those of dpjax and of installed packages add nothing but a version.

  Raises:
    UserError: a file was edited after it was imported.

  >>> of().modules, sorted(of().versions)[:3]
  ({}, ['dp_accounting', 'dpjax', 'flax'])
  """
  search = _Search()
  for root in roots:
    if isinstance(root, str):
      search.module(root, live=True)
    else:
      search.value(root)
  search.finish()
  return Code(search.modules(), _versions() | search.versions, frozenset(search.files))


def source(file: str) -> bytes:
  """The bytes of a file of code as they were when its module was first looked at.

  Raises:
    OSError: it cannot be read.
  """
  for module in list(sys.modules.values()):
    spec = getattr(module, "__spec__", None)
    if spec is not None and getattr(spec, "origin", None) == file:
      return _read(spec, file)
  return pathlib.Path(file).read_bytes()


def check_same(before: Mapping[str, Any] | None, code: Code, *, workdir: object) -> None:
  """Raises UserError, which names the module or package, unless a run was begun with this code.

  Args:
    before: `Code.to_json()` of the run in the workdir.
  """
  then = "bring that back, or choose another directory, nothing was changed"
  if before is None:
    raise UserError(
      f"workdir={workdir}: holds a run of an earlier version, which did not remember its "
      "code, so it cannot be gone on with; choose another directory, nothing was changed"
    )
  for kind, now in code.to_json().items():
    held = before.get(kind, {})
    changed = sorted(name for name in {**held, **now} if held.get(name) != now.get(name))
    if not changed:
      continue
    name = changed[0]
    if kind == "modules":
      raise UserError(
        f"module {name!r}: is not the code of the run in workdir={workdir}, which was begun "
        f"with another version of it; {then}"
      )
    was = str(held.get(name)).partition(" ")[0]
    version = str(now.get(name)).partition(" ")[0]
    told = f"{was}, not {version}" if was != version else f"another state of {was}"
    raise UserError(f"{name}: the run in workdir={workdir} was begun with {told}; {then}")


# --- which files are whose


@functools.cache
def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
  """(folders of installed packages, folders of the standard library)."""
  paths = sysconfig.get_paths()
  installed = [paths["purelib"], paths["platlib"], site.getusersitepackages()]
  installed += site.getsitepackages() if hasattr(site, "getsitepackages") else []
  standard = [paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__)]
  ends = lambda folders: tuple(
    sorted({os.path.join(os.path.realpath(each), "") for each in folders})
  )
  return ends(installed), ends(standard)


@functools.cache
def _owner(file: str) -> str:
  """Whose a file is: "user", "dpjax", "installed" or "standard"."""
  real = os.path.realpath(file)
  installed, standard = _folders()
  if real.startswith(os.path.join(str(_PACKAGE), "")):
    return "dpjax"
  parts = pathlib.PurePath(real).parts
  if real.startswith(installed) or {"site-packages", "dist-packages"} & {*parts}:
    return "installed"
  return "standard" if real.startswith(standard) else "user"


@functools.cache
def _version_of_python() -> str:
  return f"{sys.version_info.major}.{sys.version_info.minor}"


@functools.cache
def _versions() -> dict[str, str]:
  found = {name: _version(name) for name in DISTRIBUTIONS}
  found["dpjax"] = f"{found['dpjax'].partition(' ')[0]} {_DPJAX}"
  return found | {"python": _version_of_python()}


@functools.cache
def _version(name: str) -> str:
  """A version; of a package that was installed from a folder or a repository, whose version says
  little, also a digest of the hashes in its RECORD; of a checkout one of all its sources."""
  try:
    held = importlib.metadata.distribution(name)
  except importlib.metadata.PackageNotFoundError:
    return "none"
  spec = None if name == "dpjax" else _find(name)
  if spec is not None and spec.has_location and _owner(spec.origin) == "user":
    return f"{held.version} {_sha256_of_sources(os.path.dirname(spec.origin))}"
  if held.read_text("direct_url.json") is None:
    return held.version
  rows = (held.read_text("RECORD") or "").splitlines()
  # Scripts name this machine's Python, and the files of the installer its folders.
  rows = sorted(
    row for row in rows if row.partition(",")[0].endswith((".py", *_EXTENSIONS))
  )
  return f"{held.version} {hashlib.sha256(json.dumps(rows).encode()).hexdigest()}"


@functools.cache
def _brought_by(top: str) -> list[str]:
  """The installed packages that hold a module. To look through them all takes a second, so the
  one with its name comes first."""
  try:
    return [importlib.metadata.distribution(top).metadata["Name"]]
  except (importlib.metadata.PackageNotFoundError, ValueError):
    return sorted(set(_all_packages().get(top, [])))


@functools.cache
def _all_packages() -> Mapping[str, list[str]]:
  return importlib.metadata.packages_distributions()


def _sha256_of_sources(folder: str) -> str:
  """Of all Python files below a folder; 400 files take a few milliseconds."""
  paths = []
  for here, _, files in os.walk(folder):
    paths += [os.path.join(here, file) for file in files if file.endswith(".py")]
  names = {os.path.relpath(path, folder).replace(os.sep, "/"): path for path in paths}
  found = hashlib.sha256()
  for name in sorted(names):
    content = pathlib.Path(names[name]).read_bytes()
    found.update(f"{name} {hashlib.sha256(content).hexdigest()} ".encode())
  return found.hexdigest()


# When dpjax is imported, so that a later edit does not pass for what runs.
_DPJAX = _sha256_of_sources(str(_PACKAGE))


# --- sources, as they were imported

_SEEN: dict[int, tuple[Any, bytes]] = {}  # id of a spec -> (the spec, its source)


def _read(spec: Any, file: str) -> bytes:
  """The source of an imported module. A module that is reloaded has a new spec."""
  if id(spec) not in _SEEN:
    content = _bytes(spec, file)
    _check_compiled(spec, file, content)
    _SEEN[id(spec)] = (spec, content)
  return _SEEN[id(spec)][1]


def _bytes(spec: Any, file: str) -> bytes:
  read = getattr(spec.loader, "get_data", None)  # also of an archive
  return pathlib.Path(file).read_bytes() if read is None else read(file)


def _check_compiled(spec: Any, file: str, content: bytes) -> None:
  """Raises UserError where the compiled file is of another source than the one that lies there.

  An import brings the compiled file up to date, so then the source was edited since; or an edit
  kept size and second of the file, and Python runs what was compiled before it.
  """
  if type(spec.loader) is not importlib.machinery.SourceFileLoader:
    return
  if sys.dont_write_bytecode:  # nobody brings it up to date
    return
  try:
    cached = pathlib.Path(importlib.util.cache_from_source(file))
    held = cached.read_bytes()
    if held[:4] != importlib.util.MAGIC_NUMBER or not os.access(cached.parent, os.W_OK):
      return
    compiled = _code_name(marshal.loads(held[16:]))
    same = compiled == _code_name(compile(content, file, "exec", dont_inherit=True))
  except (OSError, NotImplementedError, ValueError, EOFError, TypeError, SyntaxError):
    return
  if not same:
    raise UserError(
      f"module {spec.name!r}: its file was edited after it was imported or compiled; touch it "
      "and start Python again (a notebook: its kernel), so that what runs is what it says"
    )


# --- byte code


def _constant(value: Any) -> Any:
  if isinstance(value, types.CodeType):
    return _code_name(value)
  if isinstance(value, tuple):
    return ["tuple", *map(_constant, value)]
  if isinstance(value, frozenset):  # whose order changes with each process
    return ["frozenset", *sorted(map(repr, value))]
  return [type(value).__name__, repr(value)]


def _code_name(code: types.CodeType) -> str:
  """Names byte code; without its file and its lines."""
  told = [
    code.co_qualname,
    code.co_code.hex(),
    code.co_argcount,
    code.co_posonlyargcount,
    code.co_kwonlyargcount,
    code.co_flags,
    code.co_names,
    code.co_varnames,
    code.co_freevars,
    code.co_cellvars,
    code.co_exceptiontable.hex(),
    [_constant(value) for value in code.co_consts],
  ]
  return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
  yield code
  for value in code.co_consts:
    if isinstance(value, types.CodeType):
      yield from _codes_in(value)


# --- what a source names


class _Names(NamedTuple):
  """What one source imports, by what its text says."""

  imports: frozenset[str]  # absolute names, or what may be some
  packages: frozenset[str]  # of which any child may be imported
  stars: frozenset[str]  # of which all is imported
  files: frozenset[str]  # names that end with .py
  maybe: frozenset[str]  # strings that could name a module
  literals: dict[str, Any]  # set once, to a number or a string
  exported: tuple[str, ...]  # strings of __all__
  top: frozenset[str]  # imports outside of functions and branches


def _absolute(name: str, package: str) -> str | None:
  if not name.startswith("."):
    return name
  try:
    return importlib.util.resolve_name(name, package) if package else None
  except ImportError:
    return None


@functools.lru_cache(maxsize=4096)
def _names_in(content: bytes, package: str) -> _Names:
  try:
    tree = ast.parse(content)
  except (SyntaxError, ValueError):
    return _Names(*[frozenset()] * 5, {}, (), frozenset())
  imports, packages, stars, maybe, aliases = set(), set(), set(), set(), {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        imports.add(alias.name)
        bound = alias.asname or alias.name.partition(".")[0]
        aliases[bound] = alias.name if alias.asname else bound
    elif isinstance(node, ast.ImportFrom):
      home = _absolute("." * node.level + (node.module or ""), package)
      if home is None:
        continue
      imports.add(home)
      for alias in node.names:
        if alias.name == "*":
          stars.add(home)
        else:
          imports.add(f"{home}.{alias.name}")
          aliases[alias.asname or alias.name] = f"{home}.{alias.name}"
    elif isinstance(node, ast.Call):
      called = node.func
      name = getattr(called, "attr", getattr(called, "id", ""))
      if _IMPORTS.search(str(name)):
        _named_by_call(node, package, imports, packages)
      elif name in ("iter_modules", "walk_packages"):
        packages.add(package)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      if _DOTTED.fullmatch(node.value):
        maybe.add(node.value)
  maybe |= _chains(tree, aliases)
  files = {
    node.value
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant)
    and isinstance(node.value, str)
    and node.value.endswith(".py")
    and len(node.value) < 500
    and "\n" not in node.value
  }
  top = {
    name
    for node in tree.body
    if isinstance(node, (ast.Import, ast.ImportFrom))
    for name in _of_statement(node, package)
  }
  return _Names(
    frozenset(imports),
    frozenset(packages),
    frozenset(stars),
    frozenset(files),
    frozenset(maybe),
    _literals(tree),
    _exported(tree),
    frozenset(top),
  )


def _of_statement(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
  if isinstance(node, ast.Import):
    yield from (alias.name for alias in node.names)
    return
  home = _absolute("." * node.level + (node.module or ""), package)
  if home is not None:
    yield home
    yield from (f"{home}.{alias.name}" for alias in node.names)


def _named_by_call(
  node: ast.Call, package: str, imports: set[str], packages: set[str]
) -> None:
  """What a call such as `importlib.import_module(f"helpers.{name}")` may import."""
  given = [*node.args, *(keyword.value for keyword in node.keywords)]
  texts = [
    each.value
    for argument in given
    for each in ast.walk(argument)
    if isinstance(each, ast.Constant) and isinstance(each.value, str)
  ]
  for text in texts:
    prefix = _PREFIX.fullmatch(text)
    if prefix is not None:
      home = prefix.group(1)
      # "." of f"{__name__}.{name}" or of "." + name: any module beside this one
      inside = _absolute(home, package) if home.strip(".") else package
      packages.update([] if not inside else [inside])
    elif _NAME.fullmatch(text):
      home = _absolute(text, package)
      imports.update([] if home is None else [home])
  if not texts and package:
    packages.add(package)


def _chains(tree: ast.AST, aliases: Mapping[str, str]) -> set[str]:
  """`pkg.part` of `pkg.part.function`, where `pkg` was imported."""
  found = set()
  for node in ast.walk(tree):
    parts: list[str] = []
    at: ast.AST = node
    while isinstance(at, ast.Attribute):
      parts.append(at.attr)
      at = at.value
    if parts and isinstance(at, ast.Name) and at.id in aliases:
      name = aliases[at.id]
      for part in reversed(parts):
        name = f"{name}.{part}"
        found.add(name)
  return found


def _literals(tree: ast.Module) -> dict[str, Any]:
  """Names that a module binds once and for all, to a number, a string or a tuple of those."""
  bound: dict[str, int] = {}
  for node in ast.walk(tree):
    names: Iterable[str] = ()
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
      names = (node.id,)
    elif isinstance(node, (ast.Global, ast.Nonlocal)):
      names = (*node.names, *node.names)  # somebody else sets it, too
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
      names = (node.name,)
    elif isinstance(node, ast.alias):
      names = (node.asname or node.name.partition(".")[0],)
    for name in names:
      bound[name] = bound.get(name, 0) + 1
  found = {}
  for node in tree.body:
    target: ast.AST | None = None
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
      target = node.targets[0]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
      target = node.target
    if not isinstance(target, ast.Name) or bound[target.id] != 1:
      continue
    try:
      value = ast.literal_eval(node.value)  # type: ignore[union-attr, arg-type]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
      continue
    if _is_plain(value):
      found[target.id] = value
  return found


def _is_plain(value: Any) -> bool:
  if isinstance(value, tuple):
    return all(map(_is_plain, value))
  return type(value) in _SCALARS


def _exported(tree: ast.Module) -> tuple[str, ...]:
  for node in tree.body:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if any(isinstance(each, ast.Name) and each.id == "__all__" for each in targets):
      return tuple(
        each.value
        for each in ast.walk(node.value)  # type: ignore[union-attr]
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
      )
  return ()


# --- the search


def _find(name: str) -> Any:
  """The spec of a module that is imported, or would be; nothing is run. None: there is none."""
  module = sys.modules.get(name)
  spec = getattr(module, "__spec__", None)
  if spec is not None:
    return spec
  parent, _, _ = name.rpartition(".")
  path = None
  if parent:
    above = _find(parent)
    path = getattr(above, "submodule_search_locations", None)
    if path is None:
      return None
  for finder in sys.meta_path:
    look = getattr(finder, "find_spec", None)
    try:
      spec = None if look is None else look(name, path, None)
    except Exception:  # a finder of others
      spec = None
    if spec is not None:
      return spec
  return None


class _Search:
  """One walk over the code of a run."""

  def __init__(self) -> None:
    self.files: set[str] = set()
    self.versions: dict[str, str] = {}
    self._found: set[tuple[str, str]] = set()  # (module, SHA-256)
    self._static: set[str] = set()
    self._live: set[int] = set()
    self._values: dict[int, Any] = {}  # held, so that no other value gets its id
    self._specs: dict[str, Any] = {}
    self._known_codes: dict[str, frozenset[str]] = {}  # file -> names of its byte code
    self._todo: list[Callable[[], None]] = []

  def modules(self) -> dict[str, str]:
    """Name -> SHA-256; of several files with one name, of both."""
    found: dict[str, str] = {}
    for name, digest in sorted(self._found):
      held = found.get(name)
      joined = (
        digest if held is None else hashlib.sha256(f"{held} {digest}".encode()).hexdigest()
      )
      found[name] = joined
    return found

  def finish(self) -> None:
    while self._todo:
      self._todo.pop()()

  def _spec(self, name: str) -> Any:
    if name not in self._specs:
      self._specs[name] = _find(name)
    return self._specs[name]

  # What a module's source says.

  def module(self, name: str, *, live: bool = False, users_only: bool = False) -> None:
    """A module by name, the packages that hold it, and what its source names.

    Args:
      live: it has been imported by this run, so what it holds is part of it.
      users_only: nothing but a guess, which may not add a package's version.
    """
    top = name.partition(".")[0]
    if not self._is_users(top):
      self._installed(top, users_only=users_only)
      return
    parent = name.rpartition(".")[0]
    if parent:
      self.module(parent, live=live, users_only=users_only)
    if live and name in sys.modules:
      self._todo.append(functools.partial(self.namespace, sys.modules[name]))
    if name in self._static:
      return
    spec = self._spec(name)
    if spec is None:
      main = sys.modules.get(name) if name == "__main__" else None
      file = getattr(main, "__file__", None)
      if file is not None and _owner(file) == "user":
        self._static.add(name)
        self.file(name, file, "")
      return
    file = spec.origin if spec.has_location else None
    if file is None:
      return
    if _owner(file) != "user" and not self._is_unversioned(top):
      return
    self._static.add(name)
    is_package = spec.submodule_search_locations is not None
    self.file(name, file, name if is_package else parent, spec)

  def _installed(self, top: str, *, users_only: bool) -> None:
    """Adds the version of the package that brought a module."""
    spec = self._spec(top)
    if users_only or top in DISTRIBUTIONS or spec is None:
      return
    places = (
      [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    )
    if any(_owner(place) == "installed" for place in places):
      self.versions |= {each: _version(each) for each in _brought_by(top)}

  def _is_unversioned(self, top: str) -> bool:
    """Whether a module in site-packages belongs to no package, so that nothing has a version."""
    spec = self._spec(top)
    file = spec.origin if spec is not None and spec.has_location else None
    return file is not None and _owner(file) == "installed" and not _brought_by(top)

  def file(self, name: str, file: str, package: str, spec: Any = None) -> None:
    """A file of the user, whose source is followed unless it is a compiled one."""
    real = os.path.realpath(file)
    if (name, real) in self._done_files:
      return
    self._done_files.add((name, real))
    self.files.add(real)
    try:
      content = self._content(name, file, spec)
    except OSError:
      return  # gone: what it left in memory is looked at by `namespace`
    self._found.add((name, hashlib.sha256(content).hexdigest()))
    if real.endswith((*_EXTENSIONS, ".pyc")):
      return
    named = _names_in(content, package)
    self._todo.append(functools.partial(self._follow, name, named, real))

  @functools.cached_property
  def _done_files(self) -> set[tuple[str, str]]:
    return set()

  def _content(self, name: str, file: str, spec: Any) -> bytes:
    module = sys.modules.get(name)
    imported = spec is not None and getattr(module, "__spec__", None) is spec
    if imported or (spec is not None and id(spec) in _SEEN):
      return _read(spec, file)
    return pathlib.Path(file).read_bytes() if spec is None else _bytes(spec, file)

  def _follow(self, name: str, named: _Names, file: str) -> None:
    for other in named.imports:
      self.module(other, live=other in named.top)
    for home in named.stars:
      spec = self._spec(home)
      origin = getattr(spec, "origin", None)
      if origin is None or _owner(origin) != "user" or not origin.endswith(".py"):
        continue
      inside = _names_in(self._content(home, origin, spec), home)
      for part in inside.exported:
        self.module(f"{home}.{part}")
    for home in named.packages:
      for child in self._children(home):
        self.module(child, users_only=True)
    for guess in named.maybe:
      if self._is_users(guess.partition(".")[0]):
        self.module(guess, users_only=True)
    for text in named.files:
      for folder in (os.path.dirname(file), os.getcwd()):
        path = os.path.join(folder, text)
        if os.path.isfile(path) and _owner(path) == "user":
          self.file(os.path.basename(text), path, "")

  def _is_users(self, top: str) -> bool:
    """Whether a first name is that of a file or folder of the user."""
    if top in DISTRIBUTIONS:
      return False
    spec = self._spec(top)
    if spec is None:
      return top == "__main__"
    places = (
      [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    )
    return any(_owner(place) == "user" for place in places) or self._is_unversioned(top)

  def _children(self, package: str) -> list[str]:
    if not self._is_users(package.partition(".")[0]):
      return []
    locations = getattr(self._spec(package), "submodule_search_locations", None) or ()
    found = set()
    for location in locations:
      folder = pathlib.Path(location)
      for path in folder.iterdir() if folder.is_dir() else ():
        is_module = path.suffix == ".py" or path.name.endswith(_EXTENSIONS)
        if is_module or (path / "__init__.py").is_file():
          found.add(f"{package}.{path.name.partition('.')[0]}")
    return sorted(found - {f"{package}.__init__"})

  # What a module, a function or a value is made of.

  def namespace(self, module: types.ModuleType) -> None:
    """What an imported module of the user holds, and what in it is not as its source says."""
    if id(module) in self._live:
      return
    self._live.add(id(module))
    file, name = getattr(module, "__file__", None), module.__name__
    if file is None or _owner(file) != "user":
      return
    package = getattr(module, "__package__", None) or ""
    self.file(name, file, package, getattr(module, "__spec__", None))
    held = {**vars(module)}
    for key, value in held.items():
      # A package has as attributes also what others imported of it; see `_follow`.
      is_child = isinstance(value, types.ModuleType) and value.__name__ == f"{name}.{key}"
      if not (is_child or key.startswith("__")):
        self.value(value)
    if not file.endswith(".py"):
      return
    with contextlib.suppress(OSError):
      content = self._content(name, file, getattr(module, "__spec__", None))
      for key, value in _names_in(content, package).literals.items():
        if key in held and not key.startswith("__"):
          self._compare(f"{name}.{key}", value, held[key])

  def _compare(self, name: str, value: Any, live: Any) -> None:
    if live is value or (type(live) is type(value) and repr(live) == repr(value)):
      return
    told = repr(live) if _is_plain(live) else f"of type {type(live).__name__}"
    self._found.add((name, hashlib.sha256(told.encode()).hexdigest()))

  def value(self, value: Any) -> None:
    """Anything that could hold a function of the user."""
    if type(value) in _SCALARS or id(value) in self._values:
      return
    self._values[id(value)] = value
    self._todo.append(functools.partial(self._look, value))

  def _look(self, value: Any) -> None:
    if isinstance(value, types.ModuleType):
      file = getattr(value, "__file__", None)
      if file is not None and _owner(file) == "user":
        self.namespace(value)
      return
    if isinstance(value, type):
      return self._class(value)
    if isinstance(value, types.FunctionType):
      return self._function(value)
    if isinstance(value, types.MethodType):
      self.value(value.__func__)
      return self.value(value.__self__)
    if isinstance(value, functools.partial):
      for part in (value.func, *value.args, *value.keywords.values()):
        self.value(part)
      return
    if isinstance(value, (staticmethod, classmethod)):
      return self.value(value.__func__)
    if isinstance(value, property):
      for part in (value.fget, value.fset, value.fdel):
        self.value(part)
      return
    if isinstance(value, Mapping):
      for part in [*_items(value)]:
        self.value(part)
      return
    if isinstance(value, (tuple, list, set, frozenset)):
      for part in list(value):
        self.value(part)
      return
    self._instance(value)

  def _instance(self, value: Any) -> None:
    """Of an own class all that it holds; of another one what it wraps, and the fields of a
    dataclass, such as a linen module's."""
    self.value(type(value))
    with contextlib.suppress(Exception):  # an object of others may refuse any look
      self.value(vars(value).get("__wrapped__", getattr(value, "__wrapped__", None)))
      home = sys.modules.get(type(value).__module__)
      own = _owner(getattr(home, "__file__", None) or os.__file__) == "user"
      if own or dataclasses.is_dataclass(value) or callable(value):
        for part in list(vars(value).values()):
          self.value(part)

  def _class(self, value: type) -> None:
    home = sys.modules.get(value.__module__)
    file = getattr(home, "__file__", None)
    methods = [
      part for part in vars(value).values() if isinstance(part, types.FunctionType)
    ]
    files = {file, *(part.__code__.co_filename for part in methods)} - {None}
    if not any(_is_users_code(str(each)) for each in files):
      return
    if home is not None and file is not None:
      self.namespace(home)
    for base in value.__mro__[1:]:
      self.value(base)
    for part in list(vars(value).values()):
      self.value(part)

  def _function(self, value: types.FunctionType) -> None:
    code = value.__code__
    made_by = str(value.__globals__.get("__name__"))
    if "__create_fn__" in code.co_qualname or made_by.startswith("namedtuple_"):
      return  # of a dataclass or a named tuple: its class says all of it
    parts = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for cell in value.__closure__ or ():
      with contextlib.suppress(ValueError):  # an empty cell
        parts.append(cell.cell_contents)
    parts += vars(value).values()
    for part in parts:
      self.value(part)
    if not _is_users_code(code.co_filename):
      # Made by a package for a user's class or function, or of no file at all.
      if not code.co_filename.startswith("<"):
        return
      home = value.__globals__.get("__file__")
      if home is not None and _owner(home) != "user":
        return
    name = str(value.__globals__.get("__name__", value.__module__))
    home = sys.modules.get(name)
    if home is not None and vars(home) is value.__globals__:
      self.namespace(home)
    file = getattr(home, "__file__", None)
    if file is None or vars(home) is not value.__globals__:
      file = code.co_filename if os.path.isfile(code.co_filename) else None
      if file is not None:
        spec = value.__globals__.get("__spec__")
        package = str(value.__globals__.get("__package__") or "")
        self.file(name, file, package, spec)
    same_file = file is not None and _same(file, code.co_filename)
    if not same_file and os.path.isfile(code.co_filename):
      self.file(name, code.co_filename, "")
      file = code.co_filename
    if file is None or not self._is_in_source(name, file, code, value.__globals__):
      self._found.add((f"{name}:{code.co_qualname}", _code_name(code)))
      # No source says what it imports, so look at all that it names.
      named = {each for part in _codes_in(code) for each in part.co_names}
      for each in sorted(named & {*value.__globals__}):
        self.value(value.__globals__[each])
      for each in sorted(named):
        if self._is_users(each):
          self.module(each, users_only=True)

  def _is_in_source(
    self, name: str, file: str, code: types.CodeType, where: Mapping[str, Any]
  ) -> bool:
    """Whether byte code is that of the file's source; unknown where others compiled it."""
    spec = where.get("__spec__")
    loader = getattr(spec, "loader", None)
    if loader is not None and type(loader) is not importlib.machinery.SourceFileLoader:
      return _same(file, code.co_filename)
    if file not in self._known_codes:
      try:
        content = self._content(name, file, spec)
        whole = compile(content, file, "exec", dont_inherit=True)
      except (OSError, SyntaxError, ValueError):
        return False
      self._known_codes[file] = frozenset(map(_code_name, _codes_in(whole)))
    return _code_name(code) in self._known_codes[file]


def _items(value: Mapping[Any, Any]) -> Iterator[Any]:
  with contextlib.suppress(Exception):  # a mapping of others may refuse
    for key in list(value):
      yield key
      yield value[key]


def _is_users_code(file: str) -> bool:
  return not file.startswith("<") and _owner(file) == "user"


def _same(file: str, other: str) -> bool:
  return os.path.realpath(file) == os.path.realpath(other)


# --- what runs


@contextlib.contextmanager
def watched(code: Code, again: Callable[[], Code]) -> Iterator[None]:
  """Refuses the block, when it ends, where it ran a function of a file that is not in `code`, or
  where code was edited between the first look and its import.

  Args:
    code: of the run. again: looks a second time.

  Raises:
    UserError: names the file, and what would make it known.
  """
  if not code.modules:  # nothing of a user's own takes part
    yield
    return
  called: set[str] = set()
  with _calls(called):
    yield
  real = {os.path.realpath(file) for file in called if _is_users_code(file)}
  unknown = sorted(real - code.files)
  if unknown:
    raise UserError(
      f"{os.path.basename(unknown[0])}: the run calls a function of this file, but no import "
      "in its other files names it, so its noise would not change with it; import it by its "
      "name where it is used"
    )
  now = again().modules
  changed = sorted(name for name in code.modules if now.get(name) != code.modules[name])
  if changed:
    raise UserError(
      f"module {changed[0]!r}: was edited or exchanged while the run was built; run the same "
      "command again"
    )


@contextlib.contextmanager
def _calls(files: set[str]) -> Iterator[None]:
  """Collects the files of all functions that this thread calls."""
  monitoring = getattr(sys, "monitoring", None)
  if monitoring is None:
    before = sys.getprofile()
    if before is not None:  # somebody measures; a run is no reason to end that
      yield
      return

    def told(frame: Any, event: str, argument: Any) -> None:
      if event == "call":
        files.add(frame.f_code.co_filename)

    sys.setprofile(told)
    try:
      yield
    finally:
      sys.setprofile(before)
    return
  me, tool = threading.get_ident(), 4
  if monitoring.get_tool(tool) is not None:
    yield
    return

  def started(code: types.CodeType, offset: int) -> Any:
    if threading.get_ident() != me:
      return None
    files.add(code.co_filename)
    return monitoring.DISABLE

  monitoring.use_tool_id(tool, "dpjax")
  monitoring.register_callback(tool, monitoring.events.PY_START, started)
  monitoring.set_events(tool, monitoring.events.PY_START)
  monitoring.restart_events()
  try:
    yield
  finally:
    monitoring.set_events(tool, 0)
    monitoring.register_callback(tool, monitoring.events.PY_START, None)
    monitoring.free_tool_id(tool)
