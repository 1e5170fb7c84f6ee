"""Distillation: a private teacher and a smaller student under one budget.

  python -m launch.distill --config=configs/distillation/quickstart.py --workdir=runs/distill
  python -m launch.distill --config=configs/distillation/mnist.py --workdir=runs/distill_mnist \\
    --config.method=joint

Every field of the config (dpjax/experiments/kinds/distillation/config.py) can be overridden by its
dotted name. The run writes to --workdir: config.json, metrics.jsonl, result.json, report.png and
.csv, params.npz (both networks), checkpoints/ (with the noise key: secret). Stop it at any time;
the same command goes on where it stopped.

With --config.method=public the student reads public images and the teacher, and costs nothing more.
With --config.method=joint teacher and student read private records, and one clipped gradient holds
the parts of both.
"""

from __future__ import annotations

from absl import flags

from dpjax.experiments.kinds.distillation.kind import DISTILLATION
from dpjax.experiments.run import guarantee, loop, writers
from launch import app, config_flag

config_flag.define(kind=DISTILLATION, default="configs/distillation/quickstart.py")
flags.DEFINE_string(
  "workdir", None, "Directory of this run (default: runs/distill_<config>)."
)


def line(result: dict) -> str:
  """Returns one line about a finished run: its scores, its guarantee and its time."""
  return (
    f"{result['dataset']} {result['method']}: {writers.headline(result)} of the student, "
    f"teacher_accuracy={result['teacher_accuracy']:.4g}, "
    f"{guarantee.summary(result)}{writers.took(result)}"
  )


def main() -> None:
  """Runs the steps that are left, and prints the result."""
  config = config_flag.get()
  workdir = config_flag.workdir("distill_")
  with app.stoppable(workdir):
    print(line(loop.train(config, workdir)))


if __name__ == "__main__":
  app.run(main)
