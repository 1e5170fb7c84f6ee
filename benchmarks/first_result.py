"""Processor seconds of short commands, first without programs of earlier runs, then with them.

    python -m benchmarks.first_result [--tree=ANOTHER_CHECKOUT] [--only=check] > first_result.csv

Each command runs twice in processes of its own, with a cache of compiled programs that is empty
before the first: `cold` and `warm`. `--tree` measures another state of dpjax in turns with this.
"""

from __future__ import annotations

import argparse
import csv
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile

_HERE = pathlib.Path(__file__).resolve().parents[1]
# Name -> arguments of Python; DIR is a new folder, NOTEBOOK README's first program.
COMMANDS = {
  "train": ["-m", "launch.train", "--workdir=DIR"],
  "train --dry_run": ["-m", "launch.train", "--dry_run"],
  "federate": ["-m", "launch.federate", "--workdir=DIR"],
  "check": ["-m", "launch.check", "--config=configs/quickstart.py"],
  "attack": ["-m", "launch.attack", "--workdir=DIR"],
  "sweep of 15": [
    "-m",
    "launch.sweep",
    "--config=configs/sweeps/quickstart.py",
    "--workdir=DIR",
    "--config.seeds=[0, 1, 2]",
    "--config.epsilons=[0.5, 1.0, 2.0, 4.0, 8.0]",
  ],
  "account": [
    *("-m", "launch.account", "--noise_multiplier=1.1", "--sampling_prob=0.01"),
    "--num_steps=4000",
  ],
  "README's notebook": ["-c", "NOTEBOOK"],
}


def processor_seconds(tree: pathlib.Path, name: str, programs: str) -> float:
  """Returns the processor seconds of a command of a checkout, with its child processes."""
  with tempfile.TemporaryDirectory() as folder:
    first = re.search("```python\n(.*?)```", (tree / "README.md").read_text(), re.S)
    assert first
    words = [word.replace("DIR", f"{folder}/run") for word in COMMANDS[name]]
    arguments = [first[1] if word == "NOTEBOOK" else word for word in words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
      [sys.executable, *arguments],
      cwd=tree,
      env={**os.environ, "PYTHONPATH": str(tree), "XDG_CACHE_HOME": programs},
      capture_output=True,
      text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
  if ran.returncode:
    raise SystemExit(f"{name} of {tree}: {ran.stderr[-500:]}")
  return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
  """Prints a row for each command and checkout."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--tree", type=pathlib.Path, action="append", default=[])
  parser.add_argument("--only", action="append", choices=COMMANDS)
  flags = parser.parse_args()
  rows = csv.writer(sys.stdout)
  rows.writerow(["command", "tree", "cold", "warm"])
  for name in flags.only or COMMANDS:
    for tree in (*flags.tree, _HERE):
      with tempfile.TemporaryDirectory() as programs:
        seconds = [processor_seconds(tree, name, programs) for _ in range(2)]
      label = "now" if tree == _HERE else tree.name
      rows.writerow([name, label, *(f"{value:.1f}" for value in seconds)])
      sys.stdout.flush()


if __name__ == "__main__":
  main()
