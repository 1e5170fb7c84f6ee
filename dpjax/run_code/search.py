"""The search for a run's code, along the names in its sources and the parts of its values."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dpjax.run_code import loaded, packages, patched, sources, values
from dpjax.run_code.named import Names, is_plain, names_in
from dpjax.run_code.packages import EXTENSIONS, is_users_code, owner
from dpjax.run_code.record import Code


def of(roots: Iterable[Any] = ()) -> Code:
  """Returns the code of a run that begins at `roots`.

  Args:
    roots: names of modules that can be imported; import paths (`package.module:name`) of functions
      that may have read a data set (`loaded.reading`); functions, classes or values whose code
      is part of the run. Roots of dpjax and of installed packages add nothing but a version.

  Raises:
    UserError: a file was edited after it was imported or loaded.

  >>> of().modules, sorted(of().versions)[:3]
  ({}, ['dp_accounting', 'dpjax', 'flax'])
  """
  search = _Search()
  as_of = loaded.number_of_changes()
  for root in roots:
    if isinstance(root, str) and ":" in root:
      search.paths.add(root)
    elif isinstance(root, str):
      search.module(root, live=True)
    else:
      search.value(root)
  for config_file in loaded.config_files():
    search.config_file(config_file)
  for value in patched.replaced():
    search.value(value)
  search.drain()
  # A loaded file may have loaded other files, so the search repeats until no file is new.
  while search.loads():
    search.drain()
  versions = {**packages.versions(), **packages.settings(), **search.versions}
  return Code(
    search.modules(),
    versions,
    frozenset(search.files),
    search.inputs,
    frozenset(search.read),
    as_of,
  )


# Name of the config file in the list of modules.
_CONFIG_FILE = "config file"


class _Search:
  """Search for a run's code. Pending items wait in `todo`, so a long chain needs no recursion."""

  def __init__(self) -> None:
    self.files: set[str] = set()
    self.paths: set[str] = set()
    self.versions: dict[str, str] = {}
    self.todo: list[Callable[[], None]] = []
    self.read: set[str] = set()
    self._digests: set[tuple[str, str]] = set()  # (module, SHA-256)
    self._inputs: set[tuple[str, str]] = set()  # (what was read or computed, SHA-256)
    self._configs: set[str] = set()  # the config file, and files that it imports
    self._loaded: set[str] = set()  # files that were looked at by `loads`
    self._named: set[str] = set()  # modules whose source was looked at
    self._read: set[tuple[str, str]] = set()  # (module, file)
    self._live: set[int] = set()  # ids of modules whose values were looked at
    self._values: dict[int, Any] = {}  # id -> value, kept so that the id stays its own
    self._specs: dict[str, Any] = {}
    self._known_codes: dict[str, frozenset[str]] = {}  # file -> digests of its byte code

  def modules(self) -> dict[str, str]:
    return _named(self._digests)

  @property
  def inputs(self) -> dict[str, str]:
    return _named(self._inputs)

  def drain(self) -> None:
    while self.todo:
      self.todo.pop()()

  # --- loads

  def loads(self) -> bool:
    """Adds files that were loaded in ways that no source shows. Returns whether a file was new.

    It is called after the sources were followed, so that a file that they name keeps the name of
    its module.
    """
    loads = [load for file in sorted(self.files) for load in loaded.by(file)]
    # Code that only config files loaded is left out here: `config_file` decides about it.
    of_configs = {load.file for file in self._configs for load in loaded.by(file)}
    others = {load.file for file in self.files - self._configs for load in loaded.by(file)}
    loads = [
      load
      for load in loads
      if not load.is_code or load.file not in of_configs or load.file in others
    ]
    for path in sorted(self.paths):
      held = loaded.by(loaded.key_of(path))
      loads += [load for load in held if load.is_code]
      # A data set may have many files, so all its files share one name.
      beside = [load for load in held if not load.is_code and load.sha256()]
      self.read |= {os.path.realpath(load.file) for load in beside}
      named = ((f"a file that {path!r} reads", load.sha256()) for load in beside)
      self._inputs.update(named)
    new = [load for load in loads if os.path.realpath(load.file) not in self._loaded]
    for load in new:
      real = os.path.realpath(load.file)
      self._loaded.add(real)
      name = os.path.basename(load.file)
      if load.is_code and real not in self.files:
        self._loaded_code(name, load)
      elif not load.is_code and load.sha256():
        self.read.add(real)
        self._inputs.add((f"file {name!r}", load.sha256()))
    return bool(new)

  def config_file(self, file: str) -> None:
    """Adds the config file and the user's files that it imports, each if it modifies its imports.

    Examples are `helper.SCALE = 3` and `jax.config.update(...)`. Files that do not modify imports
    affect a run only through the values in the config, which has a digest of its own.
    """
    todo = [(_CONFIG_FILE, file, "")]
    seen = set()
    while todo:
      name, path, package = todo.pop()
      real = os.path.realpath(path)
      if real in seen or owner(real) != "user" or not os.path.isfile(real):
        continue
      seen.add(real)
      self._configs.add(real)
      named = names_in(sources.source(path), package)
      if named.acts:
        self.files.add(real)
        self._digests.add((name, hashlib.sha256(sources.source(path)).hexdigest()))
      for each in sorted(named.imports):
        spec = self._spec(each) if self._is_users(each.partition(".")[0]) else None
        if spec is not None and spec.has_location:
          is_package = spec.submodule_search_locations is not None
          home = each if is_package else each.rpartition(".")[0]
          todo.append((each, spec.origin, home))
      loads = [load.file for load in loaded.by(real) if load.is_code]
      todo += [(os.path.basename(each), each, "") for each in loads]

  def _loaded_code(self, name: str, load: loaded.LoadedFile) -> None:
    digest = load.sha256()
    if not digest:
      return
    real = os.path.realpath(load.file)
    self.files.add(real)
    # The digest is named after the file, because any part of the process may have imported the file
    # under another module name.
    self._digests.add((name, digest))
    if real.endswith(".py"):
      content = pathlib.Path(real).read_bytes()
      self.todo.append(functools.partial(self._follow, names_in(content, ""), real))
    for module in list(sys.modules.values()) if load.is_imported else ():
      file = getattr(module, "__file__", None)
      if isinstance(file, str) and _is_same(file, real):
        self._read.add((module.__name__, real))
        self.namespace(module)

  def _spec(self, name: str) -> Any:
    if name not in self._specs:
      self._specs[name] = packages.find(name)
    return self._specs[name]

  # --- names in sources

  def module(self, name: str, *, live: bool = False, guess: bool = False) -> None:
    """Adds a module by name, the packages that contain it, and the names in its source.

    Args:
      live: whether this run has imported the module. If so, its values are part of the run.
      guess: whether the name may belong to no module. If so, no version of a package is added.
    """
    top = name.partition(".")[0]
    if not self._is_users(top):
      self._installed(top, guess=guess)
      return
    parent = name.rpartition(".")[0]
    if parent:
      self.module(parent, live=live, guess=guess)
    if live and name in sys.modules:
      self.todo.append(functools.partial(self.namespace, sys.modules[name]))
    spec = self._spec(name)
    if name in self._named or spec is None or not spec.has_location:
      return
    if owner(spec.origin) != "user" and not self._is_unversioned(top):
      return
    self._named.add(name)
    is_package = spec.submodule_search_locations is not None
    self.file(name, spec.origin, name if is_package else parent, spec)

  def _is_users(self, top: str) -> bool:
    """Returns whether a top-level module is a user's file or folder, or has no version."""
    if top in packages.DISTRIBUTIONS:
      return False
    spec = self._spec(top)
    if spec is None:
      return top == "__main__"
    is_users = any(owner(place) == "user" for place in packages.places(spec))
    return is_users or self._is_unversioned(top)

  def _is_unversioned(self, top: str) -> bool:
    """Returns whether a module in site-packages belongs to no package, and so has no version."""
    spec = self._spec(top)
    file = spec.origin if spec is not None and spec.has_location else None
    is_installed = file is not None and owner(file) == "installed"
    return is_installed and not packages.brought_by(top)

  def _installed(self, top: str, *, guess: bool) -> None:
    """Adds the version of the installed package that contains a top-level module."""
    spec = self._spec(top)
    if guess or top in packages.DISTRIBUTIONS or spec is None:
      return
    if any(owner(place) == "installed" for place in packages.places(spec)):
      self.versions |= {name: packages.version(name) for name in packages.brought_by(top)}

  def file(self, name: str, file: str, package: str, spec: Any = None) -> None:
    """Adds a user's file. The names in its source are followed unless the file is compiled."""
    real = os.path.realpath(file)
    if (name, real) in self._read:
      return
    self._read.add((name, real))
    self.files.add(real)
    try:
      content = self._content(name, file, spec)
    except OSError:
      # The file is gone. `namespace` inspects the values that it left in memory.
      return
    self._digests.add((name, hashlib.sha256(content).hexdigest()))
    if not real.endswith((*EXTENSIONS, ".pyc")):
      self.todo.append(functools.partial(self._follow, names_in(content, package), real))

  def _content(self, name: str, file: str, spec: Any) -> bytes:
    """Returns a source as it was imported. For a module not yet imported, returns the
    file's content."""
    module = sys.modules.get(name)
    is_imported = getattr(module, "__spec__", None) is spec or id(spec) in sources.SEEN
    if spec is not None and is_imported:
      return sources.read(spec, file)
    return pathlib.Path(file).read_bytes() if spec is None else sources.bytes_of(spec, file)

  def _follow(self, named: Names, file: str) -> None:
    for name in named.imports:
      self.module(name, live=name in named.top)
    for home in named.stars:
      for part in self._exported(home):
        self.module(f"{home}.{part}")
    for name in named.variables & {*os.environ}:
      if values.is_option(os.environ[name]) and not packages.is_of_machine(name):
        self._computed(name, os.environ[name], kind="environment variable")
    guesses = [child for home in named.packages for child in self._children(home)]
    for name in (*guesses, *named.maybe):
      self.module(name, guess=True)
    self._beside(named.files, file)

  def _beside(self, texts: Iterable[str], file: str) -> None:
    """Adds the user's code files that a source names, beside it or in the current folder."""
    for text in texts:
      for folder in (os.path.dirname(file), os.getcwd()):
        path = os.path.join(folder, text)
        if os.path.isfile(path) and owner(path) == "user":
          self.file(os.path.basename(text), path, "")

  def _exported(self, home: str) -> list[str]:
    """Returns the names in `__all__` of a user's module `home`, which `import *` may import."""
    spec = self._spec(home)
    origin = str(getattr(spec, "origin", None))
    if not origin.endswith(".py") or owner(origin) != "user":
      return []
    return names_in(self._content(home, origin, spec), home).exported

  def _children(self, package: str) -> set[str]:
    if not package or not self._is_users(package.partition(".")[0]):
      return set()
    children = set()
    for location in getattr(self._spec(package), "submodule_search_locations", None) or ():
      folder = pathlib.Path(location)
      for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.endswith((".py", *EXTENSIONS)) or (path / "__init__.py").is_file():
          children.add(f"{package}.{path.name.partition('.')[0]}")
    return children - {f"{package}.__init__"}

  # --- parts of values

  def namespace(self, module: types.ModuleType) -> None:
    """Adds a user's imported module: its file, the code in its values, and changed values."""
    file = getattr(module, "__file__", None)
    if id(module) in self._live or file is None or owner(file) != "user":
      return
    self._live.add(id(module))
    name = module.__name__
    spec = getattr(module, "__spec__", None)
    package = getattr(module, "__package__", None) or ""
    self.file(name, file, package, spec)
    held = {key: value for key, value in vars(module).items() if not key.startswith("__")}
    for key, value in held.items():
      # A package also has attributes for submodules that other code imported, so submodules are
      # skipped here. `_follow` adds the submodules that this run imports.
      is_child = isinstance(value, types.ModuleType) and value.__name__ == f"{name}.{key}"
      if not is_child:
        self.value(value)
    named = Names()
    # The file may have been deleted after its import.
    with contextlib.suppress(OSError):
      if file.endswith(".py"):
        named = names_in(self._content(name, file, spec), package)
    self._held(name, held, named)

  def _held(self, name: str, held: Mapping[str, Any], named: Names) -> None:
    """Adds the values of a module that differ from its source, or that the source computes."""
    for key in {*named.literals} & {*held}:
      if repr(held[key]) != repr(named.literals[key]):
        self._differs(f"{name}.{key}", held[key])
    for key in {*named.tables} & {*held}:
      if held[key] != named.tables[key]:
        self._computed(f"{name}.{key}", held[key])
    for key in {*held} - {*named.literals} - {*named.tables} - named.changing:
      is_table = key in named.displays and values.is_table(held[key])
      is_value = values.is_number_or_array(held[key]) or values.is_settings(held[key])
      if is_table or is_value:
        self._computed(f"{name}.{key}", held[key])

  def _computed(self, name: str, live: Any, *, kind: str = "value") -> None:
    """Adds a value to the secret inputs: no source shows it, and it may depend on private data."""
    self._inputs.add((f"{kind} {name!r}", values.sha256(live)))

  def _differs(self, name: str, live: Any) -> None:
    text = repr(live) if is_plain(live) else f"of type {type(live).__name__}"
    self._digests.add((name, hashlib.sha256(text.encode()).hexdigest()))

  def value(self, value: Any) -> None:
    """Queues a value for the search, unless it is plain or was queued before."""
    if is_plain(value) or id(value) in self._values:
      return
    self._values[id(value)] = value
    self.todo.append(functools.partial(self._look, value))

  def _look(self, value: Any) -> None:
    if isinstance(value, types.ModuleType):
      self.namespace(value)
    elif isinstance(value, type):
      self._class(value)
    elif isinstance(value, types.FunctionType):
      self._function(value)
    else:
      for part in _parts(value):
        self.value(part)

  def _class(self, value: type) -> None:
    home = sys.modules.get(value.__module__)
    methods = [
      part for part in vars(value).values() if isinstance(part, types.FunctionType)
    ]
    files = {method.__code__.co_filename for method in methods}
    files.add(str(getattr(home, "__file__", None)))
    if not any(map(is_users_code, files)):
      return
    if home is not None:
      self.namespace(home)
    for part in (*value.__mro__[1:], *list(vars(value).values())):
      self.value(part)
    if home is None or not is_users_code(str(getattr(home, "__file__", None) or "<none>")):
      return
    for key, held in list(vars(value).items()):
      is_shown = held is not None and not key.startswith("_")
      if is_shown and values.is_option(held):
        self._computed(f"{value.__module__}.{value.__qualname__}.{key}", held)

  def _function(self, value: types.FunctionType) -> None:
    code = value.__code__
    space = value.__globals__
    if "__create_fn__" in code.co_qualname or "namedtuple_" in str(space.get("__name__")):
      # The class of a dataclass or a named tuple covers its generated methods.
      return
    for part in _held_by(value):
      self.value(part)
    in_file = not code.co_filename.startswith("<")
    if owner(code.co_filename if in_file else str(space.get("__file__", ""))) != "user":
      # The version of the package covers the function.
      return
    name = str(space.get("__name__", value.__module__))
    defaults = (value.__defaults__, value.__kwdefaults__)
    if any(defaults) and values.is_option(defaults):
      self._computed(f"{name}.{code.co_qualname}, defaults", defaults)
    home = sys.modules.get(name)
    file = None
    if home is not None and vars(home) is space:
      self.namespace(home)
      file = getattr(home, "__file__", None)
    if os.path.isfile(code.co_filename) and not _is_same(file, code.co_filename):
      # The code is from another file than its module: the module is not registered, or the code was
      # compiled by a call of `compile`.
      file = code.co_filename
      is_its_own = _is_same(space.get("__file__"), file)
      spec = space.get("__spec__") if is_its_own else None
      self.file(name, file, str(space.get("__package__") or ""), spec)
    if file is None or not self._is_in_source(name, file, code, space):
      self._without_source(name, code, space)

  def _is_in_source(
    self, name: str, file: str, code: types.CodeType, space: Mapping[str, Any]
  ) -> bool:
    """Returns whether the source of `file` compiles to this byte code, among other code. If another
    tool compiled the module, it is enough that the byte code names that file."""
    spec = space.get("__spec__")
    if sources.is_compiled_by_others(spec):
      return _is_same(file, code.co_filename)
    if file not in self._known_codes:
      try:
        is_of_spec = _is_same(getattr(spec, "origin", None), file)
        content = self._content(name, file, spec if is_of_spec else None)
        whole = compile(content, file, "exec", dont_inherit=True)
      except (OSError, SyntaxError, ValueError):
        return False
      codes = map(sources.code_name, sources.codes_in(whole))
      self._known_codes[file] = frozenset(codes)
    return sources.code_name(code) in self._known_codes[file]

  def _without_source(
    self, name: str, code: types.CodeType, space: Mapping[str, Any]
  ) -> None:
    """Adds byte code and everything that it names, since no source shows it."""
    self._digests.add((f"{name}:{code.co_qualname}", sources.code_name(code)))
    named = {each for part in sources.codes_in(code) for each in part.co_names}
    for each in sorted(named & {*space}):
      self.value(space[each])
      if is_plain(space[each]):
        self._differs(f"{name}:{each}", space[each])
    for each in sorted(named):
      self.module(each, guess=True)


def _named(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
  """Returns {name: SHA-256}, in which the digests of equal names are combined into one."""
  named: dict[str, str] = {}
  for name, digest in sorted(pairs):
    before = named.get(name)
    both = f"{before} {digest}".encode()
    named[name] = digest if before is None else hashlib.sha256(both).hexdigest()
  return named


def _is_same(file: str | None, other: str) -> bool:
  if file is None:
    return False
  # `samefile` is tried first: nearly all files differ, and resolving a path takes ten times longer.
  # `samefile` raises OSError if a file is gone.
  with contextlib.suppress(OSError):
    if not os.path.samefile(file, other):
      return False
  return os.path.realpath(file) == os.path.realpath(other)


def _held_by(function: types.FunctionType) -> list[Any]:
  """Returns a function's parts besides its code: defaults, values of the closure, attributes."""
  held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
  for cell in function.__closure__ or ():
    # `cell_contents` raises ValueError for an empty cell.
    with contextlib.suppress(ValueError):
      held.append(cell.cell_contents)
  return held + list(vars(function).values())


def _parts(value: Any) -> Iterator[Any]:
  """Yields the parts of a value that is no function, class or module."""
  if isinstance(value, types.MethodType):
    yield from (value.__func__, value.__self__)
  elif isinstance(value, functools.partial):
    yield from (value.func, *value.args, *value.keywords.values())
  elif isinstance(value, property):
    yield from (value.fget, value.fset, value.fdel)
  elif isinstance(value, (tuple, list, set, frozenset)):
    yield from list(value)
  elif isinstance(value, Mapping):
    # A mapping of another package may raise any error when it is read.
    with contextlib.suppress(Exception):
      yield from [part for pair in list(value.items()) for part in pair]
  yield from _parts_of_object(value)


def _parts_of_object(value: Any) -> Iterator[Any]:
  """Yields the type and the parts of an object.

  For an object of a user's class, all attributes are parts. For another object, the function that
  it wraps is a part. The attributes are parts, too, if the object is a dataclass (such as a linen
  module) or a callable (such as `jax.custom_vjp`).
  """
  yield type(value)
  # An object of another package may raise any error when it is read.
  with contextlib.suppress(Exception):
    yield getattr(value, "__wrapped__", getattr(value, "__func__", None))
    home = sys.modules.get(type(value).__module__)
    is_own = is_users_code(str(getattr(home, "__file__", None) or "<none>"))
    if is_own or dataclasses.is_dataclass(value) or callable(value):
      yield from list(vars(value).values())
