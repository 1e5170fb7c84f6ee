"""Prints what a command's own flags refuse: `python -m tests.parsed_flags LAUNCHER WORDS`.

LAUNCHER may be "benchmarks SUITE", too. WORDS is JSON: a list of the words of each command.
"""

import importlib
import json
import sys

from absl import flags


def main():
  package, _, suite = sys.argv[1].partition(" ")
  if suite:
    importlib.import_module(f"{package}.__main__").define(suite)
  else:
    module = importlib.import_module(f"launch.{package}")
    getattr(module, "define_flags", lambda: None)()
  for words in json.loads(sys.argv[2]):
    try:
      flags.FLAGS(["launcher", *words])
    except flags.Error as error:
      # A sentence names the flag alone.
      if not str(error).startswith("Missing value"):
        print(words, error)


if __name__ == "__main__":
  main()
