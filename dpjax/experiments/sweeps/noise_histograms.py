"""Figure 9 of Kang and Wang 2024: draws of the Laplace and of the Gaussian mechanism.

The paper draws 100,000 numbers of each at epsilon 1, sensitivity 1 and delta 1e-3, and prefers
Laplace. The figure compares the noise of one number. A record is a vector of d numbers, with L1
sensitivity d and L2 sensitivity sqrt(d): for large d, its Gaussian noise is smaller.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpjax import validate
from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.experiments.run import report, writers
from dpjax.experiments.run.workdir import check_own
from dpjax.mechanisms import additive
from dpjax.noise import source

_EPSILON = 1.0
_DELTA = 1e-3
_RANGE = 12.0  # the histograms span -_RANGE to _RANGE
_BINS = 120


class FigureNoise(NamedTuple):
  """A noise distribution of figure 9, with its scale and standard deviations."""

  name: str
  sample: Callable[[jax.Array, jax.Array, float], jax.Array]  # (key, like, scale)
  scale: float  # scale of the noise of one number
  deviation: float  # standard deviation of the noise of one number
  of_a_record: float  # standard deviation, for each number of a record in [0, 1]^d


def figure_noises(num_features: int) -> list[FigureNoise]:
  """Returns three noises: the paper's Laplace and Gaussian noise, and the smallest Gaussian noise
  that is proved.

  The paper's factor sqrt(2 ln(1.25 / delta)) is proved only for epsilon < 1, but the figure has
  epsilon 1.

  Args:
    num_features: number d of features of a record.

  >>> [round(each.deviation, 2) for each in figure_noises(784)]
  [1.41, 3.78, 2.57]
  >>> [round(each.of_a_record) for each in figure_noises(784)]
  [1109, 106, 72]
  """
  validate.integer_at_least(1, num_features=num_features)
  classic = math.sqrt(2 * math.log(1.25 / _DELTA)) / _EPSILON
  analytic = additive.analytic_noise_multiplier(_EPSILON, _DELTA)
  laplace = math.sqrt(2) / _EPSILON
  width = math.sqrt(num_features)
  return [
    FigureNoise("Laplace", source.laplace, 1 / _EPSILON, laplace, laplace * num_features),
    FigureNoise(
      "Gaussian, the paper's", source.gaussian, classic, classic, classic * width
    ),
    FigureNoise("Gaussian, proved", source.gaussian, analytic, analytic, analytic * width),
  ]


def run(
  out: str | pathlib.Path,
  *,
  num_draws: int = 100_000,
  num_features: int = 784,
  seed: int = 0,
) -> dict[str, Any]:
  """Draws noise, and writes figure_9.png, figure_9.csv (histograms) and result.json.

  Args:
    out: folder, made if it is missing.
    num_draws: number of draws of each noise, at least 2.
    num_features: number d of features of a record in [0, 1]^d.
    seed: seed of the draws, which protect no data.

  Returns:
    Content of result.json. For each noise it has the scale, the mean size and standard deviation of
    the draws, the share of draws within 1 of 0, and the deviation in a record of d numbers.
  """
  validate.integer_at_least(2, num_draws=num_draws)
  validate.folder(figure_9=out)
  folder = pathlib.Path(out)
  check_own(folder, "figure_9.csv", field="figure_9")
  folder.mkdir(parents=True, exist_ok=True)
  edges = np.linspace(-_RANGE, _RANGE, _BINS + 1)
  histograms: list[dict[str, Any]] = [
    {"from": a, "to": b} for a, b in itertools.pairwise(edges)
  ]
  rows = []
  for index, noise_kind in enumerate(figure_noises(num_features)):
    # Each noise has a separate key, so that the draws of different noises are independent.
    key = jax.random.fold_in(jax.random.key(seed), index)
    draws = np.asarray(
      noise_kind.sample(key, jnp.zeros(num_draws), noise_kind.scale), np.float64
    )
    counts, _ = np.histogram(draws, edges)
    for row, count in zip(histograms, counts):
      row[noise_kind.name] = int(count)
    rows.append(_row(noise_kind, draws))
  report.write_csv(folder / "figure_9.csv", histograms)
  redraw.write(folder / "figure_9.csv", recipe())
  result = {
    "epsilon": _EPSILON,
    "delta": _DELTA,
    "sensitivity": 1.0,
    "num_draws": num_draws,
    "num_features": num_features,
    "seed": seed,
    "noises": rows,
  }
  writers.write_json(folder / "result.json", result)
  return result


def recipe() -> Recipe:
  """Returns how figure_9.csv is drawn: the number of draws of each noise in each interval."""
  names = tuple(noise.name for noise in figure_noises(1))
  return Recipe(
    "lines", ("to",), names, stairs=names, together=True, title="Figure 9",
    words={"to": "noise", "value": f"draws in {2 * _RANGE / _BINS:.2g} of the noise"},
  )  # fmt: skip


def _row(noise_kind: FigureNoise, draws: np.ndarray) -> dict[str, Any]:
  return {
    "name": noise_kind.name,
    "scale": noise_kind.scale,
    "mean_size": float(np.mean(np.abs(draws))),
    "standard_deviation": float(np.std(draws)),
    "share_within_1": float(np.mean(np.abs(draws) <= 1)),
    "standard_deviation_of_a_record": noise_kind.of_a_record,
  }


def line(row: dict[str, Any], num_features: int) -> str:
  """Describes a noise in one line.

  Args:
    row: entry of `noises` in result.json.
    num_features: number of features of a record.
  """
  return (
    f"{row['name']}: standard deviation {row['standard_deviation']:.2f} for one number "
    f"({row['share_within_1']:.0%} within 1), {row['standard_deviation_of_a_record']:.0f} for "
    f"each of {num_features} numbers of a record"
  )
