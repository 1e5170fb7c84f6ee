"""Processor seconds until a clipped gradient is compiled, and the size of its program.

    python -m benchmarks.program_size > results/compile_time/program_size.csv

Each network and method is compiled in a process of its own, for 8 examples and without programs of
earlier runs. `--only=NETWORK,METHOD` compiles one of them in this process.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks import gradient_speed, workloads
from dpjax import jaxprs, losses
from dpjax.types import Example
from dpjax.zoo import networks

METHODS = ("ordinary", "jax_privacy", "vmap", "auto")
NETWORKS = ("transformer of 12 layers", "WRN-16-4")
COLUMNS = ("network", "method", "trace", "lower", "XLA", "seconds", "equations")
_EXAMPLES = 8


def workload(network: str) -> workloads.Workload:
  """Returns loss, parameters and examples of one of `NETWORKS`."""
  if network == "WRN-16-4":
    model = networks.WideResNet(num_classes=10)
    return workloads._images(model, (32, 32, 3), _EXAMPLES)
  model = networks.Transformer(vocab_size=1024, num_layers=12, tie_embeddings=False)
  tokens = workloads._tokens(_EXAMPLES, 128, 1024)
  params = jax.jit(model.init)(jax.random.key(0), tokens[:1])
  batch = Example(tokens, jnp.zeros(_EXAMPLES, jnp.int32))
  loss_fn = losses.next_token(workloads._apply(model))
  return workloads.Workload(loss_fn, params, batch)


def row(network: str, method: str) -> list[str | int]:
  """Compiles the gradient of one method and returns a row of the table."""
  work = workload(network)
  gradient = jax.jit(gradient_speed.function(work, method))
  clock = [time.process_time()]
  traced = gradient.trace(work.params, work.batch)
  clock.append(time.process_time())
  lowered = traced.lower()
  clock.append(time.process_time())
  lowered.compile()
  clock.append(time.process_time())
  seconds = [after - before for before, after in itertools.pairwise(clock)]
  count = sum(1 for _ in jaxprs.every_equation(traced.jaxpr.jaxpr))
  return [network, method, *(f"{part:.1f}" for part in (*seconds, sum(seconds))), count]


def main() -> None:
  """Prints the table, or one row of it."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only")
  only = parser.parse_args().only
  rows = csv.writer(sys.stdout, lineterminator="\n")
  if only:
    network, method = only.split(",")
    return rows.writerow(row(network, method))
  rows.writerow(COLUMNS)
  sys.stdout.flush()
  env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
  for network in NETWORKS:
    for method in METHODS:
      words = ["-m", "benchmarks.program_size", f"--only={network},{method}"]
      subprocess.run([sys.executable, *words], env=env, check=True)
  return None


if __name__ == "__main__":
  main()
