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

from launch import app, main

main.define("synthesize", default="configs/synthesis/quickstart.py")

if __name__ == "__main__":
  app.run(main.main)
