"""Processor time of whole private steps, from the draw to the update, beside an ordinary loop.

    python -m benchmarks.private_steps > results/training/private_steps.csv

Every loop takes its rows from the same arrays in memory and updates by Adam. `ordinary` takes the
next rows of a shuffled order. `dpjax, fixed size` has as many rows, all real. `dpjax, Poisson` and
`jax_privacy` draw as many on average, and pad to the capacity of dpjax's plan. All methods of a
workload take turns in one process; jax_privacy has none where its gradients of single
examples would take gigabytes.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax
from benchmarks import workloads
from dpjax import losses, models, trees
from dpjax.types import Example
from dpjax.zoo import networks

_STEPS = 10_000  # of the plans: more than any loop takes
_TURN_SECONDS = 0.5  # of each method
_WIDE = {"xla_cpu_prefer_vector_width": 512}  # as of the steps that dpjax compiles
_MOST_STACKED_BYTES = 2e9  # of gradients of single examples, which jax_privacy holds
COLUMNS = ("workload", "rows", "batch", "parameters", "method")


class Work(NamedTuple):
  """Data in memory, first parameters, and the loss of one example."""

  data: Any
  params: Any
  loss_fn: Callable[[Any, Any], jax.Array]
  batch_size: int


def _dense(num_rows: int, columns: int, widths: tuple[int, ...], batch_size: int) -> Work:
  draw = np.random.default_rng(0)
  x = draw.standard_normal((num_rows, columns), np.float32)
  data = dpjax.data.from_arrays(x, draw.integers(0, 2, num_rows), num_classes=2)
  model = models.Mlp(num_classes=2, features=widths)
  params = model.init(jax.random.key(0), x[:1])
  return Work(
    data, params, losses.softmax_cross_entropy(workloads._apply(model)), batch_size
  )


def _transformer(num_rows: int, batch_size: int) -> Work:
  tokens = np.random.default_rng(0).integers(0, 256, (num_rows, 64)).astype(np.int32)
  labels = np.zeros(num_rows, np.int64)
  data = dpjax.data.from_arrays(tokens, labels, num_classes=2, vocab_size=256)
  model = networks.Transformer(vocab_size=256, num_layers=2, tie_embeddings=False)
  params = jax.jit(model.init)(jax.random.key(0), tokens[:1])
  return Work(data, params, losses.next_token(workloads._apply(model)), batch_size)


def _images(num_rows: int, batch_size: int) -> Work:
  draw = np.random.default_rng(0)
  x = draw.standard_normal((num_rows, 28, 28, 1), np.float32)
  data = dpjax.data.from_arrays(x, draw.integers(0, 10, num_rows), num_classes=10)
  model = models.Cnn(num_classes=10)
  params = model.init(jax.random.key(0), x[:1])
  loss_fn = losses.softmax_cross_entropy(workloads._apply(model))
  return Work(data, params, loss_fn, batch_size)


WORKLOADS: dict[str, Callable[[], Work]] = {
  "logistic regression, 100 columns": lambda: _dense(100_000, 100, (), 1_000),
  "logistic regression, 20 columns": lambda: _dense(1_000_000, 20, (), 1_000),
  "logistic regression, 4 columns": lambda: _dense(10_000_000, 4, (), 1_000),
  "MLP": lambda: _dense(100_000, 100, (256, 256), 256),
  "CNN": lambda: _images(20_000, 64),
  "transformer of 2 layers": lambda: _transformer(20_000, 32),
  "MLP of 1e7": lambda: _dense(10_000, 784, (2560, 2560), 64),
}


def _with(tx: Any, grad_fn: Callable) -> Callable:
  @functools.partial(jax.jit, compiler_options=_WIDE)
  def step(params: Any, state: Any, *batch: Any) -> Any:
    updates, state = tx.update(grad_fn(params, *batch), state, params)
    return optax.apply_updates(params, updates), state

  return step


def _taken(work: Work, rows: np.ndarray) -> Example:
  return Example(work.data.x[rows], work.data.y[rows])


def _ordinary(work: Work) -> Iterator[None]:
  mean = lambda p, b: jnp.mean(jax.vmap(work.loss_fn, (None, 0))(p, b))
  tx = optax.adam(1e-3)
  step = _with(tx, jax.grad(mean))
  params, state = work.params, tx.init(work.params)
  draw = np.random.default_rng(0)
  size = work.batch_size
  while True:
    order = draw.permutation(len(work.data))
    for start in range(0, len(order) - size + 1, size):
      params, state = step(params, state, _taken(work, order[start : start + size]))
      jax.block_until_ready(params)
      yield


def _poisson_plan(work: Work) -> dpjax.Plan:
  count = len(work.data)
  epochs = _STEPS * work.batch_size / count
  options: Any = {"epsilon": 3.0, "delta": 1e-8, "l2_clip_norm": 1.0, "num_examples": count}
  size = work.batch_size
  return dpjax.Plan.for_data(work.data, batch_size=size, epochs=epochs, **options)


def _fixed_size_plan(work: Work) -> dpjax.Plan:
  sampler = dpjax.sampling.FixedSizeSampler(
    batch_size=work.batch_size, num_examples=len(work.data)
  )
  return dpjax.Plan(
    noise_multiplier=1.0,
    sampler=sampler,
    num_steps=_STEPS,
    l2_clip_norm=1.0,
    normalize_by=work.batch_size,
    delta=1e-8,
    neighboring_relation=dpjax.NeighboringRelation.REPLACE_ONE,
  )


def _ours(plan_of: Callable[[Work], dpjax.Plan]) -> Callable[[Work], Iterator[None]]:
  def loop(work: Work) -> Iterator[None]:
    plan = plan_of(work)
    tx = optax.chain(plan.transform(dpjax.new_key()), optax.adam(1e-3))
    step = _with(tx, plan.clipped_grad(work.loss_fn))
    params, state = work.params, tx.init(work.params)
    for batch in plan.batches(work.data):
      params, state = step(params, state, batch)
      jax.block_until_ready(params)
      yield

  return loop


def _jax_privacy(work: Work) -> Iterator[None]:
  from jax_privacy import (  # pyright: ignore[reportMissingImports]
    batch_selection,
    clipping,
    noise_addition,
  )

  size = work.batch_size
  sampler: Any = _poisson_plan(work).sampler
  capacity = sampler.capacity
  clipped = clipping.clipped_grad(
    work.loss_fn, l2_clip_norm=1.0, keep_batch_dim=False, normalize_by=size
  )
  noise = noise_addition.gaussian_privatizer(
    stddev=clipped.sensitivity() * 1.0, prng_key=jax.random.key(0)
  )
  tx = optax.chain(noise, optax.adam(1e-3))
  step = _with(tx, lambda p, b, out: clipped(p, b, is_padding_example=out))
  params, state = work.params, tx.init(work.params)
  count = len(work.data)
  drawn = batch_selection.CyclicPoissonSampling(size / count, _STEPS)
  for rows in drawn.batch_iterator(count, np.random.default_rng(0)):
    padded = batch_selection.pad_to_multiple_of(rows, capacity)
    batch = _taken(work, padded)
    params, state = step(params, state, batch, padded == -1)
    jax.block_until_ready(params)
    yield


METHODS: dict[str, Callable[[Work], Iterator[None]]] = {
  "ordinary": _ordinary,
  "dpjax, fixed size": _ours(_fixed_size_plan),
  "dpjax, Poisson": _ours(_poisson_plan),
  "jax_privacy": _jax_privacy,
}


def _seconds(loop: Iterator[None], steps: int) -> float:
  began = time.process_time()
  for _ in itertools.islice(loop, steps):
    pass
  return (time.process_time() - began) / steps


def rows_of(name: str, repeats: int, methods: list[str]) -> Iterator[list[Any]]:
  """Yields the rows of the table of one workload."""
  work = WORKLOADS[name]()
  stacked = 8 * work.batch_size * trees.size(work.params)
  fit = [name for name in methods if name != "jax_privacy" or stacked < _MOST_STACKED_BYTES]
  loops = {method: METHODS[method](work) for method in fit}
  steps = {}
  for method, loop in loops.items():
    # The first steps compile.
    _seconds(loop, 3)
    steps[method] = min(200, max(2, round(_TURN_SECONDS / _seconds(loop, 2))))
  spent: dict[str, list[float]] = {method: [] for method in fit}
  for _ in range(repeats):
    for method, loop in loops.items():
      spent[method].append(_seconds(loop, steps[method]))
  first = statistics.median(spent[methods[0]])
  for method, each in spent.items():
    middle = statistics.median(each)
    about = [f"{1e3 * middle:.3g}", f"{1e3 * statistics.stdev(each):.2g}", len(each)]
    size = trees.size(work.params)
    head = [name, len(work.data), work.batch_size, size, method]
    yield [*head, *about, f"{middle / first:.2f}"]


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", action="append", choices=WORKLOADS)
  parser.add_argument("--methods", action="append", choices=METHODS)
  parser.add_argument("--repeats", type=int, default=5)
  flags = parser.parse_args()
  rows = csv.writer(sys.stdout, lineterminator="\n")
  rows.writerow([*COLUMNS, "ms a step", "sd", "n", "of ordinary"])
  for name in flags.only or WORKLOADS:
    for row in rows_of(name, flags.repeats, flags.methods or list(METHODS)):
      rows.writerow(row)
      sys.stdout.flush()


if __name__ == "__main__":
  main()
