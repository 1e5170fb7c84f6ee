"""Runs README's test command under another Python or other libraries; adds a row to a table.

    python .ci/versions.py --python=python3.13
    python .ci/versions.py --python=python3.13 --require='jax==0.12.*'
    python .ci/versions.py --python=python3.14 --without=vertical

Tests whose extra is named by `--without`, because it cannot be installed there, are skipped.

A fresh virtual environment takes what `pip install` gives today under the bounds of
requirements.txt, then each `--require` on top, whatever the bounds say. The row names the
versions that ran, and how many tests passed, failed and were skipped. Exit code 1 where one
failed. Needs no library of its own.
"""

import argparse
import csv
import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "results" / "versions" / "table.csv"
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy")
EXTRAS = ("dev", "docs", "vertical", "flower", "secure", "he", "mpc-spu", "lm", "serve")
_READ = """
import importlib.metadata, json, platform, sys
found = {name: importlib.metadata.version(name) for name in sys.argv[1:]}
print(json.dumps({"python": platform.python_version(), **found}))
"""


def installed(python: pathlib.Path) -> dict[str, str]:
  """Returns {"python": its version, library: its version} of an environment."""
  command = [python, "-c", _READ, *LIBRARIES]
  return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def counts(report: pathlib.Path) -> dict[str, int]:
  """Returns the tests that passed, failed and were skipped, of pytest's XML report."""
  suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
  total = int(suite.attrib["tests"])
  failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
  skipped = int(suite.attrib["skipped"])
  return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def add_row(row: dict[str, str | int]) -> None:
  """Puts a row into the table, in place of an earlier one of the same versions."""
  names = ("python", *LIBRARIES)
  rows = []
  if TABLE.exists():
    with TABLE.open(newline="") as file:
      rows = list(csv.DictReader(file))
  rows = [old for old in rows if any(old[name] != row[name] for name in names)]
  # rows of before a column was added have no value there
  rows = [dict.fromkeys(row, "") | old for old in rows]
  rows.append({name: str(value) for name, value in row.items()})
  rows.sort(key=lambda row: [row[name] for name in names])
  TABLE.parent.mkdir(parents=True, exist_ok=True)
  with TABLE.open("w", newline="") as file:
    writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--python", default=sys.executable, help="the interpreter to test")
  parser.add_argument("--require", action="append", default=[], help="as pip takes it")
  parser.add_argument(
    "--without", action="append", default=[], choices=EXTRAS[1:], help="extra to leave out"
  )
  parser.add_argument("tests", nargs="*", help="arguments of pytest; default: README's")
  options = parser.parse_args()
  extras = ",".join(extra for extra in EXTRAS if extra not in options.without)
  with tempfile.TemporaryDirectory() as folder:
    venv = pathlib.Path(folder) / "venv"
    subprocess.run([options.python, "-m", "venv", venv], check=True)
    python = venv / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "-e", f"{ROOT}[{extras}]"], check=True)
    if options.require:
      subprocess.run([*install, *options.require], check=True)
    report = pathlib.Path(folder) / "report.xml"
    pytest = [python, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}"]
    subprocess.run([*pytest, *options.tests], cwd=ROOT, check=False)
    row = installed(python) | counts(report) | {"without": ",".join(options.without)}
  print(row)
  # part of the suite says nothing of the whole
  if not options.tests:
    add_row(row)
  return int(row["failed"] > 0)


if __name__ == "__main__":
  sys.exit(main())
