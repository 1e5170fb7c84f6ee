"""Packages import their names when they are asked for: the right ones, in any order."""

import ast
import importlib
import pathlib
import pickle
import subprocess
import sys

import pytest

from tests import test_layers as layers

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_MOST_LINES = 27_000  # of dpjax; the launchers' own come to them
_OTHER_KINDS = ("federated", "secure", "relevance", "attacks")


def _lazy_packages():
  for path in sorted((_ROOT / "dpjax").rglob("__init__.py")):
    if "_lazy.attach(" in path.read_text():
      yield ".".join(path.parent.relative_to(_ROOT).parts)


@pytest.mark.parametrize("name", _lazy_packages())
def test_every_name_is_there_and_is_listed(name):
  package = importlib.import_module(name)
  assert package.__all__
  for public in package.__all__:
    assert getattr(package, public) is not None
    assert public in dir(package)
  with pytest.raises(AttributeError, match="no attribute 'nothing'"):
    package.nothing  # noqa: B018


@pytest.mark.slow
@pytest.mark.parametrize(
  "first",
  [
    "import dpjax.accounting.epsilon",
    "from dpjax.accounting import epsilon",
    "import dpjax; dpjax.accounting.epsilon",
    "import dpjax.accounting.calibration",  # imports the module of that name
  ],
)
def test_a_function_stands_before_the_module_of_its_name(first):
  program = f"{first}\nfrom dpjax import accounting\nassert callable(accounting.epsilon)"
  subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_modules_that_are_not_listed_are_attributes():
  program = "import dpjax\nprint(dpjax.accounting.gdp.approximate.__name__)"
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
  assert done.stdout == "approximate\n", done.stderr


def test_a_package_is_pickled_by_its_name():
  """Ray and Flower send functions of a user, which name dpjax and its packages."""
  for name in ("dpjax", "dpjax.federated"):
    package = importlib.import_module(name)
    assert pickle.loads(pickle.dumps(package)) is package


@pytest.mark.slow
def test_launch_train_imports_its_own_kind_alone_and_few_lines():
  program = (
    "import sys, launch.train\n"
    "for name, module in sys.modules.items():\n"
    "  if name.split('.')[0] == 'dpjax' and getattr(module, '__file__', None):\n"
    "    print(name, module.__file__)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, cwd=_ROOT, check=True
  )
  rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
  lines = sum(len(pathlib.Path(file).read_text().splitlines()) for _, file in rows)
  assert lines < _MOST_LINES, lines
  for kind in _OTHER_KINDS:
    assert not [name for name, _ in rows if name.startswith(f"dpjax.{kind}")]
    assert not [name for name, _ in rows if f".kinds.{kind.rstrip('s')}" in name]


@pytest.mark.slow
def test_a_server_is_imported_by_nobody_who_does_not_serve():
  program = (
    "import sys, dpjax, launch.train\n"
    "dpjax.serving.Predictor\n"
    "names = {name.split('.')[0] for name in sys.modules}\n"
    "print(sorted(names & {'starlette', 'uvicorn', 'prometheus_client', 'h11'}))\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, cwd=_ROOT, check=True
  )
  assert done.stdout == "[]\n"


_CORE = """
import importlib, pathlib, sys
import dpjax
root = pathlib.Path(dpjax.__file__).parent
folders = {core}
for path in [*root.glob("*.py"), *(p for name in folders for p in (root / name).rglob("*.py"))]:
  parts = ("dpjax", *path.relative_to(root).with_suffix("").parts)
  importlib.import_module(".".join(parts).removesuffix(".__init__"))
rooms = lambda: {{".".join(name.split(".")[:2]) for name in sys.modules}}
print(sorted(rooms()))
dpjax.check
print(sorted(rooms()))
"""


@pytest.mark.slow
def test_the_core_loads_no_wing_and_a_check_no_launcher():
  folders = [name for layer in layers._CORE for name in layer]
  core = [name for name in folders if (_ROOT / "dpjax" / name).is_dir()]
  wings = {name.split(".")[0] for layer in layers._WINGS for name in layer}
  done = subprocess.run(
    [sys.executable, "-c", _CORE.format(core=core)],
    capture_output=True, text=True, cwd=_ROOT, check=True,
  )  # fmt: skip
  of_core, with_check = map(ast.literal_eval, done.stdout.splitlines())
  assert "dpjax.gradients" in of_core and "dpjax.checks" in with_check
  loaded = lambda names: {name.removeprefix("dpjax.") for name in names} & wings
  assert loaded(of_core) == set()
  assert loaded(with_check) == {"checks", "auditing"}
  assert not {"launch", "configs"} & {name.split(".")[0] for name in with_check}
