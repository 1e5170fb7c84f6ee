"""Distillation: a private teacher and a smaller student under one budget.

  python -m launch.distill --config=configs/distillation/quickstart.py --workdir=runs/distill
  python -m launch.distill --config=configs/distillation/mnist.py --workdir=runs/distill_mnist \\
    --config.method=joint

Every field of the config (dpjax/experiments/kinds/distillation.py) can be overridden by its
dotted name. The run writes to --workdir: config.json, metrics.jsonl, result.json, report.png and
.csv, params.npz (both networks), checkpoints/ (with the noise key: secret). Stop it at any time;
the same command goes on where it stopped.

With --config.method=public the student reads public images and the teacher, and costs nothing more.
With --config.method=joint teacher and student read private records, and one clipped gradient holds
the parts of both.
"""

from launch import app, main

main.define("distill", default="configs/distillation/quickstart.py")

if __name__ == "__main__":
  app.run(main.main)
