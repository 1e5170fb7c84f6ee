"""Old names of modules, attributes and arguments: they work for one release, and warn.

`import dpjax.runs.central.config` gives `dpjax.experiments.kinds.central.config` itself, not a
copy, so classes of both names are identical. Delete an entry of the tables below one release after
its name has changed.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Modules that moved after version 0.1: old name -> present name.
MOVED = {
  "dpjax.accounting.events": "dpjax.accounting",
  "dpjax.accounting.documents": "dpjax.experiments.checks.documents",
  "dpjax.price": "dpjax.solve",
  "dpjax.noise.correlated.by_name": "dpjax.noise.correlated",
  "dpjax.passes": "dpjax.accounting.event_kinds.random_allocation",
  "dpjax.sampling.participation": "dpjax.sampling",
  "dpjax.sampling.truncated": "dpjax.sampling.truncated_poisson",
  "dpjax.schema": "dpjax.experiments.config",
  "dpjax.runs": "dpjax.experiments.run",
  "dpjax.runs.central": "dpjax.experiments.kinds.central",
  "dpjax.runs.federated": "dpjax.experiments.kinds.federated",
  "dpjax.runs.relevance": "dpjax.experiments.kinds.relevance",
  "dpjax.runs.attack": "dpjax.experiments.kinds.attack",
  "dpjax.runs.secure": "dpjax.experiments.kinds.secure",
  "dpjax.runs.attack_report": "dpjax.experiments.kinds.attack.curves",
  "dpjax.runs.audits": "dpjax.experiments.kinds.audits",
  "dpjax.runs.bounds": "dpjax.experiments.kinds.bounds",
  "dpjax.runs.unused": "dpjax.experiments.kinds.unused",
  "dpjax.runs.catalogue": "dpjax.experiments.catalogue",
  "dpjax.sweeps": "dpjax.experiments.sweeps",
  "dpjax.checks": "dpjax.experiments.checks",
  "dpjax.processes": "dpjax.parallel",
  "dpjax.allocator": "dpjax.parallel.allocator",
  "dpjax.federated.client_states": "dpjax.parallel.client_states",
  "dpjax.federated.row_journal": "dpjax.parallel.row_journal",
  "dpjax.federated.corrections": "dpjax.federated.algorithms",
  "dpjax.federated.personalization": "dpjax.federated.algorithms",
  "dpjax.federated.robust": "dpjax.federated.aggregators",
  "dpjax.federated.vertical": "dpjax.secure.vertical",
  "dpjax.federated.alignment": "dpjax.secure.vertical.alignment",
  "dpjax.federated.encrypted_vectors": "dpjax.secure.vertical.encrypted_vectors",
  "dpjax.federated.linear_regression": "dpjax.secure.vertical.linear_regression",
  "dpjax.federated.transfer": "dpjax.secure.vertical.transfer",
  "dpjax.experiments.run.promise": "dpjax.experiments.run.guarantee",
  "dpjax.noise.laws": "dpjax.noise.distributions",
  "dpjax.experiments.checks.noise_laws": "dpjax.experiments.checks.noise_distributions",
  "dpjax.experiments.run.streams": "dpjax.experiments.run.run_keys",
  "dpjax.secure.sums.letters": "dpjax.secure.sums.messages",
}

# Packages that were one module in version 0.1. Each is mapped to the modules that now hold names
# which the package does not list.
NAMES = {
  "dpjax.federated.algorithms": (
    "dpjax.federated.round",
    "dpjax.federated.algorithms.apfl",
    "dpjax.federated.algorithms.scaffold",
  ),
  "dpjax.federated.aggregators": ("dpjax.federated.aggregators.geometric_median",),
}

# Public names that changed after version 0.1: old name -> present name.
RENAMED = {
  "dpjax.noise.check_paid": "dpjax.noise.check_accounted",
  "dpjax.relevance.Streams": "dpjax.relevance.Keys",
  "dpjax.sampling.slice_slots": "dpjax.sampling.rows_of_slice",
}


def home(name: str) -> str | None:
  """Returns the present module of an old dotted name; None for any other name.

  >>> home("dpjax.runs.central.config")
  'dpjax.experiments.kinds.central.config'
  >>> home("dpjax.plan") is None
  True
  """
  before = name
  after = ""
  while before and before not in MOVED:
    before, _, last = before.rpartition(".")
    after = f".{last}{after}"
  return MOVED[before] + after if before else None


def attribute(package: str, name: str) -> object:
  """Returns what a former attribute of a package is now, and warns.

  The attribute is a moved module, or a name covered by `NAMES` or `RENAMED`. Any other name raises
  AttributeError.
  """
  old = f"{package}.{name}"
  if old in RENAMED:
    warn(old, RENAMED[old], stacklevel=4)
    module, _, new = RENAMED[old].rpartition(".")
    return getattr(importlib.import_module(module), new)
  for module in () if name.startswith("_") else NAMES.get(package, ()):
    source = importlib.import_module(module)
    if hasattr(source, name):
      warn(old, f"{module}.{name}", stacklevel=4)
      return getattr(source, name)
  if old not in MOVED:
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
  return importlib.import_module(old)


class _Alias(importlib.abc.Loader):
  """Loads a module of a new name under its old name."""

  def __init__(self, new_name: str):
    self.new_name = new_name
    self.spec: importlib.machinery.ModuleSpec | None = None

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
    module = importlib.import_module(self.new_name)
    self.spec = module.__spec__
    return module

  def exec_module(self, module: types.ModuleType) -> None:
    # Python has set the alias's spec on the module, so a reload would use the old name. The true
    # spec is put back.
    module.__spec__ = self.spec


class _Finder(importlib.abc.MetaPathFinder):
  """Finds modules by their old names, and warns that they have new names."""

  def find_spec(
    self,
    fullname: str,
    path: Sequence[str] | None,
    target: types.ModuleType | None = None,
  ) -> importlib.machinery.ModuleSpec | None:
    new_name = home(fullname) if fullname.startswith("dpjax.") else None
    if new_name is None or importlib.util.find_spec(new_name) is None:
      return None
    warnings.warn(
      f"{fullname} is {new_name} now; the old name goes with the next release",
      DeprecationWarning,
      stacklevel=2,
    )
    return importlib.machinery.ModuleSpec(fullname, _Alias(new_name))


def install() -> None:
  """Makes old names importable; a second call does nothing."""
  if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    # This finder must come before Python's own finder. That one would load a second copy of each
    # module, since the alias `dpjax.runs` has the new folder as its `__path__`.
    sys.meta_path.insert(0, _Finder())


def names_of_module(module: str, **new_names: str) -> Callable[[str], Any]:
  """Returns a `__getattr__` for a module: it warns, and reads old names as their new names."""

  def get(name: str) -> Any:
    if name not in new_names:
      raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn(f"{module}.{name}", f"{module}.{new_names[name]}", stacklevel=3)
    return getattr(sys.modules[module], new_names[name])

  return get


class OldName:
  """Old name of a class attribute: warns, and reads the attribute under its new name.

  >>> class Box:
  ...   width = OldName("size")
  ...   size = 3
  >>> with warnings.catch_warnings(record=True) as caught:
  ...   warnings.simplefilter("always")
  ...   Box.width, Box().width
  (3, 3)
  >>> str(caught[0].message)
  'Box.width is Box.size now; the old name goes with the next release'
  """

  def __init__(self, new: str):
    self._new = new
    self._old = ""

  def __set_name__(self, owner: type, name: str) -> None:
    self._old = name

  def __get__(self, instance: object, kind: type) -> Any:
    warn(f"{kind.__name__}.{self._old}", f"{kind.__name__}.{self._new}", stacklevel=3)
    return getattr(kind if instance is None else instance, self._new)


def rename_attributes(kind: type, **new_names: str) -> None:
  """Renames attributes that a user's class defines under old names, and warns.

  Call it in `__init_subclass__`: Python looks for missing abstract methods only after that.
  """
  for old, new in new_names.items():
    if old in vars(kind) and not isinstance(vars(kind)[old], OldName):
      warn(f"{kind.__name__}.{old}", f"{kind.__name__}.{new}", stacklevel=4)
      setattr(kind, new, vars(kind)[old])
      delattr(kind, old)


def rename_keywords(
  **new_names: str,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
  """Lets callers of a function use old names of its arguments for one release.

  >>> @rename_keywords(width="size")
  ... def doubled(size):
  ...   return 2 * size
  >>> with warnings.catch_warnings():
  ...   warnings.simplefilter("ignore")
  ...   doubled(width=3)
  6
  """

  def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
    name = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")

    @functools.wraps(function)
    def renamed(*args: _P.args, **named: _P.kwargs) -> _R:
      changed: dict[str, Any] = {}
      for old, value in named.items():
        new = new_names.get(old, old)
        if new != old:
          warn(f"{name}({old}=)", f"{name}({new}=)", stacklevel=3)
        if new in changed:
          raise TypeError(f"{name}() got multiple values for argument {new!r}")
        changed[new] = value
      return function(*args, **changed)  # pyright: ignore[reportCallIssue]

    return renamed

  return decorated


def warn(old: str, new: str, stacklevel: int) -> None:
  """Warns that `old` is now called `new`, and that the next release removes `old`."""
  warnings.warn(
    f"{old} is {new} now; the old name goes with the next release",
    DeprecationWarning,
    stacklevel=stacklevel,
  )
