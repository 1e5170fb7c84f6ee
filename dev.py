"""Short commands for who changes dpjax, from the root of a clone.

python -m dev test               # which tests are of which folder
python -m dev test gradients     # the quick cases and the doctests of one, or of several
python -m dev test plan          # those of a module beside the packages
python -m dev test sweeps -m long
python -m dev style              # ruff and basedpyright, of everything
python -m dev site               # the pages, as .ci/run builds them
python -m dev package            # wheel and source archive, in dist/
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent
_COMMANDS = {
  "style": ["pre-commit", "run", "--all-files", "--hook-stage=manual"],
  "site": ["mkdocs", "build", "--strict"],
  "package": [sys.executable, "-m", "build"],
}
# Folders whose tests do not lie in tests/NAME or tests/core/NAME, or not only there.
_ELSEWHERE = {
  "accounting": ["tests/test_front_door.py"],
  "auditing": ["tests/adversary"],
  "config": ["tests/schema"],
  "experiments": [
    "tests/runs",
    "tests/schema",
    "tests/sweeps",
    "tests/plots",
    "tests/board",
  ],
  "gradients": ["tests/adversary"],
  "kinds": ["tests/runs"],
  "parallel": ["tests/processes"],
  "run": ["tests/runs"],
}


def folders() -> dict[str, list[str]]:
  """Returns the paths of each folder's code and tests, by its name: `gradients`, `sweeps`. So it
  does of each module beside the packages: `plan`."""
  places = [*(ROOT / "dpjax").iterdir(), *(ROOT / "dpjax/experiments").iterdir()]
  places += [ROOT / "launch", ROOT / "benchmarks"]
  packages = [place for place in places if [*place.glob("*.py")]]
  paths: dict[str, list[str]] = {}
  for package in sorted(packages, key=lambda place: place.name):
    name = package.name
    code = package.relative_to(ROOT).as_posix()
    own = [f"tests/core/{name}", f"tests/{name}"]
    tests = [path for path in own if (ROOT / path).is_dir()] + _ELSEWHERE.get(name, [])
    paths[name] = list(dict.fromkeys([*paths.get(name, []), code, *tests]))
  return {**paths, **_modules()}


def _modules() -> dict[str, list[str]]:
  """Returns the paths of each module of `dpjax/` itself that has tests of its name: `plan`."""
  paths: dict[str, list[str]] = {}
  for file in sorted((ROOT / "dpjax").glob("*.py")):
    name = file.stem.strip("_")
    tests = [*ROOT.glob(f"tests/core/test_{name}*.py"), *ROOT.glob(f"tests/test_{name}.py")]
    if tests:
      paths[name] = [path.relative_to(ROOT).as_posix() for path in (file, *sorted(tests))]
  return paths


def main(arguments: Sequence[str]) -> int:
  """Runs a command; returns its exit status."""
  if [*arguments] == ["test"]:
    for name, paths in folders().items():
      print(f"{name:13}", *paths)
    return 0
  if arguments and arguments[0] == "test":
    known = folders()
    names = [word for word in arguments[1:] if word in known]
    others = [word for word in arguments[1:] if word not in known]
    if not names:
      print(f"{others[0]!r} is none of: {', '.join(known)}", file=sys.stderr)
      return 2
    paths = dict.fromkeys(path for name in names for path in known[name])
    return subprocess.call(
      [sys.executable, "-m", "pytest", "-q", *paths, *others], cwd=ROOT
    )
  if len(arguments) == 1 and arguments[0] in _COMMANDS:
    return subprocess.call(_COMMANDS[arguments[0]], cwd=ROOT)
  print(__doc__, file=sys.stderr)
  return 2


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
