"""Check the parts of a private run before it is trusted.

  python -m launch.check --config=configs/quickstart.py
  python -m launch.check --config=configs/mnist_cnn.py --workdir=runs/mnist_cnn

Every check uses the config's own model, gradient, noise, sampler and keys.
Gradient: the influence of one example; each clipped term alone and their sum, for every mask, for
long and short gradients, and for a batch of the run's own size; padding; examples that are not
finite; sums that remember earlier batches; cross-example leakage; whether a whole step adds
anything to the parts that are checked.
Noise: distribution, tails and independence over every step of the run (on a sample of the
coordinates); updates that hold more than their own sum and noise; the divisor.
The rest: the sampler's scheme and its seed, the accountant, what is stated, overflow, reuse of
keys, and the epsilon that gradient canaries prove.
Prints one line for each; with --workdir also writes check.json there. No model is trained.
Exit code 1 if a check fails.
"""

from __future__ import annotations

import pathlib

from absl import flags

from dpjax import validate
from dpjax.checks import table
from dpjax.checks.table import CheckTable
from dpjax.experiments.checks import of_config
from dpjax.experiments.config.naming import naming
from dpjax.experiments.kinds.central.config import TrainConfig
from dpjax.experiments.run import writers
from dpjax.experiments.run.kind import KINDS
from launch import app, config_flag

config_flag.define(kind=KINDS["train"], default="configs/quickstart.py")
flags.DEFINE_string("workdir", None, "Directory to write check.json to (default: nowhere).")


def run_checks(config: TrainConfig) -> CheckTable:
  """Runs every check of a config's run. A bar on a terminal names the part that is at work."""
  with writers.Progress(1, desc="model and data", lines=False) as bar:
    subject = of_config.subject(config)
    bar.update()
  checks = of_config.checks(subject)
  with writers.Progress(len(checks), desc="checks", lines=False) as bar:
    rows = []
    for row in table.rows(checks, subject, begins=lambda name: bar.update(0, now=name)):
      rows.append(row)
      bar.update()
  return CheckTable(rows)


def main() -> None:
  """Runs every check, and prints the table. A failed check ends the process with exit code 1."""
  workdir = flags.FLAGS.workdir
  if workdir is not None:
    validate.folder(workdir=workdir)
  config = config_flag.get()
  app.prepare_memory([config])
  with naming(config):
    result = run_checks(config)
  print(result)
  if workdir is not None:
    writers.write_json(pathlib.Path(workdir) / "check.json", result.to_json())
  if result.failed:
    names = "; ".join(row.name for row in result.failed)
    app.fail(f"{len(result.failed)} of {len(result)} checks failed: {names}", code=1)


if __name__ == "__main__":
  app.run(main)
