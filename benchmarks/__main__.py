"""Measures dpjax against an ordinary gradient, an ordinary loop, and against its peers.

  python -m benchmarks gradients --workloads=small_cnn,mlp --methods=vmap,auto --out=runs/benchmark
  python -m benchmarks gradients --help

The first word says what is measured; --help beside it lists its flags. A table is printed, and
files are written to --out. What can be measured:

"""

from __future__ import annotations

import importlib
import pathlib
import sys
from types import ModuleType

from absl import flags

from dpjax import validate
from dpjax.validate import UserError
from launch import app

# What is measured -> its module, which has `define` (its flags), `parts` (which measures one part
# after the other), `write` and `table`.
SUITES = {
  "allocator": "allocator_speed",
  "compiled": "compiled",
  "correlated": "correlated_cost",
  "data": "data_speed",
  "devices": "device_speed",
  "draws": "noise_draws",
  "federated": "federated_speed",
  "gradients": "gradient_speed",
  "noise": "noise_error",
  "parts": "card_parts",
  "peers": "peer_rounds",
  "population": "population_cost",
  "secure_sums": "sum_overhead",
  "serve": "serving_load",
  "sum_messages": "sum_messages",
  "sweeps": "sweep_speed",
  "training": "training_speed",
}


def define(word: str) -> ModuleType:
  """Defines the flags of a suite, and returns its module.

  Raises:
    UserError: no such suite.
  """
  validate.one_of(SUITES, suite=word)
  suite = importlib.import_module(f"benchmarks.{SUITES[word]}")
  flags.DEFINE_string("out", None, "Directory for the files of the results.")
  suite.define()
  return suite


def measure(suite: ModuleType) -> None:
  """Measures all parts of a suite, and prints its table."""
  values = flags.FLAGS
  out = None if values.out is None else pathlib.Path(values.out)
  if out is not None:
    validate.folder(out=out)
  entries = []
  for name, measured in suite.parts(values):
    entries += measured
    print(f"measured {name}", file=sys.stderr, flush=True)
    # Results are written after each part, so that an interrupted run keeps them.
    if out is not None:
      suite.write(entries, out)
  print(suite.table(entries))


def main() -> None:
  """Runs the suite that the first word names."""
  word = sys.argv[1] if sys.argv[1:] else "--help"
  if word in ("-h", "--help", "help"):
    print(f"{__doc__}{', '.join(SUITES)}")
    return
  try:
    suite = define(word)
  except UserError as error:
    app.fail(error)
  del sys.argv[1]
  # absl prints it for --help.
  sys.modules["__main__"].__doc__ = (suite.__doc__ or "").replace("%", "%%")
  app.run(lambda: measure(suite))


if __name__ == "__main__":
  main()
