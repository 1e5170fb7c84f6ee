"""Owners of files, and versions of packages."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import pathlib
import re
import site
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

import jax

# Distributions that affect every run, even if the user does not import them.
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
EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]  # dpjax


# Defaults of the JAX options that determine a run's precision.
_PRECISION: dict[str, Any] = {
  "jax_default_matmul_precision": None,
  "jax_enable_x64": False,
  "jax_numpy_dtype_promotion": "standard",
}
_PRECISION_FLAGS = re.compile(r"precision|fast_m|tf32|bf16|fp8|f16")
# Environment variables that describe a machine, a user, a job or a secret. They are no part of the
# code, since a run may continue in another job, on another machine.
_OF_MACHINE = re.compile(
  r"HOME|USER|LOGNAME|SHELL|TERM|PWD|OLDPWD|LANG|DISPLAY|EDITOR|TZ|RANK|(LOCAL|NODE|GLOBAL)_RANK"
  r"|(LOCAL_)?WORLD_SIZE|(CUDA|COLAB|JAX|KAGGLE|LC|MKL|NCCL|NVIDIA|OMP|OPENBLAS|PBS|PYTEST|SLURM|SSH"
  r"|TMUX|WANDB|XDG|XLA)_.*|(PYTHON|TEMP|TMP|TF_CPP_).*"
  r"|.*(PATH|DIR|FOLDER|CACHE|TOKEN|API_KEY|SECRET|PASSWORD|HOST|HOSTNAME|ADDR|ADDRESS|PORT|URL"
  r"|JOB_ID|NUM_THREADS|VISIBLE_DEVICES)"
)


def settings() -> dict[str, str]:
  """Returns settings of precision that differ from JAX's defaults.

  Two runs with the same noise and different precisions would reveal how their sums are rounded.

  >>> settings()
  {}
  """
  variables = {}
  for name, usual in _PRECISION.items():
    value = getattr(jax.config, name, usual)
    if value != usual:
      variables[name] = str(value)
  flags = os.environ.get("XLA_FLAGS", "").split()
  flags = sorted(flag for flag in flags if _PRECISION_FLAGS.search(flag))
  return variables | ({"XLA_FLAGS": " ".join(flags)} if flags else {})


def is_of_machine(variable: str) -> bool:
  """Returns whether an environment variable describes where a run takes place, rather than its
  computation.

  >>> is_of_machine("SLURM_JOB_ID"), is_of_machine("LORA_RANK")
  (True, False)
  """
  return _OF_MACHINE.fullmatch(variable) is not None


def find(name: str) -> Any:
  """Returns the spec of a module that is imported or could be imported; None: there is none. The
  module is not run."""
  module = sys.modules.get(name)
  spec = getattr(module, "__spec__", None)
  if spec is not None:
    return spec
  parent, _, _ = name.rpartition(".")
  path = None
  if parent:
    above = find(parent)
    path = getattr(above, "submodule_search_locations", None)
    if path is None:
      return None
  for finder in sys.meta_path:
    look = getattr(finder, "find_spec", None)
    try:
      spec = None if look is None else look(name, path, None)
    # A finder of another package may raise any error.
    except Exception:
      spec = None
    if spec is not None:
      return spec
  return None


@functools.cache
def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Returns (folders of installed packages, folders of the standard library)."""
  paths = sysconfig.get_paths()
  installed = [paths["purelib"], paths["platlib"], site.getusersitepackages()]
  installed += site.getsitepackages() if hasattr(site, "getsitepackages") else []
  standard = [paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__)]
  ends = lambda folders: tuple(
    sorted({os.path.join(os.path.realpath(each), "") for each in folders})
  )
  return ends(installed), ends(standard)


@functools.cache
def owner(file: str) -> str:
  """Returns the owner of a file: "user", "dpjax", "installed" or "standard"."""
  real = os.path.realpath(file)
  installed, standard = _folders()
  if real.startswith(os.path.join(str(_PACKAGE), "")):
    return "dpjax"
  # Folders with these names may also belong to an environment that this Python does not know.
  parts = pathlib.PurePath(real).parts
  if real.startswith(installed) or {"site-packages", "dist-packages"} & {*parts}:
    return "installed"
  return "standard" if real.startswith(standard) else "user"


@functools.cache
def versions() -> dict[str, str]:
  by_name = {name: version(name) for name in DISTRIBUTIONS}
  by_name["dpjax"] = f"{by_name['dpjax'].partition(' ')[0]} {_DPJAX}"
  return by_name | {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}


@functools.cache
def version(name: str) -> str:
  """Returns the version of a package; "none" if it is not installed.

  A package installed from a folder or a repository may change without a new version. So a digest
  is added: of all sources if the package is a checkout, otherwise of the hashes in its RECORD.
  """
  try:
    held = importlib.metadata.distribution(name)
  except importlib.metadata.PackageNotFoundError:
    return "none"
  spec = None if name == "dpjax" else find(name)
  if spec is not None and spec.has_location and owner(spec.origin) == "user":
    return f"{held.version} {sha256_of_sources(os.path.dirname(spec.origin))}"
  if held.read_text("direct_url.json") is None:
    return held.version
  rows = (held.read_text("RECORD") or "").splitlines()
  # Only rows of code count: scripts and the installer's files contain folders of this machine.
  rows = sorted(row for row in rows if row.partition(",")[0].endswith((".py", *EXTENSIONS)))
  return f"{held.version} {hashlib.sha256(json.dumps(rows).encode()).hexdigest()}"


@functools.cache
def brought_by(top: str) -> list[str]:
  """Returns the names of the installed packages that contain a top-level module.

  A full search takes a second, so the package of the same name is tried first.
  """
  try:
    return [importlib.metadata.distribution(top).metadata["Name"]]
  except (importlib.metadata.PackageNotFoundError, ValueError):
    return sorted(set(_all_packages().get(top, [])))


@functools.cache
def _all_packages() -> Mapping[str, list[str]]:
  return importlib.metadata.packages_distributions()


def sha256_of_sources(folder: str) -> str:
  """Returns the SHA-256 of all Python files below a folder; 400 files take a few milliseconds."""
  paths = []
  for here, _, files in os.walk(folder):
    paths += [os.path.join(here, file) for file in files if file.endswith(".py")]
  names = {os.path.relpath(path, folder).replace(os.sep, "/"): path for path in paths}
  sha256 = hashlib.sha256()
  for name in sorted(names):
    content = pathlib.Path(names[name]).read_bytes()
    sha256.update(f"{name} {hashlib.sha256(content).hexdigest()} ".encode())
  return sha256.hexdigest()


# The digest is computed when this module is imported, so that a later edit does not count as the
# running code.
_DPJAX = sha256_of_sources(str(_PACKAGE))


def places(spec: Any) -> list[str]:
  """Returns the paths of a module: its file, or the folders of a package without a file."""
  return [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())


def is_users_code(file: str) -> bool:
  """Returns whether the code of `file` belongs to the user. Code without a file, such as <string>,
  does not."""
  return not file.startswith("<") and owner(file) == "user"
