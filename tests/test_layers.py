"""Who may import whom (architecture: rooms). Reads the imports; refuses upward or sideways."""

import ast
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_CORE = (
  {"validate"},
  {"sealed"},  # which types hold
  {"types", "_lazy"},
  {"branches", "key_uses", "standard_kernels"},
  {"weight_folders"},
  {"names", "trees", "markdown", "files", "optional"},
  {"jaxprs", "columns"},
  {"parallel", "pictures"},  # machines, not privacy; how everything that is drawn looks
  {"closed_over"},  # which rewrites jaxprs, for the machine that programs are made for
  {"accounting"},  # NumPy alone: samplers state its events and their proofs
  {
    "gradients",
    "noise",
    "sampling",
    "models",
    "data",
    "losses",
    "metrics",
  },
  {"transforms", "mechanisms"},  # which draw from noise/ and state events of accounting/
  {"plan", "solve"},
  {"joint"},  # several plans under one budget
  {"training"},
)
_WINGS = (
  {"zoo"},
  {"federated", "relevance"},
  {"secure"},  # joins the rounds of federated/
  {"attacks", "auditing"},
  {"checks"},  # which audit, too
  {"experiments.config", "experiments.plots"},
  {"experiments.run", "experiments.kinds", "experiments.catalogue"},  # ONE run
  # of runs
  {
    "experiments.board",
    "experiments.sweeps",
    "experiments.checks",
    "serving",
  },
)
_LAYERS = (*_CORE, *_WINGS)
# The core's one door to a wing, which is opened when it is asked for: README's notebook loads so.
_DOOR = ("data", "dpjax.zoo.datasets.registry.load")
_LEVEL = {package: level for level, packages in enumerate(_LAYERS) for package in packages}


def _imports(path):
  """Modules that a file imports, `from a import b` counted as a.b."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room(module):
  """The package that a layer names: `experiments` has four of them."""
  parts = module.split(".")
  if parts[0] != "dpjax" or len(parts) < 2:
    return None
  return ".".join(parts[1:3]) if parts[1] == "experiments" else parts[1]


def _allowed(package, module):
  outside = ("launch", "configs", "benchmarks")
  if module.split(".")[0] in outside or module.startswith("absl.flags"):
    return False
  other = _room(module)
  if (package, module) == _DOOR:
    return True
  if other not in _LEVEL or other == package:
    return True
  together = package.startswith("experiments") and other.startswith("experiments")
  return _LEVEL[other] < _LEVEL[package] or (together and _LEVEL[other] == _LEVEL[package])


def _violations(package, modules):
  return [
    f"{package} imports {module}" for module in modules if not _allowed(package, module)
  ]


def _files():
  for path in sorted((_ROOT / "dpjax").rglob("*.py")):
    parts = path.relative_to(_ROOT).with_suffix("").parts
    if parts[1:] not in (("__init__",), ("experiments", "__init__")):
      yield pytest.param(path, _room(".".join(parts)), id="/".join(parts[1:]))


@pytest.mark.parametrize(("path", "room"), _files())
def test_imports_point_down(path, room):
  assert room in _LEVEL, f"{room} has no layer: name it here and in WORKSPACE.md"
  assert (_violations(room, _imports(path))) == []


@pytest.mark.cases(long=["dpjax"])
@pytest.mark.parametrize("folder", ["dpjax", "configs"])
def test_nobody_imports_the_launchers(folder):
  for path in (_ROOT / folder).rglob("*.py"):
    assert not [m for m in _imports(path) if m.split(".")[0] == "launch"], path


def test_the_check_can_fail():
  assert _violations("noise", ["dpjax.gradients.clipping"])  # sideways
  assert _violations("training", ["dpjax.zoo.networks.build"])  # a wing
  assert _violations("data", ["dpjax.zoo.datasets.published"])  # not by the door
  assert _violations("gradients", ["dpjax.plan.Plan"])  # upward
  assert _violations("plan", ["launch.train"])
  assert _violations("experiments.run", ["dpjax.experiments.sweeps.engine"])
  assert _violations("experiments.config", ["dpjax.experiments.run.loop"])
  assert _violations("mechanisms", ["dpjax.transforms.clip_and_noise"])  # sideways
  assert _violations("noise", ["dpjax.mechanisms.Laplace"])  # upward
  assert _violations("accounting", ["dpjax.sampling.PoissonSampler"])  # upward
  assert not (_violations("mechanisms", ["dpjax.noise.source", "dpjax.accounting"]))
  assert not (_violations("plan", ["dpjax.gradients", "jax.numpy", "dpjax.trees.add"]))
