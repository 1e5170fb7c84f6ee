"""Measures dpjax against an ordinary gradient and against its peers.

  python -m launch.benchmark --suite=gradients
  python -m launch.benchmark --suite=gradients --workloads=small_cnn,mlp --methods=vmap,auto \\
    --repeats=9 --out=runs/benchmark

For each workload, in one process and in turns: the ordinary gradient, the vmap route, the
fast route (ghost), auto, and jax_privacy.clipped_grad where it is installed. Prints the
median time, compile time and memory of each with their ratio to the ordinary gradient; a
method whose per-example gradients would not fit in 8 GB is skipped and says so. Writes
gradients.csv and gradients.png to --out. Takes about ten minutes on two CPU cores.
"""

from __future__ import annotations

import pathlib
import sys

from absl import flags

from dpjax import validate
from dpjax.experiment import gradient_benchmark, workloads
from launch import app

SUITES = ("gradients",)

flags.DEFINE_string("suite", "gradients", f"What to measure: {', '.join(SUITES)}.")
flags.DEFINE_list("workloads", list(workloads.NAMES), "Which workloads.")
flags.DEFINE_list("methods", list(gradient_benchmark.METHODS), "Which methods.")
flags.DEFINE_string("out", None, "Directory for gradients.csv and gradients.png.")
flags.DEFINE_integer("repeats", 5, "Timed rounds; medians are reported.")
flags.DEFINE_bool("peak_rss", True, "Also run each entry alone, for its peak memory.")


def main() -> None:
  """Runs the suite, a line on stderr as each workload is done."""
  options = flags.FLAGS
  validate.one_of(SUITES, suite=options.suite)
  validate.integer_at_least(1, repeats=options.repeats)
  gradient_benchmark.check(options.workloads, options.methods)
  entries = []
  for name in options.workloads:
    entries += gradient_benchmark.measure(
      name, options.methods, repeats=options.repeats, fresh_process=options.peak_rss
    )
    print(f"measured {name}", file=sys.stderr, flush=True)
    if options.out is not None:  # after each workload: a stopped run keeps what it has
      gradient_benchmark.write(entries, pathlib.Path(options.out))
  print(gradient_benchmark.table(entries))


if __name__ == "__main__":
  app.run(main)
