"""Old names of modules that moved: they work for one release, and warn.

`import dpjax.runs.central.config` gives `dpjax.experiments.kinds.central.config`, the very same
module, so that types of the two are equal. Delete a row one release after its move.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence

# Modules that moved in version 0.2.
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
  "dpjax.secure.sums.letters": "dpjax.secure.sums.messages",
}

# Package that was one module -> new places of names that the package does not list.
NAMES = {  # as of 0.2
  "dpjax.federated.algorithms": (
    "dpjax.federated.round",
    "dpjax.federated.algorithms.apfl",
    "dpjax.federated.algorithms.scaffold",
  ),
  "dpjax.federated.aggregators": ("dpjax.federated.aggregators.geometric_median",),
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
  """Returns a former attribute of a package, with a warning: a module, or a name in
  `NAMES`.

  AttributeError: it never was one.
  """
  for module in () if name.startswith("_") else NAMES.get(package, ()):
    source = importlib.import_module(module)
    if hasattr(source, name):
      warnings.warn(
        f"{package}.{name} is {module}.{name} now; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=3,
      )
      return getattr(source, name)
  if f"{package}.{name}" not in MOVED:
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
  return importlib.import_module(f"{package}.{name}")


class _Alias(importlib.abc.Loader):
  """Loads the module of the new name under the old one."""

  def __init__(self, new_name: str):
    self.new_name = new_name
    self.spec: importlib.machinery.ModuleSpec | None = None

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
    module = importlib.import_module(self.new_name)
    self.spec = module.__spec__
    return module

  def exec_module(self, module: types.ModuleType) -> None:
    # Python has put the alias's spec on the module, and would reload it by the old name.
    module.__spec__ = self.spec


class _Finder(importlib.abc.MetaPathFinder):
  """Finds modules by their old names."""

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
    # First in order: `dpjax.runs.__path__` is the new folder, where Python would load a
    # second copy.
    sys.meta_path.insert(0, _Finder())
