"""The package as people get it: built, installed elsewhere, used outside of the checkout.

No network: setuptools must be here already, in the version that pyproject.toml asks for. By hand:

    pip install 'setuptools>=77' && python -m pytest -q -m long tests/test_package.py
"""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.validate import UserError
from launch import config_flag

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_BUILT = ("dpjax", "launch", "configs")
_READ = ("pyproject.toml", "README.md", "LICENSE")  # by the build
_SDIST = "from setuptools import build_meta as b; print(b.build_sdist('dist'))"


def test_a_shipped_config_is_found_from_any_folder(tmp_path, monkeypatch):
  here = config_flag.load("configs/quickstart.py", TrainConfig)
  monkeypatch.chdir(tmp_path)
  assert config_flag.load("configs/quickstart.py", TrainConfig) == here
  with pytest.raises(
    UserError, match=r"no such file \(did you mean 'configs/quickstart.py'"
  ):
    config_flag.load("configs/quickstarts.py", TrainConfig)
  with pytest.raises(
    UserError, match="no such file"
  ):  # only what lies in configs/ is shipped
    config_flag.load("launch/train.py", TrainConfig)
  own = tmp_path / "configs" / "quickstart.py"
  own.parent.mkdir()
  own.write_text(
    "from dpjax.experiments.kinds.central.config import TrainConfig\n"
    "get_config = lambda: TrainConfig(num_steps=7)\n"
  )
  assert config_flag.load("configs/quickstart.py", TrainConfig).num_steps == 7


def _run(*command, cwd, path=()):
  found = os.environ.get("PYTHONPATH", "")
  kept = [p for p in found.split(os.pathsep) if p and pathlib.Path(p).resolve() != _ROOT]
  env = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), *kept])}
  done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout


def _files(folder):
  """Of the three packages, without what Python leaves there."""
  found = (
    path for package in _BUILT for path in (folder / package).rglob("*") if path.is_file()
  )
  return {p.relative_to(folder).as_posix() for p in found if "__pycache__" not in p.parts}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
  """(folder of the installation, names in the source distribution)."""
  version = importlib.metadata.version("setuptools")
  if int(version.split(".")[0]) < 77:
    pytest.skip(f"setuptools {version} is older than pyproject.toml asks for")
  folder = tmp_path_factory.mktemp("package")
  source, target = folder / "source", folder / "site"
  for package in _BUILT:
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_ROOT / package, source / package, ignore=without)
  for name in _READ:
    shutil.copy(_ROOT / name, source / name)
  _run(sys.executable, "-c", _SDIST, cwd=source)
  (sdist,) = (source / "dist").glob("dpjax-*.tar.gz")
  with tarfile.open(sdist) as archive:
    names = {name.partition("/")[2] for name in archive.getnames()}
  pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
  _run(*pip, "--no-index", f"--target={target}", str(sdist), cwd=folder)
  return target, names


@pytest.mark.long
def test_everything_is_in_the_distributions(installed):
  target, names = installed
  assert _files(target) == _files(_ROOT)
  assert _files(_ROOT) | set(_READ) <= names


@pytest.mark.long
def test_an_installation_works_outside_of_the_checkout(installed, tmp_path):
  target, _ = installed
  run = lambda *arguments: _run(sys.executable, *arguments, cwd=tmp_path, path=[target])
  where = run("-c", "import dpjax, launch; print(dpjax.__file__, launch.__file__)")
  assert all(path.startswith(str(target)) for path in where.split())
  listed = run("-m", "launch.list", "configs")
  assert "configs/fed/quickstart.py" in listed and "configs/sweeps/quickstart.py" in listed
  assert "epsilon=3 (proved" in run("-m", "launch.train", "--dry_run")
  few = ["--config.num_rounds=2", "--workdir=fed"]
  done = run("-m", "launch.federate", "--config=configs/fed/quickstart.py", *few)
  assert "test_accuracy=" in done and (tmp_path / "fed" / "result.json").exists()
  few = ["--config.base.num_steps=2", "--config.seeds=[0]", "--workdir=best"]
  done = run("-m", "launch.sweep", "--config=configs/sweeps/quickstart.py", *few)
  assert (tmp_path / "best" / "curve.png").exists(), done
