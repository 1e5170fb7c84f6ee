"""The origin of a result: library versions, commit, the user's own modules, device.

It is for a reader: nothing is refused because of it. It contains no path and no host.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import pathlib
import platform
import resource
import subprocess
import sys
import sysconfig

import jax

import dpjax
from dpjax import files

_PACKAGE = pathlib.Path(dpjax.__file__).parent
_NOT_OWN = {
  _PACKAGE.resolve(),
  # The commands of dpjax lie beside the package, in a checkout and where it is installed.
  _PACKAGE.resolve().parent / "launch",
  pathlib.Path(sysconfig.get_path("stdlib")).resolve(),
  pathlib.Path(sysconfig.get_path("platstdlib")).resolve(),
}
# Distributions that affect every run, even if the user does not import them.
_DISTRIBUTIONS = (
  "dpjax",
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "numpy",
  "scipy",
  "dp_accounting",
)


def libraries() -> dict[str, str | None]:
  """Returns the versions, by name, of dpjax, Python and the libraries that compute a result.

  The version of a library that is not installed is None.

  >>> sorted(libraries())[:4]
  ['dp_accounting', 'dpjax', 'flax', 'jax']
  """
  found: dict[str, str | None] = {}
  for name in _DISTRIBUTIONS:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  return found | {"python": platform.python_version()}


def same_libraries(stored: object) -> bool:
  """Returns whether a stored result has the versions of `libraries`; the commit does not count.

  Libraries that the result does not name do not count either: earlier results name fewer libraries.
  """
  known = dict(stored) if isinstance(stored, dict) else {}
  known.pop("git_commit", None)
  now = libraries()
  return bool(known) and all(now.get(name) == version for name, version in known.items())


def versions() -> dict[str, str | None]:
  """Returns `libraries` with an entry "git_commit": the commit of a checkout, or None.

  The commit tells where a result came from. It must not decide whether a run may resume, since it
  changes with files that do not affect the run.
  """
  return libraries() | {"git_commit": git_commit(_PACKAGE)}


def own_modules() -> dict[str, str]:
  """Returns the SHA-256 of the file of each imported module that is neither of dpjax, nor an
  installed package's, nor of the standard library, by the module's name.

  >>> "dpjax" in own_modules(), "os" in own_modules()
  (False, False)
  """
  found = {}
  for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    own = _own_file(file) if isinstance(file, str) and file.endswith(".py") else None
    if own is not None:
      # A module may outlive its file.
      with contextlib.suppress(OSError):
        found[name] = files.sha256(pathlib.Path(own))
  return dict(sorted(found.items()))


@functools.cache  # thousands of modules are imported, and a sweep asks at each of its runs
def _own_file(file: str) -> str | None:
  """Returns the path behind all links of a file that is the user's own, else None."""
  path = pathlib.Path(os.path.realpath(file))
  installed = {"site-packages", "dist-packages"} & {*path.parts}
  return None if installed or _NOT_OWN & {*path.parents} else str(path)


def device(used: int | None = None, mesh: str | None = None) -> str:
  """Describes the devices of all processes of a run, or the first `used` ones and their mesh.
  Examples: "1 x NVIDIA H200", "1 x cpu, 2 cores", "8 x NVIDIA H200, data:4,model:2"."""
  devices = jax.devices()
  text = f"{used or len(devices)} x {devices[0].device_kind}"
  text += "" if mesh is None else f", {mesh}"
  text += f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
  if devices[0].platform != "cpu":
    return text
  # The cores that this process may use are counted: a container often has fewer than the machine.
  count = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
  )
  return f"{text}, {count or 1} cores"


def peak_rss() -> int:
  """Returns the peak memory of this process in bytes.

  On Linux, it reads /proc/self/status: `getrusage` reports at least the memory of the process that
  started this one.
  """
  peak = process_memory("VmHWM")
  # ru_maxrss is in bytes on macOS and in kilobytes on Linux.
  unit = 1 if sys.platform == "darwin" else 1024
  return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def process_memory(field: str, *, forget_peak: bool = False) -> int | None:
  """Returns the memory of this process in bytes, as Linux reports it; None elsewhere.

  Args:
    field: "VmRSS" for the current memory, or "VmHWM" for its peak.
    forget_peak: whether to reset the peak first.
  """
  try:
    if forget_peak:
      with contextlib.suppress(OSError):
        # Writing 5 resets the peak; see the manual page proc(5). Containers may forbid it.
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    status = pathlib.Path("/proc/self/status").read_text()
  except OSError:
    return None
  return 1024 * int(status.split(f"{field}:")[1].split()[0])


def git_commit(package: pathlib.Path) -> str | None:
  """Returns the commit of the repository whose top folder holds the package; None: there is none.

  A package that is installed into the folder of another project must not get the commit of that
  project. So the package has to lie at the top of the repository, and be tracked there. If tracked
  files have uncommitted changes, the commit ends with "-dirty".
  """
  top = _git(package, "rev-parse", "--show-toplevel")
  if top is None or pathlib.Path(top).resolve() != package.resolve().parent:
    return None
  if not _git(package, "ls-files", "--", "."):
    return None
  return _git(package, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: pathlib.Path, *arguments: str) -> str | None:
  command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()
