"""PATE: a student learns from public examples that are labelled by noisy votes of teachers.

  python -m launch.pate --config=configs/pate/quickstart.py --workdir=runs/pate
  python -m launch.pate --config=configs/pate/mnist.py --workdir=runs/pate_mnist \\
    --config.epsilon=1

Every field of the config (dpjax/experiments/kinds/pate/config.py) can be overridden by its dotted
name. The run writes to --workdir: config.json, metrics.jsonl, result.json, report.png and .csv,
params.npz (the published labels and the student), checkpoints/ (votes and noise key: secret).
Stop it at any time; the same command goes on where it stopped.

The epsilon that is printed does not depend on the votes. With --config.data_dependent=true
result.json also says what these very votes cost, which is private; with
--config.cost=published that number gets noise of its own, which is accounted.
--config.release=true takes keys of 256 bits and writes nothing private.
"""

from __future__ import annotations

from absl import flags

from dpjax.experiments.kinds.pate.kind import PATE
from dpjax.experiments.run import guarantee, loop, writers
from launch import app, config_flag

config_flag.define(kind=PATE, default="configs/pate/quickstart.py")
flags.DEFINE_string("workdir", None, "Directory of this run (default: runs/pate_<config>).")


def line(result: dict) -> str:
  """Returns one line about a finished run: scores, guarantee, answered queries and time."""
  return (
    f"{result['dataset']} {result['method']}: {writers.headline(result)}, "
    f"{guarantee.summary(result)}, {result['num_answers']} of {result['num_queries']} queries "
    f"answered{writers.took(result)}"
  )


def main() -> None:
  """Runs what is left of the run: teachers, queries and the student."""
  config = config_flag.get()
  workdir = config_flag.workdir("pate_")
  with app.stoppable(workdir):
    print(line(loop.train(config, workdir)))


if __name__ == "__main__":
  app.run(main)
