"""Laplace or Gaussian noise: of one number, and of a record.

  python examples/noise_of_a_record.py

Draws 100,000 numbers of each noise at epsilon 1, sensitivity 1 and delta 1e-3. Laplace noise is the
smallest, as figure 9 of a paper shows. But a record of d numbers in [0, 1] has L1 sensitivity d and
L2 sensitivity sqrt(d): for d = 784 Gaussian noise is 15 times smaller. The usual factor
sqrt(2 ln(1.25 / delta)) is proved for epsilon < 1 alone; the third noise is the smallest with a
proof.
Source: Kang and Wang 2024, figure 9. Time: seconds on two CPU cores.
"""

import csv
import math
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from dpjax.experiments.plots import redraw
from dpjax.experiments.plots.recipes import Recipe
from dpjax.mechanisms import additive
from dpjax.noise import source

EPSILON, DELTA, DRAWS, FEATURES = 1.0, 1e-3, 100_000, 784
EDGES = np.linspace(-12.0, 12.0, 121)

usual = math.sqrt(2 * math.log(1.25 / DELTA)) / EPSILON
proved = additive.analytic_noise_multiplier(EPSILON, DELTA)
# How it is drawn, its scale, and the standard deviation of each number of a record.
noises = {
  "Laplace": (source.laplace, 1 / EPSILON, FEATURES * math.sqrt(2) / EPSILON),
  "Gaussian, the paper's": (source.gaussian, usual, math.sqrt(FEATURES) * usual),
  "Gaussian, proved": (source.gaussian, proved, math.sqrt(FEATURES) * proved),
}
counts, deviations = {}, {}
for index, (name, (sample, scale, of_a_record)) in enumerate(noises.items()):
  # Each noise has a key of its own, so that the draws are independent.
  key = jax.random.fold_in(jax.random.key(0), index)
  draws = np.asarray(sample(key, jnp.zeros(DRAWS), scale), np.float64)
  counts[name] = np.histogram(draws, EDGES)[0]
  deviations[name] = float(np.std(draws))
  print(
    f"{name}: standard deviation {deviations[name]:.2f} of the draws, {of_a_record:.0f} of each "
    f"of {FEATURES} numbers of a record"
  )

path = pathlib.Path(tempfile.mkdtemp()) / "figure_9.csv"
with path.open("w", newline="", encoding="utf-8") as file:
  rows = csv.writer(file, lineterminator="\n")
  rows.writerow(("from", "to", *counts))
  rows.writerows(zip(EDGES[:-1], EDGES[1:], *counts.values()))
picture = Recipe(
  "lines",
  x=("to",),
  y=tuple(counts),
  stairs=tuple(counts),
  together=True,
  title="Figure 9",
  words={"to": "noise", "value": "draws in 0.2 of the noise"},
)
redraw.write(path, picture)
print(f"{path} and its picture")
