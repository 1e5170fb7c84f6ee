"""Private synthetic images: one noisy release of an embedding, a generator, and samples.

  python -m launch.synthesize --config=configs/synthesis/quickstart.py --workdir=runs/synthesis
  python -m launch.synthesize --config=configs/synthesis/mnist.py --workdir=runs/synthesis_mnist \\
    --config.epsilon=0.2

Every field of the config (dpjax/experiments/kinds/synthesis/config.py) can be overridden by its
dotted name. The run writes to --workdir: config.json, metrics.jsonl, result.json, report.png and
.csv, samples.npz, samples.csv (the first 1,000), samples.png, params.npz (the noisy sums and the
generator), checkpoints/ (with the noise key: secret). Stop it at any time; the same command goes on
where it stopped.

Only the first step reads private records. The generator and its samples cost nothing more.
--config.attack=true also attacks the samples; its result is private.
--config.release=true takes keys of 256 bits and writes nothing private.
"""

from __future__ import annotations

from absl import flags

from dpjax.experiments.kinds.synthesis.kind import SYNTHESIS
from dpjax.experiments.run import guarantee, loop, writers
from launch import app, config_flag

config_flag.define(kind=SYNTHESIS, default="configs/synthesis/quickstart.py")
flags.DEFINE_string(
  "workdir", None, "Directory of this run (default: runs/synthesis_<config>)."
)


def line(result: dict) -> str:
  """Returns one line about a finished run: its scores, its guarantee and its time."""
  return (
    f"{result['dataset']} {result['method']}: {writers.headline(result)} of classifiers that saw "
    f"samples alone, {guarantee.summary(result)}{writers.took(result)}"
  )


def main() -> None:
  """Runs what is left of the run: the release, if it was not made yet, and the updates."""
  config = config_flag.get()
  workdir = config_flag.workdir("synthesis_")
  with app.stoppable(workdir):
    print(line(loop.train(config, workdir)))


if __name__ == "__main__":
  app.run(main)
