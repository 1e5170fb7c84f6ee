"""Error of a private sum of clients' vectors: Skellam shares by bits, against central noise.

  python -m benchmarks noise

It measures no time, and writes distributed_noise.csv, .md and .png.

Each entry is one sum of random vectors of the largest norm, its noise calibrated to the same
epsilon (one round, zero-out, delta 1e-5), by the accountant of Skellam noise, Renyi DP, for
both kinds; central Gaussian noise by its own tightest accountant stands beside it.
"""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks import entries as entries_file
from dpjax import accounting, markdown, secure, validate
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.secure.distributed_noise import SkellamSum
from dpjax.secure.sums import PlainSum
from dpjax.validate import UserError

# A sum whose error is 5 % above that of central noise is as good as any.
RECIPE = Recipe(
  "lines", ("bits",), ("ratio",), "epsilon",
  references=(("5 % more than central noise", None, 1.05),),
  words={"bits": "bits of the modulus", "ratio": "RMSE over that of central noise"}
  | {f"{epsilon:g}": f"epsilon {epsilon:g}" for epsilon in (0.5, 1.0, 4.0, 8.0)},
  title="Skellam shares inside a sum, against central Gaussian noise",
)  # fmt: skip
BITS = (10, 12, 14, 16, 18, 20)
EPSILONS = (0.5, 1.0, 4.0, 8.0)
_DELTA = 1e-5
_RELATION = "replace_special"


class Entry(NamedTuple):
  """One number of bits at one epsilon; errors are of one coordinate of the sum / clip norm."""

  bits: int
  epsilon: float
  noise_multiplier: float | None  # of the Skellam noise; None: no grid so coarse reaches it
  grid_scale: float | None
  rmse: float | None  # measured, rounding and wrapping included
  central_rmse: float  # Gaussian noise, by Renyi DP
  ratio: float | None  # of the last two
  ratio_to_pld: float | None  # to Gaussian noise by PLD
  wrap_probability: float | None  # bound, of a whole sum
  seconds: float | None  # of one sum, all clients encoded on one machine


def measure(
  *,
  bits: Sequence[int] = BITS,
  epsilons: Sequence[float] = EPSILONS,
  dim: int = 4096,
  num_clients: int = 100,
) -> list[Entry]:
  """Every pair of them.

  Args:
    dim: numbers in a message.
  """
  validate.integer_at_least(1, dim=dim, num_clients=num_clients)
  rng = np.random.default_rng(0)
  vectors = rng.random((num_clients, dim)) - 0.5
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  return [_entry(b, epsilon, vectors) for epsilon in epsilons for b in bits]


def _calibrated(make: Any, epsilon: float, accountant: str) -> float:
  return accounting.calibrate_noise_multiplier(
    make,
    epsilon=epsilon,
    delta=_DELTA,
    neighboring_relation=_RELATION,
    accountant=accountant,
  )


def _entry(bits: int, epsilon: float, vectors: np.ndarray) -> Entry:
  count, dim = vectors.shape
  central, tight = (
    _calibrated(accounting.gaussian_event, epsilon, by) for by in ("rdp", "pld")
  )

  def sized(z: float) -> SkellamSum:
    return SkellamSum.sized(
      noise_multiplier=z, l2_clip_norm=1.0, dim=dim, bits=bits,
      max_clients=count, min_survivors=count,
    )  # fmt: skip

  try:
    mechanism = sized(_calibrated(lambda z: sized(z).event, epsilon, "rdp"))
  except UserError:
    return Entry(bits, epsilon, None, None, None, central, None, None, None, None)
  aggregator = secure.skellam_mean(PlainSum(min_survivors=count), mechanism, seed=bits)
  messages = jnp.asarray(vectors, jnp.float32)
  there = np.ones(count, bool)
  start = time.perf_counter()
  mean, _ = aggregator.update(messages, there, jnp.int32(0))
  seconds = time.perf_counter() - start
  error = count * (np.asarray(mean) - vectors.mean(axis=0))
  rmse = math.sqrt(float(np.mean(error**2)))
  return Entry(
    bits, epsilon, mechanism.noise_multiplier, mechanism.scale, rmse, central,
    rmse / central, rmse / tight, mechanism.wrap_probability, seconds,
  )  # fmt: skip


def table(entries: Sequence[Entry]) -> str:
  """As Markdown.

  >>> print(table([Entry(10, 0.5, None, None, None, 7.668, None, None, None, None)]))
  | bits | epsilon | noise_multiplier | grid_scale | rmse | central_rmse | ratio | ...
  | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
  | 10 | 0.5 | - | - | - | 7.668 | - | - | - | - |
  """
  shown = lambda value: "-" if value is None else f"{value:.4g}"
  rows = ([shown(value) for value in entry] for entry in entries)
  return markdown.table(Entry._fields, rows).rstrip()


def write(entries: Sequence[Entry], out: pathlib.Path) -> None:
  """`out`/distributed_noise.csv, .md and .png."""
  out.mkdir(parents=True, exist_ok=True)
  entries_file.write(out / "distributed_noise.csv", entries)
  (out / "distributed_noise.md").write_text(table(entries) + "\n")
  redraw.write(out / "distributed_noise.csv", RECIPE)


def define() -> None:
  """Defines the flags: none."""


def parts(_: object) -> Iterator[tuple[str, list[Entry]]]:
  """Yields (name, its entries) of the only part."""
  yield "sums", measure()
