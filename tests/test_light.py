"""`pip install .` alone: the core works, and what needs more says so in one line."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from dpjax import optional
from dpjax.validate import UserError

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Every module of these, then what needs the extra, and two launchers. README's block, with its
# calibration and its training, runs in the same way in test_readme.py.
_CORE = """
import importlib, pathlib, sys
import dpjax
root = pathlib.Path(dpjax.__file__).parent
core = ("accounting", "data", "gradients", "mechanisms", "models", "noise", "sampling", "training",
        "transforms", "experiments/run", "experiments/plots")
paths = [*root.glob("*.py"), *(path for folder in core for path in (root / folder).rglob("*.py"))]
for path in paths:
  parts = ("dpjax", *path.relative_to(root).with_suffix("").parts)
  importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
from dpjax.experiments.run import writers
for attempt in (lambda: dpjax.pictures.new_figure(dpjax.pictures.PAGE, height=1.0),
                lambda: writers.MetricsWriter("events"),
                lambda: dpjax.data.load("breast_cancer"),
                lambda: dpjax.data.load("mnist")):
  try:
    attempt()
  except dpjax.UserError as error:
    print(error)
import runpy
sys.argv = ["train", "--config=configs/quickstart.py", "--workdir=run"]
try:
  runpy.run_module("launch.train", run_name="__main__")
except SystemExit as stopped:
  print("train:", stopped.code)
sys.argv = ["account", "--noise_multiplier=1.1", "--sampling_prob=0.01", "--num_steps=100"]
runpy.run_module("launch.account", run_name="__main__")
"""


@pytest.mark.slow
def test_the_core_imports_and_accounts_and_a_launcher_ends_in_one_line(tmp_path):
  (tmp_path / "core.py").write_text(_CORE)
  done = subprocess.run(
    [sys.executable, "-m", "tests.without_runs", "core.py"],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(_ROOT), "TFDS_DATA_DIR": str(tmp_path)},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  *needed, ended, told = done.stdout.split("\n", 5)
  needs = re.compile(
    r"needs (\w+), which is not installed: pip install -e '\.\[runs\]' in .*"
  )
  packages = [needs.search(line)[1] for line in needed]
  assert packages == ["matplotlib", "tensorboardX", "sklearn", "tensorflow_datasets"]
  # The launcher ended before it trained, in one line.
  assert ended == "train: 2" and not (tmp_path / "run" / "metrics.jsonl").exists()
  (line,) = done.stderr.splitlines()
  assert needs.fullmatch(line.removeprefix("error: "))
  assert "0.5498" in told


# What a run's config and kind have imported, before it names a sampler, a strategy or a rule.
_NAMED = """
import sys
import dpjax.experiments.kinds.central.build
from dpjax.noise.correlated.registry import STRATEGIES
from dpjax.sampling.registry import SCHEMES
from dpjax.transforms.every_clip_rule import CLIP_RULES
paths = [f"dpjax.sampling.{row.sampler}" for row in SCHEMES.values()]
paths += [path for path in (*STRATEGIES.values(), *CLIP_RULES.values()) if isinstance(path, str)]
paths += ["dpjax.accounting.event_kinds.skellam:", "dpjax.zoo.networks.scattering:"]
print(*sorted({path.partition(":")[0] for path in paths} & sys.modules.keys()))
"""


@pytest.mark.slow
def test_a_run_imports_what_it_names_alone():
  done = subprocess.run(
    [sys.executable, "-c", _NAMED],
    env=os.environ | {"PYTHONPATH": str(_ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  # Every run has white noise, whose file has trees, too.
  assert done.stdout.split() == ["dpjax.noise.correlated.strategies"], done.stderr


def test_an_error_that_is_about_no_extra_passes():
  with (
    pytest.raises(ModuleNotFoundError, match="no_such_package"),
    optional.require_extra(),
  ):
    import no_such_package  # noqa: F401  # pyright: ignore[reportMissingImports]
  with pytest.raises(UserError, match="needs matplotlib"), optional.require_extra():
    raise ModuleNotFoundError(name="matplotlib.figure")
  assert optional.missing(ModuleNotFoundError()) is None


def test_the_lists_of_packages_agree():
  project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
  runs = project["optional-dependencies"]["runs"]
  text = (_ROOT / "requirements.txt").read_text()
  core, space, launchers = text.partition("# Extra: runs\n")
  assert space

  def listed(part):
    lines = (line.partition("#")[0].strip() for line in part.splitlines())
    return sorted(line for line in lines if line)

  assert listed(core) == sorted(project["dependencies"])
  assert listed(launchers) == sorted(runs)
  # Names to import, beside names to install.
  renamed = {"PIL": "pillow", "sklearn": "scikit-learn", "skimage": "scikit-image"}
  named = lambda packages: {
    re.split(r"[><=]", each)[0].replace("-", "_") for each in packages
  }
  for extra in ("runs", "data"):
    of_extra = [
      name for name, brought_by in optional.EXTRA_OF.items() if brought_by == extra
    ]
    known = {renamed.get(name, name).replace("-", "_") for name in of_extra}
    assert known == named(project["optional-dependencies"][extra])
  # What no extra may bring stands beside the extra that says so.
  pins = " ".join(optional.WITHOUT_REQUIREMENTS.values())
  assert f"pip install --no-deps {pins}" in (_ROOT / "pyproject.toml").read_text()
