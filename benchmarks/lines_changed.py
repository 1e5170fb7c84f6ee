"""What an existing script has to change for DP-SGD, and what it scores then.

    python -m benchmarks.lines_changed --peer_python=PYTHON > results/peers/lines_changed.csv

`examples/existing/X_ordinary.py` is a script as its library's tutorial writes it, and `X_NAME.py`
the same with DP-SGD by a library (epsilon 3, delta 1e-5, clip norm 1). Each is run `--runs` times.
`--peer_python` is a Python with PyTorch, Opacus and scikit-learn; without it their rows stay out.
Blank lines and docstrings do not count; a line that is edited counts as one gone and one new.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import pathlib
import re
import statistics
import subprocess
import sys
from typing import NamedTuple

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "examples" / "existing"
_NUMBER = r"(?m)^{} ([\d.]+)"


class Change(NamedTuple):
  """One script beside the ordinary one."""

  script: str
  lines: int
  new: int
  gone: int
  accuracy: float  # mean of the runs
  sd: float
  epsilon: str
  runs: int


def lines(path: pathlib.Path) -> list[str]:
  """Returns the lines of a script without its docstring and blank ones."""
  text = re.sub(r'\A""".*?"""', "", path.read_text(), flags=re.DOTALL)
  return [line for line in text.splitlines() if line.strip()]


def changed(before: list[str], after: list[str]) -> tuple[int, int]:
  """Returns how many lines are new and how many are gone.

  >>> changed(["a", "b"], ["a", "c", "d"])
  (2, 1)
  """
  marks = [line[0] for line in difflib.ndiff(before, after)]
  return marks.count("+"), marks.count("-")


def measured(name: str, python: str, runs: int) -> Change:
  """Runs a script, and compares it with the ordinary one of its library."""
  path = _FOLDER / f"{name}.py"
  scores, epsilon = [], ""
  for _ in range(runs):
    done = subprocess.run([python, str(path)], capture_output=True, text=True, check=True)
    scores.append(float(re.findall(_NUMBER.format("accuracy"), done.stdout)[0]))
    epsilon = ([*re.findall(_NUMBER.format("epsilon"), done.stdout), ""])[0]
  own = lines(path)
  new, gone = changed(lines(_FOLDER / f"{name.partition('_')[0]}_ordinary.py"), own)
  mean, sd = statistics.fmean(scores), statistics.stdev(scores) if runs > 1 else 0.0
  return Change(name, len(own), new, gone, round(mean, 4), round(sd, 4), epsilon, runs)


def main() -> None:
  """Prints a CSV row for each script."""
  parser = argparse.ArgumentParser(description="What a script has to change for DP-SGD.")
  parser.add_argument("--runs", type=int, default=5)
  parser.add_argument("--peer_python", help="a Python with torch, opacus and scikit-learn")
  flags = parser.parse_args()
  writer = csv.writer(sys.stdout, lineterminator="\n")
  writer.writerow(Change._fields)
  for path in sorted(_FOLDER.glob("*.py")):
    python = flags.peer_python if path.stem.startswith("torch") else sys.executable
    if python:
      writer.writerow(measured(path.stem, python, flags.runs))
      sys.stdout.flush()


if __name__ == "__main__":
  main()
