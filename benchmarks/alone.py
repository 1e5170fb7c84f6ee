"""A measurement in a process of its own: nothing before it counts as its memory."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple


class Apart(NamedTuple):
  """Of one process: what it found, or why it found nothing."""

  printed: Any  # the JSON that it printed last; None where it failed
  reason: str  # the last line of its errors; "" where it did not fail


def run(module: str, *order: Any) -> Apart:
  """`python -m module ORDER`, ORDER being `order` as JSON (`ordered` reads it back).

  >>> run("this")  # prints a poem, no JSON
  Traceback (most recent call last):
  ...
  json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
  >>> run("no_such_module", 1).reason
  '...No module named no_such_module'
  """
  command = [sys.executable, "-m", module, json.dumps(order)]
  # This package is not installed: the process finds it from any folder.
  checkout = str(pathlib.Path(__file__).resolve().parents[1])
  paths = [checkout, *filter(None, [os.environ.get("PYTHONPATH")])]
  env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
  done = subprocess.run(command, capture_output=True, text=True, env=env)
  if done.returncode:
    return Apart(None, (done.stderr.strip().splitlines() or [""])[-1])
  return Apart(json.loads((done.stdout.strip().splitlines() or [""])[-1]), "")


def ordered() -> list[Any]:
  """What this process was told by `run`."""
  return json.loads(sys.argv[1])
