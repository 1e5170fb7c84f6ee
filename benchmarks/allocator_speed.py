"""What it saves or costs that the C library keeps freed memory (`dpjax.parallel.allocator`).

  python -m benchmarks allocator

It writes allocator.csv.

Steps of DP-SGD run in processes of their own that do and that do not, in turns.

Of a linear model on features as wide as scattering features of MNIST, and of a small CNN on
microbatches, whose many small operations then wait for each other.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from benchmarks import alone, options
from benchmarks import entries as entries_file
from dpjax import data, losses, models, sampling, training, trees, validate
from dpjax.data import resident
from dpjax.experiments.run import provenance
from dpjax.gradients.ghost.explain import aligned
from dpjax.parallel import allocator
from dpjax.plan import Plan
from dpjax.validate import UserError

METHODS = (
  "returned",
  "kept",
)  # what is freed; the first is what the second is compared with
WORKLOADS = ("wide", "small")
_EXAMPLES = 20_000
_CLASSES = 10
_STEPS = 40


class Entry(NamedTuple):
  """One workload under one method; medians over processes."""

  workload: str
  method: str
  step_s: float  # median over steps, batch included
  system_s: float  # of all threads in the kernel: mean over steps
  peak_bytes: int  # of the process
  ratio: float  # of step_s, to the first method
  params_sha256: str  # after all steps: equal for both


class _Found(NamedTuple):
  """By one process."""

  step_s: float
  system_s: float
  peak_bytes: int
  params_sha256: str


class _Work(NamedTuple):
  """What is trained."""

  model: Any
  shape: tuple[int, ...]  # of an example
  size: int  # of a batch, on average
  microbatch_size: int | None


def _work(workload: str) -> _Work:
  if workload == "wide":
    return _Work(models.Linear(num_classes=_CLASSES), (4_000,), 4_096, None)
  return _Work(models.Cnn(num_classes=_CLASSES), (28, 28, 1), 512, 128)


def _measured(workload: str) -> _Found:
  model, shape, size, microbatch_size = _work(workload)
  plan = Plan(
    sampler=sampling.PoissonSampler(
      sampling_prob=size / _EXAMPLES, capacity=size + 8 * math.isqrt(size)
    ),
    noise_multiplier=1.0,
    l2_clip_norm=0.1,
    normalize_by=size,
    num_steps=_STEPS + 2,  # the first two compile
    delta=1e-5,
  )
  init, step = training.dp_sgd(
    losses.softmax_cross_entropy(model.apply), plan, optax.sgd(0.1),
    noise_key=jax.random.key(0), microbatch_size=microbatch_size,
  )  # fmt: skip
  step = jax.jit(step, donate_argnums=0)
  x = np.random.default_rng(0).random((_EXAMPLES, *shape), np.float32)
  labels = np.arange(_EXAMPLES) % _CLASSES
  dataset = resident.resident(data.from_arrays(x, labels, num_classes=_CLASSES))
  state = init(model.init(jax.random.key(1), jnp.zeros((1, *shape))))
  seconds = []
  batches = plan.batches(dataset, rng=1)
  for batch in itertools.islice(batches, 2):
    state, _ = step(state, batch)
  jax.block_until_ready(state)
  system = _system_seconds()
  began = time.perf_counter()
  for batch in batches:
    state, _ = step(state, batch)
    jax.block_until_ready(state)
    seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
  return _Found(
    step_s=statistics.median(seconds),
    system_s=(_system_seconds() - system) / len(seconds),
    peak_bytes=provenance.peak_rss(),
    params_sha256=trees.sha256(state.params),
  )


def _system_seconds() -> float:
  return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def measure(workload: str, *, repeats: int = 3) -> list[Entry]:
  """One workload: an entry for each method.

  Args:
    workload: "wide" or "small".
    repeats: processes of each method.

  Raises:
    UserError: a wrong argument; a process failed; nothing can be kept here; the parameters of
      two processes differ.
  """
  validate.one_of(WORKLOADS, workloads=workload)
  validate.integer_at_least(1, repeats=repeats)
  for name in allocator.chosen_by_user():
    raise UserError(
      "must not be set: it is left as it is", field=name, value=os.environ[name]
    )
  measured: dict[str, list[_Found]] = {method: [] for method in METHODS}
  for _ in range(repeats):
    for method in METHODS:
      outcome = alone.run(__name__, workload, method)
      if outcome.printed is None:
        raise UserError(
          f"failed: {outcome.reason[:160]}", field="workloads", value=workload
        )
      measured[method].append(_Found(*outcome.printed))
  trained = {each.params_sha256 for all_of in measured.values() for each in all_of}
  if len(trained) > 1:
    raise UserError(
      f"trained {len(trained)} different parameters", field="workloads", value=workload
    )
  first = statistics.median(each.step_s for each in measured[METHODS[0]])
  return [_entry(workload, method, each, first) for method, each in measured.items()]


def _entry(workload: str, method: str, measured: Sequence[_Found], first: float) -> Entry:
  step_s = statistics.median(each.step_s for each in measured)
  return Entry(
    workload=workload,
    method=method,
    step_s=step_s,
    system_s=statistics.median(each.system_s for each in measured),
    peak_bytes=int(statistics.median(each.peak_bytes for each in measured)),
    ratio=step_s / first,
    params_sha256=measured[0].params_sha256,
  )


def table(entries: Sequence[Entry]) -> str:
  """The entries for people.

  >>> print(table([Entry("wide", "kept", 0.02, 0.001, 10**9, 0.4, "5f1c" * 16)]))
  workload  freed memory is  step     kernel, all threads  peak     ratio  parameters
  wide      kept             20.0 ms  1.0 ms               1000 MB  0.40   5f1c5f1c
  """
  header = ("workload", "freed memory is", "step", "kernel, all threads", "peak", "ratio",
            "parameters")  # fmt: skip
  rows = [
    (
      e.workload,
      e.method,
      f"{1e3 * e.step_s:.1f} ms",
      f"{1e3 * e.system_s:.1f} ms",
      f"{e.peak_bytes / 1e6:.0f} MB",
      f"{e.ratio:.2f}",
      e.params_sha256[:8],
    )
    for e in entries
  ]
  return aligned([header, *rows])


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/allocator.csv."""
  entries_file.write(out / "allocator.csv", entries)


def define() -> None:
  """Defines the flags."""
  options.define_names("workloads", WORKLOADS)
  options.define_repeats()


def parts(values: flags.FlagValues) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of each part that the flags ask for."""
  for name in options.names("workloads", WORKLOADS):
    yield name, measure(name, repeats=values.repeats)


if __name__ == "__main__":
  asked_workload, asked_method = alone.ordered()
  if asked_method == "kept" and not allocator.keep_freed_memory():
    raise UserError("freed memory can be kept under glibc 2.35 or newer alone")
  print(json.dumps(_measured(asked_workload)))
