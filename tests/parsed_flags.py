"""Prints what a launcher's own flags refuse: `python -m tests.parsed_flags LAUNCHER WORDS`.

WORDS is JSON: a list of the words of each command.
"""

import importlib
import json
import sys

from absl import flags


def main():
  module = importlib.import_module(f"launch.{sys.argv[1]}")
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
