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

from launch import app, main

main.define("pate", default="configs/pate/quickstart.py")

if __name__ == "__main__":
  app.run(main.main)
