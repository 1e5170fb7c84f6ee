"""Runs dpjax from the command line.

  dpjax train --config=configs/quickstart.py --workdir=runs/quickstart

`dpjax NAME ...` is `python -m launch.NAME ...`, with the current directory first on Python's path.
"""

from __future__ import annotations

import runpy
import sys

from dpjax import validate
from launch import app

# Name of a launcher -> what it does, for `dpjax --help`.
COMMANDS = {
  "train": "train a model privately",
  "federate": "train over clients, with privacy for each client",
  "run": "carry out a config of any kind",
  "sweep": "run a grid of trainings, and draw their curve",
  "account": "epsilon of a plan, or the noise for an epsilon; no data",
  "audit": "play a game for every claim, or check a final model",
  "attack": "attack a run: membership, inversion, extraction, poisoning",
  "check": "test the parts of a run on your own config before it costs",
  "list": "models, data, samplers, optimizers, attacks by name",
  "plot": "draw a CSV file of results again",
  "prepare": "write a tensorflow-datasets data set",
  "pate": "train a student from noisy votes of teachers",
  "distill": "train a private teacher and a small student",
  "synthesize": "write private synthetic images, and score them",
  "serve": "serve a finished run: drift, alarms, release by stages",
  "report": "explain a finished run to an ethics board",
  "relevance": "layer-wise relevance, RADP and its relatives",
  "secure": "secure sums, encrypted tables and images, two parties",
}
_HELP = ("-h", "--help", "help")


def usage() -> str:
  """Returns the help, one line for each command.

  >>> len(usage().splitlines()) <= 24
  True
  """
  rows = [f"  {name:<11} {words}" for name, words in COMMANDS.items()]
  return "\n".join(
    [
      "usage: dpjax COMMAND [--flag=value ...]",
      "",
      *rows,
      "",
      "dpjax COMMAND --help lists the flags, and every field of the config.",
      "python -m launch.COMMAND does the same.",
    ]
  )


def main() -> None:
  """Runs the launcher that the first argument names, with the other arguments."""
  name = sys.argv[1] if len(sys.argv) > 1 else ""
  if name in _HELP:
    print(usage())
    return
  if name not in COMMANDS:
    hint = validate.did_you_mean(name, COMMANDS) if name else ""
    app.fail(f"dpjax {name}: must be one of {', '.join(COMMANDS)}{hint}")
  # Python searches the folder of the script first, where no user's code lies. So the current folder
  # is put before it.
  sys.path.insert(0, "")
  sys.argv = [f"launch.{name}", *sys.argv[2:]]
  # The launcher is run as by `python -m`, so that only its flags are defined.
  runpy.run_module(f"launch.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
  main()
